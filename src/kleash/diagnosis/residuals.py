"""The one model of what a hypothesis leaves of the differences: a mixture of scales, with families that restrict it.

Independent errors of standard deviation sigma in the logits change the log-probability of a token of probability p by
about sigma (1 - p): a token that is nearly certain stays so. Scales are in this unit, "nats of a logit", except for
errors of one size on all log-probabilities. The weights of the mixture are fitted to one half of the responses and
judged by the other.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MACHINE_EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative spacing of numbers, by dtype."""
HEALTHY_EPSILONS = 4
"""Largest healthy error of a logit in units of its dtype's epsilon: logits are of size 4 to 32, and the hidden states
behind them have been rounded some dozens of times."""
FLOOR_NATS = 3e-7
"""Rounding of a log-probability of a few nats to float32."""
SOFTMAX_NATS = 2.0**-15
"""Error of any log-probability that is there in any case: the softmax in float32, and the digits of the file."""
EQUAL_SHARE = 2**-1.5
"""Errors of one size on all log-probabilities that are healthy, as a share of the largest healthy error of a logit: the
largest logits, of the most certain tokens, are rounded most."""
MISTAKES = 0.02
"""Share of outliers that a right prediction leaves at most."""
DISTINCT = 2.0
"""A fault's errors are at least so many times as large as those that rounding explains."""
MOST, NEARLY_ALL = 0.6, 0.9
"""Shares of the tokens that errors on most tokens, or on all, are at least on."""
SMALLEST_DIFFERENCE = 3e-3
"""Errors of logits, in nats, from which another model, context or routing is a hypothesis."""

NORMAL, TAILED, EQUAL = range(3)
"""Kinds of components: normal errors of logits, heavy-tailed ones (Student's t with 2 degrees of freedom), and normal
errors of one size on all log-probabilities."""
_EXPONENTS = {kind: np.arange(-23, 5.1, step) for kind, step in ((NORMAL, 1), (TAILED, 2), (EQUAL, 1.5))}
SCALE = 2.0 ** np.concatenate(list(_EXPONENTS.values()))
"""Powers of 2, as the largest errors that dtypes explain and ``DISTINCT`` are: both bounds are scales themselves."""
KIND = np.repeat(list(_EXPONENTS), [len(exponents) for exponents in _EXPONENTS.values()])
FITTED_TOKENS = 2500
EM_STEPS, RELAXATION = 40, 1.8
"""Tokens to which the weights are fitted, steps of expectation maximisation, and the power of each within blocks."""
EVEN_TOKENS = 5
"""Tokens that count for all components of a block alike, beside those that the weights are fitted to."""
OCTAVES = (0, 1, -1, 2, -2, 4, -4, 8, -8, 16, -16)
OCTAVE_SHARES = np.r_[0.8, np.full(10, 0.02)]
SLACK = 2
"""Powers of 2 by which all errors of a response may be larger than those of others, since other kernels or batches made
them, or none; the share of the responses for each; and by how many they may be above the largest of a block."""


class Block(NamedTuple):
    """Components whose weights have a sum between two bounds."""

    members: NDArray[np.bool_]
    low: float
    high: float


Family = tuple[Block, ...]
"""A restriction of the mixture: blocks, no two with a component in common; the first has what the others leave."""


class Residuals(NamedTuple):
    """What is left of the differences between trainer and engine under a hypothesis."""

    values: Floats
    """In nats, one for each token; NaN where the hypothesis says nothing."""
    unit: Floats
    """Change of each log-probability for one nat of error in its logit."""
    floor: Floats
    """Standard deviation of a further error of each token, in nats."""


def healthy_scale(dtype: str) -> float:
    """The largest error of logits that rounding explains, in nats, where networks run in ``dtype``."""
    return max(HEALTHY_EPSILONS * MACHINE_EPSILON[dtype], SOFTMAX_NATS)


def token_unit(log_probabilities: Floats) -> Floats:
    """1 - p, the change of a log-probability for each nat of error in its logit."""
    return -np.expm1(np.minimum(log_probabilities, 0.0))


def _core(limit: float) -> NDArray[np.bool_]:
    """Components of rounding: errors of logits of at most ``limit``, and those of a softmax in float32."""
    return np.less_equal(SCALE, np.where(KIND == EQUAL, max(SOFTMAX_NATS, EQUAL_SHARE * limit), limit))


