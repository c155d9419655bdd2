"""Scoring the shards of a run that no other process has, and the running KL.

What a shard holds does not depend on who scores it, and it is on disk as a whole or not at all. So any number of
processes, on any machines, go through the shards of one folder in one order; each scores those that it can claim. The
decision of ``until_relative_error`` is that of the shards from the first on without a gap: it is the same for any
number of processes.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kleash.engines import Engine, Shard
from kleash.jobs import MeasureJob
from kleash.measuring.largest_drift import MAX_SEQUENCES, Largest, alternatives_of_shard
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.sequence_clusters import SequenceSums, mean_of_sequences, sequence_rows, sum_sequences
from kleash.measuring.shards import ShardPlan, plan_shards
from kleash.measuring.shared_weights import agreed
from kleash.models import Pair, turns_of
from kleash.store import RunFolder
from kleash.store.checksums import Checksums
from kleash.store.file_hashes import require_unchanged_files
from kleash.store.locks import claim, wait_for_parts
from kleash.store.statistics import KL_POLICY_REFERENCE
from kleash.store.summary import counted

MIN_CLUSTERS = 64
"""``until_relative_error`` does not stop a run before so many: an error estimated from fewer can be small by chance."""
CHECK_GROWTH = 1.01
"""The KL is computed whenever the sequences have become so many times more: after each shard of a small run, and seldom
enough in one of many shards that it, which reads all sums, takes little of its time."""


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that this process takes part in, and whose models are loaded."""

    job: MeasureJob
    pair: Pair
    folder: RunFolder
    reporter: ProgressReporter
    source_sha256: str
    workers: Engine | None = None
    """The workers that score the shards; None where this process does."""
    source_notes: tuple[str, ...] = ()
    """Which columns are read."""
    measurement_before: tuple[int, ...] | None = None
    """The ``measurement_version`` of the folder when this process began."""


@dataclass(kw_only=True)
class RunningKL:
    """KL over finished shards: with ``until_relative_error`` over all, from the first on without a gap.

    Otherwise it is only displayed, and is that of the shards that this process has written.
    """

    run: OpenRun
    has_kl: bool = True
    """Whether the exact KL is known: not where one model is behind a server."""
    stop: int | None = None
    """The number of shards at which ``until_relative_error`` is reached; None before."""
    _written: dict[int, SequenceSums] = field(default_factory=dict)
    """The sums of shards that this process has written, until their turn has come."""
    _sums: list[SequenceSums] = field(default_factory=list)
    _num_sequences: int = 0
    _next_size: int = 0
    """The number of sequences before which the KL is not computed again."""

    def add(self, index: int, sums: SequenceSums) -> None:
        """Add a shard that this process has written."""
        self._written[index] = sums
        self.advance()

    def advance(self) -> None:
        """Add the shards whose turn has come; sets ``stop`` once ``until_relative_error`` is reached."""
        if self.run.job.until_relative_error is None:
            while self._written:
                self._add(self._written.popitem()[1])
            return
        of_others = self._of_others()
        while self.stop is None:
            sums = self._written.pop(len(self._sums), None) or next(of_others, None)
            if sums is None:
                return
            self._add(sums)

    def _of_others(self) -> Iterator[SequenceSums]:
        """Iterate over the sums of the next shards that other processes, or earlier ones, have written."""
        folder, column = self.run.folder, self.run.job.headline
        # A process alone would otherwise read all names and checksums after each shard.
        if not folder.has(len(self._sums)):
            return
        on_disk = folder.on_disk()
        # read after the names: each file has its checksum before it has its name
        checksums = Checksums.read(folder.root)
        while (index := len(self._sums)) in on_disk:
            part = folder.part("tokens", index, ["prompt_id", "sample_id", column], checksums)
            hashes = folder.part("sequences", index, ["prompt_hash"], checksums)["prompt_hash"]
            yield sum_sequences(part, hashes, part[column])

    def _add(self, sums: SequenceSums) -> None:
        """Add the sums of a shard; show the KL and decide whether to stop, where that is due."""
        self._sums.append(sums)
        self._num_sequences += len(sums.tokens)
        if self._num_sequences < self._next_size:
            return
        self._next_size = math.ceil(CHECK_GROWTH * self._num_sequences)
        on_text, target = self.run.job.source[0] == "text", self.run.job.until_relative_error
        kl = mean_of_sequences(self._sums, on_text=on_text, is_one_model=self.run.pair.is_one_model)
        if self.has_kl:
            self.run.reporter.update_kl(kl)
        if target is not None and kl.clusters >= MIN_CLUSTERS and kl.relative_error <= target:
            self.stop = len(self._sums)


