"""The tokens of rollouts as flat columns, which hypotheses about a mismatch are fitted to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kleash.diagnosis.noise_models import Floats, token_unit
from kleash.diagnosis.rollout_records import LOG_OF_ZERO, RolloutRecord

SMALLEST_RUN = 3
"""Tokens of a run of equal values that count as placeholders."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenTable:
    """Columns over all tokens that count, one response after the other.

    Where trainer or reference rules a token out, its log-probability is that of the smallest float64, -745.
    """

    trainer: Floats
    engine: Floats
    reference: Floats | None
    sequence: np.ndarray
    """Index of the response of each token."""
    position: np.ndarray
    """Index of each token in its response."""
    token_id: np.ndarray
    rows: np.ndarray
    """Index of each token among all response tokens, those included that do not count."""
    num_sequences: int

    @property
    def difference(self) -> Floats:
        """Trainer minus engine, in nats."""
        return self.trainer - self.engine

    @property
    def unit(self) -> Floats:
        """1 - p of each token, by the engine where its value is a log-probability."""
        return token_unit(np.where(self.engine <= 0, self.engine, self.trainer))

    def by_sequence(self, values: Floats) -> Floats:
        """The sum of a column over each response."""
        sums = np.bincount(self.sequence, weights=values, minlength=self.num_sequences)
        return sums.astype(np.float64)

    def neighbour(self, values: Floats, offset: int) -> Floats:
        """The value of the token ``offset`` places later in the same response; NaN where there is none that counts."""
        shifted = np.full(len(values), np.nan)
        place = np.arange(len(values)) + offset
        inside = (place >= 0) & (place < len(values))
        source = place[inside]
        same = (self.sequence[source] == self.sequence[inside]) & (
            self.position[source] - self.position[inside] == offset
        )
        shifted[np.flatnonzero(inside)[same]] = values[source[same]]
        return shifted

    def placeholder_runs(self, values: Floats) -> np.ndarray:
        """Whether each token is in a run of at least 3 equal values in one response, which real log-probabilities
        of uncertain tokens are not."""
        if not len(values):
            return np.zeros(0, dtype=bool)
        starts = np.flatnonzero(
            np.r_[
                True, (np.diff(values) != 0) | (np.diff(self.sequence) != 0) | (np.diff(self.position) != 1)
            ]
        )
        lengths = np.diff(np.r_[starts, len(values)])
        return np.repeat(lengths >= SMALLEST_RUN, lengths)


def tabulate(rollouts: Sequence[RolloutRecord]) -> TokenTable:
    """The table of the tokens that count; the reference is None unless every rollout has one."""

    def column(parts: list[np.ndarray]) -> Floats:
        return np.maximum(np.concatenate(parts)[is_counted], LOG_OF_ZERO)

    lengths = [len(rollout.response_ids) for rollout in rollouts]
    is_counted = np.concatenate([rollout.is_counted for rollout in rollouts])
    references = [rollout.reference for rollout in rollouts if rollout.reference is not None]
    has_reference = len(references) == len(rollouts)
    return TokenTable(
        trainer=column([rollout.trainer for rollout in rollouts]),
        engine=np.concatenate([rollout.engine for rollout in rollouts])[is_counted],
        reference=column(references) if has_reference else None,
        sequence=np.repeat(np.arange(len(rollouts)), lengths)[is_counted],
        position=np.concatenate([np.arange(length) for length in lengths])[is_counted],
        token_id=np.concatenate([rollout.response_ids for rollout in rollouts])[is_counted],
        rows=np.flatnonzero(is_counted),
        num_sequences=len(rollouts),
    )
