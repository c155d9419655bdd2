"""What a server says about the tokens of a sequence: their log-probabilities, and those of the likeliest tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int

ROUNDING_NATS = 1e-3
"""Largest log-probability above 0 that is taken for a rounding error and replaced by 0."""
ZERO_PROBABILITY = -9999.0
"""The number by which vLLM writes a log-probability of -inf, which JSON cannot hold."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class AnswerError(ValueError):
    """An answer without the log-probabilities that were asked for; the text goes on "its answer ..."."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """What a server says about one scored token."""

    token_logp: float
    """Log-probability of the token, in nats."""
    listed: Mapping[int, float]
    """Token id -> log-probability of the likeliest tokens. Whether a token is here does not depend on the token that
    was scored."""
    unlisted_most: float
    """No token outside ``listed`` has a larger log-probability."""
    top1: int
    """The likeliest token."""
    top1_logp: float
    rank: int | None = None
    """Number of tokens with a larger probability than the scored one; None if unknown."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ListedLogprobs:
    """What a server says about the scored tokens of a sequence, in order; the fields of ``Position`` as arrays."""

    token_logp: Float[np.ndarray, " tokens"]
    listed_ids: Int[np.ndarray, "tokens listed"]
    """-1 in rows with fewer tokens than others."""
    listed_logp: Float[np.ndarray, "tokens listed"]
    """-inf there."""
    unlisted_most: Float[np.ndarray, " tokens"]
    top1: Int[np.ndarray, " tokens"]
    top1_logp: Float[np.ndarray, " tokens"]
    rank: Int[np.ndarray, " tokens"]
    """-1 if unknown."""
    texts: Mapping[int, str] = field(default_factory=dict[int, str])
    """Texts of tokens as the server writes them, by id."""

    @classmethod
    def of(cls, positions: Sequence[Position], texts: Mapping[int, str] | None = None) -> "ListedLogprobs":
        """The arrays of consecutive positions."""
        width = max((len(position.listed) for position in positions), default=0)
        ids = np.full((len(positions), width), -1, dtype=np.int64)
        logp = np.full((len(positions), width), -np.inf)
        for row, position in enumerate(positions):
            ids[row, : len(position.listed)] = list(position.listed)
            logp[row, : len(position.listed)] = list(position.listed.values())
        return cls(
            token_logp=np.array([position.token_logp for position in positions], dtype=np.float64),
            listed_ids=ids,
            listed_logp=logp,
            unlisted_most=np.array([position.unlisted_most for position in positions], dtype=np.float64),
            top1=np.array([position.top1 for position in positions], dtype=np.int64),
            top1_logp=np.array([position.top1_logp for position in positions], dtype=np.float64),
            rank=np.array([-1 if p.rank is None else p.rank for p in positions], dtype=np.int64),
            texts=texts or {},
        )


def position_from_ids(
    entries: Mapping[int, float], token: int, top: int, vocab_size: int, rank: int | None = None
) -> Position:
    """The position of ``token`` from the tokens that a server lists by their ids: the likeliest, and ``token`` itself.

    Servers list ``top`` tokens if the scored token is among them, and otherwise also the scored one.

    Args:
        entries: token id -> log-probability.
        token: the scored token.
        top: number of likeliest tokens that were asked for.
        vocab_size: number of tokens of the model.
        rank: the scored token's rank from 0, if the server says it.

    Raises:
        AnswerError: if there are more or fewer tokens, or the scored token is missing.
    """
    expected = min(top, vocab_size)
    if token not in entries:
        raise AnswerError(f"lacks the log-probability of token {token}")
    if not expected <= len(entries) <= expected + 1:
        raise AnswerError(f"lists {len(entries)} tokens where {expected} were asked for")
    listed = dict(entries)
    if len(entries) > expected:
        token_logp = listed.pop(token)
        if token_logp > min(listed.values()):
            raise AnswerError(f"leaves a token out that is less likely than token {token}, which it lists")
    elif (
        rank is not None
        and rank >= expected
        and entries[token]
        < min((logp for token_id, logp in entries.items() if token_id != token), default=-math.inf)
    ):
        raise AnswerError(f"lists {expected - 1} tokens beside token {token} where {expected} were asked for")
    top1 = max(listed, key=lambda token_id: listed[token_id])
    unlisted_most = -math.inf if len(listed) >= vocab_size else min(listed.values())
    if token in listed:  # then all that are likelier are, too
        rank = sum(logp > entries[token] for logp in listed.values())
    return Position(
        token_logp=entries[token],
        listed=listed,
        unlisted_most=unlisted_most,
        top1=top1,
        top1_logp=listed[top1],
        rank=rank,
    )


def read_logprob(value: Any) -> float:
    """A log-probability of an answer, with -inf for a probability of 0.

    Raises:
        AnswerError: if it is not a number, NaN, or above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnswerError(f"has {str(value)[:40]!r} in place of a log-probability")
    if not value <= ROUNDING_NATS:  # also NaN
        raise AnswerError(f"has {str(value)[:40]} as a log-probability")
    return -math.inf if value <= ZERO_PROBABILITY else min(float(value), 0.0)


def read_token_id(value: Any, vocab_size: int) -> int:
    """A token id of an answer, which may be a number or its digits.

    Raises:
        AnswerError: if it is no token of the vocabulary.
    """
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 12:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise AnswerError(f"has {str(value)[:40]!r} in place of a token id")
    if not 0 <= value < vocab_size:
        raise AnswerError(
            f"has token {value}, and the local model has {vocab_size} tokens: it is of another model"
        )
    return value


@dataclass(frozen=True, eq=False, kw_only=True)
class VocabularyTexts:
    """The texts of a tokenizer's tokens, by which a server's tokens are checked."""

    tokenizer: Any
    size: int
    """Tokens that have a logit in the local model."""

    def text_of(self, token_id: int) -> str:
        """The text of a token decoded by itself; "" beyond the tokenizer."""
        if token_id >= self._token_count:
            return ""
        return self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)

    def matches(self, token_id: int, text: str) -> bool:
        """Whether ``text`` is how a server may write a token: leading spaces and parts of characters may differ."""
        local_text = self.text_of(token_id)
        if not text or REPLACEMENT in local_text or REPLACEMENT in text:
            return True
        return local_text.strip() == text.replace("\u2581", " ").strip()

    @cached_property
    def _token_count(self) -> int:
        """Ids of the tokenizer."""
        return max(self.tokenizer.get_vocab().values()) + 1
