"""Attribution of a candidate's KL to groups of its weights: swap one group back at a time, and measure again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kleash.jobs import SweepJob
from kleash.launch_environment import local_world_size
from kleash.measuring.attribution_passes import (
    ALL,
    CANDIDATE,
    CONTROL,
    SwapModels,
    choose_sequences,
    plan_passes,
    read_chosen,
    run_passes,
)
from kleash.measuring.model_pair import load_models, loading
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.run import on_device_of_rank
from kleash.measuring.run_identity import header_of
from kleash.measuring.sequence_clusters import Floats, SequenceSums, clusters_of
from kleash.models import load_reference
from kleash.models.threads import threads_for_scoring
from kleash.models.weight_groups import WeightGroup, weight_groups
from kleash.reports.formatting import format_bytes
from kleash.store.file_hashes import watching_files
from kleash.store.sweep import Attribution, GroupChange, SweepCandidate
from kleash.uncertainty import Estimate, paired_difference, ratio_of_sums
from kleash.uncertainty.diagnostics import few_clusters
from kleash.uncertainty.simultaneous import SimultaneousPairs, differences_from_control

EXACTLY_0 = Estimate(value=0.0, unit="nats", standard_error=0.0, ci95=(0.0, 0.0))
REMAINING_SHARE = 0.01
"""Share of a candidate's KL above which what remains with all groups swapped is warned of."""


def attribute(
    job: SweepJob,
    out: Path,
    candidate: SweepCandidate,
    run: SequenceSums,
    digest: str,
    reporter: ProgressReporter,
) -> tuple[Attribution, ...]:
    """The attributions of a candidate that was measured, one for each grouping of ``job.attribute``.

    Loads the candidate and the reference, and says what the passes cost before the first. Each pass is a run in a
    folder of its own under ``attribution/`` of the sweep's, and goes on there when the sweep is resumed.

    Args:
        job: the sweep.
        out: its folder, with the reference's cache.
        candidate: from the ranking.
        run: its sequences.
        digest: hash of the source.
        reporter: receives the progress.

    Raises:
        ModelError: if the two models differ in architecture.
        NonFiniteError: if a swapped network gives NaN or infinite logits.
        RunFolderError: if a finished pass is damaged, or one cannot be written.
    """
    with watching_files():
        models = load_swap_models(job, out, candidate, run)
        passes = plan_passes(models.groups)
        reporter.note(_cost(candidate, models, len(passes), len(run.tokens)))
        header = header_of(models.job, models.pair, digest)
        header = replace(header, settings={**header.settings, "attribute_tokens": job.attribute_tokens})
        root = out / "attribution" / Path(candidate.folder).name / f"{job.attribute_tokens}-tokens"
        with threads_for_scoring(models.pair, local_world_size()):
            sums = run_passes(passes.values(), models, root, header, reporter)
        by_group = {key: sums[swap.name] for key, swap in passes.items()}
        return tuple(
            attribution_of(models, candidate.number, grouping, by_group, on_text=job.responses is None)
            for grouping in job.attribute
        )


def load_swap_models(job: SweepJob, out: Path, candidate: SweepCandidate, run: SequenceSums) -> SwapModels:
    """Load both models, find the groups, and read the sequences.

    Raises:
        ModelError: if a model cannot be loaded, or they differ in architecture.
        RunFolderError: if the source has other sequences than were measured.
    """
    measure_job = on_device_of_rank(job.measure_job(candidate.number, out))
    pair = load_models(measure_job, None)
    reference = load_reference(job.reference, job.revision_reference, loading(measure_job)).reference
    groups = {grouping: weight_groups(pair.policy, reference, grouping) for grouping in job.attribute}
    chosen = choose_sequences(run.tokens, job.attribute_tokens)
    prompts = run.distinct_prompts(on_text=job.responses is None)
    return SwapModels(
        job=measure_job,
        pair=pair,
        reference=reference,
        groups=groups,
        sequences=read_chosen(measure_job, pair, run, chosen),
        prompts=prompts[chosen],
        statistic=job.statistic,
    )


def _cost(candidate: SweepCandidate, models: SwapModels, passes: int, num_sequences: int) -> str:
    """What the passes of a candidate cost, in a sentence."""
    groups = [group for groups in models.groups.values() for group in groups]
    tokens = sum(len(sequence.response_ids) for sequence in models.sequences)
    size = sum(
        parameter.numel() * parameter.element_size()
        for model in (models.pair.policy, models.reference)
        for parameter in model.network.parameters()
    )
    return (
        f"attribution of {candidate.name} by {' and '.join(models.groups)}: at most {passes} forward passes of "
        f"{tokens:,} tokens in {len(models.sequences):,} of {num_sequences:,} sequences (none for "
        f"{sum(group.is_identical for group in groups)} identical groups); both models are in memory "
        f"({format_bytes(size)})"
    )


