"""Which worker scored each shard of a run, and what it cost: ``workers.jsonl`` in the run's folder.

The file is information about how a run was made. It has no checksum, and a line that is damaged is left out.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from kleash.store.atomic import cannot_write
from kleash.store.codec import decode, parse_json

WORKER_LOG = "workers.jsonl"


@dataclass(frozen=True, kw_only=True)
class WorkerLine:
    """The cost of a shard."""

    shard: int
    worker: int
    """Its number among the workers that one start of the run had."""
    node: str
    tokens: int
    """Scored positions."""
    seconds: float
    """From receiving the shard to its encoded files, in the worker."""
    batch_tokens: int
    """Tokens of a batch: fewer than ``--batch-tokens`` where the worker ran out of memory with that many."""


def append_worker_lines(root: Path, lines: Iterable[WorkerLine]) -> None:
    """Add lines to the log of the run in ``root``.

    Raises:
        RunFolderError: if it cannot be written.
    """
    path, texts = root / WORKER_LOG, [json.dumps(asdict(line)) + "\n" for line in lines]
    if not texts:
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(texts)
    except OSError as error:
        raise cannot_write(path, error) from error


def read_worker_lines(root: Path) -> dict[int, WorkerLine]:
    """The last line of each shard, by its number; empty if no worker scored one."""
    try:
        content = (root / WORKER_LOG).read_bytes()
    except OSError:
        return {}
    lines: dict[int, WorkerLine] = {}
    for text in content.splitlines():
        try:
            line = decode(WorkerLine, parse_json(text))
        except (ValueError, TypeError, KeyError):
            continue
        lines[line.shard] = line
    return lines


def smaller_batches_warning(root: Path, batch_tokens: int, shards: int) -> tuple[str, ...]:
    """The warning that shards of a run were scored in smaller batches than the others; empty if none was.

    Args:
        root: the folder of the run.
        batch_tokens: tokens of a batch, of the run.
        shards: the number of shards of the run.
    """
    lines = read_worker_lines(root).values()
    smaller = [line for line in lines if line.batch_tokens < batch_tokens and line.shard < shards]
    if not smaller:
        return ()
    least, count = min(line.batch_tokens for line in smaller), len(smaller)
    were = "was" if count == 1 else "were"
    sentence = (
        f"{count} of {shards} shards {were} scored in batches of down to {least} tokens instead of {batch_tokens}, "
        "since memory ran out: their rows equal those of one process up to rounding"
    )
    return (sentence,)
