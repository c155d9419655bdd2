"""Checks of values, to be called where a synchronisation costs nothing: on a first batch, in an audit."""

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import NotProbabilitiesError
from kleash.losses.surrogate import require_one_shape
from kleash.masking import as_mask

ROUNDINGS = 32
"""How many roundings above 0 a log-probability may be: logits in the tens were subtracted."""


@validated
def require_log_probabilities(
    token_logp: Float[Tensor, "*tokens_p"],
    mask: Bool[Tensor, "*tokens_m"] | Integer[Tensor, "*tokens_m"],
    name: str = "token_logp",
) -> None:
    """Raise unless what counts can be natural log-probabilities of sampled tokens.

    Caught: NaN and +inf; positive numbers, telling apart probabilities (all from 0 to 1) from logits and
    losses; and zeros throughout, which is what a model that never ran leaves behind. A
    log-probability of -inf is one. What is masked is not read; nothing to read is nothing wrong.
    Reads the values: not for the inside of a compiled step.

    Args:
        token_logp: what is claimed to be log-probabilities.
        mask: true (or 1) for the tokens that count.
        name: what to call them in the error.

    Raises:
        NotProbabilitiesError: a ValueError, if they cannot be.
        ShapeError: if the two differ in shape.
    """
    require_one_shape(**{name: token_logp, "mask": mask})
    values = token_logp.detach()[as_mask(mask)]
    if values.numel() == 0:
        return
    unreadable = values.isnan() | (values == torch.inf)
    if unreadable.any():
        said = values[unreadable][0].item()
        raise NotProbabilitiesError(
            f"{name} is {said} at {int(unreadable.sum())} of {len(values)} tokens that count; "
            "mask them, or look at the model that gave them"
        )
    least, most = values.min().item(), values.max().item()
    above = int((values > ROUNDINGS * torch.finfo(values.dtype).eps).sum())
    if above and least >= 0 and most <= 1:
        raise NotProbabilitiesError(
            f"{name} lies between {least:g} and {most:g}, as probabilities do; give their natural logarithms"
        )
    if above:
        raise NotProbabilitiesError(
            f"{name} is positive, up to {most:g}, at {above} of {len(values)} tokens that count, and no "
            "log-probability is; give log_softmax of the logits at the token, not the logit or the loss"
        )
    if least == most == 0 and len(values) > 1:
        raise NotProbabilitiesError(
            f"{name} is 0 at all {len(values)} tokens that count, as if nothing had been computed; "
            "give the log-probabilities that the model gave"
        )
