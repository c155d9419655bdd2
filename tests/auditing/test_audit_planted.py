"""Every planted fault is named, and nothing else is; and what has none gets none."""

import time
from dataclasses import replace

import pytest
import torch
from flawless import RIGHT, whole_responses
from planted import FAULTS, k3, masked

import kleash
from kleash.auditing import CONVENTIONS, audit, from_fields


@pytest.fixture(scope="module")
def planted():
    """The audits of all of them, by name."""
    return {
        name: audit(case.function, case.convention, name=name, arguments=case.arguments)
        for name, case in FAULTS.items()
    }


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named_and_no_other(planted, name):
    found, case = planted[name], FAULTS[name]
    assert {finding.kind for finding in found.faults} == case.faults, found.verdict
    assert case.notes <= {finding.kind for finding in found.findings if finding.severity == "note"}


def test_what_is_left_out_is_said(planted):
    assert planted["renormalised top-k"].value == "KL(p || q) of p's 3 likeliest tokens, renormalised"
    dropped = planted["top-k of the other side, the rest dropped"]
    assert dropped.value == "KL(p || q) of q's 3 likeliest tokens, the rest dropped"


def test_a_value_of_the_wrong_sign_is_not_called_negative_as_well(planted):
    assert not planted["wrong sign"].failing({"negative_values"})
    assert planted["k1 in the loss"].failing({"negative_values"})


def test_every_finding_is_in_the_verdict(planted):
    for found in planted.values():
        assert all(finding.sentence in found.verdict for finding in found.findings)
        severities = [("wrong", "fragile", "note").index(finding.severity) for finding in found.findings]
        assert severities == sorted(severities), "the worst come first"
        assert all(finding.remedy for finding in found.findings)
        assert ("No fault was found." in found.verdict) is (not found.faults)
        assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in found.verdict)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_what_is_right_has_no_fault_by_any_convention(name):
    found = audit(RIGHT[name], name)
    assert not found.faults, found.verdict
    claimed = {"kl": "KL(p || q)", "reverse_kl": "KL(q || p)"}[found.claims]
    assert found.value == claimed
    assert found.gradient == ("" if found.place == "metric" else claimed)
    assert bool(found.masks) is CONVENTIONS[name].takes_mask


def test_kleash_trains_on_the_kl_of_whole_responses():
    found = audit(
        whole_responses,
        from_fields("whole", "token_logp", "token_logq", "behaviour_logp", "mask", gives="sequence"),
    )
    assert not found.faults
    assert {finding.kind for finding in found.findings} == {"negative_values"}
    assert "between whole responses" in found.verdict[1]
    assert found.verdict[2] == "Off-policy its value is KL(p || q) between whole responses."


def test_which_mean_is_taken_over_a_batch():
    def of_all(p, q, mask):
        return masked(p, q, mask).sum() / mask.sum()

    def of_means(p, q, mask):
        return (masked(p, q, mask).sum(-1) / mask.sum(-1)).mean()

    def of_longest(p, q, mask):
        return masked(p, q, mask).sum() / mask.sum(-1).max()

    notes = [audit(function, "mean_loss_with_mask").notes for function in (of_all, of_means, of_longest)]
    assert "over all unmasked tokens" in notes[0][0]
    assert "mean of the responses' means" in notes[1][0]
    assert "neither" in notes[2][0]


def test_the_sign_of_the_convention_is_taken_off():
    found = audit(lambda p, q: -kleash.kl(p, q), replace(CONVENTIONS["log_probabilities"], name="-", sign=-1))
    assert not found.faults and found.value == "KL(p || q)"


def test_an_audit_takes_well_below_two_seconds():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        audit(k3, "loss")
        began = time.process_time()
        audit(k3, "loss")
        assert time.process_time() - began < 2
    finally:
        torch.set_num_threads(threads)
