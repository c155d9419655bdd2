"""What a server says about the tokens of a sequence: their log-probabilities, and those of the likeliest tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from kleash.estimators.bounds import rounding_nats
from kleash.sources.sequences import ROUNDING_NATS

ZERO_PROBABILITY = -9999.0
"""The number by which vLLM writes a log-probability of -inf, which JSON cannot hold."""
FLOAT32_EPS = 2.0**-23
DECIMALS = range(1, 6)
"""To which proxies may round; more are finer than the rounding of float32."""
LEAST_VALUES = 8
"""Fewer different numbers may be rounded by chance."""
LEAST_TOTAL = 0.99
"""The probabilities of a position may sum to at least this, if each unlisted token has the largest that it can have. A
server may have a few more tokens than the local model."""


class AnswerError(ValueError):
    """An answer without the log-probabilities that were asked for; the text goes on "its answer ..."."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ListedLogprobs:
    """What a server says about the scored tokens of a sequence, in order."""

    token_ids: Int[np.ndarray, " tokens"]
    """The scored tokens."""
    token_logp: Float[np.ndarray, " tokens"]
    """Their log-probabilities, in nats."""
    listed_ids: Int[np.ndarray, "tokens listed"]
    """The likeliest tokens. Whether a token is here does not depend on the token that was scored."""
    listed_logp: Float[np.ndarray, "tokens listed"]
    unlisted_most: Float[np.ndarray, " tokens"]
    """No token that is not listed has a larger log-probability; -inf where all tokens are listed."""
    texts: Mapping[int, str] = field(default_factory=dict[int, str])
    """Texts of tokens as the server writes them, by id."""

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        rows: Iterable[Mapping[int, float]],
        *,
        top: int,
        vocab_size: int,
        texts: Mapping[int, str] | None = None,
    ) -> "ListedLogprobs":
        """The log-probabilities of consecutive positions.

        Servers list ``top`` tokens if the scored token is among them, and otherwise also the scored one.

        Args:
            token_ids: the scored tokens.
            rows: for each of them, log-probabilities by token id.
            top: number of likeliest tokens that were asked for.
            vocab_size: number of tokens of the model.
            texts: of tokens, by id.

        Raises:
            AnswerError: if there are more or fewer tokens, the scored token is missing, or a number is no
                log-probability or no token.
        """
        count = min(top, vocab_size)
        listed: list[dict[int, float]] = []
        token_logps: list[float] = []
        for token, entries in zip(token_ids, rows, strict=True):
            if token not in entries:
                raise AnswerError(
                    f"lacks the log-probability of token {token}, at scored token {len(listed)}"
                )
            listed.append(
                {each: logp for each, logp in entries.items() if len(entries) <= count or each != token}
            )
            token_logps.append(entries[token])
            if len(listed[-1]) != count:
                raise AnswerError(f"lists {len(entries)} tokens where {count} were asked for")
        shape = (len(listed), count)
        ids = np.array([list(row) for row in listed], dtype=np.int64).reshape(shape)
        logp = np.array([list(row.values()) for row in listed], dtype=np.float64).reshape(shape)
        answer = cls(
            token_ids=np.array(token_ids, dtype=np.int64),
            token_logp=_checked(np.array(token_logps, dtype=np.float64)),
            listed_ids=ids,
            listed_logp=_checked(logp),
            unlisted_most=np.full(len(ids), -np.inf) if count == vocab_size else _checked(logp).min(-1),
            texts=texts or {},
        )
        if ((ids < 0) | (ids >= vocab_size)).any():
            raise AnswerError(
                f"has tokens from {ids.min()} to {ids.max()}, and the local model has {vocab_size}: it is of another "
                "model"
            )
        if ((answer.token_logp > answer.unlisted_most) & ~answer.is_listed).any():
            raise AnswerError("leaves a token out that is likelier than one that it lists")
        return answer

    @classmethod
    def concatenate(cls, answers: Sequence["ListedLogprobs"]) -> "ListedLogprobs":
        """The positions of several answers to one number of tokens, one after the other, without texts."""
        names = ("token_ids", "token_logp", "listed_ids", "listed_logp", "unlisted_most")
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(answer, name) for answer in answers]) for name in names
        }
        return cls(**arrays)

    @property
    def is_listed(self) -> Bool[np.ndarray, " tokens"]:
        """Whether each scored token is one of the listed."""
        return (self.listed_ids == self.token_ids[:, None]).any(-1)

    @property
    def rank(self) -> Int[np.ndarray, " tokens"]:
        """Number of tokens with a larger probability than the scored one; -1 if that is not listed."""
        return np.where(self.is_listed, (self.listed_logp > self.token_logp[:, None]).sum(-1), -1)


def _checked(logp: Float[np.ndarray, "*any"]) -> Float[np.ndarray, "*any"]:
    """Log-probabilities of an answer, with -inf for a probability of 0.

    Raises:
        AnswerError: if one is NaN or above 0.
    """
    is_wrong = ~(logp <= ROUNDING_NATS)  # also NaN
    if is_wrong.any():
        raise AnswerError(f"has {logp[is_wrong][0]} as a log-probability")
    return np.where(logp <= ZERO_PROBABILITY, -np.inf, np.minimum(logp, 0.0))


def error_nats(logp: Float[np.ndarray, "*any"]) -> Float[np.ndarray, "*any"]:
    """The largest error of log-probabilities in float32: that of the softmax, and that of each number's size."""
    return rounding_nats(torch.from_numpy(logp), torch.float32).numpy()


def require_float32(answer: ListedLogprobs) -> None:
    """Check that a server writes float32, since the bounds allow for no coarser rounding.

    Raises:
        AnswerError: if all numbers of an answer are rounded to a few decimals, to bfloat16 or to float16.
    """
    values = np.unique(np.concatenate([answer.token_logp, answer.listed_logp.ravel()]))
    values = values[np.isfinite(values) & (values != 0)]
    stored = torch.from_numpy(values)
    rounded = {f"{decimals} decimals": values.round(decimals) for decimals in DECIMALS} | {
        str(dtype).removeprefix("torch."): stored.to(dtype).double().numpy()
        for dtype in (torch.bfloat16, torch.float16)
    }
    for name, numbers in rounded.items():
        if len(values) >= LEAST_VALUES and (np.abs(values - numbers) <= FLOAT32_EPS * np.abs(values)).all():
            raise AnswerError(f"has log-probabilities rounded to {name}, of which bounds would be wrong")


def check_totals(answer: ListedLogprobs, vocab_size: int) -> None:
    """Check that the probabilities of each position can sum to 1.

    Raises:
        AnswerError: with the first position where they cannot.
    """
    token_logp = np.where(answer.is_listed, -np.inf, answer.token_logp)
    known = np.concatenate([answer.listed_logp, token_logp[:, None]], axis=-1)
    error = error_nats(known)
    unlisted = vocab_size - answer.listed_ids.shape[-1] - ~answer.is_listed
    unlisted_most = answer.unlisted_most + error_nats(answer.unlisted_most)
    least = np.exp(known - error).sum(-1)
    most = np.exp(known + error).sum(-1) + np.maximum(unlisted, 0) * np.exp(unlisted_most)
    for is_wrong, limit, total in ((least > 1, "at least", least), (most < LEAST_TOTAL, "at most", most)):
        if is_wrong.any():
            position = int(np.flatnonzero(is_wrong)[0])
            raise AnswerError(
                f"lists probabilities that sum to {limit} {total[position]:.4g} at scored token {position}"
            )
