"""Trainer against rollout engine: the same weights, two log-probabilities of each token, and how far they are apart."""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import DIVERGENCES
from kleash.errors import ShapeError
from kleash.estimators import importance_weights
from kleash.leash.mismatch_record import Mismatch, ProbabilityGaps, SequenceMeans
from kleash.masking import as_mask
from kleash.uncertainty import Estimate, ratio_of_many, transformed

NONNEGATIVE = (0.0, math.inf)
UNBOUNDED = (-math.inf, math.inf)


@validated
def mismatch(
    trainer_logp: Float[Tensor, "batch_t time_t"],
    engine_logp: Float[Tensor, "batch_e time_e"],
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
    *,
    prompts: Integer[Tensor, "batch_l"] | None = None,
) -> Mismatch:
    """Every way to say how far the trainer's log-probabilities are from the rollout engine's.

    Tokens were drawn by the engine, so KL(engine || trainer) is a plain mean over them, and what averages over the
    trainer needs weights rho = trainer / engine. All of it is right only if both columns are of one kind: the
    distribution that was really drawn from. Under a temperature, top-p or raw log-probabilities they are not:
    see ``require_same_semantics``, ``to_truncated``, ``to_full``, and ``check_agreement`` for the numbers alone.

    | | |
    | masked | not read |
    | NaN among the tokens that count | NaN wherever it enters, with a warning; nothing is dropped in silence |
    | the trainer rules a drawn token out | KL(engine || trainer) is inf, the others stay finite |
    | a sequence without a token that counts | is none: it enters no mean |

    Args:
        trainer_logp: log-probabilities of the tokens by the training code.
        engine_logp: those that came with the tokens.
        mask: true (or 1) for the tokens that count.
        prompts: a label per sequence; sequences of one prompt are not independent. By default each is its own.

    Raises:
        ShapeError: if the shapes do not fit together.
    """
    shapes = [tuple(x.shape) for x in (trainer_logp, engine_logp, mask)]
    labels = torch.arange(len(trainer_logp)) if prompts is None else prompts.cpu()
    if len(set(shapes)) > 1 or len(shapes[0]) != 2 or labels.shape != trainer_logp.shape[:1]:
        raise ShapeError(
            f"trainer_logp is {shapes[0]}, engine_logp {shapes[1]}, mask {shapes[2]} and prompts "
            f"{tuple(labels.shape)}; give [batch, time] three times, and a label for each sequence"
        )
    counts = as_mask(mask).cpu()
    used = counts.any(-1)
    counts, labels = counts[used], labels[used]
    sides = [x.detach().cpu().double()[used] for x in (trainer_logp, engine_logp)]
    trainer, engine = (torch.where(counts, x, 0.0) for x in sides)
    clusters = np.unique(labels.numpy(), return_inverse=True)[1]
    per_token = _token_estimates(trainer, engine, counts, clusters)
    log_ratio = (engine - trainer)[counts]
    return Mismatch(
        **per_token,
        **_sequence_estimates(trainer, engine, counts, clusters),
        effective_sample_size=_effective(trainer, engine, counts, "token"),
        effective_sequences=_effective(trainer, engine, counts, "sequence"),
        over_sequences=_sequence_means(trainer, engine, counts),
        probabilities=_probability_gaps(trainer[counts].exp(), engine[counts].exp()),
        largest_log_ratio=_largest(log_ratio.abs()),
        ruled_out=int((trainer[counts] == -math.inf).sum()),
        tokens=int(counts.sum()),
        sequences=len(counts),
    )


def _token_estimates(
    trainer: Tensor, engine: Tensor, counts: Tensor, clusters: np.ndarray
) -> dict[str, Estimate]:
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
    }
    found = _estimates(columns, counts, counts.sum(-1), clusters)
    found["perplexity_ratio"] = found["kl_engine_trainer_k1"]
    return found | {
        name: transformed(found[name], math.exp, math.exp) for name in found if name.startswith("perplexity")
    }


def _sequence_estimates(
    trainer: Tensor, engine: Tensor, counts: Tensor, clusters: np.ndarray
) -> dict[str, Estimate]:
    u = engine - trainer
    total = u.sum(-1)
    columns = {
        "sequence_kl_engine_trainer": (DIVERGENCES["kl"].of(u).sum(-1), "nats", NONNEGATIVE),
        "sequence_chi_squared": (DIVERGENCES["chi_squared"].swapped.of(total), "none", NONNEGATIVE),
        "sequence_mean_weight": (torch.exp(-total), "none", NONNEGATIVE),
    }
    alone = {name: (values.unsqueeze(-1), unit, ends) for name, (values, unit, ends) in columns.items()}
    ones = torch.ones(len(counts), 1, dtype=torch.bool)
    return _estimates(alone, ones, ones.sum(-1), clusters)


def _estimates(
    columns: dict[str, tuple[Tensor, str, tuple[float, float]]],
    counts: Tensor,
    sizes: Tensor,
    clusters: np.ndarray,
) -> dict[str, Estimate]:
    """The mean of each column over what counts, with the sequences' clusters behind its error."""
    groups = int(clusters.max(initial=-1)) + 1

    def summed(per_sequence: Tensor) -> np.ndarray:
        return np.bincount(clusters, weights=per_sequence.numpy(), minlength=groups)

    sums = np.stack([summed(torch.where(counts, x, 0.0).sum(-1)) for x, _, _ in columns.values()], axis=1)
    ends = [bounds for _, _, bounds in columns.values()]
    found = ratio_of_many(
        sums,
        summed(sizes.double()),
        unit=[unit for _, unit, _ in columns.values()],
        lower=[low for low, _ in ends],
        upper=[high for _, high in ends],
    )
    return dict(zip(columns, found, strict=True))


def _sequence_means(trainer: Tensor, engine: Tensor, counts: Tensor) -> SequenceMeans:
    lengths = counts.sum(-1)
    of_trainer, of_engine = (-x.sum(-1) / lengths for x in (trainer, engine))
    gap = (engine - trainer).sum(-1) / lengths
    return SequenceMeans(
        perplexity_trainer=of_trainer.exp().mean().item(),
        perplexity_engine=of_engine.exp().mean().item(),
        perplexity_ratio=gap.exp().mean().item(),
        log_perplexity_trainer=of_trainer.mean().item(),
        log_perplexity_engine=of_engine.mean().item(),
        log_perplexity_gap=gap.mean().item(),
        absolute_gap=gap.abs().mean().item(),
        largest_gap=_largest(gap),
        least_gap=-_largest(-gap),
    )


def _probability_gaps(trainer: Tensor, engine: Tensor) -> ProbabilityGaps:
    apart = (trainer - engine).abs()
    x, y = trainer - trainer.mean(), engine - engine.mean()
    spread = (
        (apart - apart.mean()).square().sum() / (len(apart) - 1) if len(apart) > 1 else apart.sum() * math.nan
    )
    return ProbabilityGaps(
        pearson=((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt()).item(),
        largest=_largest(apart),
        mean=apart.mean().item(),
        standard_deviation=spread.sqrt().item(),
    )


def _effective(trainer: Tensor, engine: Tensor, counts: Tensor, level: str) -> float:
    weights = importance_weights(trainer, engine, counts, level="token" if level == "token" else "sequence")
    return weights.effective_sample_size.item()


def _largest(values: Tensor) -> float:
    return values.max().item() if len(values) else math.nan
