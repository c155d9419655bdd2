"""Surrogate losses: values with a prescribed gradient instead of that of their own formula."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kleash.autodiff import (
    apply,
    first_derivative_only,
    times_slope,
    uncompiled_in_transforms,
)
from kleash.errors import CannotRunError, DetachedError
from kleash.estimators import ESTIMATORS, Estimator
from kleash.estimators.sampled import continued_k3
from kleash.estimators.weights import Level
from kleash.masking import as_mask
from kleash.precision import at_least_float32

FIRST_DERIVATIVE_ONLY = (
    "a loss of kleash.losses carries the gradient of a divergence, which is not that of its own value, so it has one "
    "derivative, in backward mode; for second or forward-mode derivatives take an exact function of kleash.divergences"
)


class SampledPair(NamedTuple):
    """The log-probabilities of the sampled tokens in at least float32, with mask and weights."""

    token_logp: Tensor
    token_logq: Tensor
    mask: Tensor
    """The given mask as bool: true for the tokens that get the gradient of later tokens' KL, also with weight 0."""
    is_counted: Tensor
    """True where ``mask`` is true and the weight is not 0: the tokens whose own KL enters value and gradient."""
    weights: Tensor | None
    """0 where ``is_counted`` is false; detached unless ``attach_weights`` made them."""

    @property
    def log_ratio(self) -> Tensor:
        """log p - log q, detached; 0 where ``is_counted`` is false."""
        return torch.where(self.is_counted, self.token_logp.detach() - self.token_logq.detach(), 0.0)

    def times_weights(self, values: Tensor) -> Tensor:
        """The values times the weights; unchanged without weights."""
        return values if self.weights is None else self.weights * values


def sampled_pair(token_logp: Tensor, token_logq: Tensor, mask: Tensor, weights: Tensor | None) -> SampledPair:
    """The record of the arguments of a sampled loss: log-probabilities, mask and weights, checked and converted.

    Raises:
        DetachedError: if ``weights`` carry a gradient.
    """
    is_counted, weights = mask_and_weights(mask, weights)
    return SampledPair(
        at_least_float32(token_logp), at_least_float32(token_logq), as_mask(mask), is_counted, weights
    )


def attach_weights(pair: SampledPair, level: Level) -> SampledPair:
    """The pair with weights of unchanged value, whose gradient is that of importance weights of that level."""
    logp = torch.where(pair.is_counted, pair.token_logp, 0.0)
    if level == "sequence":
        log_weight = logp.sum(-1, keepdim=True).expand_as(logp)
    elif level == "token":
        log_weight = logp
    else:
        log_weight = logp.cumsum(-1) - (logp if level == "before" else 0.0)
    return pair._replace(weights=pair.times_weights(torch.exp(log_weight - log_weight.detach())))


def kl_of_pair(pair: SampledPair, estimator: Estimator, *, backpropagated: bool = False) -> Tensor:
    """The weighted estimate of each token's KL, with the gradient ``weights * (u, -1)``, as ``kl_loss`` defines it.

    Args:
        pair: the sampled tokens.
        estimator: of the value.
        backpropagated: whether the gradient is that of the weighted estimate itself.
    """
    function = continued_k3 if estimator is ESTIMATORS["k3"] else estimator.of
    if backpropagated:
        p, q = (torch.where(pair.is_counted, x, 0.0) for x in (pair.token_logp, pair.token_logq))
        return pair.times_weights(function(p - q))
    u = pair.log_ratio
    return with_pair_gradient(function(u), pair, u, lambda: -pair.is_counted.to(u.dtype))


def future_kl_of_tokens(token_logp: Tensor, cost: Tensor, mask: Tensor) -> Tensor:
    """0 for each token, with the gradient of the KL of later tokens, as ``future_kl_loss`` defines it.

    Args:
        token_logp: in at least float32.
        cost: the weighted KL of each token, detached; 0 where it does not count.
        mask: false for tokens that get no gradient.
    """
    kl_to_go = cost.flip(-1).cumsum(-1).flip(-1)
    future_kl = torch.where(mask, pad(kl_to_go[..., 1:], (0, 1)), 0.0)
    return with_gradient(torch.zeros_like(future_kl), token_logp, future_kl)


