"""Each region against a plain loop in float64, and at its edges."""

import math

import pytest
import torch
from compiling import compiles
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kleash.errors import OptionError, ShapeError, UnknownNameError
from kleash.estimators import importance_weights
from kleash.leash import (
    generalised_advantages,
    geometric_mask,
    group_advantages,
    intersection,
    kl_mask,
    shape_rewards,
    truncated_weights,
    window_weights,
)

NAN, INF = float("nan"), float("inf")
ESTIMATE = {"k1": lambda u: u, "abs": abs, "k2": lambda u: u * u / 2, "k3": lambda u: math.expm1(-u) + u}
OVER = {"sequence_sum": sum, "sequence_mean": lambda xs: sum(xs) / len(xs), "sequence_max": max}


@st.composite
def batches(draw):
    """(policy, behaviour, mask) of some sequences, some without a token; NaN and inf where masked."""
    rows, steps = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    cell = st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.booleans())
    cells = draw(st.lists(cell, min_size=rows * steps, max_size=rows * steps))
    p, b, mask = (torch.tensor(x).view(rows, steps) for x in zip(*cells, strict=True))
    p, b = p.double(), b.double()
    return p.where(mask, NAN), b.where(mask, INF), mask


def rows_of(p, b, mask):
    """Of each sequence, the pairs of its tokens that count."""
    return [
        [(x, y) for x, y, counts in zip(*row, strict=True) if counts]
        for row in zip(p.tolist(), b.tolist(), mask.tolist(), strict=True)
    ]


def kish(weights):
    """How many equal ones; 0 for zeros."""
    squares = sum(w * w for w in weights)
    return sum(weights) ** 2 / squares if squares else 0.0


def agrees(region, mask, decisions, weights):
    """With what a loop decided about each token that counts, in order."""
    expected_kept, expected = torch.zeros_like(mask), torch.zeros(mask.shape, dtype=torch.float64)
    expected_kept[mask], expected[mask] = (
        torch.tensor(decisions, dtype=torch.bool),
        torch.tensor(weights).double(),
    )
    torch.testing.assert_close(region.kept, expected_kept)
    torch.testing.assert_close(region.weights.double(), expected, rtol=1e-6, atol=1e-9)
    share = 1 - sum(decisions) / len(decisions) if decisions else NAN
    assert region.removed_share.item() == pytest.approx(share, nan_ok=True, abs=1e-6)
    size = kish(weights) if decisions else NAN
    assert region.effective_sample_size.item() == pytest.approx(size, nan_ok=True, rel=1e-5)
    return True


@settings(max_examples=60)
@given(batches(), st.sampled_from(sorted(ESTIMATE)), st.floats(-1, 0.5), st.floats(0.5, 3))
def test_kl_mask_by_token(batch, name, least, most):
    region = kl_mask(*batch, bounds=(least, most), estimator=name)
    tokens = [y - x for row in rows_of(*batch) for x, y in row]
    decisions = [least <= ESTIMATE[name](u) <= most for u in tokens]
    assert agrees(region, batch[2], decisions, [float(d) for d in decisions])


@settings(max_examples=80)
@given(batches(), st.sampled_from(sorted(ESTIMATE)), st.sampled_from(sorted(OVER)), st.floats(0.5, 6))
def test_kl_mask_by_sequence(batch, name, over, most):
    region = kl_mask(*batch, bounds=(-2.0, most), estimator=name, over=over)
    rows = [row for row in rows_of(*batch) if row]
    decisions = [-2 <= OVER[over]([ESTIMATE[name](y - x) for x, y in row]) <= most for row in rows]
    per_sequence = [float(d) for d in decisions]
    kept = iter(decisions)
    expected = torch.stack([row & next(kept) if row.any() else row for row in batch[2]])
    assert torch.equal(region.kept, expected) and torch.equal(region.weights, expected.float())
    share = 1 - sum(decisions) / len(decisions) if decisions else NAN
    assert region.removed_share.item() == pytest.approx(share, nan_ok=True, abs=1e-6)
    size = sum(per_sequence) if decisions else NAN
    assert region.effective_sample_size.item() == pytest.approx(size, nan_ok=True)


@settings(max_examples=60)
@given(batches(), st.floats(0.05, 1), st.floats(1, 20))
def test_window_weights_by_token(batch, least, most):
    region = window_weights(*batch, bounds=(least, most))
    log_ratios = [x - y for row in rows_of(*batch) for x, y in row]
    ratios = [math.exp(log_ratio) for log_ratio in log_ratios]
    decisions = [math.log(least) <= log_ratio <= math.log(most) for log_ratio in log_ratios]
    weights = [rho * kept for rho, kept in zip(ratios, decisions, strict=True)]
    assert agrees(region, batch[2], decisions, weights)


