"""The mismatch between trainer and rollout engine: divergences between their log-probabilities of the same tokens."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import DIVERGENCES
from kleash.estimators import importance_weights
from kleash.masking import as_mask
from kleash.registry import require_choice
from kleash.uncertainty import Estimate, ratio_of_many, transformed
from kleash.uncertainty.clusters import MIN_EFFECTIVE_SHARE

NONNEGATIVE = (0.0, math.inf)
UNBOUNDED = (-math.inf, math.inf)


class SequenceMeans(NamedTuple):
    """Means over sequences, in which short and long ones have equal weight; other statistics are over tokens."""

    perplexity_trainer: float
    perplexity_engine: float
    perplexity_ratio: float
    """Trainer over engine."""
    log_perplexity_trainer: float
    log_perplexity_engine: float
    log_perplexity_gap: float
    """Trainer minus engine, in nats per token: the mean of log engine - log trainer."""
    absolute_gap: float
    largest_gap: float
    least_gap: float


class ProbabilityGaps(NamedTuple):
    """Differences between the tokens' probabilities, which are bounded, unlike ratios."""

    pearson: float
    """Pearson correlation of the two probabilities. NaN for fewer than two tokens."""
    largest: float
    """The largest absolute difference."""
    mean: float
    """The mean absolute difference."""
    standard_deviation: float
    """The standard deviation of the absolute difference, with n - 1. NaN for fewer than two tokens."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The mismatch between trainer and engine on the tokens that the engine drew.

    All statistics are from samples of the engine; standard errors are clustered by sequences (or prompts). "Along the
    engine's prefixes" means the average of next-token divergences over prefixes that the engine drew, which is the
    expectation under weights of level "token".
    """

    kl_engine_trainer: Estimate
    """KL(engine || trainer) per token in nats: the mean of k3, which is unbiased and never negative."""
    kl_engine_trainer_k1: Estimate
    """KL(engine || trainer) per token in nats: the mean of log engine - log trainer (k1), which is unbiased, noisier,
    and sometimes negative."""
    kl_trainer_engine: Estimate
    """KL(trainer || engine) per token in nats along the engine's prefixes: the mean of rho log rho - rho + 1,
    rho = trainer / engine. Unbiased and never negative."""
    jensen_shannon: Estimate
    """Per token in nats, between 0 and log 2, along the engine's prefixes. A token contributes at most a constant
    times rho, so it has the smallest variance of these."""
    chi_squared: Estimate
    """chi-squared(trainer || engine) per token: the mean of (rho - 1)^2, the variance of the token weights."""
    mean_weight: Estimate
    """The mean of rho over tokens: 1 within its error, unless the columns have different semantics."""
    perplexity_trainer: Estimate
    """exp of the mean negative log-probability over tokens."""
    perplexity_engine: Estimate
    perplexity_ratio: Estimate
    """Trainer over engine: exp of ``kl_engine_trainer_k1``."""
    sequence_kl_engine_trainer: Estimate
    """KL(engine || trainer) of whole responses, in nats: the mean over sequences of their sum of k3."""
    sequence_chi_squared: Estimate
    """The variance of the sequences' weights (products of rho), which determines the cost of sequence weights."""
    sequence_mean_weight: Estimate
    """The mean of the sequences' weights."""
    effective_sample_size: float
    """The effective number of tokens under token weights."""
    effective_sequences: float
    """The effective number of sequences under sequence weights."""
    over_sequences: SequenceMeans
    probabilities: ProbabilityGaps
    largest_log_ratio: float
    """The largest absolute difference of two log-probabilities, in nats."""
    ruled_out: int
    """Number of drawn tokens with probability 0 under the trainer, which make KL(engine || trainer) infinite."""
    tokens: int
    sequences: int

    def renamed(self, system: str) -> dict[str, float]:
        """The statistics under another system's names and with its definitions.

        "verl": ``rollout_corr/*`` of its ``compute_offpolicy_metrics`` and ``training/rollout_*`` of its debug metrics.
        The KLs are verl's ``kl`` and ``k3_kl`` of KL(rollout || training); verl does not have the other direction. Its
        chi-squared is E[rho^2] - 1, which can be negative, unlike the variance here.

        Raises:
            OptionError: if the system is unknown.
        """
        require_choice(("verl",), system=system)
        means, gaps = self.over_sequences, self.probabilities
        rollout_metrics = {
            "training_ppl": means.perplexity_trainer,
            "training_log_ppl": means.log_perplexity_trainer,
            "kl": self.kl_engine_trainer_k1.value,
            "k3_kl": self.kl_engine_trainer.value,
            "rollout_ppl": means.perplexity_engine,
            "rollout_log_ppl": means.log_perplexity_engine,
            "log_ppl_diff": means.log_perplexity_gap,
            "log_ppl_abs_diff": means.absolute_gap,
            "log_ppl_diff_max": means.largest_gap,
            "log_ppl_diff_min": means.least_gap,
            "ppl_ratio": means.perplexity_ratio,
            "chi2_token": _second_moment(self.chi_squared, self.mean_weight) - 1,
            "chi2_seq": _second_moment(self.sequence_chi_squared, self.sequence_mean_weight) - 1,
        }
        return {f"rollout_corr/{name}": value for name, value in rollout_metrics.items()} | {
            "training/rollout_probs_diff_max": gaps.largest,
            "training/rollout_probs_diff_mean": gaps.mean,
            "training/rollout_probs_diff_std": gaps.standard_deviation,
            "training/rollout_actor_probs_pearson_corr": gaps.pearson,
        }


