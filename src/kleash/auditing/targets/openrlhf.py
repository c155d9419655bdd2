"""OpenRLHF's KL code: the estimators, also as a loss and as a reward.

OpenRLHF imports packages that cannot be installed everywhere; the target replaces missing ones with stand-ins
(``Target.load``), since no audited code uses them.
"""

import torch
from torch import Tensor

from kleash.auditing.targets.cases import MINUS_REWARD, Target, make_case
from kleash.auditing.targets.packages import import_target


def kl_loss(
    token_logp: Tensor,
    token_logq: Tensor,
    mask: Tensor,
    *,
    kl_estimator: str = "k2",
    token_level_loss: bool = True,
) -> Tensor:
    """OpenRLHF's estimator followed by ``aggregate_loss``, as its actor calls them: a scalar."""
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


APPROX = "openrlhf.models.utils.compute_approx_kl"
OPENRLHF = Target(
    name="openrlhf",
    package="openrlhf",
    modules=("openrlhf.models.utils", "openrlhf.models.loss"),
    stood_in=("deepspeed", "flash_attn", "pylatexenc"),
    cases=(
        *(make_case(name, APPROX, "loss", kl_estimator=name) for name in ("k1", "k2", "k3")),
        *(
            make_case(
                f"{name}_unbiased",
                APPROX,
                "loss_with_behaviour",
                kl_estimator=name,
                unbiased_gradient=True,
            )
            for name in ("k1", "k2", "k3")
        ),
        make_case(
            "reward_k1",
            "openrlhf.models.utils.compute_reward",
            MINUS_REWARD,
            "scores of 0 and a coefficient of 1",
            "compute_reward does not mask; OpenRLHF's actor passes log-probabilities that are 0 in the padding "
            "(openrlhf.models.actor), and its advantages mask the rewards again",
            function=kl_reward,
            fragile=("padding_counts",),
        ),
        *(
            make_case(
                name,
                "openrlhf.models.loss.aggregate_loss",
                "mean_loss_with_mask",
                "compute_approx_kl followed by aggregate_loss, as the actor calls them",
                function=kl_loss,
                kl_estimator="k2",
                token_level_loss=by_token,
            )
            for name, by_token in (("loss_by_token", True), ("loss_by_sample", False))
        ),
    ),
)
