"""Dealing the shards of a run to its ranks, and the KL over the finished ones in the order of the source.

A rank takes the next shard that no other has taken, from a counter that all share, so that a slow rank takes fewer.
What a shard holds does not depend on who scores it. The running KL, and the decision of ``until_relative_error``, are
those of the shards from the first on without a gap: they are the same for any number of ranks.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kleash.engines import Engine, Shard
from kleash.engines.ray import RayEngine
from kleash.errors import RunFolderError
from kleash.jobs import MeasureJob
from kleash.measuring.largest_drift import MAX_SEQUENCES, TopEntries, alternatives_of_shard
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.rank_group import POLL_S, RankGroup
from kleash.measuring.remote_shards import describe_costs, take_alternatives, threshold, worker_line
from kleash.measuring.sequence_clusters import SequenceClusters, SequenceSums, sum_sequences
from kleash.measuring.shard_writer import ShardWriter, WrittenShard
from kleash.measuring.shards import SourceChecks, plan_shards
from kleash.models import Pair, turns_of
from kleash.store import Number, RunFolder
from kleash.store.checksums import Checksums
from kleash.store.file_hashes import require_unchanged_files
from kleash.store.run_folder import encode_top
from kleash.store.worker_log import append_worker_lines

MIN_CLUSTERS = 64
"""``until_relative_error`` does not stop a run before so many: an error estimated from fewer can be small by chance."""
CHECK_GROWTH = 1.01
"""``until_relative_error`` is decided whenever the sequences have become so many times more: after each shard of a
small run, and seldom enough in one of many shards that deciding, which reads all sums, takes little of its time."""
KL_SHARE = 0.02
"""Largest share of the time that computing the KL for display may take: it grows with the number of sequences."""
VISIBLE_S = 60.0
"""Seconds after which a file that another machine wrote must be visible on a shared disk."""


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run whose folder is locked and whose models are loaded."""

    job: MeasureJob
    pair: Pair
    folder: RunFolder
    reporter: ProgressReporter
    ranks: RankGroup
    source_sha256: str
    workers: RayEngine | None = None
    """The workers that score the shards; None where this process does."""
    source_notes: tuple[str, ...] = ()
    """Which columns are read."""


@dataclass(frozen=True, kw_only=True)
class DealtShards:
    """The shards of a run, all of them on disk."""

    total: int
    """Shards of the whole run, including those of other array tasks."""
    checks: SourceChecks
    notes: tuple[str, ...]
    """What the chat template renders of the source."""