def attribution_of(
    models: SwapModels,
    number: int,
    grouping: str,
    sums: Mapping[tuple[str, str], SequenceSums],
    *,
    on_text: bool,
) -> Attribution:
    """The numbers of one grouping from the sums of its passes.

    Args:
        models: of the attribution.
        number: of the candidate.
        grouping: "layers" or "modules".
        sums: by the keys of ``plan_passes``.
        on_text: whether the source is text, whose clusters are documents.
    """
    candidate = sums["", CANDIDATE]
    again = sums.get(("", CONTROL), candidate)
    clusters = clusters_of(models.prompts, candidate.sample_id, on_text=on_text)
    groups = models.groups[grouping]
    swapped = [group for group in groups if not group.is_identical]

    columns = _PassColumns(
        candidate=clusters.sum(candidate.total),
        single=[clusters.sum(sums[grouping, group.name].total) for group in swapped],
        everything=clusters.sum(sums.get(("", ALL), candidate).total),
        counts=clusters.sum(candidate.tokens),
    )
    mean = ratio_of_sums(
        columns.candidate,
        columns.counts,
        unit="nats",
        lower=0.0,
        known_value=0.0 if models.pair.is_one_model else None,
    )
    is_repeatable = np.array_equal(candidate.total, again.total)
    control = columns.difference(
        clusters.sum(again.total), columns.candidate, known_value=0.0 if is_repeatable else None
    )
    changes, change_of_all = columns.changes(), columns.change_of_all()
    return Attribution(
        candidate=number,
        grouping=grouping,
        statistic=models.statistic,
        sequences=len(candidate.tokens),
        tokens=int(candidate.tokens.sum()),
        clusters=clusters.count,
        mean=mean,
        groups=_group_changes(groups, swapped, changes),
        sum_of_changes=columns.sum_of_changes(),
        change_of_all=change_of_all,
        interaction=columns.interaction(),
        control=control,
        critical_value=float("nan") if changes is None else changes.critical_value,
        warnings=tuple(
            dict.fromkeys(
                (
                    *((*clusters.warnings, *few_clusters(clusters.count), *mean.warnings) if swapped else ()),
                    *_warnings(models, mean.value, mean.value + change_of_all.value, control),
                )
            )
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _PassColumns:
    """The statistic's sums by cluster, for each pass."""

    candidate: Floats
    """Of the candidate."""
    single: list[Floats]
    """With each of the groups that differ swapped by itself."""
    everything: Floats
    """With all groups swapped."""
    counts: Floats
    """Tokens."""

    def changes(self) -> SimultaneousPairs | None:
        """The changes of single groups; None if none differs."""
        if not self.single:
            return None
        columns = np.stack([self.candidate, *self.single], axis=1)
        return differences_from_control(columns, np.repeat(self.counts[:, None], columns.shape[1], axis=1))

    def sum_of_changes(self) -> Estimate:
        """The sum of the changes of single groups."""
        return self.difference(
            self._total(), len(self.single) * self.candidate, 0.0 if not self.single else None
        )

    def change_of_all(self) -> Estimate:
        """The change with all groups swapped."""
        return self.difference(self.everything, self.candidate, 0.0 if not self.single else None)

    def interaction(self) -> Estimate:
        """``sum_of_changes`` minus ``change_of_all``; 0 by construction if at most one group differs."""
        expected = (len(self.single) - 1) * self.candidate + self.everything
        return self.difference(self._total(), expected, 0.0 if len(self.single) < 2 else None)

    def difference(self, first: Floats, second: Floats, known_value: float | None = None) -> Estimate:
        """The mean per token of one column of sums minus that of another, paired by cluster."""
        return paired_difference(first, self.counts, second, self.counts, known_value=known_value)

    def _total(self) -> Floats:
        return np.sum(self.single, axis=0) if self.single else np.zeros_like(self.candidate)


def _group_changes(
    groups: tuple[WeightGroup, ...], swapped: list[WeightGroup], changes: SimultaneousPairs | None
) -> tuple[GroupChange, ...]:
    """The changes of all groups, in the order of the network."""
    pairs = dict(zip([group.name for group in swapped], changes.pairs if changes else (), strict=True))
    return tuple(
        GroupChange(
            name=group.name,
            parameters=group.parameters,
            is_identical=group.is_identical,
            change=pairs[group.name].estimate if group.name in pairs else EXACTLY_0,
            simultaneous_ci95=pairs[group.name].simultaneous_ci95 if group.name in pairs else (0.0, 0.0),
        )
        for group in groups
    )


def _warnings(models: SwapModels, mean: float, remaining: float, control: Estimate) -> tuple[str, ...]:
    """Warnings about passes that do not repeat, and about what swapping cannot change."""
    warnings: list[str] = []
    if control.value != 0:
        warnings.append(
            f"two passes of the candidate without a swap differ by {control.value:.2g} nats per token, so this device "
            "does not repeat its sums; changes of that size mean nothing"
        )
    if remaining > REMAINING_SHARE * mean and not models.pair.is_one_model:
        warnings.append(
            f"with all groups swapped {remaining:.2g} nats per token remain: rounding, or settings in which the "
            "models differ beside these weights"
        )
    return tuple(warnings)
