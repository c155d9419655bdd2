"""What is asked and what was answered, as token ids: the records between sources, generation and scoring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from jaxtyping import Float

from kleash.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Something to be answered."""

    prompt_id: int
    """Its place in the source, from 0."""
    token_ids: tuple[int, ...]
    text: str
    """What the tokens say, template included."""
    prompt_hash: str
    copy: int = 0
    """How many prompts of the same tokens came before it: a further copy draws further samples."""
    location: str = ""
    """File and line, for errors."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """What the text was made from, where that was messages."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All that its line says, by name, where that was asked for: what rewards are given."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenSequence:
    """A context, and the tokens after it whose probabilities are asked for."""

    prompt_id: int
    sample_id: int
    prompt_ids: tuple[int, ...]
    """Read, not scored: at least one token."""
    response_ids: tuple[int, ...]
    """Scored: at least one token."""
    prompt_text: str
    response_text: str
    finish_reason: str | None = None
    """"stop" if it ended by itself, "length" if it was cut off, None if nobody knows."""
    logp_sampled: Float[np.ndarray, " response"] | None = None
    """Under the distribution each token was drawn from, in nats; None if unknown."""
    prompt_hash: str = ""
    """Pairs the sequences of two runs: of the prompt's tokens, or on text of the whole window's."""
    temperature: float | None = None
    """At which somebody else drew it, if they say so."""
    retokenised: bool = False
    """Whether its tokens came from text, and so may not be those that were drawn."""
    location: str = ""
    """File and line, for errors."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """What the prompt was made from, where that was messages; known of what was generated here."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those of the prompt; known of what was generated here."""

    @property
    def num_input_tokens(self) -> int:
        """Tokens a model reads to score it: all but the last."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"prompt {self.prompt_id}, sample {self.sample_id}{f' ({self.location})' if self.location else ''}"


def hash_tokens(token_ids: tuple[int, ...]) -> str:
    """16 hex digits that stand for these token ids, the same on every machine."""
    return blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()


def retokenisation_warnings(sequences: int, retokenised: int) -> tuple[str, ...]:
    """The warning that responses which came as text must carry, if any did."""
    if not retokenised:
        return ()
    warning = (
        f"{retokenised} of {sequences} responses came as text and were tokenised again: where they were "
        "drawn as other tokens, the numbers are of tokens that nobody drew; give response_token_ids to be "
        "sure"
    )
    return (warning,)


def batch_by_length(
    lengths: Sequence[int], batch_tokens: int, *, max_sequences: int | None = None
) -> list[list[int]]:
    """Indices in batches of like length, each at most ``batch_tokens`` tokens with its padding.

    Longest first, so that memory runs out in the first batch or never. A sequence longer than the budget is
    alone in its batch. Equal lengths stay in their order, so the same lengths always give the same batches.

    Args:
        lengths: tokens of each sequence.
        batch_tokens: the budget, padding included.
        max_sequences: the most sequences in a batch; None for no limit.

    Raises:
        OptionError: if the budget is below one token.
    """
    if batch_tokens < 1:
        raise OptionError(f"batch_tokens is {batch_tokens}; a batch holds at least one token")
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        longest = lengths[batches[-1][0]] if batches else 0
        full = not batches or longest * (len(batches[-1]) + 1) > batch_tokens
        if full or (max_sequences is not None and len(batches[-1]) >= max_sequences):
            batches.append([])
        batches[-1].append(index)
    return batches
