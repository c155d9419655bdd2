"""The measurement of a finished run, from its files and a second scoring of some sequences."""

import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version

import numpy as np

from kleash.engines import Engine
from kleash.engines.endpoints import ServedModel
from kleash.errors import RunFolderError, SourceError
from kleash.jobs import MeasureJob
from kleash.measuring.cluster_sums import (
    TOKENS,
    ClusterSums,
    SequenceTerms,
    columns_to_read,
    sequence_terms,
    token_quantities,
)
from kleash.measuring.estimand import (
    Estimand,
    estimand_of,
    measured_padding,
    on_policy_warnings,
    storage_notes,
    weight_warnings,
)
from kleash.measuring.estimates import (
    bins,
    convergence,
    estimator_error,
    estimator_records,
    sequence_total,
    statistic_estimate,
)
from kleash.measuring.largest_drift import LargestDrift, write_alternatives
from kleash.measuring.partial_knowledge import reasons_left_out, with_reasons
from kleash.measuring.rescoring import Rounding, measure_rounding
from kleash.measuring.run_identity import PACKAGES
from kleash.measuring.sequence_clusters import (
    Clusters,
    clusters_of,
    distinct_prompts,
    hashes_as_ints,
    sequence_starts,
)
from kleash.measuring.shards import SourceChecks
from kleash.measuring.token_quantiles import token_quantiles
from kleash.models import Pair
from kleash.store import Counts, Measurement, RunFolder
from kleash.store.measurement import EstimatorRecord, describe_storage
from kleash.store.statistics import KL_DIRECTIONS, STATISTICS, known_statistics, to_fields
from kleash.store.tables import KL_BOUND_COLUMNS
from kleash.uncertainty import Estimate
from kleash.version import __version__


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run whose shards are all on disk."""

    job: MeasureJob
    pair: Pair
    folder: RunFolder
    engine: Engine
    source_sha256: str
    source_notes: tuple[str, ...]
    checks: SourceChecks


@dataclass(frozen=True, kw_only=True)
class SequenceCounts:
    """Clusters and counts of a run's sequences."""

    clusters: Clusters
    tokens: int
    prompts: int
    """Distinct prompts; on text, documents."""
    listed_prompts: int
    """Prompts of the source that are among the sequences, equal ones counted each."""
    truncated: int
    shards: int
    all_have_logprobs: bool

    def notes(self, *, on_text: bool) -> tuple[str, ...]:
        """That equal prompts are one cluster, where there are any; ``on_text`` if they are documents."""
        if self.prompts == self.listed_prompts:
            return ()
        noun = "documents" if on_text else "prompts"
        return (
            f"{self.prompts} of the {self.listed_prompts} {noun} are distinct; equal ones are one cluster",
        )

    def to_record(self, clusters: int) -> Counts:
        """The counts as in the measurement, with the number of clusters of the scored tokens."""
        return Counts(
            prompts=self.prompts,
            sequences=len(self.clusters.labels),
            tokens=self.tokens,
            clusters=clusters,
            truncated_sequences=self.truncated,
            shards=self.shards,
        )


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    """The results of one pass over all tokens."""

    sums: ClusterSums
    terms: SequenceTerms
    largest: LargestDrift
    tokens: int


