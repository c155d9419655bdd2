"""Speed of reading a file of base logits and a reference cache, compared with a plain read of the same bytes.

    python benchmarks/reading.py --megabytes 1000 --rounds 5

Writes a ``_logits_`` file over 151 936 tokens, in chunks of 512, and parts of a cache of hidden states 1 024 wide in
bfloat16. Each is read whole, in the order and the pieces of a measurement, by kleash's reader and by plain reads of one
MiB; from the disk, after the kernel was told to forget the file, and from memory. The ways take turns. Beside it stand
the rate at which the rows of base logits are worked on once they are in memory: the columns of a run, most of all
bounds. Rates are MB (a million bytes) of the file for a second of wall time; the result is the median of the rounds
with the smallest and the largest. Writes results/reading.json.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from harness import write_result

from kleash.engines.base_logits import COMPARED_LOGITS, TILE_LOGITS, columns_of_rows
from kleash.models.base_logit_bounds import impossible_row, logp_intervals
from kleash.models.base_logits import BaseLogitsRows, encode_rows, open_base_logits, write_header
from kleash.models.cache.hidden_states import HiddenStateStore

VOCAB, CONTEXT, DIM = 151_936, 512, 1024
SEQUENCE = 512
"""Positions of a cached sequence."""
PART = 64
"""Sequences in a file of the cache."""
BLOCK = 1 << 20


def write_logits(path: Path, size: int) -> None:
    """Write a file of base logits of about ``size`` bytes; some rows repeat, which no reader can tell."""
    rows = encode_rows(4 * torch.randn(32, VOCAB, generator=torch.Generator().manual_seed(0)))
    scored = CONTEXT - 1 - CONTEXT // 2
    chunks = max(1, size // (scored * rows[0].nbytes))
    with path.open("wb") as file:
        write_header(file, np.full((chunks, CONTEXT), 5), VOCAB)
        for number in range(chunks * scored):
            file.write(rows[number % len(rows)].tobytes())


def write_cache(folder: Path, size: int) -> list[bytes]:
    """Write hidden states of about ``size`` bytes to a folder; returns the keys of the sequences."""
    folder.mkdir()
    store = HiddenStateStore(folder)
    keys: list[bytes] = []
    for number in range(max(1, size // (PART * SEQUENCE * DIM * 2))):
        part = [number.to_bytes(8, "little") + index.to_bytes(8, "little") for index in range(PART)]
        store.write({key: torch.randn(SEQUENCE, DIM).to(torch.bfloat16) for key in part})
        keys += part
    return keys


def read_logits(path: Path) -> None:
    """Read all rows of a file of base logits, as many at once as a measurement does."""
    file = open_base_logits(path)
    step = max(1, TILE_LOGITS // file.vocab_size)
    for chunk in range(file.chunks):
        for start in range(0, file.scored, step):
            file.read(chunk, start, min(start + step, file.scored))


def read_cache(store: HiddenStateStore, keys: list[bytes]) -> None:
    """Read the hidden states of all sequences, and touch each page as the copy to a batch does."""
    for key in keys:
        store.get(key, SEQUENCE).clone()


def read_plainly(paths: list[Path]) -> None:
    """Read files from start to end into one buffer."""
    buffer = bytearray(BLOCK)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def forget(paths: list[Path]) -> None:
    """Let the kernel drop the contents of files from memory."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rates(paths: list[Path], kleash: Callable[[], None], rounds: int) -> dict[str, Any]:
    """MB/s of both ways from disk and from memory, and the ratios of kleash's to the plain read."""
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    ways = {"plain": lambda: read_plainly(paths), "kleash": kleash}
    measured: dict[str, list[float]] = {}
    for _ in range(rounds):
        for source in ("disk", "memory"):
            for name, way in ways.items():
                if source == "disk":
                    forget(paths)
                began = perf_counter()
                way()
                measured.setdefault(f"{name}_from_{source}", []).append(megabytes / (perf_counter() - began))
    figures: dict[str, Any] = {"megabytes": round(megabytes)}
    figures |= {name: spread(values) for name, values in measured.items()}
    for source in ("disk", "memory"):
        pairs = zip(measured[f"kleash_from_{source}"], measured[f"plain_from_{source}"], strict=True)
        figures[f"ratio_from_{source}"] = spread([kleash / plain for kleash, plain in pairs])
    return figures


def checked_columns(logits: torch.Tensor, rows: BaseLogitsRows, targets: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of some rows, whose sums are checked first."""
    base = logp_intervals(rows)
    assert impossible_row(base) is None
    return columns_of_rows(logits, rows, base, targets)


def computing_rates(path: Path, rounds: int) -> dict[str, Any]:
    """MB/s of the file at which rows in memory are compared with logits."""
    file = open_base_logits(path)
    step = max(1, TILE_LOGITS // file.vocab_size)
    rows = file.read(0, 0, step)
    logits = 4 * torch.randn(step, VOCAB, generator=torch.Generator().manual_seed(1))
    targets = np.full(step, 5)
    size = max(1, COMPARED_LOGITS // file.vocab_size)
    parts = [slice(start, start + size) for start in range(0, step, size)]
    ways: dict[str, Callable[[], object]] = {
        "columns": lambda: [checked_columns(logits[part], rows[part], targets[part]) for part in parts],
    }
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = perf_counter()
            way()
            if number:
                measured[name].append(step * 2 * file.row_values / 1e6 / (perf_counter() - began))
    return {name: spread(values) for name, values in measured.items()}


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest, with three digits."""
    numbers = {"median": median(values), "smallest": min(values), "largest": max(values)}
    return {name: float(f"{value:.3g}") for name, value in numbers.items()}


def main() -> None:
    """Write the files, read them, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure")
    arguments = parser.parse_args()
    size = arguments.megabytes * 1_000_000
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        path, folder = Path(work) / "base.kld", Path(work) / "cache"
        write_logits(path, size)
        logits = rates([path], lambda: read_logits(path), arguments.rounds)
        computing = computing_rates(path, arguments.rounds)
        path.unlink()
        keys = write_cache(folder, size)
        store = HiddenStateStore(folder)
        cache = rates(sorted(folder.glob("*.safetensors")), lambda: read_cache(store, keys), arguments.rounds)
    figures = {
        "base_logits_mb_per_s": logits,
        "cache_mb_per_s": cache,
        "computing_mb_per_s": computing,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(figures, write_result("reading", figures, packages=("numpy", "safetensors")), sep="\n")


if __name__ == "__main__":
    main()
