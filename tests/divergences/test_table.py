"""Every field of every record in DIVERGENCES, and of members of the parametric families."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from distributions import gradients, log

from kleash.divergences import DIVERGENCES, alpha_record, divergence, jensen_shannon_record, skew_kl_record
from kleash.divergences.table import identity

RECORDS = {
    **DIVERGENCES,
    "skew_kl .1": skew_kl_record(0.1),
    "skew_kl .999": skew_kl_record(0.999),
    "jensen_shannon .3": jensen_shannon_record(0.3),
    "jensen_shannon .3 normalised": jensen_shannon_record(0.3, normalised=True),
    **{f"alpha {a}": alpha_record(a) for a in (-2.0, -0.5, 0.01, 0.3, 0.5, 0.7, 0.99, 1.5, 3.0)},
}
LOG_RATIOS = torch.cat([torch.linspace(-6, 6, 121, dtype=torch.float64), torch.tensor([1e-9, -1e-9])])
every_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())


def test_the_table_and_its_records_are_read_only():
    with pytest.raises(TypeError):
        DIVERGENCES["kl"] = DIVERGENCES["jeffreys"]
    with pytest.raises(FrozenInstanceError):
        DIVERGENCES["kl"].finish = identity


@every_record
def test_the_score_is_the_generator_plus_its_derivative(record):
    u = LOG_RATIOS.clone().requires_grad_()
    value = record.of(u)
    (slope,) = torch.autograd.grad(value.sum(), u)
    torch.testing.assert_close(record.score(LOG_RATIOS), value + slope, rtol=1e-10, atol=1e-12)


@every_record
def test_the_generator_is_zero_at_zero_and_nonnegative(record):
    assert record.of(torch.zeros(1)) == 0
    assert (record.of(LOG_RATIOS) >= 0).all()


@every_record
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_generator_does_not_cancel_near_zero(record, sign):
    """It is a parabola near 0, except for the total variation, which has a kink."""
    at = sign * torch.tensor([1e-12, 2e-12], dtype=torch.float64)
    first, second = record.of(at).tolist()
    assert second / first == pytest.approx(2 if record is DIVERGENCES["total_variation"] else 4, rel=1e-5)


@every_record
def test_the_swapped_generator_is_the_generator_per_unit_of_the_other_mass(record):
    expected = torch.exp(-LOG_RATIOS) * record.of(-LOG_RATIOS)
    torch.testing.assert_close(record.swapped.of(LOG_RATIOS), expected, rtol=1e-10, atol=1e-13)
    assert record.swapped.swapped == record


@every_record
def test_the_swapped_record_swaps_the_arguments(record):
    torch.manual_seed(0)
    logp, logq = torch.randn(2, 4, 6, dtype=torch.float64).log_softmax(-1)
    torch.testing.assert_close(divergence(record.swapped, logp, logq), divergence(record, logq, logp))


@every_record
def test_the_contribution_at_a_zero_is_the_limit_of_the_generator(record):
    """Per unit of p where q vanishes, f(inf); the same for the other side."""
    for contribution, swapped in ((record.where_q_is_zero, record), (record.where_p_is_zero, record.swapped)):
        for limit in swapped.of(torch.tensor([5000.0, math.inf], dtype=torch.float64)).tolist():
            if math.isinf(contribution):
                assert limit > 1e2
            else:
                assert contribution == pytest.approx(limit, rel=1e-9)


@every_record
def test_a_zero_adds_its_contribution_to_the_divergence(record):
    record = replace(record, finish=identity)
    only_p = divergence(record, log(0.75, 0.25), log(1, 0)).item()
    only_q = divergence(record, log(1, 0), log(0.75, 0.25)).item()
    shared = record.of(torch.tensor(math.log(0.75), dtype=torch.float64)).item()
    assert only_p == pytest.approx(0.75 * shared + 0.25 * record.where_q_is_zero)
    shared = record.of(torch.tensor(-math.log(0.75), dtype=torch.float64)).item()
    assert only_q == pytest.approx(shared + 0.25 * record.where_p_is_zero)


@every_record
def test_gradients_in_logits_are_the_centred_score(record):
    """p (s - E_p s) for p's logits, and the same with the swapped score for q's."""
    record = replace(record, finish=identity)
    torch.manual_seed(1)
    logits = torch.randn(2, 9, dtype=torch.float64)
    logp, logq = logits.log_softmax(-1)
    got = gradients(lambda p, q: divergence(record, p, q), *logits)
    for gradient, log_mass, score in (
        (got[0], logp, record.score(logp - logq)),
        (got[1], logq, record.swapped.score(logq - logp)),
    ):
        mass = log_mass.exp()
        expected = mass * (score - (mass * score).sum())
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13)
