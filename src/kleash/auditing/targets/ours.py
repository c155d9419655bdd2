"""kleash's own KL code where it is called in two steps, audited as everybody else's is."""

from torch import Tensor

from kleash.auditing.targets.dotted import import_target
from kleash.estimators import importance_weights
from kleash.losses.relative_entropy import kl_loss


def weighted_kl_loss(
    token_logp: Tensor, token_logq: Tensor, behaviour_logp: Tensor, mask: Tensor, *, estimator: str = "k3"
) -> Tensor:
    """``kl_loss`` with token weights from ``importance_weights``, as off-policy training calls it."""
    weights = importance_weights(token_logp, behaviour_logp, mask).values
    return kl_loss(token_logp, token_logq, mask, estimator=estimator, weights=weights)


def verl_kl_penalty(token_logp: Tensor, token_logq: Tensor, *, kl_penalty: str = "low_var_kl+") -> Tensor:
    """kleash's drop-in for verl's ``kl_penalty``: a floor above this one, so found by its path."""
    return import_target("kleash.integrations.verl").kl_penalty(token_logp, token_logq, kl_penalty)
