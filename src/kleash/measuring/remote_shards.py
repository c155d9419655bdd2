"""Shards that workers of a Ray cluster score: packed there, and unpacked in the one process that writes.

A worker encodes the files of its shard and sums its sequences, so that the process that writes has little to do for
each. Of the likeliest tokens, a worker sends those of sequences that can still be among the worst of the run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kleash.engines import Shard, ShardResult
from kleash.engines.ray import PoolWorker, ScoredShard
from kleash.measuring.largest_drift import MAX_SEQUENCES, Entry, TopEntries, alternatives_of_shard
from kleash.measuring.sequence_clusters import SequenceSums, sequence_spans, sum_sequences
from kleash.store.run_folder import EncodedShard, encode_shard
from kleash.store.worker_log import WorkerLine

MAX_COST_LINES = 8
"""Workers whose cost is shown one by one."""


class PackedShard(NamedTuple):
    """The result of a shard as a worker sends it."""

    files: EncodedShard
    sums: SequenceSums
    entries: tuple[Entry, ...]
    """Its sequences that can be among the worst of the run."""
    alternatives: dict[str, Any]
    """The columns ``TOP_COLUMNS`` of these sequences."""


def pack_shard(shard: Shard, result: ShardResult, smallest: Entry | None, column: str) -> PackedShard:
    """Pack a shard, in the worker.

    Args:
        shard: the shard.
        result: of the engine.
        smallest: the smallest of the worst sequences so far; None if there are fewer than ``MAX_SEQUENCES``.
        column: of the KL that is summed.
    """
    largest = TopEntries(size=MAX_SEQUENCES, column=column)
    largest.add_sequences(result.tokens)
    largest.heap = [entry for entry in largest.heap if smallest is None or entry > smallest]
    return PackedShard(
        files=encode_shard(result.tokens, result.sequences),
        sums=sum_sequences(result.tokens, result.sequences["prompt_hash"], column),
        entries=tuple(largest.heap),
        alternatives=alternatives_of_shard(largest, result.tokens, result.likeliest),
    )


def threshold(largest: TopEntries) -> Entry | None:
    """The smallest of the worst sequences; None if there is room for more."""
    return min(largest.heap) if len(largest.heap) == largest.size else None


def take_alternatives(packed: PackedShard, largest: TopEntries) -> dict[str, Any]:
    """Add a shard's sequences to the worst so far, and return the alternatives of those that are among them."""
    for entry in packed.entries:
        largest.add(entry)
    keys = {(-entry.minus_prompt_id, -entry.minus_sample_id) for entry in largest.heap}
    columns = packed.alternatives
    prompt, sample = columns["prompt_id"], columns["sample_id"]
    is_among = np.zeros(len(prompt), dtype=bool)
    for begin, end in sequence_spans(prompt, sample):
        is_among[begin:end] = (int(prompt[begin]), int(sample[begin])) in keys
    return {name: values[is_among] for name, values in columns.items()}


def worker_line(scored: ScoredShard) -> WorkerLine:
    """The line of a shard in ``workers.jsonl``."""
    part, worker = scored.part, scored.worker
    return WorkerLine(
        shard=scored.shard.index,
        worker=worker.number,
        node=worker.node,
        tokens=part.tokens,
        seconds=round(part.seconds, 4),
        batch_tokens=part.batch_tokens,
    )


def describe_costs(workers: Sequence[PoolWorker], seconds: float) -> list[str]:
    """What each worker has scored and how long it took, in sentences: the slowest ones, and a sum if there are more.

    Args:
        workers: all of the run.
        seconds: from the first shard to the last.
    """
    busy = sorted((worker for worker in workers if worker.shards), key=lambda worker: worker.number)
    lines = [
        f"{worker.name}: {worker.shards:,} shards, {worker.tokens:,} tokens in {worker.seconds:,.1f} s of scoring "
        f"({worker.tokens / max(worker.seconds, 1e-9):,.0f} tokens/s)"
        for worker in busy[:MAX_COST_LINES]
    ]
    if len(busy) > MAX_COST_LINES:
        lines.append(f"and {len(busy) - MAX_COST_LINES} more workers")
    total = sum(worker.seconds for worker in workers)
    if busy:
        lines.append(
            f"{len(busy)} workers scored for {total:,.1f} s within {seconds:,.1f} s: "
            f"{total / max(seconds, 1e-9):.1f} at a time"
        )
    return lines
