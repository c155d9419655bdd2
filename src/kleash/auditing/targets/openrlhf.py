"""OpenRLHF's KL code: the estimators, and what they become as a loss and as a reward.

OpenRLHF imports packages that cannot be installed everywhere: the target of that name stands in for
them (``Target.load``) while it is imported. Nothing that is audited uses them.
"""

import torch
from torch import Tensor

from kleash.auditing.targets.dotted import import_target


def compute_approx_kl(
    token_logp: Tensor,
    token_logq: Tensor,
    behaviour_logp: Tensor | None = None,
    *,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
) -> Tensor:
    """OpenRLHF's ``compute_approx_kl``, per token."""
    return import_target("openrlhf.models.utils").compute_approx_kl(
        token_logp, token_logq, behaviour_logp, kl_estimator=kl_estimator, unbiased_gradient=unbiased_gradient
    )


def kl_loss(
    token_logp: Tensor,
    token_logq: Tensor,
    mask: Tensor,
    *,
    kl_estimator: str = "k2",
    token_level_loss: bool = True,
) -> Tensor:
    """OpenRLHF's estimator and ``aggregate_loss``, one after the other, as its actor calls them: a scalar."""
    per_token = import_target("openrlhf.models.utils").compute_approx_kl(
        token_logp, token_logq, kl_estimator=kl_estimator
    )
    return import_target("openrlhf.models.loss").aggregate_loss(
        per_token, mask, token_level_loss=token_level_loss
    )


def kl_reward(token_logp: Tensor, token_logq: Tensor, mask: Tensor, *, kl_estimator: str = "k1") -> Tensor:
    """OpenRLHF's ``compute_reward`` on scores of 0 with a coefficient of 1: minus the KL, per token."""
    utils = import_target("openrlhf.models.utils")
    per_token = utils.compute_approx_kl(token_logp, token_logq, kl_estimator=kl_estimator)
    return utils.compute_reward(torch.zeros(len(token_logp), dtype=per_token.dtype), 1.0, per_token, mask)
