"""What kl_loss and future_kl_loss refuse, and under which transforms they work."""

import pytest
import torch
from compiling import compiles

from kleash.errors import DetachedError, ShapeError, UnknownNameError
from kleash.estimators import sampled_kl
from kleash.losses import future_kl_loss, kl_loss

ALL = torch.ones(2, 3, dtype=torch.bool)
P = torch.tensor([[-1.0, -2.5, -0.3], [-4.0, -0.1, -1.7]])
Q = torch.tensor([[-1.5, -0.5, -0.3], [-2.0, -0.9, -6.0]])
W = torch.tensor([[0.5, 2.0, 1.0], [3.0, 0.25, 1.5]])


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
