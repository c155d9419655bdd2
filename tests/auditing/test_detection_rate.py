"""Detection rate on functions that are wrong over several tokens, calls, responses or precisions."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from faulty_functions import FAULTY_FUNCTIONS, RIGHT_FUNCTIONS
from single_faults import FAULTS, rho, right, u_of

import kleash
from kleash.auditing import audit
from kleash.auditing.finding_kinds import FINDINGS
from kleash.auditing.targets.packages import quiet

WORST = ("wrong", "fragile", "note")
CORRELATED = (668, 4291)
"""Seeds of numpy's generator whose first 34 numbers have a lag-one autocorrelation beyond 0.5 in size."""


@pytest.fixture(scope="module")
def audits():
    """The audits of all functions of both batteries, by name; the wrong ones first."""
    with quiet():  # what the audited functions warn of is theirs
        wrong = {name: audit(f.make(), f.convention, name=name) for name, f in FAULTY_FUNCTIONS.items()}
        return wrong | {name: audit(*right, name=name) for name, right in RIGHT_FUNCTIONS.items()}


@pytest.mark.parametrize("name", FAULTY_FUNCTIONS)
def test_every_faulty_function_is_reported_with_the_right_severity(audits, name):
    found, faulty = audits[name], FAULTY_FUNCTIONS[name]
    named = {finding.kind for finding in found.findings if finding.severity == faulty.severity}
    assert named & faulty.kinds, found.verdict
    worst = min(found.findings, key=lambda f: WORST.index(f.severity))
    assert worst.severity == faulty.severity, found.verdict


@pytest.mark.parametrize("name", RIGHT_FUNCTIONS)
def test_right_functions_have_no_fault(audits, name):
    found = audits[name]
    assert not found.faults and found.is_pure, found.verdict


def test_every_kind_of_finding_occurs(audits):
    found = {finding.kind for name in FAULTY_FUNCTIONS for finding in audits[name].findings}
    of_single_faults = {kind for case in FAULTS.values() for kind in (*case.faults, *case.notes)}
    assert found | of_single_faults == set(FINDINGS)


def test_audits_are_reproducible_and_restore_process_settings():
    first = audit(kleash.kl_loss, "loss_with_mask")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.inference_mode():  # which leaves gradients out, too
        second = audit(kleash.kl_loss, "loss_with_mask")
    assert torch.equal(before, torch.get_rng_state())
    assert first.to_json() == second.to_json() and first.is_pure
    noisy = [audit(lambda p, q: u_of(p, q) + torch.rand(p.shape), "reward", name="noisy") for _ in "ab"]
    assert noisy[0].to_json() == noisy[1].to_json(), "the seed of the process is the audit's"
    assert not noisy[0].is_pure and "its result is random" in " ".join(noisy[0].verdict)


def test_the_verdict_states_the_level_of_the_gradient(audits):
    by_token = audit(right, "loss")
    assert by_token.gradient_level == "token"
    assert "follows KL(p ‖ q) token by token, as it should" in by_token.verdict[1]
    found = audits["token loss, sign flipped after the first token"]
    assert found.gradient_level == "neither" and found.gradient == "KL(p ‖ q) for one token"
    assert "1, -1 and -1 times that of KL(p ‖ q) token by token" in found.verdict[1]
    assert "its value is 1, -1 and -1 times what it should be" in " ".join(found.verdict)
    assert found.verdict[0].startswith(
        "Its value is an unbiased estimate of KL(p ‖ q) for a single token, but not for several"
    )
    mixed = audits["response's ratio on each token's k3"]
    assert "neither token by token (their cosine is 0.9" in mixed.verdict[1]


def test_a_clamped_value_is_unbiased_only_inside_its_range(audits):
    found = audits["k1 clamped at 10"]
    assert found.value_range == found.gradient_range == "as long as log p - log q is between -10 and 10"
    assert found.verdict[0].startswith(f"Its value is an unbiased estimate of KL(p ‖ q), {found.value_range}")
    assert ", where no log ratio is large, not" in audits["log ratio clamped at 3"].verdict[0]
    assert audits["mean over responses and words"].value.endswith(" divided by the size of the vocabulary")


def test_a_truncated_ratio_is_reported_with_its_bound(audits):
    for bound in (5, 100):
        (finding,) = audits[f"ratio clamped at {bound}"].faults
        assert f"truncated: above {bound} it no longer counts in full" in finding.sentence


@pytest.mark.parametrize("seed", CORRELATED)
def test_noise_that_is_autocorrelated_by_chance_is_random(seed):
    generator = np.random.default_rng(seed)
    found = audit(lambda p, q: u_of(p, q) * (0.5 + generator.random()), "reward")
    assert ("random", "note") in {(finding.kind, finding.severity) for finding in found.findings}
    assert not found.faults, found.verdict


def test_a_function_that_fails_after_some_calls_is_stateful():
    calls = iter(range(11))

    def tired(p, q):
        if next(calls, None) is None:
            raise RuntimeError("the pool is empty")
        return right(p, q)

    found = audit(tired, "loss")
    assert [finding.kind for finding in found.faults] == ["stateful"]
    assert "the pool is empty" in found.verdict[0] and not found.is_pure


@pytest.mark.parametrize(
    "tidy",
    [lambda q: q.clamp_(min=-100), lambda q: q.nan_to_num_(), lambda q: q.masked_fill_(q.isinf(), -1e4)],
    ids=["floor", "NaN", "infinity"],
)
def test_arguments_overwritten_only_on_extreme_inputs_are_reported(tidy):
    def function(p, q):
        tidy(q.data)
        return right(p, q)

    found = audit(function, "loss", name="tidy")
    assert "changes_inputs" in {finding.kind for finding in found.failing({"wrong"})}, found.verdict


def test_a_function_that_refuses_some_probe_inputs_is_still_audited():
    def strict(p, q, b):
        if bool(((p - b).abs() > 5).any()) or bool(((p - q).abs() < 1e-9).all()):
            raise ValueError("not these")
        return (rho(p, b).detach() * right(p, q)).sum(-1)

    assert not audit(strict, "sequence_loss_with_behaviour").failing({"wrong"})


def test_unbiased_noise_is_no_bias_on_extreme_inputs():
    noisy = Mock(side_effect=lambda p, q: torch.nn.functional.dropout(kleash.kl(p, q), 0.2))
    found = audit(noisy, "log_probabilities")
    assert not found.faults and found.findings[0].kind == "random", found.verdict
    assert noisy.call_count < 3000, "the ends of all zones are searched in the same calls"
