"""Damaged and hostile GGUF and llama.cpp logits files: is each refused in a sentence?

    python benchmarks/model_file_damage.py                       # 2 000 mutants of each kind of file
    python benchmarks/model_file_damage.py --mutants 100 --kinds gguf

A mutant is a valid file of a small model with one to three changes: truncated, extended, bits flipped, bytes
overwritten, a piece removed, doubled or zeroed, and above all a length, count, offset, type or size in the header
replaced by a hostile number (0, 1, 2^31, 2^32 - 1, 2^62, 2^63, 2^64 - 1, and near the true one). Each is loaded as a
policy in this process, whose address space is limited. Outcomes: "refused" (a KleashError), "same" (the result of the
intact file, bit for bit), "other weights" (only bytes of weights were changed: no format can show that; the fingerprint
does), "other settings" (a setting or text was changed into another valid one, and the result is another), "traceback".
"""

import argparse
import random
import resource
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from harness import write_result

HOSTILE = (0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
ADDRESS_SPACE = 6 << 30


def mutate(data: bytes, header: int, rng: random.Random) -> tuple[bytes, str]:
    """A damaged copy of a file, and the name of the first damage.

    Args:
        data: the intact file.
        header: number of bytes before the weights.
        rng: source of the choices.
    """
    changed = bytearray(data)
    names: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(tuple(DAMAGES))
        changed = DAMAGES[name](changed, min(header, len(changed)), rng)
        names.append(name)
    return bytes(changed), names[0]


def _truncate(data: bytearray, header: int, rng: random.Random) -> bytearray:
    return data[: rng.randrange(rng.choice((header, len(data))) + 1)] if data else data


def _extend(data: bytearray, header: int, rng: random.Random) -> bytearray:
    return data + rng.randbytes(rng.choice((1, 31, 32, 4096)))


def _flip(data: bytearray, header: int, rng: random.Random) -> bytearray:
    for _ in range(rng.choice((1, 1, 8)) if header else 0):
        data[rng.randrange(header)] ^= 1 << rng.randrange(8)
    return data


def _overwrite(data: bytearray, header: int, rng: random.Random) -> bytearray:
    start = rng.randrange(header + 1)
    piece = rng.randbytes(rng.choice((1, 4, 8, 64)))
    data[start : start + len(piece)] = piece[: max(0, len(data) - start)]
    return data


def _number(data: bytearray, header: int, rng: random.Random) -> bytearray:
    """Replace a number of 4 or 8 bytes by a hostile one, at any offset or where there seems to be a length."""
    width, layout = rng.choice(((4, "<I"), (8, "<Q")))
    if len(data) < width or header <= width:
        return data
    starts = [rng.randrange(header - width) for _ in range(rng.choice((1, 200)))]
    numbers = [struct.unpack_from(layout, data, start)[0] for start in starts]
    likely = [number for number, true in enumerate(numbers) if 0 < true <= header]
    place = likely[0] if likely else 0
    start, true = starts[place], numbers[place]
    value = rng.choice((*HOSTILE, true + 1, true - 1, true * 2, true ^ (1 << 31)))
    struct.pack_into(layout, data, start, value % (1 << (8 * width)))
    return data


def _count(data: bytearray, header: int, rng: random.Random) -> bytearray:
    """Replace one of the numbers at the beginning: version and counts."""
    start = rng.choice((4, 8, 12, 16, 20))
    if start + 8 <= len(data):
        struct.pack_into("<Q", data, start, rng.choice(HOSTILE))
    return data


def _remove(data: bytearray, header: int, rng: random.Random) -> bytearray:
    start = rng.randrange(header + 1)
    del data[start : start + rng.choice((1, 4, 8, 100))]
    return data


def _double(data: bytearray, header: int, rng: random.Random) -> bytearray:
    start = rng.randrange(header + 1)
    data[start:start] = data[start : start + rng.choice((1, 8, 64))]
    return data


def _zero(data: bytearray, header: int, rng: random.Random) -> bytearray:
    start = rng.randrange(header + 1)
    stop = min(len(data), start + rng.choice((4, 8, 256)))
    data[start:stop] = bytes(stop - start)
    return data


def _weights(data: bytearray, header: int, rng: random.Random) -> bytearray:
    if header < len(data):
        data[rng.randrange(header, len(data))] ^= 1 << rng.randrange(8)
    return data


DAMAGES: dict[str, Callable[[bytearray, int, random.Random], bytearray]] = {
    "truncated": _truncate,
    "extended": _extend,
    "flipped bit": _flip,
    "overwritten": _overwrite,
    "hostile number": _number,
    "another number": _number,
    "a third number": _number,
    "hostile count": _count,
    "removed": _remove,
    "doubled": _double,
    "zeroed": _zero,
    "flipped weight": _weights,
}


def run_mutants(
    intact: bytes,
    header: int,
    path: Path,
    read: Callable[[Path], Any],
    mutants: int,
    seed: int,
) -> dict[str, Any]:
    """Read many damaged copies of a file; returns outcomes, overall and by damage.

    Args:
        intact: the whole file.
        header: number of bytes before the weights.
        path: where the copies are written.
        read: reads a file; its result is compared with that of the intact file.
        mutants: number of copies.
        seed: of the choices.
    """
    from kleash.errors import KleashError

    path.write_bytes(intact)
    expected = read(path)
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    by_damage: dict[str, Counter[str]] = {}
    slowest, failures = 0.0, []
    for number in range(mutants):
        data, damage = mutate(intact, header, rng)
        path.write_bytes(data)
        start = perf_counter()
        try:
            result = read(path)
            only_weights = data[:header] == intact[:header] and len(data) == len(intact)
            outcome = "same" if result == expected else "other weights" if only_weights else "other settings"
        except KleashError as error:
            outcome = "refused" if "\n" not in str(error) else "several lines"
        except Exception:  # the outcome that must not occur
            outcome = "traceback"
            failures.append({"mutant": number, "error": traceback.format_exc().splitlines()[-1][:300]})
        slowest = max(slowest, perf_counter() - start)
        outcomes[outcome] += 1
        by_damage.setdefault(damage, Counter())[outcome] += 1
    return {
        "mutants": mutants,
        "outcomes": dict(outcomes),
        "by_damage": {name: dict(counts) for name, counts in sorted(by_damage.items())},
        "slowest_seconds": round(slowest, 3),
        "failures": failures[:20],
    }


def gguf_case(folder: Path) -> tuple[bytes, int, Callable[[Path], Any]]:
    """A GGUF file of the shipped policy, the bytes before its weights, and what reads it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
    from gguf_file import write_gguf  # pyright: ignore[reportMissingImports]

    from kleash.checkpoints.gguf_files import read_gguf_header
    from kleash.models import load_pair
    from kleash.shipped import shipped_folder

    path = write_gguf(shipped_folder("shipped:policy"), folder / "intact.gguf", "Q8_0")
    header = min(tensor.offset for tensor in read_gguf_header(path).tensors)

    def read(mutant: Path) -> Any:
        policy = load_pair(str(mutant), "shipped:reference").policy
        weights = [weight.numpy().tobytes() for weight in policy.network.state_dict().values()]
        return policy.eos_token_ids, policy.context_length, hash(tuple(weights))

    return path.read_bytes(), header, read


def read_base_logits(path: Path) -> Any:
    """Everything that a file of base logits says."""
    from kleash.models.base_logits import open_base_logits

    file = open_base_logits(path)
    rows = [file.read(chunk, 0, file.scored) for chunk in range(file.chunks)]
    arrays = [array for part in rows for array in (part.scale, part.minimum, part.codes)]
    return (
        file.context,
        hash(tuple(file.tokens(chunk).tobytes() for chunk in range(file.chunks))),
        hash(tuple(array.tobytes() for array in arrays)),
    )


def logits_case(folder: Path) -> tuple[bytes, int, Callable[[Path], Any]]:
    """A file of base logits of the shipped reference, the bytes before its codes, and what reads it."""
    from kleash.measuring import cache_reference
    from kleash.records import CacheJob

    text, path = folder / "text.txt", folder / "base.kld"
    text.write_text("A long road leads out of the town; nobody remembers where it was meant to end. " * 20)
    cache_reference(CacheJob(format="llama.cpp", out=str(path), text=str(text), window=32, limit=4))
    return path.read_bytes(), 20 + 4 * 4 * 32, read_base_logits


CASES: dict[str, Callable[[Path], tuple[bytes, int, Callable[[Path], Any]]]] = {
    "gguf": gguf_case,
    "base logits": logits_case,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/model_file_damage.json"
    )
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.RLIM_INFINITY))
    figures: dict[str, Any] = {"seed": arguments.seed, "address_space_bytes": ADDRESS_SPACE}
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory() as folder:
            intact, header, read = CASES[kind](Path(folder))
            path = Path(folder) / f"mutant.{kind.partition(' ')[0]}"
            figures[kind] = run_mutants(intact, header, path, read, arguments.mutants, arguments.seed)
        print(kind, figures[kind])
    if arguments.write:
        write_result("model_file_damage", figures, packages=("gguf", "transformers"))


if __name__ == "__main__":
    main()
