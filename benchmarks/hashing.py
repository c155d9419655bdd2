"""Speed of hashing whole files: the fingerprint of weights, and the checksum of a file that is read.

    python benchmarks/hashing.py

A file of random bytes is hashed by each method in turn, `--rounds` times; the fastest round is the result. "first" is
the fingerprint of a new file, "again" that of a file whose hash is stored, and "checksum" the SHA-256 with which a file
is verified when it is read. For comparison, BLAKE2b and plain reading.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from harness import write_result

BLOCK = 1 << 20


def seconds(job: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def main() -> int:
    """Time each method; write MiB per second to benchmarks/results/hashing.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from kleash.store import file_hashes
    from kleash.store.checksums import file_checksum

    with tempfile.TemporaryDirectory() as temporary:
        os.environ["XDG_CACHE_HOME"] = temporary
        path = Path(temporary) / "weights.safetensors"
        with path.open("wb") as file:
            for _ in range(options.mebibytes):
                file.write(os.urandom(BLOCK))

        def blocks(use: Callable[[memoryview], object]) -> None:
            block = memoryview(bytearray(BLOCK))
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(block):
                    use(block[:count])

        later = time.time_ns() + 10**10
        ways: dict[str, Callable[[], object]] = {
            "reading": lambda: blocks(len),
            "checksum": lambda: file_checksum(path),
            "BLAKE2b": lambda: blocks(hashlib.blake2b().update),
            "first": lambda: file_hashes._compute_hashes([path]),
            "again": lambda: file_hashes.hash_files([path]),
        }
        with mock.patch.object(file_hashes.time, "time_ns", lambda: later):
            best = {name: float("inf") for name in ways}
            for _ in range(options.rounds):
                for name, way in ways.items():
                    best[name] = min(best[name], seconds(way))
    figures = {
        name: round(options.mebibytes / best_seconds)
        for name, best_seconds in best.items()
        if name != "again"
    }
    print(figures, f"again: {best['again'] * 1000:.2f} ms")
    write_result(
        "hashing",
        {
            "mebibytes": options.mebibytes,
            "threads": os.cpu_count(),
            "mebibytes_per_second": figures,
            "again_ms": round(best["again"] * 1000, 2),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
