"""Random damage to a file of a model: is each copy refused in a sentence?"""

import random
import struct
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kleash.errors import KleashError

HOSTILE = (0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def damage(data: bytearray, header: int, draw: random.Random) -> None:
    """Change a file in place; most changes are in the ``header`` bytes before the weights."""
    start = draw.randrange(min(header, len(data)) + 1)
    length = draw.choice((1, 4, 8, 64))
    match draw.randrange(10):
        case 0:
            del data[draw.randrange(draw.choice((header, len(data) + 1))) :]
        case 1:
            data += draw.randbytes(length)
        case 2:
            data[start : start + 1] = bytes(byte ^ 1 << draw.randrange(8) for byte in data[start : start + 1])
        case 3:
            data[start : start + length] = draw.randbytes(length)
        case 4:
            del data[start : start + length]
        case 5:
            data[start:start] = data[start : start + length]
        case 6:
            data[start : start + length] = bytes(length)
        case 7:  # a version or a count at the beginning
            data[4 * length % 24 : 4 * length % 24 + 8] = struct.pack("<Q", draw.choice(HOSTILE))
        case _:
            replace_a_length(data, min(header, len(data)), draw)


def replace_a_length(data: bytearray, header: int, draw: random.Random) -> None:
    """Replace what seems to be a length, of 4 or 8 bytes, by a hostile number or one near it."""
    width, layout = draw.choice(((4, "<I"), (8, "<Q")))
    starts = [draw.randrange(max(header - width, 1)) for _ in range(200)] if header > width else []
    for start in starts:
        (true,) = struct.unpack_from(layout, data, start)
        if 0 < true <= header:
            value = draw.choice((*HOSTILE, true + 1, true - 1, true * 2, true ^ (1 << 31)))
            struct.pack_into(layout, data, start, value % (1 << (8 * width)))
            return


def outcomes_of_damage(
    path: Path, header: int, read: Callable[[Path], Any], copies: int
) -> tuple[Counter[str], list[str]]:
    """Reads damaged copies of a file in its place: outcomes by kind, and errors that are none of kleash's.

    Args:
        path: an intact file, which is overwritten.
        header: number of bytes before the weights.
        read: reads a file; its result is compared with that of the intact file.
        copies: number of copies, each with one to three changes.
    """
    intact, expected = path.read_bytes(), read(path)
    draw, outcomes, failures = random.Random(0), Counter[str](), list[str]()
    for _ in range(copies):
        data = bytearray(intact)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            damage(data, header, draw)
        path.write_bytes(data)
        try:
            outcomes["same" if read(path) == expected else "other"] += 1
        except KleashError as error:
            outcomes["refused"] += 1
            if "\n" in str(error):
                failures.append(str(error))
        except Exception:  # the outcome that must not occur
            failures.append(traceback.format_exc())
    return outcomes, failures
