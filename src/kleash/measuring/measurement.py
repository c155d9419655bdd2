"""The measurement of a finished run, from its files and a second scoring of some sequences."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np

from kleash.engines import Engine
from kleash.engines.endpoints import ServedModel
from kleash.errors import RunFolderError
from kleash.measuring.cluster_sums import (
    KL,
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
    on_policy_warning,
    weight_warning,
)
from kleash.measuring.estimates import (
    bins,
    convergence,
    estimator_error,
    estimator_records,
    reasons_left_out,
    sequence_total,
    statistic_estimate,
    token_quantiles,
    with_reasons,
)
from kleash.measuring.largest_drift import LargestDrift, write_alternatives
from kleash.measuring.model_pair import recorded_versions
from kleash.measuring.rescoring import measure_rounding
from kleash.measuring.sequence_clusters import (
    Clusters,
    clusters_of,
    distinct_prompts,
    hashes_as_ints,
    labelled_parts,
)
from kleash.measuring.shard_scoring import OpenRun
from kleash.measuring.shards import ShardPlan, source_warnings
from kleash.sources.documents import resolve_window
from kleash.store import Counts, Measurement, RunFolder
from kleash.store.measurement import ModelRecord, describe_storage
from kleash.store.statistics import KL_DIRECTIONS, known_statistics, to_fields
from kleash.store.tables import KL_BOUND_COLUMNS
from kleash.uncertainty import Estimate
from kleash.version import __version__


@dataclass(frozen=True, kw_only=True)
class SequenceCounts:
    """Clusters and counts of a run's sequences."""

    clusters: Clusters
    record: Counts
    """As in the measurement; of equal prompts, or documents, one is counted."""
    listed_prompts: int
    """Prompts of the source that are among the sequences, equal ones counted each."""
    last_prompt: int
    """Place of the last of them in the source."""
    all_have_logprobs: bool

    def notes(self, *, on_text: bool, documents: int) -> tuple[str, str]:
        """That equal prompts are one cluster, and that documents are too short, or "" if there are none.

        Args:
            on_text: whether prompts are documents.
            documents: their number, those too short included.
        """
        listed, noun = self.listed_prompts, "documents" if on_text else "prompts"
        same = f"{self.record.prompts} of the {listed} {noun} are distinct; equal ones are one cluster"
        short = (
            f"{documents - listed} of the {documents} documents have fewer than two tokens, and are left out"
        )
        return same if self.record.prompts < listed else "", short if on_text and documents > listed else ""


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    """The results of one pass over all tokens."""

    sums: ClusterSums
    terms: SequenceTerms
    largest: LargestDrift

    @property
    def has_kl(self) -> bool:
        """Whether the exact KL of each token is known: not where one model is behind a server."""
        return KL in self.sums


