"""What there is to say about two sets of log-probabilities of the same tokens."""

from dataclasses import dataclass
from typing import NamedTuple

from kleash.errors import OptionError
from kleash.uncertainty import Estimate


class SequenceMeans(NamedTuple):
    """Means over sequences, in which a short one counts as much as a long one; others are over tokens."""

    perplexity_trainer: float
    perplexity_engine: float
    perplexity_ratio: float
    """Trainer over engine."""
    log_perplexity_trainer: float
    log_perplexity_engine: float
    log_perplexity_gap: float
    """Trainer minus engine, nats per token: how much less likely the trainer finds a sequence."""
    absolute_gap: float
    largest_gap: float
    least_gap: float


class ProbabilityGaps(NamedTuple):
    """The tokens' probabilities themselves, which cannot run away as ratios do."""

    pearson: float
    """Their correlation: 1 where one is a rising linear function of the other. NaN over fewer than two."""
    largest: float
    """Of the absolute difference."""
    mean: float
    standard_deviation: float
    """Of the absolute difference, with n - 1. NaN over fewer than two."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """How far trainer and engine are apart on the tokens that the engine drew.

    Everything is from one-sided samples; an error comes from the sequences (or prompts) as clusters. "Along
    the engine's prefixes": each next-token divergence at the prefixes that were met, which is what weights
    of level "token" average to.
    """

    kl_engine_trainer: Estimate
    """KL(engine || trainer) per token in nats: the mean of k3, which is unbiased and never negative."""
    kl_engine_trainer_k1: Estimate
    """The same by the plain mean of log engine - log trainer: unbiased, noisier, negative at times."""
    kl_trainer_engine: Estimate
    """KL(trainer || engine) per token in nats along the engine's prefixes: the mean of rho log rho - rho + 1,
    rho = trainer / engine. Unbiased and never negative."""
    jensen_shannon: Estimate
    """Per token in nats, between 0 and log 2, along the engine's prefixes; a drawn token adds a bounded amount
    times rho at most, so it is the calmest of them."""
    chi_squared: Estimate
    """chi-squared(trainer || engine) per token: the mean of (rho - 1)^2, the variance of the token weights."""
    mean_weight: Estimate
    """The mean of rho over tokens: 1 up to its error, unless the two columns are of different kinds."""
    perplexity_trainer: Estimate
    """exp of the mean negative log-probability over tokens."""
    perplexity_engine: Estimate
    perplexity_ratio: Estimate
    """Trainer over engine: exp of ``kl_engine_trainer_k1``."""
    sequence_kl_engine_trainer: Estimate
    """KL(engine || trainer) of whole responses, in nats: the mean over sequences of their sum of k3."""
    sequence_chi_squared: Estimate
    """The variance of the sequences' weights, products of rho: what correcting for the mismatch costs."""
    sequence_mean_weight: Estimate
    """The mean of the sequences' weights."""
    effective_sample_size: float
    """How many tokens of equal weight would tell as much as these under token weights."""
    effective_sequences: float
    """How many sequences would, under sequence weights."""
    over_sequences: SequenceMeans
    probabilities: ProbabilityGaps
    largest_log_ratio: float
    """The largest absolute difference of two log-probabilities, in nats."""
    ruled_out: int
    """Tokens that the engine drew and the trainer finds impossible: KL(engine || trainer) is infinite."""
    tokens: int
    sequences: int

    def renamed(self, system: str) -> dict[str, float]:
        """The numbers under another system's names and with its definitions.

        "verl": ``rollout_corr/*`` of its ``compute_offpolicy_metrics`` and ``training/rollout_*`` of its
        debug metrics. The KLs are verl's ``kl`` and ``k3_kl``, of KL(rollout || training); verl has none the other
        way. Its chi-squared is E[rho^2] - 1, which is negative at times where the variance here is not.

        Raises:
            OptionError: if there is no such system.
        """
        if system != "verl":
            raise OptionError(f"system is {system!r}; there is 'verl'")
        means, gaps = self.over_sequences, self.probabilities
        corrected = {
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
        return {f"rollout_corr/{name}": value for name, value in corrected.items()} | {
            "training/rollout_probs_diff_max": gaps.largest,
            "training/rollout_probs_diff_mean": gaps.mean,
            "training/rollout_probs_diff_std": gaps.standard_deviation,
            "training/rollout_actor_probs_pearson_corr": gaps.pearson,
        }


def _second_moment(variance: Estimate, mean: Estimate) -> float:
    """E[rho^2], from E[(rho - 1)^2] and E[rho]."""
    return variance.value + 2 * mean.value - 1
