"""Exact KLs, entropies and log-probabilities of the responses that a trainer has generated."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from kleash.integrations.trl.leash import REFERENCE_HIDDEN, OwnKL
from kleash.linear import TokenStatistics, token_statistics


class ResponseStatistics(NamedTuple):
    """Token statistics of a generated batch."""

    mask: Bool[Tensor, "batch time"]
    """True for the tokens that the policy generated."""
    statistics: TokenStatistics
    """Of these tokens, one response after the other; KL(policy || reference) is ``kl_pq``."""


def response_statistics(trainer: OwnKL, output: dict[str, Any]) -> ResponseStatistics:
    """The exact KLs, entropies and log-probabilities of a generated batch, before it is learned from.

    One more pass of the policy, and one of the reference where its hidden states were not kept.

    Args:
        trainer: a leashed trainer, which has a reference.
        output: what its ``_generate_and_score_completions`` returned.

    Raises:
        CannotRunError: if a model does not come apart into hidden states and a head.
    """
    mask = trainer._counted(output)
    policy_hidden = trainer._pass_over(output, reference=False, hidden=True).hidden
    reference_hidden = output.get(REFERENCE_HIDDEN)
    if reference_hidden is None:
        reference_hidden = trainer._pass_over(output, reference=True, hidden=True).hidden
    assert policy_hidden is not None and reference_hidden is not None, "hidden=True was requested"
    head_p, head_q = trainer._heads()
    with torch.no_grad():
        statistics = token_statistics(
            policy_hidden[mask],
            head_p,
            reference_hidden[mask],
            head_q,
            output["completion_ids"][mask],
            temperature=trainer.temperature,
        )
    return ResponseStatistics(mask=mask, statistics=statistics)
