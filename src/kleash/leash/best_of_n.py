"""The KL of best-of-n sampling from the reference: exact, its upper bound, and estimates from draws.

Best of n draws n responses and returns the one with the highest reward; ties are broken at random. Let F be the
reference's probability of a reward at most r, G that of a reward below r, and m = F - G. Then the winner has reward r
with probability F^n - G^n, and

    KL(best of n || reference) = sum over rewards of (F^n - G^n) log((F^n - G^n) / m)

Responses of equal reward keep their proportions, so only the distribution of the *rewards* matters. Without ties, and
with a negligible probability of each response, the sum is the integral of n x^(n-1) log(n x^(n-1)), the upper bound.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Real
from numpy.typing import NDArray

from kleash.divergences import kl
from kleash.errors import NotProbabilitiesError, OptionError, ShapeError
from kleash.uncertainty import Estimate, clustered_mean

Array = NDArray[np.float64]
SUM_TOLERANCE = 1e-5
LOG_OF_ZERO = -1e4
"""Finite replacement of log 0, whose exponential is 0 and whose product with 0 is 0."""
DRAWS_PER_N = 4
"""The recommended number of draws per prompt, as a multiple of n."""


def best_of_n_bound(n: int) -> float:
    """The upper bound log n - (n - 1) / n nats of the KL of best-of-n, exact if rewards never tie.

    It is often quoted as the KL itself. The two are equal only if no single response is likely and no two responses
    have the same reward; over finitely many outcomes the KL is at most -log of the smallest probability.

    Raises:
        OptionError: if ``n`` is below 1.

    References:
        Beirami et al., "Theoretical Guarantees on the Best-of-n Alignment Policy" (2024),
        https://arxiv.org/abs/2401.01879
    """
    if n < 1:
        raise OptionError(f"n is {n}; the best is taken of at least 1")
    return math.log(n) - (n - 1) / n


def best_of_n_kl(probs: Any, rewards: Any, n: int) -> float:
    """KL(best of n || reference) in nats, exactly, for a finite set of outcomes.

    Outcomes of equal reward keep their proportions, since ties among the n draws are broken at random. (If one of them
    were always preferred, their rewards would differ.) Outcomes of probability 0 are ignored.

    Args:
        probs: the reference's probability of each outcome; array-like, divided by their sum.
        rewards: the reward of each outcome; any numbers but NaN.
        n: the number of draws, at least 1.

    Raises:
        NotProbabilitiesError: if probabilities are negative, not finite, missing or do not sum to 1.
        ShapeError: if there is not one reward per outcome.
        OptionError: if a reward is NaN, or ``n`` is below 1.
    """
    best_of_n_bound(n)
    p, r = np.asarray(probs, np.float64), np.asarray(rewards, np.float64)
    if p.ndim != 1 or p.shape != r.shape:
        raise ShapeError(f"probs are {p.shape} and rewards {r.shape}; give one of each per outcome")
    if not (p >= 0).all() or not abs(p.sum() - 1) <= SUM_TOLERANCE:
        raise NotProbabilitiesError(
            f"probs are not probabilities: they sum to {p.sum():g}, the least is {_smallest(p)}"
        )
    _require_comparable(r)
    masses = np.bincount(np.unique(r, return_inverse=True)[1], weights=p)
    masses = masses[masses > 0] / masses.sum()
    cumulative = np.cumsum(masses)
    cumulative /= cumulative[-1]
    with np.errstate(divide="ignore"):  # the share below the lowest reward is 0
        log_share_below = np.log1p(-np.minimum(masses / cumulative, 1.0))
    log_best_probs = n * np.log(cumulative) + np.log(-np.expm1(n * log_share_below))
    return kl(torch.tensor(log_best_probs), torch.tensor(np.log(masses))).item()


def best_of_n_kl_from_rewards(rewards: Real[np.ndarray, "..."], n: int) -> Estimate:
    """KL(best of n || reference) in nats per prompt, from the rewards of draws from the reference.

        bound - mean over draws of gap(below, tied) / tied

    where ``below`` and ``tied`` are the shares of the prompt's *other* draws with a lower and with the same reward, and
    ``gap`` is the excess of the bound over the sum for rewards of that rank. No probabilities are needed. A draw
    without ties contributes 0, so the estimate is the bound if rewards never tie. Otherwise the shares are unbiased but
    enter a curved function; the jackknife removes the bias of order 1/draws, and one of order 1/draws^2 remains. Noise
    can make the estimate larger than the bound.

    For several prompts it is their mean, with each prompt as a cluster. For one prompt its draws (their jackknife
    pseudo-values) are the clusters.

    Args:
        rewards: [draws] of one prompt or [prompts, draws]; at least 3 draws per prompt, better 4 n.
        n: the n of best-of-n, which may differ from the number of draws.

    Raises:
        ShapeError: if there are fewer than 3 draws, or more than two axes.
        OptionError: if a reward is NaN, or ``n`` is below 1.
    """
    bound = best_of_n_bound(n)
    r = np.asarray(rewards, np.float64)
    if r.ndim not in (1, 2) or r.shape[-1] < 3 or not r.size:
        raise ShapeError(
            f"rewards are {r.shape}; give [draws] or [prompts, draws], at least 3 draws of each prompt"
        )
    _require_comparable(r)
    values = _pseudo_values(r, n) if r.ndim == 1 else np.array([_pseudo_values(row, n).mean() for row in r])
    estimate = clustered_mean(bound - values, np.arange(len(values)), lower=0.0, upper=bound)
    return _with_warnings(estimate, draws=r.shape[-1], n=n, ties=bool(values.any()))


def best_of_n_kl_from_winners(
    winner_logp: Real[np.ndarray, "winners"], n: int, *, prompts: Any = None
) -> Estimate:
    """KL(best of n || reference) in nats, from the reference's log-probabilities of the winning responses.

        e = exp(winner_logp):    (1 - e)^n (log n + (n - 1) log(1 - e) - (n - 1)/n)
                                 + (1 - (1 - e)^n) log((1 - (1 - e)^n) / e)

    The estimator of Beirami et al.: the KL if the winner were the best possible response and no other response were
    likely. It needs one best-of-n draw per prompt and is below the bound for likely winners. It is biased in either
    direction: for two equally likely outcomes and n = 4 it gives 0.499 nats instead of 0.459. For long responses e is
    about 0 and it equals the bound.

    Args:
        winner_logp: log-probability of each winner under the reference; at most 0.
        n: the n of best-of-n.
        prompts: labels of the prompts; winners of one prompt form a cluster. None for a cluster per winner.

    Raises:
        ShapeError: if ``winner_logp`` does not have one axis, or ``prompts`` does not have one label per winner.
        OptionError: if a log-probability is above 0 or NaN, or ``n`` is below 1.

    References:
        Beirami et al., "Theoretical Guarantees on the Best-of-n Alignment Policy" (2024),
        https://arxiv.org/abs/2401.01879
    """
    bound = best_of_n_bound(n)
    logp = np.asarray(winner_logp, np.float64)
    if logp.ndim != 1:
        raise ShapeError(f"winner_logp is {logp.shape}; give one log-probability per winner")
    if not (logp <= 0).all():
        raise OptionError(f"winner_logp reaches {logp.max():g}; a log-probability is at most 0")
    mass = np.exp(logp)
    with np.errstate(divide="ignore"):  # the other responses have probability 0 if the winner is certain
        log_rest = np.maximum(np.log1p(-mass), LOG_OF_ZERO)
    absent_prob = np.exp(n * log_rest)
    per_mass = np.divide(-np.expm1(n * log_rest), mass, out=np.full_like(mass, n), where=mass > 0)
    estimates = absent_prob * (bound + (n - 1) * log_rest) + per_mass * mass * np.log(per_mass)
    labels = np.arange(len(logp)) if prompts is None else np.asarray(prompts)
    return clustered_mean(estimates, labels, lower=0.0, upper=bound)


def _pseudo_values(rewards: Array, n: int) -> Array:
    """Jackknife pseudo-values, one per draw, of the gap between the bound and the KL for one prompt."""
    _, level, counts = np.unique(rewards, return_inverse=True, return_counts=True)
    draws, tied = len(rewards), np.flatnonzero(counts > 1)
    if not len(tied):
        return np.zeros(draws)
    full_sample = _mean_gap(counts, n)
    # Leave-one-out values depend on the draw's level if it ties, and otherwise on the number of tied levels below it.
    kind = np.where(counts > 1, -1 - np.arange(len(counts)), np.searchsorted(tied, np.arange(len(counts))))
    _, example, kind_of_level = np.unique(kind, return_index=True, return_inverse=True)
    leave_one_out = np.array([_mean_gap(counts - (np.arange(len(counts)) == index), n) for index in example])
    return draws * full_sample - (draws - 1) * leave_one_out[kind_of_level[level]]


def _mean_gap(counts: NDArray[np.int64], n: int) -> float:
    """The mean gap between bound and KL over the draws, each ranked among the other draws."""
    draws = counts.sum()
    is_tied = counts > 1
    lower_share, tied_share = (
        (np.cumsum(counts) - counts)[is_tied] / (draws - 1),
        (counts[is_tied] - 1) / (draws - 1),
    )
    return float(counts[is_tied] @ _gap_per_mass(lower_share, tied_share, n) / draws)


def _gap_per_mass(below: Array, mass: Array, n: int) -> Array:
    """The KL of distinct rewards with ranks in (below, below + mass) minus that of one reward, divided by ``mass``."""
    top = below + mass
    best_prob = top**n * -np.expm1(n * _bounded_log(below / top))
    spread = (n - 1) * (_x_log_x(top, n) - _x_log_x(below, n)) + best_of_n_bound(n) * best_prob
    single_level = best_prob * (_bounded_log(best_prob) - np.log(mass))
    return (spread - single_level) / mass


def _x_log_x(x: Array, n: int) -> Array:
    """x^n log x; 0 at 0."""
    return x**n * _bounded_log(x)


def _bounded_log(x: Array) -> Array:
    """log x, with ``LOG_OF_ZERO`` at 0, for products with 0."""
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(x), LOG_OF_ZERO)


def _with_warnings(estimate: Estimate, *, draws: int, n: int, ties: bool) -> Estimate:
    """The estimate with warnings about missing ties and too few draws."""
    warnings = list(estimate.warnings)
    if not ties:
        warnings.append(
            "no two rewards of a prompt tie, so this is the bound; likely responses may have gone unseen"
        )
    if draws < DRAWS_PER_N * n:
        warnings.append(
            f"{draws} draws per prompt for the best of {n}; below {DRAWS_PER_N * n} likely responses go unseen"
        )
    return replace(estimate, warnings=tuple(warnings))


def _smallest(probs: Array) -> str:
    return f"{probs.min():g}" if probs.size else "absent"


def _require_comparable(rewards: Array) -> None:
    if np.isnan(rewards).any():
        raise OptionError(f"{int(np.isnan(rewards).sum())} rewards are NaN; leave those outcomes out")
