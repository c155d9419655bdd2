"""From the files of a run to its measurement."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version

import numpy as np

from kleash.engines import LocalEngine
from kleash.estimators import ESTIMATORS
from kleash.measuring.cluster_sums import ClusterSums, SequenceTerms, sequence_terms, token_sums
from kleash.measuring.columns import PER_TOKEN, READ, quantities
from kleash.measuring.estimand import Estimand, estimand_of, on_policy_warnings, weight_warnings
from kleash.measuring.estimates import (
    bins,
    estimator_records,
    known_value,
    mean_per_token,
    perplexities,
    probability_changes,
    sequence_total,
)
from kleash.measuring.largest_drift import Worst, write_alternatives
from kleash.measuring.rescoring import Aftermath, SourceChecks, measure_rounding
from kleash.measuring.sequence_clusters import Clusters, clusters_of, sequence_starts
from kleash.measuring.token_quantiles import climb
from kleash.models import Pair
from kleash.records import Counts, MeasureJob, Measurement, Number, RunFolder, RunningMean
from kleash.uncertainty import running_mean
from kleash.version import __version__

PACKAGES = ("torch", "transformers", "numpy", "peft", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose shards are all there."""

    job: MeasureJob
    pair: Pair
    folder: RunFolder
    engine: LocalEngine
    source_sha256: str
    checks: SourceChecks


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """What ``sequences/`` tells of a run as a whole."""

    clusters: Clusters
    tokens: int
    prompts: int
    truncated: int
    all_have_logprobs: bool


def summarise(run: Run, seconds: Callable[[], float]) -> Measurement:
    """Everything that is reported of a run, from its files and a second look at some of its sequences."""
    sequences = read_sequences(run.folder, on_text=run.job.source[0] == "text")
    estimand = estimand_of(
        run.job,
        all_have_logprobs=sequences.all_have_logprobs,
        split=len(sequences.clusters.labels) > sequences.prompts,
    )
    one_model = run.pair.is_one_model
    counted = tally(run.folder, estimand, sequences.clusters, one_model=one_model)
    sums, worst = counted.sums, counted.worst
    worst_sequences = worst.worst_sequences()
    write_alternatives(run.folder, worst_sequences, run.pair.tokenizer)
    after = measure_rounding(run.job, run.engine, run.folder, sequences.tokens)
    quantiles, top_share = climb(run.folder, sequences.clusters, one_model=one_model)
    return Measurement(
        kleash=__version__,
        estimand=estimand.words,
        job=run.job.settings(),
        source_sha256=run.source_sha256,
        models={model.role: model.record() for model in (run.pair.policy, run.pair.reference)},
        device=device_of(run.pair),
        counts=Counts(
            prompts=sequences.prompts,
            sequences=len(sequences.clusters.labels),
            tokens=sequences.tokens,
            clusters=len(sums["tokens"]),
            truncated_sequences=sequences.truncated,
            shards=run.folder.finished_shards(),
        ),
        per_token={name: Number.of(mean_per_token(sums, name)) for name in PER_TOKEN},
        per_sequence=(
            sequence_total(counted.terms, sequences.clusters, one_model=one_model)
            if estimand.between_sequences and np.isfinite(counted.terms.weight).all()
            else None
        ),
        estimators=estimator_records(sums, tuple(ESTIMATORS)),
        estimators_note=estimand.estimators_note,
        quantiles=quantiles,
        by_position=bins(sums, "position"),
        by_confidence=bins(sums, "confidence"),
        top1_agreement=Number.of(mean_per_token(sums, "top1_agreement")),
        perplexity=perplexities(sums),
        probability_change=probability_changes(sums),
        top_percent_share=top_share,
        noise_floor=after.noise_floor,
        dtype_gap=after.dtype_gap,
        convergence=convergence(sums),
        worst_tokens=worst.worst_tokens(),
        worst_sequences=worst_sequences,
        prompts=worst.worst_prompts(run.folder, on_text=run.job.source[0] == "text"),
        warnings=gather_warnings(run, estimand, sequences, counted, after),
        notes=(*run.pair.notes, *run.job.without_effect()),
        seconds=seconds(),
        finished=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    )


def device_of(pair: Pair) -> str:
    """Where the models of a run are."""
    places = [str(model.device_map or model.device) for model in (pair.policy, pair.reference)]
    return " and ".join(dict.fromkeys(places))


def read_sequences(folder: RunFolder, *, on_text: bool) -> Sequences:
    """Clusters and counts of a run's sequences."""
    prompt, sample = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    tokens = truncated = 0
    for part in folder.sequence_parts(["prompt_id", "sample_id", "tokens", "finish_reason"]):
        prompt.append(part["prompt_id"].astype(np.int64))
        sample.append(part["sample_id"].astype(np.int64))
        tokens += int(part["tokens"].sum(dtype=np.int64))
        truncated += part["finish_reason"].count("length")
    unknown = any(np.isnan(part["logp_sampled"]).any() for part in folder.token_parts(["logp_sampled"]))
    prompts = np.concatenate(prompt)
    return Sequences(
        clusters=clusters_of(prompts, np.concatenate(sample), on_text=on_text),
        tokens=tokens,
        prompts=len(np.unique(prompts)),
        truncated=truncated,
        all_have_logprobs=not unknown,
    )


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What one pass over all tokens gives."""

    sums: ClusterSums
    terms: SequenceTerms
    worst: Worst


def tally(folder: RunFolder, estimand: Estimand, clusters: Clusters, *, one_model: bool = False) -> Tally:
    """One pass over all tokens: the sums of every quantity for each cluster, and what drifted most."""
    sums, worst, terms = ClusterSums(one_model=one_model), Worst(), [SequenceTerms(*np.zeros((3, 0)))]
    done = 0
    for part in folder.token_parts([*READ, "text"]):
        starts = sequence_starts(part["prompt_id"], part["sample_id"])
        labels = clusters.labels[done : done + len(starts)]
        done += len(starts)
        found = quantities(part, estimand.weighting)
        lengths = np.diff([*starts, len(part["prompt_id"])])
        sums.add(np.repeat(labels, lengths), token_sums(found))
        if estimand.between_sequences and estimand.weighting is not None:
            terms.append(sequence_terms(part, found, estimand.weighting))
        worst.add(part)
    return Tally(
        sums=sums,
        worst=worst,
        terms=SequenceTerms(*(np.concatenate(column) for column in zip(*terms, strict=True))),
    )


def convergence(sums: ClusterSums) -> tuple[RunningMean, ...]:
    """The mean KL as it stood at up to a hundred moments of the run."""
    tokens, means, halves = running_mean(
        sums["kl_policy_reference"],
        sums["tokens"],
        known_value=known_value(sums, "kl_policy_reference"),
    )
    return tuple(
        RunningMean(tokens=int(count), mean=float(mean), ci95=(float(mean - half), float(mean + half)))
        for count, mean, half in zip(tokens, means, halves, strict=True)
    )


def gather_warnings(
    run: Run, estimand: Estimand, sequences: Sequences, counted: Tally, after: Aftermath
) -> tuple[str, ...]:
    """Warnings about the whole run."""
    return tuple(
        dict.fromkeys(
            [
                *run.pair.warnings,
                *sequences.clusters.warnings,
                *estimand.warnings,
                *run.checks.warnings(),
                *after.warnings,
                *on_policy_warnings(counted.sums, estimand),
                *weight_warnings(counted.terms.weight, estimand),
            ]
        )
    )
