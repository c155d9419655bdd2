"""Every divergence of the table and of the families as a loss on samples: tokens, responses, off-policy."""

from dataclasses import replace

import pytest
import torch
from compiling import compiles
from every_response import World, error, gradient

from kleash.divergences import DIVERGENCES, alpha_record, divergence, jensen_shannon_record, skew_kl_record
from kleash.divergences.table import identity
from kleash.errors import DetachedError, UnknownNameError
from kleash.estimators import importance_weights
from kleash.losses import divergence_loss

RECORDS = {
    **DIVERGENCES,
    "skew .3": skew_kl_record(0.3),
    "jensen-shannon .2, normalised": jensen_shannon_record(0.2, normalised=True),
    "alpha .5": alpha_record(0.5),
    "alpha 3": alpha_record(3.0),
    "alpha -1": alpha_record(-1.0),
}
every_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
WORLDS = [World(seed=0, spread=0.7), World(seed=1, end=2, spread=0.7)]


def inner(record):
    """The divergence without what is made of the mean."""
    return replace(record, finish=identity)


def between_tokens(world, record, p, q, prefixes):
    exact = divergence(inner(record), world.next_logp(p), world.next_logp(q))
    return (world.probability(prefixes.detach()) * torch.where(world.mask, exact, 0.0).sum(-1)).sum()


def between_responses(world, record, p, q):
    """Over the distribution of responses themselves: those that differ only after their end are one."""
    logp, logq = (torch.where(world.mask, world.token_logp(x), 0.0).sum(-1) for x in (p, q))
    ended = torch.where(world.mask, world.tokens, -1)
    kept = torch.tensor([ended[:i].eq(row).all(-1).any().item() for i, row in enumerate(ended)])
    return divergence(inner(record), logp[~kept], logq[~kept])


def check(got, truth, table):
    torch.testing.assert_close(got(table.requires_grad_()), truth(table), rtol=1e-9, atol=1e-13)
    assert error(gradient(got, table), gradient(truth, table)) < 1e-10


