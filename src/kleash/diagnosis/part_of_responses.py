"""Hypotheses about faults of some responses only, as of one rank, one batch or one adapter of several."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kleash.diagnosis.causes import HEALTHY
from kleash.diagnosis.column_hypotheses import column_hypotheses
from kleash.diagnosis.hypotheses import hypotheses_without_models
from kleash.diagnosis.hypothesis import DISTINCT, Hypothesis
from kleash.diagnosis.noise_models import Residuals
from kleash.diagnosis.token_table import TokenTable

FAULTY_SHARE, SOUND_SHARE = 0.25, 0.08
"""Share of a response's tokens that differ by more than rounding: above the first it has a fault, up to the second it
has none."""
LARGEST_UNCLEAR = 0.1
"""Share of the responses that may lie between the two; with more, the fault is in all of them, at some tokens."""
LEAST_RESPONSES = 2
"""Responses that are faulty, and that are sound, at least: one alone is no group."""
TOKEN_CAUSES = ("routing", "tensor_parallel")
"""Causes that are of tokens, not of responses."""


def hypotheses_about_some_responses(table: TokenTable, largest_scale: float) -> Iterator[Hypothesis]:
    """Each hypothesis about the responses that differ by more than rounding, with the others healthy.

    None if they are no group of their own: if no response or all differ, or if many differ at some of their tokens.

    Args:
        table: the tokens.
        largest_scale: the largest error of logits that rounding explains, in nats.
    """
    residuals = Residuals(table.difference, table.unit, table.rounding_error)
    is_large = np.abs(residuals.values) > DISTINCT * residuals.scale(largest_scale)
    lengths = table.by_sequence(np.ones(len(is_large)))
    has_tokens = lengths > 0
    share = table.by_sequence(is_large.astype(np.float64)) / np.maximum(lengths, 1)
    is_faulty = share > FAULTY_SHARE
    unclear = int(np.sum((share > SOUND_SHARE) & ~is_faulty))
    count, faulty = int(has_tokens.sum()), int(is_faulty.sum())
    if min(faulty, count - faulty) < LEAST_RESPONSES or unclear > LARGEST_UNCLEAR * count:
        return
    in_faulty = is_faulty[table.sequence]
    part, rest = table.selected(in_faulty), table.selected(~in_faulty)
    sound = max(
        (
            hypothesis
            for hypothesis in hypotheses_without_models(rest, largest_scale)
            if hypothesis.cause == HEALTHY
        ),
        key=lambda hypothesis: hypothesis.score,
    )
    odds = np.where(is_faulty, np.log(faulty / count), np.log1p(-faulty / count)) * has_tokens
    for hypothesis in (
        *hypotheses_without_models(part, largest_scale),
        *column_hypotheses(part, largest_scale),
    ):
        if hypothesis.cause != HEALTHY and hypothesis.cause not in TOKEN_CAUSES:
            yield replace(
                hypothesis,
                log_likelihood=sound.log_likelihood + hypothesis.log_likelihood + odds,
                parameters=sound.parameters + hypothesis.parameters + 1,
                evidence=f"in {faulty} of {count} responses, the others are healthy: {hypothesis.evidence}",
            )
