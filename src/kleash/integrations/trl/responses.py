"""What both models say about each token of the responses that a trainer has generated."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from kleash.integrations.trl.leash import REFERENCE_HIDDEN, OwnKL
from kleash.linear import TokenStatistics, token_statistics


class Told(NamedTuple):
    """Of a generated batch."""

    mask: Bool[Tensor, "batch time"]
    """A response's own tokens."""
    statistics: TokenStatistics
    """Of these tokens, one response after the other; KL(policy || reference) is ``kl_pq``."""


def response_statistics(trainer: OwnKL, output: dict[str, Any]) -> Told:
    """The exact KLs, entropies and log-probabilities of a generated batch, before it is learned from.

    One more pass of the policy, and one of the reference where its hidden states were not kept.

    Args:
        trainer: a leashed trainer, which has a reference.
        output: what its ``_generate_and_score_completions`` returned.

    Raises:
        CannotRunError: if a model does not come apart into hidden states and a head.
    """
    mask = trainer._counted(output)
    own = trainer._pass_over(output, reference=False, hidden=True).hidden
    other = output.get(REFERENCE_HIDDEN)
    if other is None:
        other = trainer._pass_over(output, reference=True, hidden=True).hidden
    assert own is not None and other is not None, "they were asked for"
    head_p, head_q = trainer._heads()
    with torch.no_grad():
        found = token_statistics(
            own[mask],
            head_p,
            other[mask],
            head_q,
            output["completion_ids"][mask],
            temperature=trainer.temperature,
        )
    return Told(mask=mask, statistics=found)
