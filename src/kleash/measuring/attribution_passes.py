"""The passes of an attribution: the candidate scored again with groups of its weights swapped for the reference's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import numpy as np

from kleash.engines import LocalEngine, Shard
from kleash.errors import RunFolderError
from kleash.jobs import MeasureJob
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.sequence_clusters import Floats, Ids, SequenceSums
from kleash.measuring.shards import group_by_cost, source_sequences
from kleash.measuring.sweep_ranking import sum_run
from kleash.models import Model, Pair, TokenSequence
from kleash.models.weight_groups import WeightGroup, swapped_weights
from kleash.reports.formatting import format_duration
from kleash.store import RunFolder
from kleash.store.job_folder import RunHeader
from kleash.store.locks import claim, wait_for_parts

CANDIDATE, ALL, CONTROL = "candidate", "all", "control"
"""The passes without a swap, with all groups swapped, and again without a swap at the end."""
POLL_S = 0.2
"""Seconds from one look at the folder to the next, while other processes score."""
SHORT_S = 2.0
"""Seconds below which no time is estimated."""


@dataclass(frozen=True, kw_only=True)
class SwapPass:
    """One pass over the sequences."""

    name: str
    """Of its run folder."""
    groups: tuple[WeightGroup, ...]
    """Those that are swapped."""


@dataclass(frozen=True, kw_only=True)
class SwapModels:
    """The models of an attribution, and what they read."""

    job: MeasureJob
    """That of the candidate's measurement."""
    pair: Pair
    """The candidate, and the reference's hidden states."""
    reference: Model
    """The reference, loaded, whose modules are swapped in."""
    groups: Mapping[str, tuple[WeightGroup, ...]]
    """By grouping."""
    sequences: tuple[TokenSequence, ...]
    prompts: Ids
    """Of each sequence, as ``distinct_prompts`` of all that were measured."""
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


def read_chosen(job: MeasureJob, pair: Pair, run: SequenceSums, chosen: Ids) -> tuple[TokenSequence, ...]:
    """The sequences of a job's source with these indices.

    Args:
        job: the candidate's measurement.
        pair: its models.
        run: the sequences as they were measured.
        chosen: indices in rising order.

    Raises:
        RunFolderError: if the source has other sequences than were measured.
    """
    places = set(chosen.tolist())
    sequences: list[TokenSequence] = []
    for place, sequence in enumerate(source_sequences(job, pair)):
        if len(sequences) == len(places):
            break
        if place not in places:
            continue
        measured = (int(run.prompt_id[place]), int(run.sample_id[place]), int(run.tokens[place]))
        if (sequence.prompt_id, sequence.sample_id, len(sequence.response_ids)) != measured:
            break
        sequences.append(sequence)
    if len(sequences) < len(places):
        raise RunFolderError(
            f"{job.source[1]} has other sequences than were measured into {job.out}; sweep it again into another --out"
        )
    return tuple(sequences)


def plan_passes(groups: Mapping[str, Sequence[WeightGroup]]) -> dict[tuple[str, str], SwapPass]:
    """The passes by grouping and group's name; those of ``CANDIDATE``, ``ALL`` and ``CONTROL`` have no grouping.

    Groups that are identical in both models need no pass; if all are, the candidate's own is the only one. Two groups
    of the same modules share a pass.
    """
    passes: dict[tuple[str, str], SwapPass] = {("", CANDIDATE): SwapPass(name=CANDIDATE, groups=())}
    by_weights: dict[tuple[tuple[str, ...], tuple[str, ...]], SwapPass] = {}
    for grouping, groups_of_network in groups.items():
        for number, group in enumerate(groups_of_network):
            if group.is_identical:
                continue
            new = SwapPass(name=f"{grouping}-{number:03d}", groups=(group,))
            passes[grouping, group.name] = by_weights.setdefault((group.modules, group.tensors), new)
    if by_weights:
        passes["", ALL] = SwapPass(name=ALL, groups=tuple(next(iter(groups.values()))))
        passes["", CONTROL] = SwapPass(name=CONTROL, groups=())
    return passes


def run_passes(
    passes: Iterable[SwapPass], models: SwapModels, root: Path, header: RunHeader, reporter: ProgressReporter
) -> dict[str, SequenceSums]:
    """The sums by sequence of each pass, by name: this process scores the shards that no other has claimed.

    Args:
        passes: all of them.
        models: loaded here.
        root: the folder that has a run folder for each pass.
        header: of the candidate's run on the sequences that are scored.
        reporter: receives the progress.

    Raises:
        NonFiniteError: if a swapped network gives NaN or infinite logits.
        RunFolderError: if a shard cannot be written, or is damaged, or a folder holds a run of something else.
    """
    by_name = {swap.name: swap for swap in passes}
    shards = [
        Shard(index=index, sequences=tuple(part))
        for index, part in enumerate(
            group_by_cost(models.sequences, lambda sequence: sequence.num_input_tokens, models.job)
        )
    ]

    def missing() -> list[str]:
        return [
            _claim_of(name, shard)
            for name in by_name
            for shard in shards
            if not RunFolder(root / name).has(shard.index)
        ]

    reporter.set_total(len(missing()) * len(models.sequences) // len(shards))
    has_noted, is_complete = False, False
    while not is_complete:
        for swap in by_name.values():
            start = monotonic()
            if not _score_missing(swap, shards, models, root, header, reporter) or has_noted:
                continue
            remaining = (monotonic() - start) * len(missing()) / len(shards)
            if remaining >= SHORT_S:
                reporter.note(f"the first pass is done: about {format_duration(remaining)} for the others")
            has_noted = True
        is_complete = wait_for_parts(root, missing, reporter.note, poll_seconds=POLL_S)
    return {name: sum_run(root / name, models.statistic, len(shards)) for name in by_name}


def _score_missing(
    swap: SwapPass,
    shards: Sequence[Shard],
    models: SwapModels,
    root: Path,
    header: RunHeader,
    reporter: ProgressReporter,
) -> bool:
    """Score the shards of a pass that are not on disk and that no other process has claimed; whether there were any.

    Raises:
        RunFolderError: if its folder holds another run.
    """
    has_scored = False
    swapped = ", ".join(group.name for group in swap.groups) or "none"
    header = replace(header, fingerprints={**header.fingerprints, "policy groups of the reference": swapped})
    with (
        RunFolder(root / swap.name).writing(header, resume=True) as folder,
        swapped_weights(models.pair.policy, models.reference, swap.groups) as policy,
    ):
        pair = replace(models.pair, policy=policy)
        engine = LocalEngine(pair=pair, job=models.job, top=0, on_scored=reporter.add_scored)
        for shard in shards:
            with claim(root, _claim_of(swap.name, shard)) as is_ours:
                if is_ours and not folder.has(shard.index):
                    result = engine.run(shard)
                    folder.write_shard(shard.index, result.tokens, result.sequences)
                    has_scored = True
    return has_scored


def _claim_of(name: str, shard: Shard) -> str:
    """The name of the claim of a pass's shard."""
    return f"{name}-{shard.index:05d}"
