"""prime-rl's custom loss (``trainer.loss.type = "custom"``): policy gradient, trust region, and a KL that is one."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kleash.errors import OptionError
from kleash.extras import require_attributes
from kleash.leash import binary_divergence_mask
from kleash.losses import KLTerm
from kleash.precision import at_least_float32

__all__ = ["leashed_loss"]

MODULE = "prime_rl.trainer.rl.loss"
SEAMS = {
    f"{MODULE}:LossInputs": (
        *(
            "trainer_logprobs",
            "inference_logprobs",
            "ref_logprobs",
            "advantages",
            "loss_mask",
            "loss_weights",
        ),
    ),
    f"{MODULE}:LossOutputs": ("loss", "metrics"),
}


def leashed_loss(
    inputs: Any,
    *,
    beta: float,
    against: str = "inference",
    estimator: str = "k3",
    cap: float | None = None,
    most_total_variation: float | None = 0.2,
) -> Any:
    """The loss of one sequence, summed over its tokens as prime-rl's own are.

        loss = sum_t weight_t (-kept_t A_t rho_t + beta KL_t),    rho = policy / inference

    KL_t is KL(policy || against) of the token, rho_t times ``estimator``, with its own gradient: rho_t u_t on log p.
    The tokens were drawn by the inference engine, and rho puts that right. kept_t is the trust region of
    prime-rl's default loss (DPPO, total variation): 1 within ``most_total_variation``, or on the way back.

    Args:
        inputs: prime-rl's ``LossInputs``.
        beta: nats of reward paid for one nat of KL.
        against: "inference", the policy as it drew the tokens, or "reference", whose log-probabilities prime-rl
            hands over only for algorithms that score with one.
        estimator: what the KL is called in the metrics; the gradient is the same for each.
        cap: the most that rho may be in the KL; None for no limit.
        most_total_variation: None for no trust region.

    Returns:
        prime-rl's ``LossOutputs``; its metrics, for a sequence with tokens that count, are ``kl`` (nats per token) and
        ``removed`` (share of the tokens).

    Raises:
        OptionError: if ``against`` is neither, there are no reference log-probabilities, or a number means nothing.
        CannotRunError: if this prime-rl is not the one that this was written for.
    """
    logp, behaviour, mask = (
        x[None] for x in (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.loss_mask)
    )
    against_logp = _against(inputs, against)[None]
    term = KLTerm(estimator=estimator, ratio="token", cap=cap)
    kl = term.per_token(logp, against_logp, mask, behaviour_logp=behaviour)
    advantages = torch.where(mask, inputs.advantages[None], 0.0)
    inside_region = mask
    if most_total_variation is not None:
        inside_region = binary_divergence_mask(
            logp, behaviour, advantages, mask, most=most_total_variation, divergence="total_variation"
        ).kept
    log_ratio = torch.where(inside_region, at_least_float32(logp) - at_least_float32(behaviour.detach()), 0.0)
    per_token = beta * kl - torch.where(inside_region, advantages, 0.0) * log_ratio.exp()
    if inputs.loss_weights is not None:
        per_token = per_token * torch.where(mask, inputs.loss_weights[None], 0.0)
    metrics = (
        {}
        if not mask.any()
        else {"kl": kl.detach()[mask].mean(), "removed": 1 - inside_region.sum() / mask.sum()}
    )
    return _outputs()(loss=per_token.sum(), metrics=metrics)


def _against(inputs: Any, against: str) -> Tensor:
    if against not in ("inference", "reference"):
        raise OptionError(f"against is {against!r}; there are inference, reference")
    logprobs = inputs.inference_logprobs if against == "inference" else inputs.ref_logprobs
    if logprobs is None:
        raise OptionError(
            "prime-rl hands over no reference log-probabilities for this algorithm; take against='inference', or an "
            "algorithm that scores with a reference"
        )
    return logprobs


@cache
def _outputs() -> Any:
    """prime-rl's own record, once it is known to be the right one."""
    require_attributes("prime-rl", SEAMS)
    return import_module(MODULE).LossOutputs