def make_measurement(
    run: OpenRun, engine: Engine, source: ShardPlan, seconds: Callable[[], float]
) -> Measurement:
    """The measurement of a run whose shards are all on disk; writes ``alternatives.parquet``.

    Args:
        run: the run.
        engine: by which some sequences are scored again.
        source: its shards, which are scored.
        seconds: the time since the start.

    Raises:
        RunFolderError: if tokens/ has another number of tokens than sequences/.
    """
    on_text = run.job.source[0] == "text"
    counts = count_sequences(run.folder, on_text=on_text)
    models = {model.role: model.record() for model in (run.pair.policy, run.pair.reference)}
    declared = source.declared[: counts.record.sequences]
    estimand = estimand_of(
        run.job,
        all_have_logprobs=counts.all_have_logprobs,
        is_greedy=run.job.temperature == 0 or any(temperature == 0 for _, temperature in declared),
        window=run.job.window or resolve_window(run.pair.context_length, None, None)[0],
        split=len(counts.clusters.labels) > counts.listed_prompts,
        vocabulary=run.pair.vocabulary,
        storage=describe_storage(models),
    )
    statistics = known_statistics(run.folder.token_columns(), engine.traits.unknown_columns)
    totals = sum_tokens(run, estimand, counts, statistics)
    write_alternatives(run.folder, totals.largest.sequences.drifted(), run.pair.tokenizer)
    noise_floor, dtype_gap = measure_rounding(run.job, engine, run.folder, counts.record.tokens)
    numbers, padding_note, padding_warning = _numbers(run, totals.sums, statistics)
    warnings = (
        *(*run.pair.warnings, *counts.clusters.warnings, *estimand.warnings),
        *source_warnings(declared, run.job.temperature or 1.0),
        "" if noise_floor is not None else f"no noise floor: {engine.traits.no_noise_floor}",
        *(*sampling_warnings(estimand, totals), padding_warning),
    )
    documents = source.documents if run.folder.stop is None else counts.last_prompt + 1
    notes = (
        *(*run.pair.notes, padding_note, *run.source_notes, *source.notes),
        *(*counts.notes(on_text=on_text, documents=documents), *run.job.without_effect()),
        _rounding_note(dtype_gap, numbers.get(run.job.headline), models["reference"].dtype),
    )
    return Measurement(
        **_provenance(run, estimand, models),
        counts=replace(counts.record, clusters=len(totals.sums[TOKENS])),
        **to_fields(numbers),
        left_out={} if totals.has_kl else reasons_left_out(engine.traits.unknown_columns),
        estimators=estimator_records(totals.sums),
        **_exact_fields(run, estimand, counts.clusters, totals),
        noise_floor=noise_floor,
        dtype_gap=dtype_gap,
        warnings=tuple(filter(None, dict.fromkeys(warnings))),
        notes=tuple(filter(None, notes)),
        seconds=seconds(),
    )


def _rounding_note(dtype_gap: Estimate | None, kl: Estimate | None, dtype: str) -> str:
    """A note if rounding may move the KL by more than its standard error; otherwise ""."""
    if dtype_gap is None or kl is None or kl.is_exact or 2 * dtype_gap.value <= kl.standard_error:
        return ""
    return (
        f"rounding to {dtype} puts the reference {dtype_gap.rounded} nats from itself in float32, and adds up to about "
        "twice that to a KL between two models; in float32 (--dtype float32) it is left out"
    )


def _provenance(run: OpenRun, estimand: Estimand, models: Mapping[str, ModelRecord]) -> dict[str, Any]:
    """The fields of a measurement that say what it is of, and by what it was made."""
    local_devices = [
        str(model.device_map or model.device)
        for model in (run.pair.policy, run.pair.reference)
        if not isinstance(model, ServedModel)
    ]
    return {
        "kleash": __version__,
        "estimand": estimand.description,
        "estimators_note": estimand.estimators_note,
        "models": models,
        "job": run.job.settings(),
        "source_sha256": run.source_sha256,
        "device": " and ".join(dict.fromkeys(local_devices)),
        "headline": run.job.headline,
        "folder": run.folder.root,
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": recorded_versions(),
    }


def _numbers(
    run: OpenRun, sums: ClusterSums, statistics: Collection[str]
) -> tuple[dict[str, Estimate], str, str]:
    """The statistics by name, and the note and the warning about rows of the heads that are no tokens, or ""."""
    numbers = with_reasons({name: statistic_estimate(sums, name) for name in statistics})
    note, warning = measured_padding(numbers, int(sums[TOKENS].sum()), run.job.endpoint_role)
    numbers |= {
        name: replace(numbers[name], warnings=(*numbers[name].warnings, warning))
        for name in numbers.keys() & {*KL_DIRECTIONS, *KL_BOUND_COLUMNS}
        if warning
    }
    return numbers, note, warning


def _exact_fields(run: OpenRun, estimand: Estimand, clusters: Clusters, totals: RunTotals) -> dict[str, Any]:
    """The fields of a measurement that are made of the exact KL of each token; empty where that is unknown."""
    sums, terms, headline = totals.sums, totals.terms, run.job.headline
    is_one_model = run.pair.is_one_model
    quantiles, top_share, total = {}, float("nan"), None
    if totals.has_kl:
        quantiles, top_share = token_quantiles(run.folder, clusters, headline, is_one_model=is_one_model)
    if totals.has_kl and estimand.has_sequence_kl and np.isfinite(terms.weight).all():
        total = sequence_total(terms, clusters, is_one_model=is_one_model)
    return {
        "per_sequence": total,
        "quantiles": quantiles,
        "by_position": bins(sums, "position", headline),
        "by_confidence": bins(sums, "confidence", headline),
        "top_percent_share": top_share,
        "convergence": convergence(sums, headline) if totals.has_kl else (),
        "worst_tokens": totals.largest.tokens.drifted(),
        "worst_sequences": totals.largest.sequences.drifted(),
        "prompts": totals.largest.worst_prompts(run.folder, on_text=run.job.source[0] == "text"),
    }


