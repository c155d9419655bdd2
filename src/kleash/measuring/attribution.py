"""Attribution of a candidate's KL to groups of its weights: swap one group back at a time, and measure again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path

import numpy as np

from kleash.engines import LocalEngine, Shard
from kleash.errors import RunFolderError
from kleash.jobs import MeasureJob, SweepJob
from kleash.launch_environment import local_world_size
from kleash.measuring.model_pair import header_of, load_models, on_device_of_rank
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.sequence_clusters import Clusters, Floats, Ids, SequenceSums, clusters_of, sum_run
from kleash.measuring.shard_scoring import claim_of
from kleash.measuring.shards import group_by_cost, hash_source, source_sequences
from kleash.models import Model, Pair, TokenSequence, load_reference
from kleash.models.threads import threads_for_scoring
from kleash.models.weight_groups import WeightGroup, swapped_weights, weight_groups
from kleash.store import RunFolder
from kleash.store.file_hashes import watching_files
from kleash.store.job_folder import RunHeader
from kleash.store.locks import claim, wait_for_parts
from kleash.store.sweep import Attribution, GroupChange, SweepCandidate
from kleash.uncertainty import Estimate, paired_difference, ratio_of_sums
from kleash.uncertainty.diagnostics import few_clusters
from kleash.uncertainty.simultaneous import SimultaneousPairs, differences_from_control

CANDIDATE, ALL, CONTROL = "candidate", "all", "control"
"""The passes without a swap, with all groups swapped, and again without a swap at the end."""
EXACTLY_0 = Estimate(value=0.0, unit="nats", standard_error=0.0, ci95=(0.0, 0.0))
REMAINING_SHARE = 0.01
"""Share of a candidate's KL above which what remains with all groups swapped is warned of."""


Groups = tuple[WeightGroup, ...]


@dataclass(frozen=True, kw_only=True)
class SwapModels:
    """The models of an attribution, and what they read."""

    job: MeasureJob
    """That of the candidate's measurement."""
    pair: Pair
    """The candidate, and the reference's hidden states."""
    reference: Model
    """The reference, loaded, whose modules are swapped in."""
    groups: Mapping[str, Groups]
    """By grouping."""
    sequences: tuple[TokenSequence, ...]
    clusters: Clusters
    """Of the sequences."""
    statistic: str
    """The token column that is attributed."""


def choose_sequences(tokens: Floats, target: int) -> Ids:
    """The indices of sequences drawn at random until they have ``target`` tokens, in rising order; all if they do not.

    Args:
        tokens: of each sequence.
        target: number of tokens.
    """
    order = np.random.default_rng(0).permutation(len(tokens))
    count = int(np.searchsorted(np.cumsum(tokens[order]), target)) + 1
    return np.sort(order[:count])


def plan_passes(
    groups: Mapping[str, Sequence[WeightGroup]],
) -> tuple[dict[str, Groups], dict[tuple[str, ...], str]]:
    """The passes over the sequences, and the name of the pass of each group, by the group's modules.

    A pass has a name, that of its run folder, and groups of weights that are swapped. Groups that are identical in both
    models need no pass; if all are, the candidate's own is the only one. Two groups of the same modules share a pass.
    """
    passes: dict[str, Groups] = {CANDIDATE: ()}
    names: dict[tuple[str, ...], str] = {}
    for grouping, groups_of_network in groups.items():
        for number, group in enumerate(groups_of_network):
            if not group.is_identical:
                name = names.setdefault(group.parts, f"{grouping}-{number:03d}")
                passes.setdefault(name, (group,))
    if names:
        # the groups of any grouping are all weights
        passes |= {ALL: tuple(next(iter(groups.values()))), CONTROL: ()}
    return passes, names