def rounding(limit: float, outliers: float = 1e-5) -> Family:
    """Rounding of at most ``limit``, of any mixture of sizes, with at most a share of outliers."""
    is_outlier = (KIND == TAILED) & (SCALE > 0.3) & (SCALE < 10)
    return (Block(_core(limit), 0.0, 1.0), Block(is_outlier, 1e-5, outliers))


def _large(smallest: float, smallest_equal: float = math.inf) -> NDArray[np.bool_]:
    """Components of errors of logits of at least a size, and of errors of one size of at least another."""
    return np.greater_equal(SCALE, np.where(KIND == EQUAL, smallest_equal, smallest))


def most(smallest: float) -> Family:
    """Errors of logits of at least ``smallest`` on most tokens, and any on the others."""
    large = _large(smallest)
    return (Block(~large, 0.0, 1 - MOST), Block(large, MOST, 1.0))


def everywhere(smallest: float) -> Family:
    """Errors of at least ``smallest`` without heavy tails on nearly all tokens, and any on the others."""
    large = _large(smallest, EQUAL_SHARE * smallest) & (KIND != TAILED)
    return (Block(~large, 0.0, 1 - NEARLY_ALL), Block(large, NEARLY_ALL, 1.0))


def at_most(largest: float) -> Family:
    """Errors of at most ``largest``."""
    return (Block(np.less_equal(SCALE, largest), 0.0, 1.0),)


FREE = at_most(math.inf)
"""Errors of any sizes."""


def on_some(limit: float, smallest: float, low: float, high: float) -> Family:
    """Rounding, and errors of at least ``smallest`` on a share of the tokens."""
    return (Block(_core(limit), 0.0, 1.0), Block(_large(smallest) & ~_core(limit), low, high))


def _sizes(residuals: Residuals, members: NDArray[np.int64]) -> Floats:
    """Scales [tokens, components] of components, in nats of the values."""
    unit, floor = residuals.unit[:, None], residuals.floor[:, None]
    return np.maximum(
        np.hypot(SCALE[members] * np.where(KIND[members] == EQUAL, 1.0, unit), floor), FLOOR_NATS
    )


def log_densities(residuals: Residuals, members: NDArray[np.int64]) -> Floats:
    """Log-densities [tokens, components] under some of the components."""
    size, is_tailed = _sizes(residuals, members), KIND[members] == TAILED
    logs = (residuals.values[:, None] / size) ** 2
    logs[:, is_tailed] = -1.5 * np.log1p(logs[:, is_tailed] / 2) - 1.5 * math.log(2)
    logs[:, ~is_tailed] = -0.5 * logs[:, ~is_tailed] - 0.5 * math.log(2 * math.pi)
    return logs - np.log(size)


def mass_above(residuals: Residuals, lowest: Floats, members: NDArray[np.int64]) -> Floats:
    """The probability [tokens, components] of values from ``lowest`` on under some of the components."""
    z = -lowest[:, None] / _sizes(residuals, members)
    normal = torch.special.ndtr(torch.from_numpy(z)).numpy()
    return np.where(KIND[members] == TAILED, 0.5 + z / (2 * np.sqrt(2 + z**2)), normal)


def _fit(log_likelihoods: Floats, blocks: Sequence[Block]) -> Floats:
    """The weights of the components, 0 outside of the blocks, by expectation maximisation.

    Args:
        log_likelihoods: of the tokens under each of the components, [tokens, components].
        blocks: a family, of these components.
    """
    highest = log_likelihoods.max(axis=1, keepdims=True, initial=-1e300)
    likelihoods, count = np.exp(log_likelihoods - highest).astype(np.float32), len(log_likelihoods)
    weights = np.any([block.members for block in blocks], axis=0) / log_likelihoods.shape[1]
    ratios = np.ones(len(weights))
    for step in range(EM_STEPS + 1):
        if step and count:
            mixed = np.maximum(likelihoods @ weights.astype(np.float32), 1e-12)
            ratios = ((1 / mixed) @ likelihoods / count).astype(np.float64)
        # Shares of blocks by plain steps: relaxed ones would add what the even weights take from a component.
        sums = [float(weights[block.members] @ ratios[block.members]) for block in blocks[1:]]
        shares = [
            min(max(total, block.low), block.high) for total, block in zip(sums, blocks[1:], strict=True)
        ]
        weights *= ratios**RELAXATION
        for block, share in zip(blocks, [max(1 - sum(shares), 1e-9), *shares], strict=True):
            weights[block.members] = _scaled(weights[block.members], share, count)
    return weights