def count_sequences(folder: RunFolder, *, on_text: bool) -> SequenceCounts:
    """Clusters and counts of a run's sequences, from its files.

    Args:
        folder: of the run.
        on_text: whether its sequences are windows of documents.
    """
    columns = [np.zeros((3, 0), dtype=np.int64)]
    tokens = truncated = 0
    for part in folder.parts(
        "sequences", ["prompt_id", "sample_id", "prompt_hash", "tokens", "finish_reason"]
    ):
        columns.append(
            np.stack([part["prompt_id"], part["sample_id"], hashes_as_ints(part["prompt_hash"])]).astype(
                np.int64
            )
        )
        tokens += int(part["tokens"].sum(dtype=np.int64))
        truncated += part["finish_reason"].count("length")
    any_unknown = any(
        np.isnan(part["logp_sampled"]).any() for part in folder.parts("tokens", ["logp_sampled"])
    )
    prompt, sample, prompt_hash = np.concatenate(columns, axis=1)
    distinct = distinct_prompts(prompt, sample, prompt_hash, on_text=on_text)
    clusters = clusters_of(distinct, sample, on_text=on_text)
    return SequenceCounts(
        clusters=clusters,
        record=Counts(
            prompts=len(np.unique(distinct)),
            sequences=len(prompt),
            tokens=tokens,
            clusters=clusters.count,
            truncated_sequences=truncated,
            shards=len(folder.finished_shards()),
        ),
        listed_prompts=len(np.unique(prompt)),
        last_prompt=int(prompt.max(initial=0)),
        all_have_logprobs=not any_unknown,
    )


def sum_tokens(
    run: OpenRun, estimand: Estimand, counts: SequenceCounts, statistics: Collection[str]
) -> RunTotals:
    """Sum all quantities within clusters, and collect the largest drift, in one pass over all tokens.

    Args:
        run: whose headline is the KL of the binnings and of the largest drift.
        estimand: decides which sampled estimates are summed.
        counts: of the run's sequences, with their clusters.
        statistics: names of the statistics that can be computed.

    Raises:
        RunFolderError: if tokens/ has another number of tokens than sequences/.
    """
    clusters = counts.clusters
    sums = ClusterSums(clusters.count, is_one_model=run.pair.is_one_model)
    largest = LargestDrift(column=run.job.headline)
    terms = [SequenceTerms(*np.zeros((4, 0)))]
    for part, labels in labelled_parts(run.folder, clusters, [*columns_to_read(statistics), "text"]):
        quantities = token_quantities(part, estimand.weighting, statistics, run.job.headline)
        sums.add(labels, quantities)
        if KL in quantities:
            largest.add(part)
        if KL in quantities and estimand.has_sequence_kl and estimand.weighting is not None:
            terms.append(sequence_terms(part, quantities[KL], estimand.weighting))
    summed = int(sums[TOKENS].sum())
    if summed != counts.record.tokens:  # of processes that may round apart, on a disk without locks
        raise RunFolderError(
            f"{run.folder.root} has {summed} tokens in tokens/ and {counts.record.tokens} in sequences/: some "
            "files are of different processes; measure again into another --out, with one process"
        )
    return RunTotals(
        sums=sums,
        largest=largest,
        terms=SequenceTerms(*(np.concatenate(column) for column in zip(*terms, strict=True))),
    )


def sampling_warnings(estimand: Estimand, totals: RunTotals) -> tuple[str, ...]:
    """The warnings about how the tokens were drawn, where the exact KL is known; some may be empty."""
    if not totals.has_kl or estimand.weighting is None:
        return ()
    return (
        on_policy_warning(estimator_error(totals.sums, "k1"), estimand),
        weight_warning(totals.terms.weight, estimand),
    )
