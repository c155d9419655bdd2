import math

import pytest
import torch
from distributions import log, pairs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from textbook import textbook

from kleash.divergences import DIVERGENCES, divergence, kl, skew_kl_record
from kleash.errors import OptionError, UnknownNameError
from kleash.estimators import Tail, kl_bounds, shared_head

NAMES = list(DIVERGENCES)
INF, NAN = float("inf"), float("nan")


def exact_tail(logp, logq, outside):
    """The exact bounds of the tokens outside the head, as a tail."""
    p, q = logp[outside], logq[outside]
    return Tail(logp_least=p.min(), logp_most=p.max(), logq_least=q.min(), logq_most=q.max())


@st.composite
def pairs_with_heads(draw, **options):
    """A pair, and the tokens of a head: p's likeliest, q's, or any."""
    logp, logq = draw(pairs(**options))
    k, any_order = draw(st.integers(0, len(logp))), draw(st.permutations(range(len(logp))))
    by = draw(st.sampled_from([logp, logq, torch.tensor(any_order)]))
    order = by.argsort(descending=True)
    return logp, logq, order[:k], order[k:]


@settings(max_examples=120)
@given(cut=pairs_with_heads(spread=30.0), name=st.sampled_from(NAMES), known=st.booleans())
def test_the_exact_value_is_within_the_bounds(cut, name, known):
    logp, logq, head, rest = cut
    tail = None
    if len(rest):
        tail = exact_tail(logp, logq, rest) if known else Tail(logq_least=logq[rest].min())
    bounds = kl_bounds(logp[head], logq[head], divergence=name, tail=tail)
    exact = textbook(name, logp, logq)
    assert bounds.lower <= exact or bounds.lower.item() == pytest.approx(exact, rel=1e-12)
    assert bounds.upper >= exact or bounds.upper.item() == pytest.approx(exact, rel=1e-12)
    torch.testing.assert_close(bounds.mass_p, logp[head].exp().sum())
    torch.testing.assert_close(bounds.mass_q, logq[head].exp().sum())


@settings(max_examples=100)
@given(cut=pairs_with_heads(spread=5.0, zeros=False), name=st.sampled_from(NAMES))
def test_the_lower_bound_is_the_value_with_the_tail_in_one_bucket(cut, name):
    logp, logq, head, rest = cut
    assume(len(rest) > 0)
    coarse = [torch.cat([x[head], x[rest].logsumexp(-1, keepdim=True)]) for x in (logp, logq)]
    got = kl_bounds(logp[head], logq[head], divergence=name).lower
    assert got.item() == pytest.approx(textbook(name, *coarse), rel=1e-5, abs=1e-6)


