"""Custom loss for prime-rl: policy gradient, trust region, and a KL term with its own gradient.

Written for the signatures of prime-rl 0.8.0 (commit 559b447, 21 August 2026): ``LossInputs`` and ``LossOutputs`` of
``prime_rl.trainer.rl.loss``, documented in its ``docs/algorithms.md`` under "Custom Loss". Needs kleash and prime-rl;
prime-rl is imported when the loss is first called. Put this file on the Python path of the trainer and set::

    [trainer.loss]
    type = "custom"
    import_path = "prime_rl_loss.leashed_loss"
"""

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from kleash.errors import CannotRunError, OptionError
from kleash.leash import binary_divergence_mask
from kleash.losses import KLTerm
from kleash.precision import at_least_float32

__all__ = ["leashed_loss"]

RECORDS = {
    "LossInputs": (
        *("trainer_logprobs", "inference_logprobs", "ref_logprobs"),
        *("advantages", "loss_mask", "loss_weights"),
    ),
    "LossOutputs": ("loss", "metrics"),
}
"""Records of prime-rl and the fields that are used of each."""


def leashed_loss(
    inputs: Any,
    *,
    beta: float,
    against: str = "inference",
    estimator: str = "k3",
    cap: float | None = None,
    most_total_variation: float | None = 0.2,
) -> Any:
    """Return the loss of one sequence, summed over its tokens as in prime-rl's default loss.

        loss = sum_t weight_t (-in_region_t A_t rho_t + beta KL_t),    rho = policy / inference

    KL_t estimates KL(policy || against) at the token, weighted by rho_t because the inference engine drew the token.
    Its gradient is rho_t u_t on log p. in_region_t is the trust region of prime-rl's default loss (DPPO, total
    variation): 1 within ``most_total_variation``, or if the update moves the token back towards it.

    Args:
        inputs: prime-rl's ``LossInputs``.
        beta: coefficient of the KL, in units of reward per nat.
        against: "inference" (the policy that drew the tokens) or "reference". prime-rl has reference log-probabilities
            only for algorithms that score with a reference.
        estimator: estimator of the KL that is logged; the gradient is the same for all.
        cap: largest rho in the KL; None for no limit.
        most_total_variation: size of the trust region; None for no trust region.

    Returns:
        prime-rl's ``LossOutputs``. Its metrics are ``kl`` (nats per token) and ``removed`` (share of the tokens
        outside the trust region); they are empty if the mask is.

    Raises:
        OptionError: if ``against`` is unknown, there are no reference log-probabilities, or a number is out of range.
        CannotRunError: if prime-rl's records lack a field that is used.
    """
    logp, behaviour, mask = (
        x[None] for x in (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.loss_mask)
    )
    against_logp = _against_logprobs(inputs, against)[None]
    term = KLTerm(estimator=estimator, ratio="token", cap=cap)
    kl = term.per_token(logp, against_logp, mask, behaviour_logp=behaviour)
    advantages = torch.where(mask, inputs.advantages[None], 0.0)
    in_region = mask
    if most_total_variation is not None:
        in_region = binary_divergence_mask(
            logp, behaviour, advantages, mask, most=most_total_variation, divergence="total_variation"
        ).kept
    log_ratio = torch.where(in_region, at_least_float32(logp) - at_least_float32(behaviour.detach()), 0.0)
    per_token = beta * kl - torch.where(in_region, advantages, 0.0) * log_ratio.exp()
    if inputs.loss_weights is not None:
        per_token = per_token * torch.where(mask, inputs.loss_weights[None], 0.0)
    metrics = (
        {}
        if not mask.any()
        else {"kl": kl.detach()[mask].mean(), "removed": 1 - in_region.sum() / mask.sum()}
    )
    return _loss_outputs()(loss=per_token.sum(), metrics=metrics)


def _against_logprobs(inputs: Any, against: str) -> Tensor:
    if against not in ("inference", "reference"):
        raise OptionError(f"against is {against!r}; there are inference, reference")
    logprobs = inputs.inference_logprobs if against == "inference" else inputs.ref_logprobs
    if logprobs is None:
        raise OptionError(
            "prime-rl passes no reference log-probabilities for this algorithm; take against='inference', or an "
            "algorithm that scores with a reference"
        )
    return logprobs


@cache
def _loss_outputs() -> Any:
    """The class ``LossOutputs`` of prime-rl, after checking the fields of its records."""
    module = import_module("prime_rl.trainer.rl.loss")
    missing = [
        f"{record}.{field}"
        for record, fields in RECORDS.items()
        for field in fields
        if field not in signature(getattr(module, record)).parameters
    ]
    if missing:
        raise CannotRunError(
            f"the installed prime-rl lacks {', '.join(missing)}; this recipe was written for prime-rl 0.8.0"
        )
    return module.LossOutputs
