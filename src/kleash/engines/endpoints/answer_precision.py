"""How exactly a server writes log-probabilities, and whether those of a position can be a distribution."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from kleash.engines.endpoints.listed_logprobs import AnswerError, ListedLogprobs
from kleash.estimators.bounds import NORMALISER_NATS

STORED_DTYPES = (torch.bfloat16, torch.float16)
"""In which some servers compute log-probabilities, coarsest first."""
DECIMALS = range(1, 6)
"""To which some proxies round; more are finer than the rounding of float32."""
LEAST_VALUES = 8
"""Fewer different numbers may be of a coarse dtype by chance."""
FLOAT32_EPS = 2.0**-23
LEAST_TOTAL = 0.99
"""The probabilities of a position may sum to at least this, if each unlisted token has the largest that it can have. A
server may have a few more tokens than the local model."""


@dataclass(frozen=True, kw_only=True)
class LogprobPrecision:
    """The largest error of a log-probability that a server writes."""

    name: str = "float32"
    """The dtype, or the number of decimals."""
    relative: float = FLOAT32_EPS
    """Share of the log-probability's size."""
    absolute: float = NORMALISER_NATS * FLOAT32_EPS
    """In nats: of the softmax, in float32, and of decimals."""

    def error_nats(self, logp: Float[np.ndarray, "*any"]) -> Float[np.ndarray, "*any"]:
        """The largest error of each log-probability; that of -inf is only the absolute one."""
        return self.absolute + self.relative * np.where(np.isinf(logp), 0.0, np.abs(logp))


def find_precision(answer: ListedLogprobs) -> LogprobPrecision:
    """The precision of a server, from the numbers of an answer: the coarsest that holds them all."""
    values = np.unique(np.concatenate([answer.token_logp, answer.listed_logp.ravel()]))
    values = values[np.isfinite(values) & (values != 0)]
    if len(values) < LEAST_VALUES:
        return LogprobPrecision()
    for decimals in DECIMALS:
        if (np.abs(values - values.round(decimals)) <= FLOAT32_EPS * np.abs(values)).all():
            step = 10.0**-decimals
            return LogprobPrecision(
                name=f"{decimals} decimals", absolute=step / 2 + LogprobPrecision.absolute
            )
    stored = torch.from_numpy(values)
    for dtype in STORED_DTYPES:
        if torch.equal(stored.to(dtype).double(), stored):
            name = str(dtype).removeprefix("torch.")
            return LogprobPrecision(name=name, relative=torch.finfo(dtype).eps)
    return LogprobPrecision()


def check_totals(
    answer: ListedLogprobs, token_ids: np.ndarray, vocab_size: int, precision: LogprobPrecision
) -> None:
    """Check that the probabilities of each position can sum to 1.

    Args:
        answer: of a server.
        token_ids: the scored tokens.
        vocab_size: number of tokens of the model.
        precision: of the server.

    Raises:
        AnswerError: with the first position where they cannot.
    """
    is_listed = (answer.listed_ids == token_ids[:, None]).any(-1)
    token_logp = np.where(is_listed, -np.inf, answer.token_logp)
    known = np.concatenate([answer.listed_logp, token_logp[:, None]], axis=-1)
    error = precision.error_nats(known)
    unlisted = vocab_size - (answer.listed_ids >= 0).sum(-1) - ~is_listed
    unlisted_most = answer.unlisted_most + precision.error_nats(answer.unlisted_most)
    least = np.exp(known - error).sum(-1)
    most = np.exp(known + error).sum(-1) + np.maximum(unlisted, 0) * np.exp(unlisted_most)
    for is_wrong, limit, total in ((least > 1, "at least", least), (most < LEAST_TOTAL, "at most", most)):
        if is_wrong.any():
            position = int(np.flatnonzero(is_wrong)[0])
            raise AnswerError(
                f"lists probabilities that sum to {limit} {total[position]:.4g} at scored token {position}"
            )