@settings(max_examples=60)
@given(batches(), st.floats(0.05, 1), st.floats(1, 20), st.booleans())
def test_window_weights_and_geometric_mask_by_sequence(batch, least, most, geometric):
    function = geometric_mask if geometric else window_weights
    region = function(*batch, bounds=(least, most), **({} if geometric else {"level": "sequence"}))
    rows = [row for row in rows_of(*batch) if row]
    totals = [sum(x - y for x, y in row) for row in rows]
    log_ratios = [t / len(row) if geometric else t for t, row in zip(totals, rows, strict=True)]
    # next to a bound, the exponential here and the logarithm there round differently
    for log_ratio in log_ratios:
        assume(all(log_ratio == math.log(x) or abs(log_ratio - math.log(x)) > 1e-12 for x in (least, most)))
    judged = [math.exp(log_ratio) for log_ratio in log_ratios]
    decisions = [least <= rho <= most for rho in judged]
    weights = [kept * (1.0 if geometric else rho) for rho, kept in zip(judged, decisions, strict=True)]
    given = iter(weights)
    rows = [row * next(given) if row.any() else row * 0.0 for row in batch[2].double()]
    expected = torch.stack(rows).nan_to_num()
    torch.testing.assert_close(region.weights.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(region.kept, expected > 0)
    size = kish(weights) if decisions else NAN
    assert region.effective_sample_size.item() == pytest.approx(size, nan_ok=True, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_weights_are_capped_and_nothing_is_removed(level):
    p = torch.tensor([[0.9, 0.2], [0.1, 0.6]]).log()
    b = torch.tensor([[0.3, 0.2], [0.2, 0.1]]).log()
    mask = torch.tensor([[1, 1], [0, 1]])
    region = truncated_weights(p, b, mask, cap=2.0, level=level)
    expected = {"token": [[2.0, 1], [0, 2]], "sequence": [[2.0, 2], [0, 2]]}[level]
    torch.testing.assert_close(region.weights, torch.tensor(expected))
    assert torch.equal(region.kept, mask.bool()) and region.removed_share == 0
    assert region.capped_share.item() == pytest.approx({"token": 2 / 3, "sequence": 1}[level])
    assert region.effective_sample_size.item() == pytest.approx({"token": 25 / 9, "sequence": 2}[level])


def test_the_kl_is_behaviour_against_policy():
    """Drawn from (3/4, 1/4), the tokens' mean k1 is KL(behaviour || policy), and the policy's gain is negative."""
    b, p = torch.tensor([3 / 4, 1 / 4]).log(), torch.tensor([0.5, 0.5]).log()
    drawn = torch.tensor([[0, 0, 0, 1]])
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    sides = (p[drawn].requires_grad_(), b[drawn].requires_grad_(), torch.ones_like(drawn))
    for name in ("k1", "k3"):
        near = kl_mask(*sides, bounds=(kl - 1e-6, kl + 1e-6), estimator=name, over="sequence_mean")
        assert near.kept.all()
    token = kl_mask(*sides, bounds=(-INF, 0.0), estimator="k1")
    assert token.kept.tolist() == [[False, False, False, True]]
    window = window_weights(*sides, bounds=(1.0, 9.0))
    assert window.kept.tolist() == [[False, False, False, True]] and not window.weights.requires_grad


def test_nan_tokens_are_removed_and_counted():
    p, b = torch.tensor([[-1.0, NAN, -1.0], [-1, -1, -1]]), torch.full((2, 3), -1.0)
    mask = torch.ones(2, 3, dtype=torch.bool)
    everything = (-INF, INF)
    for region in (kl_mask(p, b, mask, bounds=everything), window_weights(p, b, mask, bounds=(0.0, INF))):
        assert region.removed_share.item() == pytest.approx(1 / 6)
        assert region.weights.tolist() == [[1, 0, 1], [1, 1, 1]]
        assert region.effective_sample_size == 5
    for over in OVER:
        region = kl_mask(p, b, mask, bounds=everything, over=over)
        assert region.kept.tolist() == [[False] * 3, [True] * 3] and region.removed_share == 0.5
    assert geometric_mask(p, b, mask, bounds=(0.0, INF)).removed_share == 0.5
    scored = mask & ~p.isnan()
    assert kl_mask(p, b, scored, bounds=everything, over="sequence_max").removed_share == 0
    truncated = truncated_weights(p, b, mask, cap=2.0)
    assert truncated.weights.isnan().tolist() == [[False, True, False], [False] * 3]


def test_units_with_infinite_ratios_are_removed():
    """A token that the policy rules out has ratio 0 and an infinite KL; one that the behaviour does, the opposite."""
    p, b = torch.tensor([[-INF, -1.0]]), torch.tensor([[-1.0, -INF]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert kl_mask(p, b, mask, bounds=(0.0, 1e30)).kept.tolist() == [[False, False]]
    window = window_weights(p, b, mask, bounds=(0.0, 5.0))
    assert window.kept.tolist() == [[True, False]] and window.weights.tolist() == [[0, 0]]
    assert kl_mask(p, b, mask, bounds=(-INF, INF), over="sequence_mean", estimator="k1").removed_share == 1


@pytest.mark.parametrize("over", ["token", *OVER])
def test_an_empty_mask_gives_nan_shares(over):
    for rows, steps in ((2, 3), (0, 3), (2, 0)):
        nothing = torch.zeros(rows, steps)
        region = kl_mask(nothing, nothing, nothing.bool(), bounds=(0.0, 1.0), over=over)
        assert region.removed_share.isnan() and region.effective_sample_size.isnan()
        assert region.capped_share.isnan() and not region.kept.any()
        assert truncated_weights(nothing, nothing, nothing.bool(), cap=1.0).removed_share.isnan()


def test_an_intersection_combines_masks_and_weights():
    generator = torch.Generator().manual_seed(1)
    p, b = -torch.rand(2, 6, 4, generator=generator) * 2
    mask = torch.rand(6, 4, generator=generator) < 0.8
    sequences = geometric_mask(p, b, mask, bounds=(0.8, 1.3))
    tokens = truncated_weights(p, b, mask, cap=1.2)
    both = intersection(sequences, tokens, mask=mask)
    assert torch.equal(both.kept, sequences.kept)
    torch.testing.assert_close(both.weights, sequences.weights * tokens.weights)
    squared = intersection(tokens, tokens, sequences, mask=mask)
    torch.testing.assert_close(squared.weights, tokens.weights.square() * sequences.weights)
    assert both.removed_share.item() == pytest.approx(1 - sequences.kept.sum().item() / mask.sum().item())
    size = kish(both.weights[both.kept].tolist())
    assert both.effective_sample_size.item() == pytest.approx(size, rel=1e-5)
    assert both.capped_share == 0
    capped = importance_weights(p, b, mask, cap=1.2)
    assert torch.equal(intersection(tokens, mask=mask).weights, capped.values)
    unscored = truncated_weights(p.where(mask.cumsum(-1) != 2, NAN), b, mask, cap=1.2)
    assert intersection(unscored, mask=mask).effective_sample_size.isnan()


@compiles
def test_a_whole_step_compiles(compiler):
    generator = torch.Generator().manual_seed(2)
    p, b = -torch.rand(2, 5, 3, generator=generator)
    mask = torch.ones(5, 3, dtype=torch.bool)

    def step(p, b, mask):
        sequences = kl_mask(p, b, mask, bounds=(0.0, 0.1), over="sequence_max")
        region = intersection(sequences, window_weights(p, b, mask, bounds=(0.7, 1.5)), mask=mask)
        rewards = shape_rewards(p.sum(-1), p - b, mask, beta=0.1)
        groups = group_advantages(rewards.sum(-1), torch.tensor([0, 1, 1, 0, 0]), scale="std")
        return *region, *generalised_advantages(rewards, p, mask), groups

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(p, b, mask)
    for one, other in zip(compiled, step(p, b, mask), strict=True):
        torch.testing.assert_close(one, other)


def test_invalid_trust_region_arguments_are_errors(unhooked):
    p, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for bounds in ((1.0, 0.0), (0.0, NAN)):
        with pytest.raises(OptionError, match="least first"):
            kl_mask(p, p, mask, bounds=bounds)
    with pytest.raises(OptionError, match="sequence_max"):
        kl_mask(p, p, mask, bounds=(0.0, 1.0), over="response")
    with pytest.raises(UnknownNameError, match="k3"):
        kl_mask(p, p, mask, bounds=(0.0, 1.0), estimator="k33")
    for bounds in ((-0.5, 2), (0.0, 0.0), (NAN, 2), (2.0, 0.5)):
        with pytest.raises(OptionError, match=f"bounds are {bounds[0]} and {bounds[1]}; give ratios"):
            window_weights(p, p, mask, bounds=bounds)
    with pytest.raises(OptionError, match="token, sequence"):
        window_weights(p, p, mask, bounds=(0.5, 2.0), level="prefix")
    with pytest.raises(OptionError, match="cap is 0"):
        truncated_weights(p, p, mask, cap=0.0)
    with pytest.raises(OptionError, match="at least one"):
        intersection(mask=mask)
    with pytest.raises(ShapeError, match=r"\(2, 3\) and mask \(1, 3\)"):
        intersection(truncated_weights(p, p, mask, cap=1.0), mask=mask[:1])