@dataclass(kw_only=True)
class RunningKL:
    """KL over the finished shards in the order of the source, from the first on without a gap; on the first rank."""

    run: OpenRun
    finished: frozenset[int]
    """Shards that were on disk at the start."""
    largest: TopEntries
    """Receives the sequences of shards that were on disk at the start."""
    has_kl: bool = True
    """Whether the exact KL is known: not where one model is behind a server."""
    stop: int | None = None
    """The number of shards at which ``until_relative_error`` is reached; None before."""
    next_index: int = 0
    _next_kl_time: float = 0.0
    """Before it, the KL is not computed for display."""
    _num_sequences: int = 0
    _next_decision: int = 0
    """The number of sequences before which ``until_relative_error`` is not decided again."""
    _sequences: SequenceClusters = field(init=False)
    _checksums: Checksums = field(init=False)

    def __post_init__(self) -> None:
        """Begin before the first shard of this array task."""
        self.next_index = self.run.job.part[0] - 1
        self._sequences = SequenceClusters(
            column=self.run.job.headline,
            on_text=self.run.job.source[0] == "text",
            is_one_model=self.run.pair.is_one_model,
        )
        self._checksums = self.run.folder.checksums()

    def advance(self) -> None:
        """Add the sums of the shards finished since the last call, in order, up to the first that is not finished.

        Updates the shown KL, and sets ``stop`` once ``until_relative_error`` is reached.
        """
        while self.stop is None and (sums := self._next_sums()) is not None:
            self._sequences.add(sums)
            self._num_sequences += len(sums.tokens)
            self.next_index += self.run.job.part[1]
            target = self.run.job.until_relative_error
            is_due = time.monotonic() >= self._next_kl_time if target is None else self._is_stop_checked()
            if not is_due:
                continue
            start = time.monotonic()
            kl = self._sequences.kl()
            if self.has_kl:
                self.run.reporter.update_kl(Number.of(kl))
            self._next_kl_time = time.monotonic() + (time.monotonic() - start) / KL_SHARE
            if target is not None and kl.clusters >= MIN_CLUSTERS and kl.relative_error <= target:
                self.stop = self.next_index
                self.run.ranks.post("stop", self.stop)

    def _is_stop_checked(self) -> bool:
        """Whether ``until_relative_error`` is decided after this shard, which depends on the shards alone."""
        if self._num_sequences < self._next_decision:
            return False
        self._next_decision = math.ceil(CHECK_GROWTH * self._num_sequences)
        return True

    def _next_sums(self) -> SequenceSums | None:
        """The sums of the next shard; None if it is not finished yet."""
        if self.next_index in self.finished:
            part = self.run.folder.token_part(self.next_index, self._sequences.columns, self._checksums)
            if self.has_kl:
                self.largest.add_sequences(part)
            sequences = self.run.folder.sequence_part(self.next_index, ["prompt_hash"], self._checksums)
            return sum_sequences(part, sequences["prompt_hash"], self._sequences.column)
        message = self.run.ranks.take(f"sums/{self.next_index}")
        if message is None:
            return None
        sums = SequenceSums.from_lists(message["sums"])
        if message["rank"] != self.run.ranks.rank:
            self.run.reporter.add_scored(len(sums.tokens), int(sums.tokens.sum()))
        return sums


def run_shards(run: OpenRun, engine: Engine) -> DealtShards:
    """Score and write this rank's part of the shards that are not on disk.

    Returns when all shards are on disk, or ``until_relative_error`` is reached and later shards are removed. Ranks
    other than the first return when no shard is left to take.

    Raises:
        RankError: if another rank fails or is lost.
        RunFolderError: if a shard cannot be written.
        ChangedInputError: if a file of the source or a model changes before a shard that needs it is written.
    """
    ranks, largest = run.ranks, TopEntries(size=MAX_SEQUENCES, column=run.job.headline)
    running = None
    if ranks.is_first:
        running = RunningKL(
            run=run,
            finished=frozenset(run.folder.finished_shards()),
            largest=largest,
            has_kl="kl_policy_reference" not in engine.unknown_columns,
        )
        if running.finished:
            run.reporter.note(f"resuming after {len(running.finished)} finished shards in {run.folder.root}")
        running.advance()
    finished = frozenset(ranks.broadcast("finished", sorted(running.finished) if running else None))
    plan = plan_shards(run.job, run.pair)
    for sentence in plan.notes:
        run.reporter.note(sentence)
    run.reporter.set_total(plan.sequences if run.job.shard is None else None)
    dealing = Dealing(run=run, finished=finished)
    shards = dealing.shards_to_score(plan.shards)
    if running is not None and isinstance(engine, RayEngine):
        _write_scored(run, engine, shards, running)
    with turns_of(run.pair, engine.temperature):
        for shard in shards:
            _score_shard(run, engine, shard, largest)
            if running is not None:
                running.advance()
    ranks.add("done")
    if running is None:
        return DealtShards(total=dealing.total, checks=dealing.checks, notes=plan.notes)
    ranks.wait_for(lambda: _all_done(running))
    running.advance()
    total = dealing.total if running.stop is None else running.stop
    _close_shards(run, total, is_cut=running.stop is not None)
    return DealtShards(total=total, checks=dealing.checks.first(total), notes=plan.notes)