def make_measurement(run: FinishedRun, seconds: Callable[[], float]) -> Measurement:
    """The measurement of a run; writes ``alternatives.parquet``.

    Args:
        run: the run.
        seconds: the time since its start.

    Raises:
        SourceError: if no token was scored.
    """
    on_text = run.job.source[0] == "text"
    counts = _scored_sequences(run, on_text=on_text)
    models = {model.role: model.record() for model in (run.pair.policy, run.pair.reference)}
    estimand = estimand_of(
        run.job,
        all_have_logprobs=counts.all_have_logprobs,
        split=len(counts.clusters.labels) > counts.listed_prompts,
        vocabulary=run.pair.vocabulary,
        storage=describe_storage(models),
    )
    is_one_model = run.pair.is_one_model
    statistics = known_statistics(run.folder.token_columns(), run.engine.unknown_columns)
    has_kl = "kl_policy_reference" in statistics
    totals = sum_tokens(
        run.folder,
        estimand,
        counts.clusters,
        is_one_model=is_one_model,
        statistics=statistics,
        headline=run.job.headline,
    )
    _require_same_tokens(run.folder, totals.tokens, counts.tokens)
    sums, worst_sequences = totals.sums, totals.largest.sequences.drifted()
    write_alternatives(run.folder, worst_sequences, run.pair.tokenizer)
    rounding = measure_rounding(run.job, run.engine, run.folder, counts.tokens)
    quantiles, top_share = {}, float("nan")
    if has_kl:
        quantiles, top_share = token_quantiles(
            run.folder, counts.clusters, run.job.headline, is_one_model=is_one_model
        )
    numbers, estimators, left_out = _estimates(run, sums, statistics)
    padding_notes, padding_warnings = measured_padding(numbers, counts.tokens)
    for name in numbers.keys() & {*KL_DIRECTIONS, *KL_BOUND_COLUMNS} if padding_warnings else ():
        numbers[name] = replace(numbers[name], warnings=(*numbers[name].warnings, *padding_warnings))
    return Measurement(
        kleash=__version__,
        estimand=estimand.description,
        job=run.job.settings(),
        source_sha256=run.source_sha256,
        models=models,
        device=device_of(run.pair),
        counts=counts.to_record(clusters=len(sums[TOKENS])),
        headline=run.job.headline,
        **to_fields(numbers),
        left_out=left_out,
        per_sequence=(
            sequence_total(totals.terms, counts.clusters, is_one_model=is_one_model)
            if has_kl and estimand.has_sequence_kl and np.isfinite(totals.terms.weight).all()
            else None
        ),
        estimators=estimators,
        estimators_note=estimand.estimators_note,
        quantiles=quantiles,
        by_position=bins(sums, "position", run.job.headline),
        by_confidence=bins(sums, "confidence", run.job.headline),
        top_percent_share=top_share,
        noise_floor=rounding.noise_floor,
        dtype_gap=rounding.dtype_gap,
        convergence=convergence(sums, run.job.headline) if has_kl else (),
        worst_tokens=totals.largest.tokens.drifted(),
        worst_sequences=worst_sequences,
        prompts=totals.largest.worst_prompts(run.folder, on_text=on_text) if has_kl else (),
        warnings=(*run_warnings(run, estimand, counts, totals, rounding), *padding_warnings),
        notes=(
            *run.pair.notes,
            *storage_notes(models["policy"], models["reference"]),
            *padding_notes,
            *run.source_notes,
            *counts.notes(on_text=on_text),
            *run.job.without_effect(),
        ),
        seconds=seconds(),
        finished=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    )


def _scored_sequences(run: FinishedRun, *, on_text: bool) -> SequenceCounts:
    """Clusters and counts of the run's sequences, of which at least one token was scored."""
    counts = count_sequences(run.folder, on_text=on_text)
    if counts.tokens == 0:
        raise SourceError(f"no token of {run.job.source[1]} was scored; give longer texts or responses")
    return counts


def _estimates(
    run: FinishedRun, sums: ClusterSums, statistics: Collection[str]
) -> tuple[dict[str, Estimate], dict[str, EstimatorRecord], dict[str, str]]:
    """Statistics and sampled estimates by name, and the reasons for those that are left out."""
    numbers = {name: statistic_estimate(sums, name) for name in statistics}
    estimators = estimator_records(sums)
    if "kl_policy_reference" in statistics:
        return numbers, estimators, {}
    return with_reasons(numbers, run.job), estimators, reasons_left_out(run.engine.unknown_columns)


def device_of(pair: Pair) -> str:
    """The devices of a run's local models: "cpu", "cuda:0 and cuda:1"."""
    local_models = [model for model in (pair.policy, pair.reference) if not isinstance(model, ServedModel)]
    devices = [str(model.device_map or model.device) for model in local_models]
    return " and ".join(dict.fromkeys(devices))


def _require_same_tokens(folder: RunFolder, scored: int, counted: int) -> None:
    """See that no shard has files of two processes, which may round apart on a disk without locks.

    Raises:
        RunFolderError: if tokens/ has another number of tokens than sequences/.
    """
    if scored != counted:
        raise RunFolderError(
            f"{folder.root} has {scored} tokens in tokens/ and {counted} in sequences/: some files are of different "
            "processes; measure again into another --out, with one process"
        )


