"""Random damage to the settings and the headers of a checkpoint, for tests of what loading makes of it."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 10**9, 10**12, 2**63, 2**64 + 1, -(2**40), 0.0, 0.5, -3.5, 1e308, float("inf"), float("nan"),
    "", "x", "(", "auto", "../..", "\x1b[31m", "a" * 300, "float99", "/dev/null", "é\ud800", True, False, None, [],
    {}, [1], [[1]], [1, "x"], {"x": 1}, {"": None}, [None], [-1], [10**12], [0] * 1000,
)  # fmt: skip
SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json")


def mutated(source: Path, target: Path, seed: int) -> str:
    """Copy a checkpoint with one or two of its values changed; says which."""
    draw = random.Random(seed)
    shutil.copytree(source, target)
    files = [path for name in SETTINGS if (path := target / name).is_file()]
    weights = sorted(target.glob("*.safetensors"))
    done: list[str] = []
    for number in range(draw.choice((1, 1, 2))):
        if number and "header" in done[0]:
            break
        done.append(
            _in_header(draw.choice(weights), draw)
            if draw.random() < 0.3
            else _in_json(draw.choice(files), draw)
        )
    return "; ".join(done)


def _in_json(path: Path, draw: random.Random) -> str:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        return f"{path.name} stays"
    holder: Any = content
    key = draw.choice(sorted(content) or ["x"])
    while isinstance(holder.get(key), dict) and holder[key] and draw.random() < 0.7:
        holder = holder[key]
        key = draw.choice(sorted(holder))
    if draw.random() < 0.1:
        holder.pop(key, None)
        done = f"without {key}"
    else:
        holder[key] = draw.choice(ODD)
        done = f"{key} = {repr(holder[key])[:40]}"
    path.write_text(json.dumps(content))
    return f"{path.name}: {done}"


def _in_header(path: Path, draw: random.Random) -> str:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    name = draw.choice([name for name in header if name != "__metadata__"])
    what = draw.choice(("dtype", "shape", "data_offsets", "name", "length", "twice", "body", "deep"))
    if what == "dtype":
        header[name]["dtype"] = draw.choice(("F64", "F16", "BF16", "I32", "F99", "", None, 5))
    elif what == "shape":
        header[name]["shape"] = draw.choice(
            ([-1, -1], [], [2**40, 2**40], "x", [1.5], [0], None, [[1]], [10**30])
        )
    elif what == "data_offsets":
        other = draw.choice(sorted(header.keys() - {"__metadata__"}))
        header[name]["data_offsets"] = draw.choice(
            ([-8, 8], [8, 0], [0], None, [0, 2**64], header[other]["data_offsets"], ["0", "8"], [0, 10**40])
        )
    elif what == "name":
        header[name[::-1]] = header.pop(name)
    text = json.dumps(header).encode()
    if what == "twice":
        text = text[:-1] + b"," + json.dumps({name: header[name]}).encode()[1:]
    elif what == "deep":
        text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    elif what == "body":
        body = body[: draw.randrange(len(body))]
    size = draw.choice((2**63, 2**40, 0, len(text) // 2)) if what == "length" else len(text)
    path.write_bytes(size.to_bytes(8, "little") + text + body)
    return f"{path.name}: header, {what} of {name}"
