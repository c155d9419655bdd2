"""kl_loss and future_kl_loss at their edges: masks, weights, overflow, types, transforms, refusals."""

import math

import pytest
import torch
from compiling import compiles

from kleash.errors import DetachedError, ShapeError, UnknownNameError
from kleash.estimators import ESTIMATORS, bounded_k3, sampled_kl
from kleash.losses import extreme_tokens, future_kl_loss, kl_loss

ALL = torch.ones(2, 3, dtype=torch.bool)
P = torch.tensor([[-1.0, -2.5, -0.3], [-4.0, -0.1, -1.7]])
Q = torch.tensor([[-1.5, -0.5, -0.3], [-2.0, -0.9, -6.0]])
W = torch.tensor([[0.5, 2.0, 1.0], [3.0, 0.25, 1.5]])
NAMES = list(ESTIMATORS)


def run(token_logp, token_logq, mask, **options):
    """Value, and gradient in both sides."""
    p, q = token_logp.clone().requires_grad_(), token_logq.clone().requires_grad_()
    value = kl_loss(p, q, mask, **options)
    return value.detach(), *torch.autograd.grad(value.sum(), (p, q))


def run_future(token_logp, token_kl, mask, weights=None):
    leaf = token_logp.clone().requires_grad_()
    value = future_kl_loss(leaf, token_kl, mask, weights=weights)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", [None, W])
def test_value_and_gradients_are_as_stated(name, weights):
    value, in_p, in_q = run(P, Q, ALL, estimator=name, weights=weights)
    w = torch.ones(2, 3) if weights is None else weights
    torch.testing.assert_close(value, w * sampled_kl(P, Q, name))
    torch.testing.assert_close(in_p, w * (P - Q))
    torch.testing.assert_close(in_q, -w)
    assert torch.equal(run(P, Q, ALL)[0], run(P, Q, ALL, estimator="k3")[0])


def test_an_estimator_may_be_a_record():
    record = bounded_k3(-1.0)
    value, in_p, _ = run(P, Q, ALL, estimator=record)
    torch.testing.assert_close(value, record.of(P - Q))
    torch.testing.assert_close(in_p, P - Q)
    assert value[0, 1] < sampled_kl(P, Q)[0, 1]


@pytest.mark.parametrize("name", NAMES)
def test_masked_values_are_not_read(name):
    """Holes in the middle, padding, and a weight of 0, whatever stands there on either side."""
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    p, q, w = P.clone(), Q.clone(), W.clone()
    for side, place in ((p, 0), (q, 1), (w, 2)):
        side[0, 1], side[1, 1], side[1, 2] = junk.roll(place)
    weights = w.clone()
    weights[1, 0], p[1, 0] = 0.0, -torch.inf
    for given_weights in (None, weights):
        keep = mask.bool() if given_weights is None else mask.bool() & (torch.arange(2) == 0)[:, None]
        pp = p if given_weights is not None else torch.where(torch.isinf(p) & mask.bool(), P, p)
        value, in_p, in_q = run(pp, q, mask, estimator=name, weights=given_weights)
        used = torch.ones(2, 3) if given_weights is None else W
        torch.testing.assert_close(value, torch.where(keep, used * sampled_kl(P, Q, name), 0.0))
        torch.testing.assert_close(in_p, torch.where(keep, used * (P - Q), 0.0))
        torch.testing.assert_close(in_q, torch.where(keep, -used, 0.0))


def test_future_kl_of_a_small_example_with_masked_tokens():
    cost = torch.tensor([[1.0, torch.nan, 2.0, 4.0, torch.inf]])
    mask = torch.tensor([[1, 0, 1, 1, 0]])
    logp = torch.tensor([[-1.0, torch.nan, -1.0, -1.0, torch.nan]])
    value, slope = run_future(logp, cost, mask)
    assert value.tolist() == [[0, 0, 0, 0, 0]] and slope.tolist() == [[6, 0, 4, 0, 0]]
    weights = torch.tensor([[9.0, torch.nan, 0.5, 0.25, torch.nan]])
    assert run_future(logp, cost, mask, weights)[1].tolist() == [[2, 0, 1, 0, 0]]


def test_a_token_of_weight_zero_is_credited_with_later_tokens():
    slope = run_future(P[:1], torch.ones(1, 3), ALL[:1], torch.tensor([[0.0, 2.0, 3.0]]))[1]
    assert slope.tolist() == [[5, 3, 0]]


def test_future_kl_has_no_gradient_in_the_kl():
    leaf, cost = P.clone().requires_grad_(), Q.clone().requires_grad_()
    future_kl_loss(leaf, cost, ALL).sum().backward()
    assert cost.grad is None
    torch.testing.assert_close(leaf.grad, torch.stack([Q[:, 1] + Q[:, 2], Q[:, 2], 0 * Q[:, 0]], 1))


def test_values_are_not_clamped_and_gradients_do_not_vanish():
    """Where the usual clamps have gradient 0 or NaN."""
    u = torch.tensor([-2.7, -11.0, -79.0, -81.0, -300.0, 11.5, 300.0])
    value, in_p, in_q = run(u, torch.zeros(7), torch.ones(7, dtype=torch.bool))
    torch.testing.assert_close(in_p, u)
    assert (in_q == -1).all()
    torch.testing.assert_close(value[:3], sampled_kl(u[:3], torch.zeros(3)), rtol=1e-5, atol=0)
    assert value.isfinite().all() and (value[3:5] > math.exp(80)).all() and value[4] > value[3]
    assert value[-1] == 299