def count_sequences(folder: RunFolder, *, on_text: bool) -> SequenceCounts:
    """Clusters and counts of a run's sequences, from its files.

    Args:
        folder: of the run.
        on_text: whether its sequences are windows of documents.
    """
    columns = [np.zeros((3, 0), dtype=np.int64)]
    tokens = truncated = 0
    for part in folder.sequence_parts(["prompt_id", "sample_id", "prompt_hash", "tokens", "finish_reason"]):
        columns.append(
            np.stack([part["prompt_id"], part["sample_id"], hashes_as_ints(part["prompt_hash"])]).astype(
                np.int64
            )
        )
        tokens += int(part["tokens"].sum(dtype=np.int64))
        truncated += part["finish_reason"].count("length")
    any_unknown = any(np.isnan(part["logp_sampled"]).any() for part in folder.token_parts(["logp_sampled"]))
    prompt, sample, prompt_hash = np.concatenate(columns, axis=1)
    distinct = distinct_prompts(prompt, sample, prompt_hash, on_text=on_text)
    return SequenceCounts(
        clusters=clusters_of(distinct, sample, on_text=on_text),
        tokens=tokens,
        prompts=len(np.unique(distinct)),
        listed_prompts=len(np.unique(prompt)),
        truncated=truncated,
        shards=len(folder.finished_shards()),
        all_have_logprobs=not any_unknown,
    )


def sum_tokens(
    folder: RunFolder,
    estimand: Estimand,
    clusters: Clusters,
    *,
    is_one_model: bool = False,
    statistics: Collection[str] = tuple(STATISTICS),
    headline: str = "kl_policy_reference",
) -> RunTotals:
    """Sum all quantities within clusters, and collect the largest drift, in one pass over all tokens.

    Args:
        folder: of the run.
        estimand: decides which sampled estimates are summed.
        clusters: of the run's sequences.
        is_one_model: whether policy and reference are the same model.
        statistics: names of the statistics that can be computed.
        headline: name of the KL of the binnings and of the largest drift.
    """
    sums, largest = ClusterSums(is_one_model=is_one_model), LargestDrift(column=headline)
    terms = [SequenceTerms(*np.zeros((3, 0)))]
    first_sequence = tokens = 0
    has_kl = "kl_policy_reference" in statistics
    for part in folder.token_parts([*columns_to_read(statistics), "text"]):
        starts = sequence_starts(part["prompt_id"], part["sample_id"])
        labels = clusters.labels[first_sequence : first_sequence + len(starts)]
        first_sequence += len(starts)
        quantities = token_quantities(part, estimand.weighting, statistics, headline)
        lengths = np.diff([*starts, len(part["prompt_id"])])
        tokens += len(part["prompt_id"])
        sums.add(np.repeat(labels, lengths), quantities.columns())
        if not has_kl:
            continue
        if estimand.has_sequence_kl and estimand.weighting is not None:
            terms.append(sequence_terms(part, quantities, estimand.weighting))
        largest.add(part)
    return RunTotals(
        sums=sums,
        largest=largest,
        tokens=tokens,
        terms=SequenceTerms(*(np.concatenate(column) for column in zip(*terms, strict=True))),
    )


def run_warnings(
    run: FinishedRun, estimand: Estimand, counts: SequenceCounts, totals: RunTotals, rounding: Rounding
) -> tuple[str, ...]:
    """The warnings about the whole run, each once."""
    has_kl = "kl_policy_reference" not in run.engine.unknown_columns
    has_estimators = has_kl and estimand.weighting is not None
    return tuple(
        dict.fromkeys(
            [
                *run.pair.warnings,
                *counts.clusters.warnings,
                *estimand.warnings,
                *run.checks.warnings(),
                *rounding.warnings,
                *(on_policy_warnings(estimator_error(totals.sums, "k1"), estimand) if has_estimators else ()),
                *(weight_warnings(totals.terms.weight, estimand) if has_kl else ()),
            ]
        )
    )
