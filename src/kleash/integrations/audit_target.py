"""kleash's own KL code as an audit target: losses, estimators, and the replacement of verl's penalty.

Registered as the entry point ``kleash`` of the group ``kleash.audit_targets``.
"""

from torch import Tensor

from kleash.auditing.targets import Target
from kleash.auditing.targets.cases import make_case
from kleash.divergences import kl
from kleash.estimators import importance_weights, sampled_kl
from kleash.integrations.verl import kl_penalty
from kleash.linear import linear_kl
from kleash.losses import kl_loss


def weighted_kl_loss(
    token_logp: Tensor, token_logq: Tensor, behaviour_logp: Tensor, mask: Tensor, *, estimator: str = "k3"
) -> Tensor:
    """``kl_loss`` with the token weights of off-policy training, from ``importance_weights``."""
    return kl_loss(
        token_logp,
        token_logq,
        mask,
        estimator=estimator,
        weights=importance_weights(token_logp, behaviour_logp, mask).values,
    )


KLEASH = Target(
    name="kleash",
    package="kleash",
    modules=(),
    cases=(
        make_case("kl_loss", "kleash.losses.kl_loss", "loss_with_mask", function=kl_loss),
        make_case("kl_loss_k2", "kleash.losses.kl_loss", "loss_with_mask", function=kl_loss, estimator="k2"),
        make_case(
            "kl_loss_weighted",
            "kleash.losses.kl_loss",
            "loss_with_behaviour_and_mask",
            "with the token weights of importance_weights",
            function=weighted_kl_loss,
        ),
        make_case(
            "sampled_k1", "kleash.estimators.sampled_kl", "reward", function=sampled_kl, estimator="k1"
        ),
        make_case(
            "sampled_k3", "kleash.estimators.sampled_kl", "metric", function=sampled_kl, estimator="k3"
        ),
        make_case("kl", "kleash.divergences.kl", "log_probabilities", function=kl),
        make_case("linear_kl", "kleash.linear.linear_kl", "heads", function=linear_kl),
        make_case(
            "verl_k3+",
            "kleash.integrations.verl.kl_penalty",
            "f(token_logp, token_logq, 'low_var_kl+')",
            function=kl_penalty,
        ),
    ),
)