def mask_and_weights(mask: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The mask, false also where the weight is 0, and the weights, 0 where masked.

    Raises:
        DetachedError: if the weights carry a gradient.
    """
    is_counted = as_mask(mask)
    if weights is None:
        return is_counted, None
    if weights.requires_grad:
        raise DetachedError(
            "weights carry a gradient, which would be added to one that is already right; "
            "give importance_weights(...).values, or weights.detach()"
        )
    is_counted = is_counted & (weights != 0)
    return is_counted, torch.where(is_counted, at_least_float32(weights), 0.0)


def require_gradient(*tensors: Tensor, name: str = "token_logp") -> None:
    """Raise DetachedError if gradients are enabled and no tensor carries one."""
    if torch.is_grad_enabled() and not any(may_require_grad(x) for x in tensors):
        raise DetachedError(
            f"{name} carries no gradient although gradients are enabled, so this loss would not train it; "
            "give what was computed with gradients, or call under torch.no_grad() for the value alone"
        )


def may_require_grad(x: Tensor) -> bool:
    """Whether ``x`` carries a gradient; inside a functorch transform this is unknown and taken to be true."""
    return x.requires_grad or torch._C._are_functorch_transforms_active()


def with_pair_gradient(
    value: Tensor, pair: SampledPair, grad_p: Tensor, grad_q: Callable[[], Tensor]
) -> Tensor:
    """``weights * value`` with the gradient ``weights`` times ``grad_p`` and ``grad_q`` in the pair.

    Args:
        value: one number per token.
        pair: the log-probabilities that the gradient flows to.
        grad_p: the gradient in ``token_logp``, without weights.
        grad_q: returns the gradient in ``token_logq``, without weights.
    """
    in_q = pair.times_weights(grad_q()) if may_require_grad(pair.token_logq) else None
    in_p = pair.times_weights(grad_p)
    return with_gradient(pair.times_weights(value), pair.token_logp, in_p, pair.token_logq, in_q)


@uncompiled_in_transforms
def with_gradient(
    value: Tensor,
    token_logp: Tensor,
    grad_p: Tensor,
    token_logq: Tensor | None = None,
    grad_q: Tensor | None = None,
) -> Tensor:
    """``value`` with the gradient ``grad_p`` in ``token_logp``; forward mode, which would lose it, is refused.

    Args:
        value: one number per token.
        token_logp: log-probabilities that the gradient flows to.
        grad_p: the gradient in ``token_logp``.
        token_logq: a second tensor.
        grad_q: the gradient in it; None for 0.

    Raises:
        CannotRunError: if it is compiled inside ``torch.func.vmap``.
    """
    if torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(value):
        raise CannotRunError(
            "torch.compile loses gradients inside vmap (seen in torch 2.13); compile the inside"
        )
    # torch.compile takes no function with a forward mode of its own
    function = _WithGradient if torch.compiler.is_compiling() else _WithoutForwardMode
    return apply(function, token_logp, token_logq, value, grad_p, grad_q)


class _WithGradient(torch.autograd.Function):
    """The identity on ``value`` with given gradients, which are constants: it has first derivatives only.

    Tokens that are selected away afterwards have the gradient 0, also if the given one is infinite.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        token_logp: Tensor, token_logq: Tensor | None, value: Tensor, grad_p: Tensor, grad_q: Tensor | None
    ) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        ctx.save_for_backward(
            *inputs[3:],
            # A tensor of inference mode, which needs no gradient, could not be saved.
            *(x if needed else None for x, needed in zip(inputs[:2], ctx.needs_input_grad[:2], strict=True)),
        )

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, weight: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_p, grad_q, token_logp, token_logq = ctx.saved_tensors
        grad_p = first_derivative_only(times_slope(weight, grad_p), token_logp, FIRST_DERIVATIVE_ONLY)
        if grad_q is not None:
            grad_q = first_derivative_only(times_slope(weight, grad_q), token_logq, FIRST_DERIVATIVE_ONLY)
        return grad_p, grad_q, None, None, None


class _WithoutForwardMode(_WithGradient):
    """``_WithGradient`` that raises under forward-mode differentiation, which is not supported."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        raise CannotRunError(FIRST_DERIVATIVE_ONLY)
