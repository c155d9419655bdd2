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


class UnsendableError(ValueError):
    """A sequence that a server cannot be asked about; the text is a sentence."""


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
    top1: int | None
    """The likeliest token; None if the server names it by a text that several tokens have."""
    top1_logp: float
    rank: int | None = None
    """Number of tokens with a larger probability than the scored one; None if unknown."""
    is_complete: bool = True
    """False if it is not known whether the scored token is among the likeliest; then ``listed`` lacks it."""


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
    """-1 if unknown."""
    top1_logp: Float[np.ndarray, " tokens"]
    rank: Int[np.ndarray, " tokens"]
    """-1 if unknown."""
    is_complete: np.ndarray
    texts: Mapping[int, str] = field(default_factory=dict[int, str])
    """Texts of tokens as the server writes them, by id; empty if it names tokens by texts alone."""

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
            top1=np.array([-1 if p.top1 is None else p.top1 for p in positions], dtype=np.int64),
            top1_logp=np.array([position.top1_logp for position in positions], dtype=np.float64),
            rank=np.array([-1 if p.rank is None else p.rank for p in positions], dtype=np.int64),
            is_complete=np.array([position.is_complete for position in positions], dtype=np.bool_),
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


def position_from_texts(
    entries: Mapping[str, float], token: int, token_text: str, top: int, vocabulary: "VocabularyTexts"
) -> Position:
    """The position of ``token`` from the tokens that a server lists by their texts: the likeliest, and ``token``.

    Several tokens may have one text (parts of characters have none). Such a token cannot be identified, and of several
    in one list only one is left. They count as unlisted, with the bound on their probability that is still certain.

    Args:
        entries: text -> log-probability.
        token: the scored token.
        token_text: its text in ``entries``.
        top: number of likeliest tokens that were asked for.
        vocabulary: texts of the tokens.

    Raises:
        AnswerError: if there are more tokens than that, or the scored token is missing.
    """
    expected = min(top, vocabulary.size)
    if token_text not in entries:
        raise AnswerError(f"lacks the log-probability of token {token} ({token_text!r})")
    if len(entries) > expected + 1:
        raise AnswerError(f"lists {len(entries)} tokens where {expected} were asked for")
    token_logp = entries[token_text]
    other_logps = {text: logp for text, logp in entries.items() if text != token_text}
    least = min(other_logps.values(), default=-math.inf)
    token_is_among = len(entries) == expected and token_logp > least
    all_are_there = len(entries) == expected + 1 or token_is_among
    listed: dict[int, float] = {}
    unlisted_most = least if all_are_there else 0.0
    for text, logp in other_logps.items():
        token_id = vocabulary.id_of(text)
        if token_id is None or token_id == token:
            unlisted_most = max(unlisted_most, logp)
        else:
            listed[token_id] = logp
    if token_is_among:
        if vocabulary.id_of(token_text) == token:
            listed[token] = token_logp
        else:
            unlisted_most = max(unlisted_most, token_logp)
    best = max(entries, key=lambda text: entries[text])
    top1 = token if best == token_text else vocabulary.id_of(best)
    return Position(
        token_logp=token_logp,
        listed=listed,
        unlisted_most=unlisted_most,
        top1=top1 if all_are_there else None,
        top1_logp=entries[best] if all_are_there else math.nan,
        rank=sum(logp > token_logp for logp in other_logps.values()) if token_is_among else None,
        is_complete=all_are_there,
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
        if token_id >= len(self._pieces):
            return ""
        return self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)

    def piece_of(self, token_id: int) -> str:
        """The text that a token adds to a text before it, with a leading space if it has one."""
        return self._pieces[token_id] if token_id < len(self._pieces) else ""

    def id_of(self, piece: str) -> int | None:
        """The one token that adds ``piece`` to a text; None if there is none, or there are several."""
        return self._ids.get(piece)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a sequence, special tokens included."""
        return self.tokenizer.decode(
            list(token_ids), clean_up_tokenization_spaces=False, skip_special_tokens=False
        )

    def has_parts(self, token_ids: Sequence[int]) -> bool:
        """Whether any token is a part of a character, which its text does not tell from others."""
        return any(REPLACEMENT in self.piece_of(token_id) for token_id in token_ids)

    def cuts_into(self, text: str, token_ids: Sequence[int]) -> bool:
        """Whether the local tokenizer cuts a text into these tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] == list(token_ids)

    def matches(self, token_id: int, text: str) -> bool:
        """Whether ``text`` is how a server may write a token: leading spaces and parts of characters may differ."""
        local_text = self.text_of(token_id)
        if not text or REPLACEMENT in local_text or REPLACEMENT in text:
            return True
        return local_text.strip() == text.replace("\u2581", " ").strip()

    def matches_exactly(self, token_id: int, text: str) -> bool:
        """Whether ``text`` is a token with its leading space; special tokens and parts of characters may be empty."""
        written = text.replace("\u2581", " ").replace(REPLACEMENT, "")
        return not text or written == self.piece_of(token_id).replace(REPLACEMENT, "")

    @cached_property
    def _pieces(self) -> list[str]:
        """``piece_of`` of every token: what decoding it after an ordinary token adds."""
        count = min(self.size, max(self.tokenizer.get_vocab().values()) + 1)
        anchor = self.tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        start = self.decode(anchor)
        texts = self.tokenizer.batch_decode(
            [[*anchor, token_id] for token_id in range(count)],
            clean_up_tokenization_spaces=False,
            skip_special_tokens=False,
        )
        return [text.removeprefix(start) for text in texts]

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Piece -> token id, for the pieces that only one token has.

        A part of a character has the text without it: llama-cpp-python writes the two bytes of a space and the
        beginning of a quotation mark as the space alone.
        """
        special = set(self.tokenizer.all_special_ids)
        ids: dict[str, int | None] = {}
        for token_id, piece in enumerate(self._pieces):
            text = piece.replace(REPLACEMENT, "")
            if text and token_id not in special:
                ids[text] = None if text in ids or text != piece else token_id
        return {piece: token_id for piece, token_id in ids.items() if token_id is not None}