def run_passes(
    passes: Mapping[str, Groups],
    models: SwapModels,
    root: Path,
    header: RunHeader,
    reporter: ProgressReporter,
) -> dict[str, SequenceSums]:
    """The sums by sequence of each pass, by name: this process scores the shards that no other has claimed.

    Args:
        passes: by name, the groups that are swapped.
        models: loaded here.
        root: the folder that has a run folder for each pass.
        header: of the candidate's run on the sequences that are scored.
        reporter: receives the progress.

    Raises:
        NonFiniteError: if a swapped network gives NaN or infinite logits.
        RunFolderError: if a shard cannot be written, or is damaged, or a folder holds a run of something else.
    """
    shards = [
        Shard(index=index, sequences=tuple(part))
        for index, part in enumerate(
            group_by_cost(models.sequences, lambda sequence: sequence.num_input_tokens, models.job)
        )
    ]

    def missing() -> list[str]:
        return [
            claim_of(name, shard.index)
            for name in passes
            for shard in shards
            if not RunFolder(root / name).has(shard.index)
        ]

    reporter.set_total(len(missing()) * len(models.sequences) // len(shards))
    is_complete = False
    while not is_complete:
        for name, groups in passes.items():
            _score_missing(name, groups, shards, models, root, header, reporter)
        is_complete = wait_for_parts(root, missing, reporter.note)
    return {
        name: sum_run(
            RunFolder(root / name).require_shards(len(shards)),
            [models.statistic],
            itemgetter(models.statistic),
        )
        for name in passes
    }


def _score_missing(
    name: str,
    groups: Groups,
    shards: Sequence[Shard],
    models: SwapModels,
    root: Path,
    header: RunHeader,
    reporter: ProgressReporter,
) -> None:
    """Score the shards of a pass that are not on disk and that no other process has claimed.

    Raises:
        RunFolderError: if its folder holds another run.
    """
    swapped = ", ".join(group.name for group in groups) or "none"
    header = replace(header, fingerprints={**header.fingerprints, "policy groups of the reference": swapped})
    with (
        RunFolder(root / name).writing(header, resume=True) as folder,
        swapped_weights(models.pair.policy, models.reference, groups) as policy,
    ):
        engine = LocalEngine(
            pair=replace(models.pair, policy=policy), job=models.job, top=0, on_scored=reporter.add_scored
        )
        for shard in shards:
            with claim(root, claim_of(name, shard.index)) as is_ours:
                if is_ours and not folder.has(shard.index):
                    result = engine.run(shard)
                    folder.write_shard(shard.index, result.tokens, result.sequences)


@watching_files()
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
        RunFolderError: if the source is another than was measured, a finished pass is damaged, or one cannot be
            written.
    """
    measure_job = job.measure_job(candidate.number, out)
    if hash_source(measure_job) != digest:
        raise RunFolderError(
            f"{measure_job.source[1]} was written to after it was measured into {measure_job.out}; sweep it again "
            "into another --out"
        )
    models = load_swap_models(job, out, candidate, run)
    passes, names = plan_passes(models.groups)
    tokens = sum(len(sequence.response_ids) for sequence in models.sequences)
    reporter.note(
        f"attribution of {candidate.name}: {len(passes)} passes of {tokens:,} tokens in "
        f"{len(models.sequences):,} of {len(run.tokens):,} sequences"
    )
    header = header_of(models.job, models.pair, digest)
    header = replace(header, settings={**header.settings, "attribute_tokens": job.attribute_tokens})
    root = out / "attribution" / Path(candidate.folder).name / f"{job.attribute_tokens}-tokens"
    with threads_for_scoring(models.pair, local_world_size()):
        sums = run_passes(passes, models, root, header, reporter)
    return tuple(
        attribution_of(models, candidate.number, grouping, sums, names) for grouping in job.attribute
    )


def load_swap_models(job: SweepJob, out: Path, candidate: SweepCandidate, run: SequenceSums) -> SwapModels:
    """Load both models, find the groups, and read the sequences.

    Raises:
        ModelError: if a model cannot be loaded, or they differ in architecture.
    """
    measure_job = job.measure_job(candidate.number, out)
    pair, loading = load_models(measure_job, None), on_device_of_rank(measure_job)
    reference = load_reference(job.reference, job.revision_reference, loading).reference
    groups = {grouping: weight_groups(pair.policy, reference, grouping) for grouping in job.attribute}
    chosen = choose_sequences(run.tokens, job.attribute_tokens)
    places = set(chosen.tolist())
    sequences = enumerate(islice(source_sequences(measure_job, pair), max(places) + 1))
    on_text = job.responses is None
    return SwapModels(
        job=measure_job,
        pair=pair,
        reference=reference,
        groups=groups,
        sequences=tuple(sequence for place, sequence in sequences if place in places),
        clusters=clusters_of(
            run.distinct_prompts(on_text=on_text)[chosen], run.sample_id[chosen], on_text=on_text
        ),
        statistic=job.statistic,
    )


def attribution_of(
    models: SwapModels,
    number: int,
    grouping: str,
    sums: Mapping[str, SequenceSums],
    names: Mapping[tuple[str, ...], str],
) -> Attribution:
    """The numbers of one grouping from the sums of its passes.

    Args:
        models: of the attribution.
        number: of the candidate.
        grouping: "layers" or "modules".
        sums: by the names of the passes.
        names: of the groups' passes, as from ``plan_passes``.

    Of a candidate c, groups g that are swapped one by one, and all of them together:

        sum of changes = sum_g (KL_g - KL_c),    interaction = sum of changes - (KL_all - KL_c)
    """
    candidate, clusters, groups = sums[CANDIDATE], models.clusters, models.groups[grouping]
    again = sums.get(CONTROL, candidate)
    swapped = [group for group in groups if not group.is_identical]
    candidate_sums, counts = clusters.sum(candidate.total), clusters.sum(candidate.tokens)
    single = [clusters.sum(sums[names[group.parts]].total) for group in swapped]
    all_swapped = clusters.sum(sums.get(ALL, candidate).total)
    sum_of_single = np.sum(single, axis=0) if single else np.zeros_like(candidate_sums)

    def difference(first: Floats, second: Floats, *, is_0: bool) -> Estimate:
        return paired_difference(first, counts, second, counts, known_value=0.0 if is_0 else None)

    known_mean = 0.0 if models.pair.is_one_model else None
    mean = ratio_of_sums(candidate_sums, counts, unit="nats", lower=0.0, known_value=known_mean)
    control = difference(
        clusters.sum(again.total), candidate_sums, is_0=np.array_equal(candidate.total, again.total)
    )
    change_of_all = difference(all_swapped, candidate_sums, is_0=not single)
    columns = np.stack([candidate_sums, *single], axis=1)
    counts_of_columns = np.repeat(counts[:, None], columns.shape[1], axis=1)
    changes = differences_from_control(columns, counts_of_columns) if single else None
    warnings = (
        *((*clusters.warnings, *few_clusters(clusters.count), *mean.warnings) if swapped else ()),
        *_warnings(models, mean.value, mean.value + change_of_all.value, control),
    )
    return Attribution(
        candidate=number,
        grouping=grouping,
        statistic=models.statistic,
        sequences=len(candidate.tokens),
        tokens=int(candidate.tokens.sum()),
        clusters=clusters.count,
        mean=mean,
        groups=_group_changes(groups, swapped, changes),
        sum_of_changes=difference(sum_of_single, len(single) * candidate_sums, is_0=not single),
        change_of_all=change_of_all,
        interaction=difference(
            sum_of_single, (len(single) - 1) * candidate_sums + all_swapped, is_0=len(single) < 2
        ),
        control=control,
        critical_value=float("nan") if changes is None else changes.critical_value,
        warnings=tuple(dict.fromkeys(warnings)),
    )


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
    """Warnings about passes that do not repeat, and about what swapping cannot change.

    Args:
        models: of the attribution.
        mean: the candidate's KL, nats per token.
        remaining: its KL with all groups swapped.
        control: the difference between two passes of the candidate without a swap.
    """
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
