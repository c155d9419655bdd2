"""The tokens of rollouts as flat columns, which hypotheses about a mismatch are fitted to."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kleash.diagnosis.residuals import MACHINE_EPSILON, Floats, token_unit
from kleash.diagnosis.rollout_records import LOG_OF_ZERO, RolloutRecord
from kleash.sources.sequences import ROUNDING_NATS

SMALLEST_RUN = 3
"""Tokens of a run of equal values that count as placeholders."""
LEAST_APART = 0.1
"""Median difference, in nats, of equal values at the ends of responses that count as placeholders."""
MOST_DECIMALS = 4
"""Decimals of a column whose rounding is larger than other errors of the file."""

LEAST_BLOCKS = 16
"""Units of evidence at least; of fewer responses, parts are units."""
LEAST_SAMPLED = 256
"""Responses that a sample has at least."""

SHORT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT_SHARE = 0.99
"""Share of a column's values that are numbers of a 16-bit type, from which its log-probabilities are rounded to it."""
LARGEST_INFORMATIVE, LEAST_INFORMATIVE = -0.01, 8
"""Values by which that is decided: all below the first, at least as many as the second."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenTable:
    """Columns over all tokens that count, one response after the other.

    Where a column rules a token out, its log-probability is that of the smallest float64, -745.
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
    prompt_tokens: np.ndarray
    """Length of the prompt of each token's response."""
    is_seen: np.ndarray
    """Whether each token stands in the prompt or earlier in the response."""
    is_repeated: np.ndarray
    """Whether each token stands earlier in the response."""

    @property
    def num_sequences(self) -> int:
        """Number of responses with a token that counts."""
        return len(np.unique(self.sequence))

    @cached_property
    def block(self) -> np.ndarray:
        """Number of each token's unit of evidence: its response, or a part of it if there are few responses."""
        parts = -(-LEAST_BLOCKS // self.num_sequences)
        place = self.position * parts // (self.position.max() + 1)
        return np.unique(self.sequence * parts + place, return_inverse=True)[1]

    @cached_property
    def fold(self) -> np.ndarray:
        """0 or 1 for each token: the half of the blocks with which it is judged by a fit to the other half."""
        halves = np.random.default_rng(0).permutation(self.block.max() + 1) % 2
        return halves[self.block]

    @cached_property
    def rounding_error(self) -> Floats:
        """Standard deviation of each token's difference that comes from rounding the columns, in nats: to few
        decimals, or to 16-bit numbers."""
        return np.hypot(rounding_error(self.trainer), rounding_error(self.engine))

    @property
    def difference(self) -> Floats:
        """Trainer minus engine, in nats."""
        return self.trainer - self.engine

    @property
    def unit(self) -> Floats:
        """1 - p of each token, by the engine where its value is a log-probability."""
        return token_unit(np.where(self.engine <= 0, self.engine, self.trainer))

    def selected(self, is_selected: np.ndarray) -> "TokenTable":
        """The table of some of the tokens."""
        columns: dict[str, Any] = {
            field.name: column[is_selected]
            for field in fields(self)
            if (column := getattr(self, field.name)) is not None
        }
        return replace(self, **columns)

    def neighbour(self, values: Floats, offset: int) -> Floats:
        """The value of the token ``offset`` places later in the same response; NaN where there is none that counts."""
        place = np.arange(len(values)) + offset
        source = place.clip(0, len(values) - 1)
        is_same = (source == place) & (self.sequence[source] == self.sequence)
        return np.where(is_same & (self.position[source] - self.position == offset), values[source], np.nan)

    def placeholder_runs(self, values: Floats) -> np.ndarray:
        """Whether each token is in a run of at least 3 equal values in one response, or is the first or last in most
        responses, of one value far from the other column's; real log-probabilities of uncertain tokens are neither."""
        is_new = (np.diff(values) != 0) | (np.diff(self.sequence) != 0) | (np.diff(self.position) != 1)
        starts = np.flatnonzero(np.r_[True, is_new])
        lengths = np.diff(np.r_[starts, len(values)])
        is_placeholder = np.repeat(lengths >= SMALLEST_RUN, lengths)
        for is_end in (np.diff(self.sequence, prepend=-1) != 0, np.diff(self.sequence, append=-1) != 0):
            value, count = Counter(values[is_end].tolist()).most_common(1)[0]
            is_same = is_end & (values == value)
            is_apart = np.median(np.abs(self.difference[is_same])) > LEAST_APART
            if is_apart and count > max(SMALLEST_RUN, is_end.sum() / 2):
                is_placeholder |= is_same
        return is_placeholder


def decimals_error(column: Floats) -> float:
    """Standard deviation of the rounding of a column that was written with at most 4 decimals; 0 with more."""
    uncertain = column[column != 0]
    for decimals in range(MOST_DECIMALS + 1):
        scaled = uncertain * 10.0**decimals
        tolerance = 1e-9 + np.abs(scaled) * 2.0**-22  # the column may have been in float32
        if len(scaled) and np.all(np.abs(scaled - np.round(scaled)) <= tolerance):
            return 10.0**-decimals / math.sqrt(12)
    return 0.0


def short_dtype(column: Floats) -> str | None:
    """The 16-bit type whose numbers a column's log-probabilities are, "bfloat16" or "float16"; None if they are not, or
    values above 0 are not log-probabilities.

    A number of float32 is one of bfloat16 with a probability of about 2^-16 (2^-13 for float16).
    """
    values = column[column < LARGEST_INFORMATIVE].astype(np.float32)
    if (
        len(values) < LEAST_INFORMATIVE
        or column.max() > ROUNDING_NATS
        or len(np.unique(values)) < LEAST_INFORMATIVE / 2
        or decimals_error(column)
    ):
        return None
    for name, dtype in SHORT_DTYPES.items():
        if np.mean(torch.from_numpy(values).to(dtype).float().numpy() == values) >= SHORT_SHARE:
            return name
    return None


def rounding_error(column: Floats) -> Floats:
    """Standard deviation of the rounding of each value of a column: to few decimals, or to 16-bit numbers; else 0."""
    name = short_dtype(column)
    if name is None:
        return np.full(len(column), decimals_error(column))
    exponent = np.frexp(column)[1] - 1
    return np.where(column == 0, 0.0, np.ldexp(MACHINE_EPSILON[name] / math.sqrt(12), exponent))


def sample_rollouts(rollouts: Sequence[RolloutRecord], most_tokens: int) -> Sequence[RolloutRecord]:
    """Rollouts drawn at random, in their order, of which at most ``most_tokens`` tokens count.

    At least 256 are drawn, if there are so many. Where these have too many tokens, only parts of the longest count:
    the beginning, and as many tokens in a row from a random place on.
    """
    tokens = sum(int(rollout.is_counted.sum()) for rollout in rollouts)
    if tokens <= most_tokens:
        return rollouts
    random = np.random.default_rng(0)
    count = min(len(rollouts), max(LEAST_SAMPLED, len(rollouts) * most_tokens // tokens))
    drawn = [rollouts[index] for index in np.sort(random.choice(len(rollouts), count, replace=False))]
    is_excess = sum(int(rollout.is_counted.sum()) for rollout in drawn) > most_tokens
    return [_shortened(rollout, most_tokens // count, random) for rollout in drawn] if is_excess else drawn


def _shortened(rollout: RolloutRecord, most_tokens: int, random: np.random.Generator) -> RolloutRecord:
    """The rollout with at most so many tokens that count: half of them at its beginning, half from a random place."""
    places = np.flatnonzero(rollout.is_counted)
    if len(places) <= most_tokens:
        return rollout
    first = most_tokens // 2
    start = first + int(random.integers(len(places) - most_tokens + 1))
    is_counted = np.zeros_like(rollout.is_counted)
    is_counted[places[:first]] = is_counted[places[start : start + most_tokens - first]] = True
    return replace(rollout, is_counted=is_counted)


def tabulate(rollouts: Sequence[RolloutRecord]) -> TokenTable:
    """The table of the tokens that count; the reference is None unless every rollout has one."""

    def column(name: str) -> Floats:
        return np.maximum(np.concatenate([getattr(each, name) for each in rollouts])[is_counted], LOG_OF_ZERO)

    lengths = [len(rollout.response_ids) for rollout in rollouts]
    earlier = [_earlier_tokens(rollout) for rollout in rollouts]
    is_counted = np.concatenate([rollout.is_counted for rollout in rollouts])
    has_reference = all(rollout.reference is not None for rollout in rollouts)
    return TokenTable(
        trainer=column("trainer"),
        engine=column("engine"),
        reference=column("reference") if has_reference else None,
        sequence=np.repeat(np.arange(len(rollouts)), lengths)[is_counted],
        position=np.concatenate([np.arange(length) for length in lengths])[is_counted],
        token_id=np.concatenate([rollout.response_ids for rollout in rollouts])[is_counted],
        rows=np.flatnonzero(is_counted),
        prompt_tokens=np.repeat([len(rollout.prompt_ids) for rollout in rollouts], lengths)[is_counted],
        is_seen=np.concatenate([seen for seen, _ in earlier])[is_counted],
        is_repeated=np.concatenate([repeated for _, repeated in earlier])[is_counted],
    )


def _earlier_tokens(rollout: RolloutRecord) -> tuple[np.ndarray, np.ndarray]:
    """Whether each token of a response stands in its prompt or earlier in it, and whether earlier in it."""
    ids = np.array(rollout.response_ids)
    is_repeated = ~np.isin(np.arange(len(ids)), np.unique(ids, return_index=True)[1])
    return is_repeated | np.isin(ids, rollout.prompt_ids), is_repeated