@settings(max_examples=100)
@given(pair=pairs(spread=5.0, zeros=False), name=st.sampled_from(NAMES))
def test_bounds_over_the_whole_vocabulary_are_exact(pair, name):
    bounds = kl_bounds(*pair, divergence=name, tail=None)
    exact = textbook(name, *pair)
    assert bounds.lower.item() == pytest.approx(exact, rel=1e-6, abs=1e-6)
    assert bounds.upper.item() == pytest.approx(exact, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_upper_bound_is_attained(name):
    """Two tokens of the largest ratio and one of the smallest attain it."""
    logp, logq = log(0.5, 0.2, 0.2, 0.1), log(0.6, 0.05, 0.05, 0.3)
    bounds = kl_bounds(logp[:1], logq[:1], divergence=name, tail=exact_tail(logp, logq, [1, 2, 3]))
    assert bounds.upper.item() == pytest.approx(textbook(name, logp, logq), rel=1e-7)
    single = exact_tail(logp, logq, [3])
    bounds = kl_bounds(logp[:3], logq[:3], divergence=name, tail=single, error_nats=0.0)
    assert bounds.upper.item() == pytest.approx(textbook(name, logp, logq), rel=1e-12)
    looser = kl_bounds(logp[:1], logq[:1], divergence=name, tail=Tail(logq_least=logq[1], logp_least=logp[3]))
    assert looser.upper > bounds.upper * 1.001
    logp = log(0.8, 0.2, 0, 0)  # no mass of p outside of the head
    bounds = kl_bounds(logp[:2], logq[:2], divergence=name, tail=exact_tail(logp, logq, [2, 3]))
    assert bounds.upper.item() == pytest.approx(textbook(name, logp, logq), rel=1e-7)


def test_the_upper_bound_with_a_lower_bound_on_q_alone():
    logp, logq = log(0.7, 0.3), log(0.6, 0.4)
    expected = 0.7 * math.log(0.7 / 0.6) + 0.3 * math.log(0.3 / 1e-4)
    got = kl_bounds(logp[:1], logq[:1], tail=Tail(logq_least=math.log(1e-4))).upper
    assert got.item() == pytest.approx(expected, rel=1e-9)


def test_divergences_that_are_finite_at_zeros_are_bounded_without_a_tail():
    logp, logq = log(0.7, 0.3), log(0.6, 0.4)
    upper = {name: kl_bounds(logp[:1], logq[:1], divergence=name).upper.item() for name in NAMES}
    assert upper["total_variation"] == pytest.approx((0.1 + 0.3 + 0.4) / 2, rel=1e-7)
    disjoint = [log(0.7, 0.3, 0.0), log(0.6, 0.0, 0.4)]
    unbounded = [name for name in NAMES if textbook(name, *disjoint) == INF]
    assert [name for name in NAMES if upper[name] == INF] == unbounded
    assert {"kl", "reverse_kl", "jeffreys", "chi_squared"} <= set(unbounded)
    assert upper["jensen_shannon"] == pytest.approx(textbook("jensen_shannon", *disjoint), rel=1e-7)


@settings(max_examples=100)
@given(
    cut=pairs_with_heads(spread=8.0, zeros=False, max_vocab=30),
    error=st.sampled_from([torch.float32, torch.bfloat16, 0.05, -0.05]),
)
def test_bounds_from_inexact_log_probabilities_contain_the_exact_value(cut, error):
    """The exact value of the pair before it was rounded, or moved apart or together by as much as ``error_nats``."""
    logp, logq, head, rest = cut
    tail = exact_tail(logp, logq, rest) if len(rest) else None
    if isinstance(error, float):
        bounds = kl_bounds(logp[head] + error, logq[head] - error, tail=tail, error_nats=abs(error))
    else:
        bounds = kl_bounds(logp[head].to(error), logq[head].to(error), tail=tail)
    assert bounds.lower - 1e-13 <= kl(logp, logq) <= bounds.upper + 1e-13


def test_a_head_whose_mass_exceeds_one():
    logp = torch.full((100,), 1 / 100).log().bfloat16()
    bounds = kl_bounds(logp, logp)
    assert bounds.mass_p > 1.01, "mass of the head before any correction"
    assert bounds.lower == 0
    wider = kl_bounds(logp, torch.full((100,), 1 / 150).log().bfloat16())
    assert 0.25 < wider.lower < math.log(1.5), "a third of q is outside, and hardly any of p"
    impossible = kl_bounds(logp + 0.1, logp)
    assert impossible.lower.isnan() and impossible.upper.isnan() and impossible.mass_p > 1.1
    with torch.device("meta"):
        assert kl_bounds(logp + 0.1, logp, error_nats=0.2).lower == 0
    assert kl_bounds(logp.double(), logp, error_nats=0.0).lower.isnan()


def test_a_tail_lost_to_rounding_is_not_a_zero():
    """In float32 all of q is in the head; the true q leaves 1e-9, and the KL is finite."""
    logp, logq = log(1 - 1e-3, 1e-3), log(1 - 1e-9, 1e-9)
    assert logq[:1].float().exp() == 1
    bounds = kl_bounds(logp[:1].float(), logq[:1].float())
    assert 0.001 < bounds.lower < kl(logp, logq) < 1
    assert kl_bounds(logp[:1], log(1.0), error_nats=0.0).lower == INF, "without rounding errors it is a zero"


def test_heads_without_mass_outside_and_heads_with_zeros():
    logp, logq = log(0.5, 0.5, 0.0), log(0.5, 0.25, 0.25)
    got = kl_bounds(logp, logq, error_nats=0.0)
    assert got.lower.item() == pytest.approx(kl(logp, logq).item()) == pytest.approx(got.upper.item())
    only_q = kl_bounds(logp[:2], logq[:2], error_nats=0.0)
    assert only_q.lower.item() == pytest.approx(only_q.upper.item()) == pytest.approx(0.5 * math.log(2))
    assert kl_bounds(logq, logp).lower == INF
    padded = [torch.cat([x[:2], torch.full((3,), -INF)]) for x in (logp, logq)]
    torch.testing.assert_close(kl_bounds(*padded, error_nats=0.0).lower, only_q.lower)


def test_nan_in_the_head_affects_its_position_only():
    logp = torch.stack([log(0.5, 0.2), log(NAN, 0.2), log(0.5, 0.2)])
    logq = torch.stack([log(0.4, 0.2), log(0.4, 0.2), log(0.5, NAN)])
    for name in NAMES:
        for tail in (None, Tail(logq_least=-9.0, logp_least=-9.0)):
            lower, upper, _, _ = kl_bounds(logp, logq, divergence=name, tail=tail)
            assert lower.isnan().tolist() == upper.isnan().tolist() == [False, True, True]


def test_tails_that_contradict_the_masses_give_nan():
    logp, logq = log(0.5), log(0.5)
    assert kl_bounds(logp, logq, tail=Tail(logq_least=math.log(0.6))).upper.isnan()
    assert kl_bounds(logp, logq, tail=Tail(logp_least=math.log(0.9))).upper.isnan()
    crossed = Tail(logp_least=-3.0, logp_most=-3.0, logq_least=-2.5, logq_most=-3.5)
    assert kl_bounds(logp, logq, tail=crossed).upper.isnan()
    assert kl_bounds(logp, logq, tail=Tail(logq_most=-5.0, logp_least=-2.0, logq_least=-9.0)).upper.isnan()


def test_custom_records_and_tails_per_position():
    logp, logq = log(0.5, 0.3, 0.2).expand(2, 3), log(0.4, 0.2, 0.4).expand(2, 3)
    tail = Tail(logq_least=torch.tensor([0.2, 0.01]).double().log(), logp_most=0.0)
    got = kl_bounds(logp[:, :1], logq[:, :1], divergence=skew_kl_record(0.1), tail=tail)
    exact = textbook("skew_kl", logp[0], logq[0], 0.1)
    assert (got.lower < exact).all() and (got.upper > exact).all() and got.upper[0] < got.upper[1]
    single = kl_bounds(logp[:, :1].float().requires_grad_(), logq[:, :1].float(), tail=tail)
    assert all(x.dtype == torch.float64 and not x.requires_grad for x in single)


@settings(max_examples=100)
@given(pair=pairs(spread=6.0, zeros=False), k=st.integers(1, 12), m=st.integers(1, 12))
def test_shared_head_of_two_top_k_lists(pair, k, m):
    logp, logq = pair
    top_p, top_q = logp.topk(min(k, len(logp))), logq.topk(min(m, len(logq)))
    shared = set(top_p.indices.tolist()) & set(top_q.indices.tolist())
    lists = (top_p.indices, top_p.values, top_q.indices, top_q.values)
    head = shared_head(*lists)
    for one, of_three in zip(head[:2], shared_head(*(x.expand(3, -1) for x in lists)), strict=False):
        assert torch.equal(of_three, one.expand(3, -1))
    assert (head.logp > -INF).sum() == len(shared) == (head.logq > -INF).sum()
    for at, token in enumerate(top_p.indices.tolist()):
        assert head.logq[at] == (logq[token] if token in shared else -INF)
    for top, most in ((top_p, head.tail.logp_most), (top_q, head.tail.logq_most)):
        others = [x for x, y in zip(*map(torch.Tensor.tolist, top), strict=True) if y not in shared]
        assert most.item() == pytest.approx(max(top.values[-1].item(), *others, -INF), abs=1e-12)
    rest = [x for x in range(len(logp)) if x not in shared]
    if rest:
        assert (logp[rest] <= head.tail.logp_most).all() and (logq[rest] <= head.tail.logq_most).all()
        tail = Tail(logp_most=head.tail.logp_most, logq_most=head.tail.logq_most, logq_least=logq.min())
        got = kl_bounds(head.logp, head.logq, tail=tail)
        assert got.lower - 1e-13 <= kl(logp, logq) <= got.upper + 1e-13


def test_tail_bounds_of_rounded_lists_are_upper_bounds():
    for vocab in range(2, 12):
        logp = torch.full((vocab,), -math.log(vocab), dtype=torch.float64)
        ids = torch.tensor([*range(vocab - 1), -1])  # with padding, which is no token of probability 0
        head = shared_head(*(ids, torch.cat([logp[1:], torch.tensor([-INF])]).float()) * 2)
        assert head.tail.logp_most.double() >= logp[0] and head.tail.logq_most.double() >= logp[0]


def test_a_token_that_is_listed_twice_makes_bounds_nan():
    lists = (torch.tensor([0, 2]), log(0.5, 0.2)), (torch.tensor([0, 2, 0]), log(0.5, 0.2, 0.5))
    for first, second in (lists, lists[::-1]):
        head = shared_head(*first, *second)
        assert kl_bounds(head.logp, head.logq, tail=head.tail).lower.isnan()


def test_invalid_arguments_raise(unhooked):
    x = torch.zeros(2, 3)
    with pytest.raises(UnknownNameError, match="no divergence is called 'k1'"):
        kl_bounds(x, x, divergence="k1")
    with pytest.raises(OptionError, match="error_nats is"):
        kl_bounds(x, x, error_nats=-0.1)


@st.composite
def extreme_splits(draw):
    """Two float64 distributions whose head has almost no mass or almost all, in a tail that is flat or nearly so."""
    outside, size = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    sides = []
    for _ in "pq":
        mass = 10.0 ** draw(st.floats(-14, -1e-7))
        inside = torch.tensor(draw(st.lists(st.floats(0.1, 1), min_size=size, max_size=size))).double()
        flatness = draw(st.sampled_from([0.0, 0.0, 1e-7, 1e-3, 3.0]))
        rest = torch.tensor(draw(st.lists(st.floats(-1, 1), min_size=outside, max_size=outside))).double()
        parts = inside / inside.sum() * mass, (flatness * rest).softmax(-1) * (1 - mass)
        sides.append(torch.cat(parts).log())
    return *sides, size


@settings(max_examples=100)
@given(
    name=st.sampled_from(["kl", "reverse_kl", "jensen_shannon", "chi_squared", "total_variation"]),
    split=extreme_splits(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    known=st.data(),
)
def test_true_bounds_of_the_tail_never_contradict_it(name, split, dtype, known):
    """The tail's own extremes, rounded as the list is: the upper end is a number, or inf where nothing bounds it."""
    p, q, size = split
    true = {"logp_least": p[size:].min(), "logp_most": p[size:].max()}
    true |= {"logq_least": q[size:].min(), "logq_most": q[size:].max()}
    chosen = {key: value for key, value in true.items() if known.draw(st.booleans())}
    as_number = known.draw(st.booleans())
    tail = Tail(**{key: x.to(dtype).item() if as_number else x.to(dtype) for key, x in chosen.items()})
    found = kl_bounds(p[:size].to(dtype), q[:size].to(dtype), divergence=name, tail=tail)
    exact = divergence(name, p, q)
    assert found.lower <= exact * (1 + 1e-9) + 1e-12
    assert found.upper >= exact * (1 - 1e-9) - 1e-12, "NaN is not above it either"
    if len(chosen) == 4:
        assert found.upper < math.inf