def _moved(family: Family) -> NDArray[np.int64]:
    """The component [octaves, components] that stands for each one where all errors are larger by an octave.

    The nearest of its kind, of at most ``SLACK`` octaves above the largest of its block. Those outside of the family
    stay.
    """
    place = np.log2(SCALE)
    moved = np.tile(place, (len(OCTAVES), 1))
    for block, kind in product(family, (NORMAL, TAILED, EQUAL)):
        inside = block.members & (kind == KIND)
        if inside.any():
            lowest, highest = place[inside].min(), place[inside].max() + SLACK
            moved[:, inside] = np.clip(place[inside] + np.array(OCTAVES)[:, None], lowest, highest)
    return (np.abs(moved[..., None] - place) + 1e3 * (KIND[:, None] != KIND)).argmin(axis=-1)


def _log_octaves(values: Floats, response: NDArray[np.int64]) -> Floats:
    """Log-probabilities [tokens, octaves] of the octaves of each token's response, by log-densities of that shape."""
    sums = np.log(OCTAVE_SHARES) + np.stack([np.bincount(response, column) for column in values.T], axis=1)
    return (sums - np.logaddexp.reduce(sums, axis=1, keepdims=True))[response]


def _scaled(weights: Floats, share: float, tokens: int) -> Floats:
    """Weights scaled to the sum ``share`` and shrunk to equal ones.

    As if ``EVEN_TOKENS`` uniform observations were added to the ``share * tokens`` that they were fitted to.
    """
    even = EVEN_TOKENS / (EVEN_TOKENS + share * tokens)
    total = float(weights.sum())
    fitted = weights / total if total else np.full(len(weights), 1 / len(weights))
    return share * ((1 - even) * fitted + even / len(weights))


def held_out(
    residuals: Residuals,
    family: Family,
    fold: NDArray[np.int64],
    response: NDArray[np.int64],
    lowest: Floats | None = None,
) -> Floats:
    """The log-density of each token under the weights that the other fold's tokens give; NaN where it has no value.

    That of a response is of the mixture over ``OCTAVES``, of which each token has a part.

    With ``lowest``, it is that of values of which as few lie below these bounds as of the other fold's.
    """
    moved, has_value = _moved(family), np.isfinite(residuals.values)
    members = np.unique(moved[:, np.any([block.members for block in family], axis=0)])
    blocks = [block._replace(members=block.members[members]) for block in family]
    moves = moved[:, members, None] == members  # [octaves, from, to]
    logs, result = log_densities(residuals, members), np.full(len(fold), np.nan)
    for number in np.unique(fold):
        is_judged, is_fitted = (has_value & (fold == number), has_value & (fold != number))
        candidates = np.flatnonzero(fold != number)  # of which every hypothesis is fitted to the same ones
        sample = candidates[:: max(1, len(candidates) // FITTED_TOKENS)]
        weights, numbers = (_fit(logs[sample[has_value[sample]]], blocks) @ moves).T, response[is_judged]
        highest = logs[is_judged].max(axis=1, keepdims=True, initial=-1e300)
        values = highest + np.log(np.maximum(np.exp(logs[is_judged] - highest) @ weights, 1e-300))
        if lowest is not None:
            is_below, rest = (
                residuals.values < lowest,
                Residuals(*(column[is_judged] for column in residuals)),
            )
            share = (is_below[is_fitted].sum() + 1) / (is_fitted.sum() + 2)
            above = (mass_above(rest, lowest[is_judged], members) @ weights).clip(1e-9, 1 - 1e-9)
            below = is_below[is_judged, None]
            values += np.log(np.where(below, share / (1 - above), (1 - share) / above))
        octaves = _log_octaves(values, numbers)
        prior = (np.log(OCTAVE_SHARES) - octaves) / np.bincount(numbers)[numbers, None]
        result[is_judged] = (np.exp(octaves) * (values + prior)).sum(axis=1)
    return result
