"""Functions of a sampled token's log ratio, and what each may be relied on for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import phi
from kleash.errors import ShapeError
from kleash.precision import at_least_float32
from kleash.registry import look_up


@validated
def k1(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """u: the definition. Its mean is the KL; a single one may be negative."""
    return log_ratio


@validated
def absolute(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """|u|: never negative, and too large."""
    return log_ratio.abs()


@validated
def k2(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """u^2 / 2: near the KL where the two nearly agree; its gradient is that of the KL."""
    return log_ratio.square() / 2


@validated
def k3(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """phi(u) = exp(-u) - 1 + u: its mean is the KL and it is never negative; its gradient is not the KL's."""
    return phi(log_ratio)


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """A function of the log ratio ``u = log p(x) - log q(x)``, ``x ~ p``, and what may be relied on.

    What holds, holds where ``q`` is 0 nowhere under ``p``; there, the KL is infinite and so are all of them.
    """

    of: Callable[[Tensor], Tensor]
    unbiased: bool
    """Whether its mean over ``x ~ p`` is KL(p || q)."""
    never_negative: bool
    """Whether a single sample's value can be trusted to be at least 0."""
    backpropagated: str
    """Whose gradient descending on it follows, in expectation, for samples of the current ``p``."""
    right_as_reward: bool
    """Whether, detached and multiplied by the score, it has the gradient of KL(p || q) in expectation."""


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "k1": Estimator(
            of=k1, unbiased=True, never_negative=False, backpropagated="zero", right_as_reward=True
        ),
        "abs": Estimator(
            of=absolute,
            unbiased=False,
            never_negative=True,
            backpropagated="sum |p - q|",
            right_as_reward=False,
        ),
        "k2": Estimator(
            of=k2, unbiased=False, never_negative=True, backpropagated="KL(p || q)", right_as_reward=False
        ),
        "k3": Estimator(
            of=k3, unbiased=True, never_negative=True, backpropagated="KL(q || p)", right_as_reward=False
        ),
    }
)
"""Name -> record; every field is a test."""


@validated
def sampled_kl(
    token_logp: Float[Tensor, "*tokens_p"], token_logq: Float[Tensor, "*tokens_q"], estimator: str = "k3"
) -> Float[Tensor, "*tokens_p"]:
    """An estimate of KL(p || q) in nats from each token ``x ~ p``: a function of its log ratio.

        estimator(log p(x) - log q(x))

    Only if the tokens were drawn from ``p``; drawn from a behaviour distribution, each needs its weight
    (``importance_weights``). The names, and what each may be relied on for, are in ``ESTIMATORS``. What
    is backpropagated is the derivative of the function, which for k1 averages to zero and for k3 is
    that of KL(q || p). A token that ``q`` rules out gives ``inf``, in all of them. Nothing is masked:
    choose the real tokens first, ``torch.where(mask, token_logp, 0.0)`` on both sides.

    Args:
        token_logp: log-probabilities of the drawn tokens under the distribution they were drawn from.
        token_logq: the same tokens under the other distribution.
        estimator: "k1", "abs", "k2" or "k3".

    Returns:
        One number per token, in float32 or, where the inputs are that, float64.

    Raises:
        UnknownNameError: if there is no such estimator.
        ShapeError: if the two differ in shape.

    References:
        Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html
    """
    chosen = look_up(ESTIMATORS, estimator, "estimator")
    if token_logp.shape != token_logq.shape:
        raise ShapeError(
            f"token_logp is {tuple(token_logp.shape)} and token_logq {tuple(token_logq.shape)}; "
            "give the same tokens under both"
        )
    return chosen.of(at_least_float32(token_logp) - at_least_float32(token_logq))
