"""Scoring the shards of a run that no other process has, and the KL over the finished ones in the order of the source.

What a shard holds does not depend on who scores it, and it is on disk as a whole or not at all. So any number of
processes, on any machines, go through the shards of one folder in one order; each scores those that it can claim. The
running KL, and the decision of ``until_relative_error``, are those of the shards from the first on without a gap: they
are the same for any number of processes.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from kleash.engines import Engine, Shard, ShardResult
from kleash.errors import RunFolderError
from kleash.jobs import MeasureJob
from kleash.measuring.largest_drift import MAX_SEQUENCES, Largest, alternatives_of_shard, sequence_rows
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.ray_workers import RayEngine
from kleash.measuring.sequence_clusters import SequenceClusters, SequenceSums, sum_sequences
from kleash.measuring.shards import SourceChecks, plan_shards
from kleash.measuring.shared_weights import agreed
from kleash.models import Pair, turns_of
from kleash.store import RunFolder
from kleash.store.file_hashes import require_unchanged_files
from kleash.store.locks import claim, wait_for_parts

MIN_CLUSTERS = 64
"""``until_relative_error`` does not stop a run before so many: an error estimated from fewer can be small by chance."""
CHECK_GROWTH = 1.01
"""``until_relative_error`` is decided whenever the sequences have become so many times more: after each shard of a
small run, and seldom enough in one of many shards that deciding, which reads all sums, takes little of its time."""
TIME_SHARE = 0.02
"""Largest share of the time that computing the KL for display may take, since it grows with the number of sequences,
and reading what other processes have written."""
VISIBLE_S = 60.0
"""Seconds after which a file that another machine wrote must be visible on a shared disk."""
POLL_S = 0.2
"""Seconds from one look at the folder to the next, while other processes score."""


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that this process takes part in, and whose models are loaded."""

    job: MeasureJob
    pair: Pair
    folder: RunFolder
    reporter: ProgressReporter
    source_sha256: str
    workers: RayEngine | None = None
    """The workers that score the shards; None where this process does."""
    source_notes: tuple[str, ...] = ()
    """Which columns are read."""
    measurement_before: tuple[int, ...] | None = None
    """The ``measurement_version`` of the folder when this process began."""


@dataclass(frozen=True, kw_only=True)
class ScoredSource:
    """What was read of a source whose shards are all on disk."""

    checks: SourceChecks
    notes: tuple[str, ...]
    """What the chat template renders of the source."""


@dataclass(kw_only=True)
class RunningKL:
    """KL over the finished shards in the order of the source, from the first on without a gap."""

    run: OpenRun
    has_kl: bool = True
    """Whether the exact KL is known: not where one model is behind a server."""
    stop: int | None = None
    """The number of shards at which ``until_relative_error`` is reached; None before."""
    next_index: int = 0
    own_sums: dict[int, SequenceSums] = field(default_factory=dict)
    """The sums of shards that this process has written, until their turn has come."""
    _before: frozenset[int] = field(init=False)
    """Shards that were on disk at the start."""
    _next_kl_time: float = 0.0
    """Before it, the KL is not computed for display."""
    _next_reading_time: float = 0.0
    """Before it, shards of other processes are not read."""
    _num_sequences: int = 0
    _next_decision: int = 0
    """The number of sequences before which ``until_relative_error`` is not decided again."""
    _sequences: SequenceClusters = field(init=False)

    def __post_init__(self) -> None:
        """Begin before the first shard."""
        self._before = self.run.folder.on_disk()
        self._sequences = SequenceClusters(
            column=self.run.job.headline,
            on_text=self.run.job.source[0] == "text",
            is_one_model=self.run.pair.is_one_model,
        )

    def advance(self, *, reads_all: bool = False) -> None:
        """Add the sums of the shards finished since the last call, in order, up to the first that is not finished.

        Updates the shown KL, and sets ``stop`` once ``until_relative_error`` is reached.

        Args:
            reads_all: whether to read all shards of other processes, whatever time it takes.
        """
        start = time.monotonic()
        read_sums = self._of_others() if reads_all or start >= self._next_reading_time else iter(())
        while self.stop is None:
            sums = self.own_sums.pop(self.next_index, None)
            if sums is None and (sums := next(read_sums, None)) is None:
                break
            self._add(sums)
        self._next_reading_time = time.monotonic() + (time.monotonic() - start) / TIME_SHARE

    def _of_others(self) -> Iterator[SequenceSums]:
        """Iterate over the sums of the shards at ``next_index`` that other processes have written."""
        folder, column = self.run.folder, self._sequences.column
        on_disk = folder.on_disk()
        checksums = (
            folder.checksums()
        )  # read after the names: each file has its checksum before it has its name
        while (index := self.next_index) in on_disk:
            part = folder.token_part(index, self._sequences.columns, checksums)
            hashes = folder.sequence_part(index, ["prompt_hash"], checksums)["prompt_hash"]
            sums = sum_sequences(part, hashes, column)
            if index not in self._before:
                self.run.reporter.add_scored(len(sums.tokens), int(sums.tokens.sum()))
            yield sums

    def _add(self, sums: SequenceSums) -> None:
        """Add the sums of the next shard; show the KL, or decide whether to stop, where that is due."""
        self._sequences.add(sums)
        self._num_sequences += len(sums.tokens)
        self.next_index += 1
        target = self.run.job.until_relative_error
        is_due = time.monotonic() >= self._next_kl_time if target is None else self._is_stop_checked()
        if not is_due:
            return
        start = time.monotonic()
        kl = self._sequences.kl()
        if self.has_kl:
            self.run.reporter.update_kl(kl)
        self._next_kl_time = time.monotonic() + (time.monotonic() - start) / TIME_SHARE
        if target is not None and kl.clusters >= MIN_CLUSTERS and kl.relative_error <= target:
            self.stop = self.next_index

    def _is_stop_checked(self) -> bool:
        """Whether ``until_relative_error`` is decided after this shard, which depends on the shards alone."""
        if self._num_sequences < self._next_decision:
            return False
        self._next_decision = math.ceil(CHECK_GROWTH * self._num_sequences)
        return True