@every_record
@pytest.mark.parametrize("world", WORLDS, ids=["plain", "ends"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_expected_gradient_of_a_token(world, record, on_policy):
    p, q, mu = world.tables
    mu = p.clone() if on_policy else mu
    logp, logq, behaviour = (world.token_logp(x) for x in (p, q, mu))
    weights = None if on_policy else importance_weights(logp, behaviour, world.mask).values
    drawn = world.probability(mu).unsqueeze(-1)

    def loss(a, b):
        return (drawn * divergence_loss(a, b, world.mask, divergence=record, weights=weights)).sum()

    check(lambda x: loss(world.token_logp(x), logq), lambda x: between_tokens(world, record, x, q, mu), p)
    check(lambda x: loss(logp, world.token_logp(x)), lambda x: between_tokens(world, record, p, x, mu), q)


@every_record
@pytest.mark.parametrize("world", WORLDS, ids=["plain", "ends"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_expected_gradient_of_a_response(world, record, on_policy):
    """Summed log-probabilities, one number per response."""
    p, q, mu = world.tables
    mu = p.clone() if on_policy else mu
    total = lambda x: torch.where(world.mask, world.token_logp(x), 0.0).sum(-1, keepdim=True)  # noqa: E731
    some = torch.ones(len(world.tokens), 1, dtype=torch.bool)
    weights = None if on_policy else importance_weights(total(p), total(mu), some).values
    drawn = world.probability(mu).unsqueeze(-1)

    def loss(x):
        return (drawn * divergence_loss(total(x), total(q), some, divergence=record, weights=weights)).sum()

    check(loss, lambda x: between_responses(world, record, x, q), p)


def run(u, **options):
    p = torch.as_tensor(u).clone().requires_grad_()
    q = torch.zeros_like(p).requires_grad_()
    value = divergence_loss(p, q, torch.ones_like(p, dtype=torch.bool), **options)
    return value.detach(), *torch.autograd.grad(value.sum(), (p, q))


@every_record
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_gradients_are_those_of_the_record(record, dtype):
    u = torch.tensor([-5.0, -0.3, -1e-4, 0.0, 1e-4, 0.3, 5.0], dtype=dtype)
    value, in_p, in_q = run(u, divergence=record)
    wide = u.double().requires_grad_()
    f = record.of(wide)
    (slope,) = torch.autograd.grad(f.sum(), wide)
    single = dtype == torch.float32
    tolerance = {"rtol": 1e-4 if single else 1e-10, "atol": 1e-7 if single else 1e-12}
    torch.testing.assert_close(value.double(), f.detach(), **tolerance)
    torch.testing.assert_close(in_p.double(), (f + slope).detach(), **tolerance)
    torch.testing.assert_close(in_q.double(), -slope.detach(), **tolerance)


@every_record
def test_large_log_ratios_have_finite_values_and_nonzero_gradients(record):
    u = torch.tensor([-120.0, -90.0, 90.0, 2000.0])
    value, in_p, in_q = run(u, divergence=record)
    assert value.isfinite().all() and in_p.isfinite().all() and in_q.isfinite().all()
    assert (value > 0).all() and (in_p != 0).all()
    assert value[0] >= value[1] and value[3] >= value[2]
    value, in_p, _ = run(torch.tensor([-torch.inf]), divergence=record)
    assert value == torch.inf and in_p < 0


@every_record
def test_the_linear_continuation_is_continuous(record):
    """In float64, where the curve can still be drawn on both sides of float32's limits."""
    growth = max(1.0, record.from_p.growth, 1 + record.from_q.growth)
    wide = torch.tensor([-699.0, 699.0], dtype=torch.float64) / growth
    inside = record.of(wide)
    assert inside.isfinite().all()
    torch.testing.assert_close(run(wide, divergence=record)[0], inside)
    lower, upper = -80 / (1 + record.from_q.growth), 80 / max(1.0, record.from_p.growth)
    at = torch.tensor([lower, upper])
    beyond = torch.tensor([lower - 1, upper + 1])
    f, s = record.of(at.double()), record.score(at.double())
    signs = torch.tensor([-1.0, 1.0])
    value, in_p, _ = run(beyond, divergence=record)
    torch.testing.assert_close(value.double(), f + signs * (s - f), rtol=1e-4, atol=1e-6)
    before = record.score(at.double() - signs)
    torch.testing.assert_close(in_p.double(), 2 * s - before, rtol=1e-4, atol=1e-6)


@every_record
def test_a_sample_of_probability_zero_under_q_has_the_records_limit(record):
    p = torch.tensor([-1.0], requires_grad=True)
    q = torch.tensor([-torch.inf], requires_grad=True)
    value = divergence_loss(p, q, torch.tensor([True]), divergence=record)
    in_p, in_q = torch.autograd.grad(value.sum(), (p, q))
    assert value.item() == in_p.item() == pytest.approx(record.where_q_is_zero)
    assert in_q.isfinite().all()


def test_masked_and_zero_weight_samples_are_not_read():
    p = torch.tensor([torch.nan, -1.0, torch.inf, -torch.inf, -1.0], requires_grad=True)
    q = torch.tensor([-1.0, torch.nan, -torch.inf, -torch.inf, -2.0])
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0])
    mask = torch.tensor([0, 1, 0, 1, 1])
    for name in DIVERGENCES:
        value = divergence_loss(p, q, mask, divergence=name, weights=weights)
        (in_p,) = torch.autograd.grad(value.sum(), p)
        assert value[:4].tolist() == in_p[:4].tolist() == [0, 0, 0, 0]
        one = torch.tensor(1.0)
        assert value[4].item() == pytest.approx(2 * DIVERGENCES[name].of(one).item())
        assert in_p[4].item() == pytest.approx(2 * DIVERGENCES[name].score(one).item())


def test_invalid_divergence_loss_arguments_are_errors(unhooked):
    p, mask = torch.zeros(3, requires_grad=True), torch.ones(3, dtype=torch.bool)
    with pytest.raises(UnknownNameError, match="no divergence is called 'kld'"):
        divergence_loss(p, torch.zeros(3), mask, divergence="kld")
    with pytest.raises(DetachedError, match="token_logp carries no gradient"):
        divergence_loss(p.detach(), torch.zeros(3), mask)


@compiles
def test_divergence_loss_compiles_without_graph_breaks(compiler):
    q, mask = torch.tensor([-1.0, -90.0, -2.0]), torch.tensor([True, True, False])
    loss = lambda p: divergence_loss(p, q, mask, divergence="chi_squared").sum()  # noqa: E731
    p = torch.tensor([-2.0, -1.0, -1.0], requires_grad=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(f(p), p) for f in (compiled, loss))
    torch.testing.assert_close(got, expected)