def run_shards(run: OpenRun, engine: Engine) -> ShardPlan:
    """Score and write the shards that are not on disk and that no other process scores.

    Returns the plan when all shards are on disk, or ``until_relative_error`` is reached.

    Raises:
        RunFolderError: if a shard cannot be written.
        ChangedInputError: if a file of the source or a model changes before a shard that needs it is written.
    """
    running = RunningKL(run=run, has_kl=KL_POLICY_REFERENCE not in engine.traits.unknown_columns)
    if on_disk := run.folder.on_disk():
        run.reporter.note(f"resuming after {counted(len(on_disk), 'finished shard')} in {run.folder.root}")
    running.advance()
    largest, reported = Largest(MAX_SEQUENCES), set(on_disk)
    plan = plan_shards(run.job, run.pair)
    run.reporter.note_all(plan.notes)
    checksums = Checksums.read(run.folder.root)
    num_on_disk = sum(
        len(run.folder.part("sequences", index, ["prompt_hash"], checksums)["prompt_hash"])
        for index in on_disk
    )
    run.reporter.set_total(None if plan.sequences is None else plan.sequences - num_on_disk)
    while True:
        claims = ShardClaims(run=run, running=running, reported=reported)
        with turns_of(run.pair, engine.traits.temperature), closing(claims):
            _score(engine, claims, plan.shards, largest)
        is_complete = agreed(
            run.job, partial(wait_for_parts, run.folder.root, claims.missing, run.reporter.note)
        )
        running.advance()
        if is_complete:
            break
        plan = plan_shards(run.job, run.pair)  # a process has left without the shards that it had claimed
    total = claims.total if running.stop is None else running.stop
    if running.stop is not None:
        with run.folder.making_result(lambda: None):  # others read it while it is written, otherwise
            if run.folder.stop is None:
                run.folder.write_stop(running.stop)
    run.folder.require_shards(total)
    return plan


@dataclass(kw_only=True)
class ShardClaims:
    """One pass over the shards of a plan, in which this process claims those that it scores."""

    run: OpenRun
    running: RunningKL
    reported: set[int]
    """Shards that are reported as scored, or were on disk at the start."""
    total: int = 0
    """Shards of the plan so far."""
    _open_claims: dict[int, ExitStack] = field(default_factory=dict)

    def close(self) -> None:
        """Release the claims of shards that were not written."""
        for index in list(self._open_claims):
            self.release(index)

    def release(self, index: int) -> None:
        """Release the claim of a shard."""
        self._open_claims.pop(index).close()

    def claimed(self, shards: Iterator[Shard]) -> Iterator[Shard]:
        """Iterate over the shards that this process is to score, until none is left or the run stops."""
        for shard in shards:
            if self.running.stop is not None and shard.index >= self.running.stop:
                return
            self.total += 1
            shard_claim = self._open_claims[shard.index] = ExitStack()
            is_ours = not self.run.folder.has(shard.index) and shard_claim.enter_context(
                claim(self.run.folder.root, claim_of("shard", shard.index))
            )
            is_reported = shard.index in self.reported
            self.reported.add(shard.index)
            if is_ours and not self.run.folder.has(shard.index):
                yield shard
                continue
            self.release(shard.index)
            if not is_reported:  # another process does it
                sequences = len(shard.sequences) or len(shard.prompts) * self.run.job.samples_per_prompt
                self.run.reporter.add_scored(sequences, 0)

    def missing(self) -> list[str]:
        """The claims of the shards that are not on disk."""
        self.running.advance()
        total, on_disk = self.running.stop or self.total, self.run.folder.on_disk()
        return [claim_of("shard", index) for index in range(total) if index not in on_disk]


def claim_of(kind: str, index: int) -> str:
    """The name of the claim of a shard; ``kind`` of an attribution's is the name of the pass."""
    return f"{kind}-{index:05d}"


def _score(engine: Engine, claims: ShardClaims, shards: Iterator[Shard], largest: Largest) -> None:
    """Score and write the shards that this process can claim."""
    run, running, claimed = claims.run, claims.running, claims.claimed(shards)
    for shard, result in engine.results(claimed):
        require_unchanged_files()
        alternatives = None
        kl = np.asarray(result.tokens[run.job.headline])
        if running.has_kl:
            largest.add(sequence_rows(result.tokens, kl))
            alternatives = alternatives_of_shard(largest, result.tokens, result.likeliest)
        if not run.folder.has(shard.index):  # as it may be where the disk knows no claims
            run.folder.write_shard(shard.index, result.tokens, result.sequences, alternatives)
            running.add(shard.index, sum_sequences(result.tokens, result.sequences["prompt_hash"], kl))
        claims.release(shard.index)
        if running.stop is not None:
            break
    deque(claimed, maxlen=0)  # to the end of the plan, whose shards are counted