def test_extreme_tokens_are_counted():
    p = torch.tensor([[-90.0, -1.0, -85.0, -80.0, -1.0]])
    q = torch.tensor([[-1.0, -torch.inf, -1.0, 0.0, -torch.inf]])
    mask = torch.tensor([[1, 1, 0, 1, 0]])
    assert tuple(x.item() for x in extreme_tokens(p, q, mask)) == (1, 1)
    assert tuple(x.item() for x in extreme_tokens(p.double(), q.double(), mask)) == (0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_probability_zero_under_q_is_infinite(name):
    one, never = torch.tensor([-1.0]), torch.tensor([-torch.inf])
    value, in_p, in_q = run(one, never, torch.tensor([True]), estimator=name)
    assert value.item() == in_p.item() == torch.inf and in_q.item() == -1


def test_mixed_precision_uses_the_wider_dtype():
    value, in_p, in_q = run(P.double(), Q, ALL)
    assert (value.dtype, in_p.dtype, in_q.dtype) == (torch.float64, torch.float64, torch.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", [None, W])
def test_the_result_may_be_modified_in_place(name, weights):
    """As trainers do: `loss += ...`, `loss[0] *= ...`; the gradient is that of each token, whatever its factor."""
    p, q = P.clone().requires_grad_(), Q.clone().requires_grad_()
    factor = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, 2.0]])
    loss = kl_loss(p, q, ALL, estimator=name, weights=weights)
    expected = 2 * factor * loss.detach()
    loss += kl_loss(p, q, ALL, estimator=name, weights=weights)
    loss *= factor
    torch.testing.assert_close(loss.detach(), expected)
    w = factor if weights is None else factor * weights
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), (p, q)), (2 * w * (P - Q), -2 * w))
    future = future_kl_loss(p, Q, ALL)
    future += 1
    assert torch.equal(q, Q) and future.sum() == 6


def test_empty_batches_give_empty_losses():
    value, in_p, _ = run(P[:0], Q[:0], ALL[:0])
    assert value.shape == in_p.shape == (0, 3)
    assert run_future(P[:, :0], Q[:, :0], ALL[:, :0])[0].shape == (2, 0)


def test_detached_log_probabilities_are_an_error_while_gradients_are_enabled():
    with pytest.raises(DetachedError, match="token_logp carries no gradient although gradients are enabled"):
        kl_loss(P, Q, ALL)
    with pytest.raises(DetachedError, match=r"or call under torch\.no_grad\(\) for the value alone"):
        future_kl_loss(P, Q.requires_grad_(False), ALL)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            torch.testing.assert_close(kl_loss(P, Q, ALL), sampled_kl(P, Q))
            assert (future_kl_loss(P, Q, ALL) == 0).all()


def test_weights_with_a_gradient_are_refused():
    p = P.clone().requires_grad_()
    for call in (kl_loss, future_kl_loss):
        with pytest.raises(DetachedError, match=r"weights carry a gradient.*give importance_weights"):
            call(p, Q, ALL, weights=(p - Q).exp())


def test_unknown_estimators_and_mismatched_shapes_are_errors(unhooked):
    p = P.clone().requires_grad_()
    with pytest.raises(UnknownNameError, match="no estimator is called 'k4'"):
        kl_loss(p, Q, ALL, estimator="k4")
    with pytest.raises(ShapeError, match="give truth values or integers"):
        kl_loss(p, Q, ALL.float())


def test_function_transforms_agree_with_autograd():
    def rowwise(p, q, mask):
        return (kl_loss(p, q, mask) + future_kl_loss(p, q, mask)).sum()

    p, q = P.clone().requires_grad_(), Q.clone().requires_grad_()
    rows = [rowwise(*row) for row in zip(p, q, ALL, strict=True)]
    expected = torch.autograd.grad(torch.stack(rows).sum(), (p, q))
    inside = torch.vmap(torch.func.grad(rowwise, argnums=(0, 1)))(P, Q, ALL)
    outside = torch.func.grad(lambda a, b: torch.vmap(rowwise)(a, b, ALL).sum(), argnums=(0, 1))(P, Q)
    for got in (inside, outside, torch.func.grad(rowwise, argnums=(0, 1))(P, Q, ALL)):
        torch.testing.assert_close(got, expected)


@compiles
@pytest.mark.parametrize(("weights", "estimator"), [(None, "k1"), (None, "k3"), (W, "k3")])
def test_kl_loss_compiles_without_graph_breaks(compiler, weights, estimator):
    def loss(p, q, mask):
        out = kl_loss(p, q, mask, weights=weights, estimator=estimator)
        return (out + future_kl_loss(p, (p - q).detach(), mask, weights=weights)).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    transformed = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(transformed(P, Q, ALL), torch.func.grad(loss)(P, Q, ALL))
    p = P.clone().requires_grad_()
    torch.testing.assert_close(*(torch.autograd.grad(f(p, Q, ALL), p) for f in (compiled, loss)))
    with torch.no_grad():
        torch.testing.assert_close(compiled(P, Q, ALL), loss(P, Q, ALL))


@compiles
def test_unsupported_compiled_transforms_are_errors(compiler):
    """torch 2.13 drops the gradient of a function of one's own inside a compiled vmap."""

    def mapped(p):
        rows = torch.vmap(lambda a, b, m: kl_loss(a, b, m).sum())
        return torch.func.grad(lambda x: rows(x, Q, ALL).sum())(p)

    with pytest.raises(Exception, match=r"compile the inside|Observed exception"):
        torch.compile(mapped, fullgraph=True, backend="aot_eager")(P)