def run_shards(run: OpenRun, engine: Engine) -> ScoredSource:
    """Score and write the shards that are not on disk and that no other process scores.

    Returns when all shards are on disk, or ``until_relative_error`` is reached.

    Raises:
        RunFolderError: if a shard cannot be written.
        ChangedInputError: if a file of the source or a model changes before a shard that needs it is written.
    """
    running = RunningKL(run=run, has_kl="kl_policy_reference" not in engine.unknown_columns)
    if on_disk := run.folder.on_disk():
        run.reporter.note(f"resuming after {len(on_disk)} finished shards in {run.folder.root}")
    running.advance(reads_all=True)
    largest = Largest(MAX_SEQUENCES)
    is_first_pass = True
    while True:
        plan = plan_shards(run.job, run.pair)
        if is_first_pass:
            for sentence in plan.notes:
                run.reporter.note(sentence)
            run.reporter.set_total(plan.sequences)
        is_first_pass = False
        claims = ShardClaims(run=run, running=running)
        with turns_of(run.pair, engine.temperature), claims:
            _score(engine, claims, plan.shards, largest)
        is_complete = agreed(run.job, claims.wait_for_others)
        running.advance(reads_all=run.job.until_relative_error is not None)
        if is_complete:
            break
    total = claims.total if running.stop is None else running.stop
    if running.stop is not None and run.folder.stop is None:
        run.folder.write_stop(running.stop)
    _require_shards(run.folder, total)
    return ScoredSource(checks=claims.checks.first(total), notes=plan.notes)


@dataclass(kw_only=True)
class ShardClaims:
    """Context of one pass over the shards of a plan, in which this process claims those that it scores."""

    run: OpenRun
    running: RunningKL
    total: int = 0
    """Shards of the plan so far."""
    checks: SourceChecks = field(init=False)
    """Those of all shards of the plan so far."""
    _open_claims: dict[int, ExitStack] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with empty checks."""
        self.checks = SourceChecks(temperature=self.run.job.temperature)

    def __enter__(self) -> "ShardClaims":
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
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
            self.checks.add(shard.sequences)
            if self.run.folder.has(shard.index):
                continue
            shard_claim = self._open_claims[shard.index] = ExitStack()
            is_ours = shard_claim.enter_context(claim(self.run.folder.root, _claim_of(shard.index)))
            if is_ours and not self.run.folder.has(shard.index):
                yield shard
            else:
                self.release(shard.index)

    def wait_for_others(self) -> bool:
        """Wait until all shards are on disk; False if one is missing that no process scores."""
        return wait_for_parts(
            self.run.folder.root, self._missing, self.run.reporter.note, poll_seconds=POLL_S
        )

    def _missing(self) -> list[str]:
        """The claims of the shards that are not on disk."""
        self.running.advance(reads_all=self.run.job.until_relative_error is not None)
        total, on_disk = self.running.stop or self.total, self.run.folder.on_disk()
        return [_claim_of(index) for index in range(total) if index not in on_disk]


def _claim_of(index: int) -> str:
    """The name of the claim of a shard."""
    return f"shard-{index:05d}"


def _score(engine: Engine, claims: ShardClaims, shards: Iterator[Shard], largest: Largest) -> None:
    """Score and write the shards that this process can claim."""
    run, running, claimed = claims.run, claims.running, claims.claimed(shards)
    for shard, result in _results(engine, claimed):
        require_unchanged_files()
        alternatives = None
        if running.has_kl:
            largest.add(sequence_rows(result.tokens, run.job.headline))
            alternatives = alternatives_of_shard(largest, result.tokens, result.likeliest)
        if not run.folder.has(shard.index):  # as it may be where the disk knows no claims
            run.folder.write_shard(shard.index, result.tokens, result.sequences, alternatives)
            prompt_hash = result.sequences["prompt_hash"]
            running.own_sums[shard.index] = sum_sequences(result.tokens, prompt_hash, run.job.headline)
        claims.release(shard.index)
        running.advance()
        if running.stop is not None:
            break
    deque(claimed, maxlen=0)  # to the end of the plan, since the checks of the source count all shards


def _results(engine: Engine, shards: Iterator[Shard]) -> Iterator[tuple[Shard, ShardResult]]:
    """Iterate over shards with their results, in the order in which they are scored."""
    if isinstance(engine, RayEngine):
        return engine.results(shards)
    return ((shard, engine.run(shard)) for shard in shards)


def _require_shards(folder: RunFolder, total: int) -> None:
    """Check that all shards are there; what another machine wrote may appear late on a shared disk.

    Raises:
        RunFolderError: if one is missing.
    """
    deadline = time.monotonic() + (VISIBLE_S if folder.has_other_writers else 0.0)
    while True:
        try:
            return folder.require_shards(total)
        except RunFolderError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
