"""Functions with a single fault are reported with exactly that fault, and right functions with none."""

import pytest
import torch
from right_functions import RIGHT, whole_responses
from single_faults import FAULTS, k3, masked, right

from kleash.auditing import CONVENTIONS, audit, from_fields


@pytest.fixture(scope="module")
def audits():
    """The audits of all of them, by name."""
    return {
        name: audit(case.function, case.convention, name=name, arguments=case.arguments)
        for name, case in FAULTS.items()
    }


@pytest.mark.parametrize("name", FAULTS)
def test_exactly_the_single_fault_is_reported(audits, name):
    found, case = audits[name], FAULTS[name]
    assert {finding.kind for finding in found.faults} == case.faults, found.verdict
    assert case.notes <= {finding.kind for finding in found.findings if finding.severity == "note"}


def test_top_k_values_are_labelled_with_their_remainder(audits):
    assert audits["renormalised top-k"].value == "KL(p ‖ q) of p's 3 likeliest tokens, renormalised"
    dropped = audits["top-k of the other side, the rest dropped"]
    assert dropped.value == "KL(p ‖ q) of q's 3 likeliest tokens, the rest dropped"
    assert audits["renormalised on one side"].value.endswith("3 likeliest tokens, p alone renormalised")
    assert audits["KLs from the mixture"].value == "(KL(m ‖ p) + KL(m ‖ q)) / 2, m the mean of p and q"
    assert audits["distance of SciPy"].value == "the square root of Jensen-Shannon(p, q)"
    assert audits["temperature 2 without its square"].value == "KL(p ‖ q) at temperature 2"
    assert audits["twice the mean over the vocabulary"].value.startswith("2 x KL(p ‖ q) divided by")
    assert audits["divided by the batch"].value == "0.125 x KL(p ‖ q) for one token", "not by the vocabulary"


def test_a_value_of_the_wrong_sign_is_not_reported_as_negative(audits):
    assert not audits["wrong sign"].failing({"negative_values"})
    assert audits["k1 in the loss"].failing({"negative_values"})
    (note,) = audits["score function with a biased value"].failing({"negative_values"})
    assert "only the mean cannot" not in note.sentence


def test_every_finding_is_in_the_verdict(audits):
    for found in audits.values():
        assert all(finding.sentence in found.verdict for finding in found.findings)
        severities = [("wrong", "fragile", "note").index(finding.severity) for finding in found.findings]
        assert severities == sorted(severities), "the worst come first"
        assert all(finding.remedy for finding in found.findings)
        assert ("No fault was found." in found.verdict) is (not found.faults)
        assert "choose the convention" not in " ".join(found.verdict), "another would not help"
        assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in found.verdict)
    in_float16 = audit(lambda p, q: torch.relu(p - q), "metric").verdict
    assert any(sentence.startswith("For float16 inputs it returns float16:") for sentence in in_float16)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_right_functions_have_no_fault_by_any_convention(name):
    found = audit(RIGHT[name], name)
    assert not found.faults and found.is_pure, found.verdict
    claimed = {"kl": "KL(p ‖ q)", "reverse_kl": "KL(q ‖ p)"}[found.claims]
    assert found.value == claimed
    assert found.gradient == ("" if found.place == "metric" else claimed)
    assert bool(found.masks) is CONVENTIONS[name].takes_mask


def test_kl_loss_with_future_kl_loss_follows_the_sequence_kl():
    convention = from_fields("whole", "token_logp", "token_logq", "behaviour_logp", "mask", gives="sequence")
    found = audit(whole_responses, convention)
    assert not found.faults
    assert {finding.kind for finding in found.findings} == {"negative_values"}
    assert "between whole responses" in found.verdict[1]
    assert found.verdict[2] == "Off-policy its value is KL(p ‖ q) between whole responses."


@pytest.mark.parametrize(
    ("mean", "words"),
    [
        (lambda sums, lengths: sums.sum() / lengths.sum(), "the mean over all unmasked tokens"),
        (lambda sums, lengths: (sums / lengths).mean(), "the mean of the responses' means"),
        (lambda sums, lengths: sums.sum() / lengths.max(), "neither"),
    ],
)
def test_the_mean_over_a_batch_is_noted(mean, words):
    found = audit(lambda p, q, mask: mean(masked(p, q, mask).sum(-1), mask.sum(-1)), "mean_loss_with_mask")
    assert words in found.notes[0]


def test_a_gradient_that_is_nearly_right_is_so_many_per_cent_off():
    found = audit(lambda p, q: 0.998 * right(p, q) + 0.002 * k3(p, q), "loss")
    assert "not KL(p ‖ q): on the far pair it is 0.32 % off" in found.verdict[1]
