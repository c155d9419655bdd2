"""verl's KL penalty by verl's names, without its clamp, and the exact KL.

The table ``kl_rules`` refuses one of these terms as a loss: k1, whose gradient averages to zero. verl allows it, and
its functions cannot know: ``kl_penalty_forward`` gets the name without the ``+`` that gives k1 another gradient, and
a reward may be detached later. So nothing is refused here.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import DIVERGENCES
from kleash.divergences.functions import divergence_of_rows
from kleash.errors import ShapeError
from kleash.estimators import sampled_kl
from kleash.estimators.sampled import with_k2_gradient
from kleash.precision import at_least_float32, normalised
from kleash.registry import look_up

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "kl": "k1",
        "k1": "k1",
        "abs": "abs",
        "mse": "k2",
        "k2": "k2",
        "low_var_kl": "k3",
        "k3": "k3",
        "full": "exact",
        "exact": "exact",
    }
)
"""verl's name -> kleash's; "exact" is new. With a ``+`` behind, any has the gradient of KL(policy || reference)."""


def is_exact(kl_penalty: str) -> bool:
    """Whether a name of verl's penalty, with or without ``+``, is that of the exact KL."""
    return NAMES.get(kl_penalty.removesuffix("+")) == "exact"


@validated
def kl_penalty(
    logprob: Float[Tensor, "*logprobs"],
    ref_logprob: Float[Tensor, "*logprobs"],
    kl_penalty: str,
) -> Float[Tensor, "*tokens"]:
    """KL(policy || reference) in nats per token, with the arguments of ``verl.trainer.ppo.core_algos.kl_penalty``.

    | name               | value                                  | gradient, on-policy |
    | kl, k1             | u = logprob - ref_logprob              | none: it averages to zero |
    | abs                | abs(u)                                 | of sum abs(p - q) |
    | mse, k2            | u^2 / 2                                | of KL(policy || reference) |
    | low_var_kl, k3     | exp(-u) - 1 + u                        | of KL(reference || policy) |
    | exact, full        | exact: sum of p (log p - log q)        | of KL(policy || reference) |
    | any of them with + | as without                             | of KL(policy || reference), by k2 |

    Value and gradient are verl's wherever verl does not clamp, up to rounding: the subtraction is done, and the
    result returned, in at least float32. verl clamps only k3, to 10: for tokens with u below -2.61 or above 11 its
    value is constant and its gradient 0. Here the value is not bounded and may be ``inf``. Where u is infinite, a
    name with ``+`` has gradient 0.

    Args:
        logprob: log-probabilities of the sampled tokens under the policy; for "exact", log-probabilities or
            logits of every token, ``[batch, time, vocab]``.
        ref_logprob: the same under the reference, in the same shape; there is no broadcasting.
        kl_penalty: one of the names; "exact+" is the same as "exact".

    Raises:
        UnknownNameError: for a name that verl does not know.
        ShapeError: if the two differ in shape, or "exact" gets sampled tokens.

    References:
        verl 0.9.1, https://github.com/verl-project/verl
    """
    name = look_up(NAMES, kl_penalty.removesuffix("+"), "KL penalty of verl")
    if name == "exact":
        if logprob.ndim != 3:
            raise ShapeError(
                f"the exact KL sums over the vocabulary and was given {tuple(logprob.shape)}; verl hands over the "
                "sampled tokens' log-probabilities alone: in a loss let its engine do it (install(exact=True)), or ask "
                "for 'k3+'; in a reward ask for 'k1'"
            )
        rows = (normalised(at_least_float32(x)) for x in (logprob, ref_logprob))
        return divergence_of_rows(DIVERGENCES["kl"], *rows)
    value = sampled_kl(logprob, ref_logprob, name)
    return with_k2_gradient(value, logprob, ref_logprob) if kl_penalty.endswith("+") else value