@validated
def mismatch(
    trainer_logp: Float[Tensor, "batch time"],
    engine_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    *,
    prompts: Integer[Tensor, "batch"] | None = None,
) -> Mismatch:
    """Measure the mismatch between the trainer's and the rollout engine's log-probabilities of sampled tokens.

    The engine drew the tokens, so KL(engine || trainer) is a plain mean over them, and averages over the trainer need
    weights rho = trainer / engine. Both columns must have the same semantics, those of the distribution that the tokens
    were drawn from. With a temperature, top-p or raw log-probabilities they may differ: see ``require_same_semantics``,
    ``to_truncated`` and ``to_full``.

    | | |
    | masked | not read |
    | NaN among the tokens that count | NaN in every statistic that it enters, with a warning |
    | a drawn token has probability 0 under the trainer | KL(engine || trainer) is inf, the others stay finite |
    | a sequence without a token that counts | ignored |
    | both columns are equal and not constant | divergences are 0 and weights 1, with intervals of one point |

    Args:
        trainer_logp: log-probabilities of the tokens, computed by the training code.
        engine_logp: log-probabilities that the engine returned with the tokens.
        mask: true (or 1) for the tokens that count.
        prompts: a label per sequence; sequences of one prompt form a cluster. None for a cluster per sequence.

    Raises:
        ShapeError: if the shapes do not fit together.
    """
    labels = torch.arange(len(trainer_logp), device="cpu") if prompts is None else prompts.cpu()
    is_counted = as_mask(mask).cpu()
    has_tokens = is_counted.any(-1)
    is_counted, labels = is_counted[has_tokens], labels[has_tokens]
    columns = [x.detach().cpu().double()[has_tokens] for x in (trainer_logp, engine_logp)]
    trainer, engine = (torch.where(is_counted, x, 0.0) for x in columns)
    clusters = np.unique(labels.numpy(), return_inverse=True)[1]
    are_equal = are_columns_equal(trainer[is_counted], engine[is_counted])
    effective_tokens = importance_weights(trainer, engine, is_counted).effective_sample_size.item()
    effective_sequences = importance_weights(
        trainer, engine, is_counted, level="sequence"
    ).effective_sample_size.item()
    return Mismatch(
        **_token_estimates(trainer, engine, is_counted, clusters, are_equal, effective_tokens),
        **_sequence_estimates(engine - trainer, clusters, are_equal, effective_sequences),
        effective_sample_size=effective_tokens,
        effective_sequences=effective_sequences,
        over_sequences=_sequence_means(trainer, engine, is_counted),
        probabilities=_probability_gaps(trainer[is_counted].exp(), engine[is_counted].exp()),
        largest_log_ratio=_largest((engine - trainer)[is_counted].abs()),
        ruled_out=int((trainer[is_counted] == -math.inf).sum()),
        tokens=int(is_counted.sum()),
        sequences=len(is_counted),
    )


def are_columns_equal(trainer: Float[Tensor, "tokens"], engine: Float[Tensor, "tokens"]) -> bool:
    """Whether two columns are equal bit for bit and have more than one value, so that they are no placeholders.

    Log-probabilities of a language model are not equal at every token by chance: one computation made both columns.
    """
    return torch.equal(trainer, engine) and bool((trainer != trainer[:1]).any())


def _token_estimates(
    trainer: Tensor,
    engine: Tensor,
    is_counted: Tensor,
    clusters: np.ndarray,
    are_equal: bool,
    effective_size: float,
) -> dict[str, Estimate]:
    """The means over tokens, by the names of ``Mismatch``'s fields."""
    u = engine - trainer
    columns = {
        "kl_engine_trainer": (DIVERGENCES["kl"].of(u), "nats", NONNEGATIVE),
        "kl_engine_trainer_k1": (u, "nats", UNBOUNDED),
        "kl_trainer_engine": (DIVERGENCES["reverse_kl"].of(u), "nats", NONNEGATIVE),
        "jensen_shannon": (DIVERGENCES["jensen_shannon"].of(u), "nats", (0.0, math.log(2))),
        "chi_squared": (DIVERGENCES["chi_squared"].swapped.of(u), "none", NONNEGATIVE),
        "mean_weight": (torch.exp(-u), "none", NONNEGATIVE),
        "perplexity_trainer": (-trainer, "nats", UNBOUNDED),
        "perplexity_engine": (-engine, "nats", UNBOUNDED),
        "perplexity_ratio": (u, "nats", UNBOUNDED),
    }
    estimates = _estimates(columns, is_counted, clusters, are_equal, effective_size)
    return estimates | {
        name: transformed(estimates[name], math.exp, math.exp)
        for name in estimates
        if name.startswith("perplexity")
    }