@dataclass(kw_only=True)
class Dealing:
    """Which shards of a plan this rank scores, and the checks of all of them."""

    run: OpenRun
    finished: frozenset[int]
    total: int = 0
    """Shards of the plan so far."""
    checks: SourceChecks = field(init=False)

    def __post_init__(self) -> None:
        """Begin with empty checks."""
        self.checks = SourceChecks(temperature=self.run.job.temperature)

    def shards_to_score(self, plan: Iterator[Shard]) -> Iterator[Shard]:
        """Iterate over the shards that this rank is to score, until none is left or the run stops.

        The unfinished shards are numbered from 0 in the order of the plan. A rank takes the next number from a counter
        that all ranks share, which is its ticket, and scores the shard of that number.
        """
        ranks, (number, count) = self.run.ranks, self.run.job.part
        ticket, number_of_shard = ranks.add("ticket") - 1, -1
        for shard in plan:
            stop = ranks.peek("stop") if self.run.job.until_relative_error is not None else None
            if stop is not None and shard.index >= stop:
                return
            self.total += 1
            self.checks.add(shard.sequences)
            if shard.index % count != number - 1 or shard.index in self.finished:
                continue
            number_of_shard += 1
            if number_of_shard < ticket:
                continue
            ranks.check()
            yield shard
            ticket = ranks.add("ticket") - 1


def _score_shard(run: OpenRun, engine: Engine, shard: Shard, largest: TopEntries) -> None:
    """Score a shard, write it, and post its sums."""
    result = engine.run(shard)
    require_unchanged_files()
    if "kl_policy_reference" not in engine.unknown_columns:
        largest.add_sequences(result.tokens)
    alternatives = alternatives_of_shard(largest, result.tokens, result.likeliest)
    run.folder.write_shard(shard.index, result.tokens, result.sequences, alternatives)
    sums = sum_sequences(result.tokens, result.sequences["prompt_hash"], run.job.headline)
    _post_sums(run, shard.index, sums)


def _write_scored(run: OpenRun, engine: RayEngine, shards: Iterator[Shard], running: RunningKL) -> None:
    """Have shards scored by the workers of a Ray cluster, and write them; once the run stops, the rest is abandoned."""
    start = time.monotonic()
    with ShardWriter(run.folder) as writer:
        for scored in engine.pool.results(shards, lambda: threshold(running.largest)):
            packed = scored.part.packed
            append_worker_lines(run.folder.root, [worker_line(scored)])
            top = encode_top(take_alternatives(packed, running.largest))
            require_unchanged_files()
            writer.add(WrittenShard(scored.shard.index, packed.sums), packed.files._replace(top=top))
            _count_written(run, running, writer.written())
            if running.stop is not None:
                break
        _count_written(run, running, writer.written(wait_for_all=True))
    # To the end of the plan, since the checks of the source count finished shards too.
    deque(shards, maxlen=0)
    for sentence in describe_costs(engine.pool.workers, time.monotonic() - start):
        run.reporter.note(sentence)


def _count_written(run: OpenRun, running: RunningKL, written: Iterable[WrittenShard]) -> None:
    """Count shards that are on disk."""
    for shard in written:
        _post_sums(run, shard.index, shard.sums)
        run.reporter.add_scored(len(shard.sums.tokens), int(shard.sums.tokens.sum()))
    running.advance()


def _post_sums(run: OpenRun, index: int, sums: SequenceSums) -> None:
    """Post the sums of a shard that is on disk."""
    run.ranks.post(f"sums/{index}", {"rank": run.ranks.rank, "sums": sums.to_lists()})


def _all_done(running: RunningKL) -> bool:
    """Whether every rank has scored its last shard."""
    running.advance()
    return running.run.ranks.add("done", 0) == running.run.ranks.world_size


def _close_shards(run: OpenRun, total: int, *, is_cut: bool) -> None:
    """Merge the checksums of all ranks, remove shards beyond the last, and check that all others are there.

    Raises:
        RunFolderError: if one is missing.
    """
    number, count = run.job.part
    deadline = time.monotonic() + (VISIBLE_S if len(set(run.ranks.nodes)) > 1 else 0.0)
    while True:  # what another machine wrote may appear late on a shared disk
        try:
            run.folder.require_shards(total, range(number - 1, total, count))
            break
        except RunFolderError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
    run.folder.merge_checksums()
    if is_cut:
        run.folder.drop_shards(total)