def _sequence_estimates(
    u: Tensor, clusters: np.ndarray, are_equal: bool, effective_size: float
) -> dict[str, Estimate]:
    """The means over sequences, by the names of ``Mismatch``'s fields; ``u``: engine minus trainer, 0 where masked."""
    total = u.sum(-1, keepdim=True)
    columns = {
        "sequence_kl_engine_trainer": (DIVERGENCES["kl"].of(u).sum(-1, keepdim=True), "nats", NONNEGATIVE),
        "sequence_chi_squared": (DIVERGENCES["chi_squared"].swapped.of(total), "none", NONNEGATIVE),
        "sequence_mean_weight": (torch.exp(-total), "none", NONNEGATIVE),
    }
    return _estimates(columns, torch.ones_like(total, dtype=torch.bool), clusters, are_equal, effective_size)


def _estimates(
    columns: dict[str, tuple[Tensor, str, tuple[float, float]]],
    is_counted: Tensor,
    clusters: np.ndarray,
    are_equal: bool,
    effective_size: float,
) -> dict[str, Estimate]:
    """The mean of each column over unmasked values, with a cluster-robust standard error.

    The mean and the variance of weights have a warning if their effective sample size is small: the sample then lacks
    the few large weights that decide them, and both are too small.

    Args:
        columns: values, unit and bounds by name.
        is_counted: which values count.
        clusters: label of each sequence.
        are_equal: whether trainer and engine are equal, so that divergences are exactly 0 and weights exactly 1.
        effective_size: of the values under their weights.
    """
    num_clusters = int(clusters.max(initial=-1)) + 1

    def sum_by_cluster(per_sequence: Tensor) -> np.ndarray:
        return np.bincount(clusters, weights=per_sequence.numpy(), minlength=num_clusters)

    sums = np.stack(
        [sum_by_cluster(torch.where(is_counted, x, 0.0).sum(-1)) for x, _, _ in columns.values()], axis=1
    )
    counts = sum_by_cluster(is_counted.sum(-1).double())

    def estimates(known_value: float | None) -> dict[str, Estimate]:
        means = ratio_of_many(
            sums,
            counts,
            unit=[unit for _, unit, _ in columns.values()],
            lower=[low for _, _, (low, _) in columns.values()],
            upper=[high for _, _, (_, high) in columns.values()],
            known_value=known_value,
        )
        return dict(zip(columns, means, strict=True))

    if not are_equal:
        total = int(is_counted.sum())
        warning = (
            f"the weights leave an effective sample size of {effective_size:.1f} out of {total}: a few large weights "
            "decide this number, and without them it is too small"
        )
        return {
            name: replace(estimate, warnings=(*estimate.warnings, warning))
            if effective_size < MIN_EFFECTIVE_SHARE * total and name.endswith(("mean_weight", "chi_squared"))
            else estimate
            for name, estimate in estimates(None).items()
        }
    weights = estimates(1.0)
    return {
        name: weights[name] if name.endswith("weight") else estimate
        for name, estimate in estimates(0.0).items()
    }


def _sequence_means(trainer: Tensor, engine: Tensor, is_counted: Tensor) -> SequenceMeans:
    """Statistics of the log-perplexities of sequences."""
    lengths = is_counted.sum(-1)
    trainer_log_ppl, engine_log_ppl = (-x.sum(-1) / lengths for x in (trainer, engine))
    gap = (engine - trainer).sum(-1) / lengths
    return SequenceMeans(
        perplexity_trainer=trainer_log_ppl.exp().mean().item(),
        perplexity_engine=engine_log_ppl.exp().mean().item(),
        perplexity_ratio=gap.exp().mean().item(),
        log_perplexity_trainer=trainer_log_ppl.mean().item(),
        log_perplexity_engine=engine_log_ppl.mean().item(),
        log_perplexity_gap=gap.mean().item(),
        absolute_gap=gap.abs().mean().item(),
        largest_gap=_largest(gap),
        least_gap=-_largest(-gap),
    )


def _probability_gaps(trainer: Tensor, engine: Tensor) -> ProbabilityGaps:
    """Statistics of the differences between two columns of probabilities."""
    gaps = (trainer - engine).abs()
    x, y = trainer - trainer.mean(), engine - engine.mean()
    variance = (
        (gaps - gaps.mean()).square().sum() / (len(gaps) - 1) if len(gaps) > 1 else gaps.sum() * math.nan
    )
    return ProbabilityGaps(
        pearson=((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt()).item(),
        largest=_largest(gaps),
        mean=gaps.mean().item(),
        standard_deviation=variance.sqrt().item(),
    )


def _largest(values: Tensor) -> float:
    """The maximum; NaN if there are no values."""
    return values.max().item() if len(values) else math.nan


def _second_moment(variance: Estimate, mean: Estimate) -> float:
    """E[rho^2], from E[(rho - 1)^2] and E[rho]."""
    return variance.value + 2 * mean.value - 1
