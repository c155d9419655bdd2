"""Random damage to files that kleash reads: is it detected?

    python benchmarks/damage.py                                  # 1 000 damages to each kind of folder
    python benchmarks/damage.py --damages 50 --kinds run cache

Three kinds of folder are made with the shipped models: a measurement ("run"), a reference cache ("cache") and a PPO
run with a checkpoint ("training"). Each damage is one change to a fresh copy: flipped bits, overwritten, zeroed,
missing or added bytes; lines of JSON Lines that are lost, doubled or swapped; a changed value in JSON; a file that
is lost, renamed, or overwritten by another valid one of its kind from this folder or from another run. Then the
folder is read by all that reads such folders: `report`, `compare`, what `measure --resume` and `train --resume`
read, a whole cache, a checkpoint with its tensors.

Each outcome is one of: "identical" (the same output as from the undamaged folder, bit for bit), "refused" (a
KleashError), "silent" (other output), "traceback".
"""

import hashlib
import json
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import parser_of, write_result

from kleash import measure
from kleash.errors import KleashError
from kleash.jobs import CacheJob, MeasureJob, PPOJob
from kleash.measuring import cache_reference
from kleash.measuring.comparison import compare
from kleash.models.cache.stored_reference import StoredReference
from kleash.reports.folder_report import write_report_of
from kleash.store import read_samples
from kleash.store.job_folder import require_same
from kleash.store.run_folder import RunFolder
from kleash.store.training_folder import CHECKPOINTS, TrainingFolder
from kleash.training import train
from kleash.training.checkpoints import restore_last
from kleash.training.ppo import set_up
from kleash.training.run_log import RunLog

NEVER_READ = {".lock", "report.html"}


@dataclass(frozen=True, kw_only=True)
class TestedFolder:
    """A folder to be damaged."""

    pristine: Path
    """Copied for each damage."""
    read: Callable[[Path], str]
    """Reads the folder in every way; the output as text."""
    donors: tuple[Path, ...]
    """Folders whose valid files may overwrite files of this one."""


def damages(tested: TestedFolder, count: int, seed: int = 0) -> Iterator[tuple[str, Path, str, str]]:
    """Damage copies of a folder and read them.

    Yields:
        The kind of damage, the damaged file, the outcome ("identical", "refused", "silent" or
        "traceback"), and the message or traceback.
    """
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "folder"
        shutil.copytree(tested.pristine, folder)
        expected = tested.read(folder)
        count_done = 0
        while count_done < count:
            shutil.rmtree(folder)
            shutil.copytree(tested.pristine, folder)
            before = _contents(folder)
            kind: Any = draw.choice((*OF_BYTES, *OF_FILES))
            files = sorted(name for name in before if Path(name).name not in NEVER_READ)
            victim = draw.choice(files)
            if kind in OF_BYTES:
                (folder / victim).write_bytes(kind(draw, before[victim]))
            else:
                kind(draw, folder, victim, tested)
            if _contents(folder) == before:
                continue  # for example, a zero was overwritten by a zero
            count_done += 1
            name = kind.__name__.removeprefix("_").replace("_", " ")
            try:
                output = tested.read(folder)
            except KleashError as error:
                yield name, Path(victim), "refused", str(error)
            except Exception:
                yield name, Path(victim), "traceback", traceback.format_exc()
            else:
                is_same = output == expected
                yield name, Path(victim), "identical" if is_same else "silent", ""


def _contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


# ---- functions that read a folder


def _reader_of_run(pristine: Path, other: Path) -> Callable[[Path], str]:
    header = RunFolder(pristine).header()

    def read(folder: Path) -> str:
        page = write_report_of(folder).read_text(encoding="utf-8")
        comparison = compare([folder, other]).to_json()
        run = RunFolder(folder)  # as --resume reads it
        require_same(folder, run.header(), header)
        for part in (
            *run.parts("tokens", ["kl_policy_reference"]),
            *run.parts("sequences", ["tokens", "prompt"]),
        ):
            page += str(len(part))
        return page + comparison

    return read


def read_cache(folder: Path) -> str:
    """Read everything that a measurement reads of a finished cache; its digest."""
    stored = StoredReference(folder)
    stored.check_reference(str(folder), None, "auto")
    tokenizer = stored.tokenizer(trust_remote_code=False)
    model = stored.as_model(torch.device("cpu"), tokenizer)
    digest = hashlib.sha256(str(stored.contents).encode())
    digest.update(str(stored.label).encode())
    digest.update(str(tokenizer("She was the youngest of the two daughters.")["input_ids"]).encode())
    if model.head.weight is not None:
        digest.update(model.head.weight.numpy().tobytes())
    for key in sorted(stored.states._index):
        digest.update(stored.states.get(key, 4).numpy().tobytes())
    for what in ("noise", "gap"):
        for values in (stored.rounding_columns(what, 1.0) or {}).values():
            digest.update(values.tobytes())
    if len(stored.states) < stored.contents.sequences:  # a measurement has another message for them
        raise KleashError("sequences are missing")
    return digest.hexdigest()


def _reader_of_training(pristine: Path, _: Path) -> Callable[[Path], str]:
    run = set_up(_ppo_job(Path(), 0))
    header = TrainingFolder(pristine).header()

    def read(folder: Path) -> str:
        page = write_report_of(folder).read_text(encoding="utf-8")
        require_same(folder, TrainingFolder(folder).header(), header)
        progress = restore_last(folder / CHECKPOINTS, run.accelerator)
        if progress is None:
            raise KleashError("there is no checkpoint: the run begins anew, and steps.jsonl says more")
        run_log = RunLog(folder, PPOJob())
        run_log.begin(progress.step)
        digest = hashlib.sha256(page.encode())
        digest.update(repr((progress, run_log.history, read_samples(folder))).encode())
        for weight in run.trained:
            for tensor in (weight.detach(), *run.optimizer.state[weight].values()):
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    return read


# ---- functions that make the folders


def _make_run(out: Path, seed: int) -> Path:
    measure(
        MeasureJob(limit=6, samples_per_prompt=1, max_new_tokens=8, batch_tokens=24, seed=seed, out=str(out))
    )
    return out


def _make_cache(out: Path, seed: int) -> Path:
    cache_reference(CacheJob(limit=3 - seed, window=64, batch_tokens=64, out=str(out)))
    return out


def _make_training(out: Path, seed: int) -> Path:
    train(_ppo_job(out, seed))
    return out


def _ppo_job(out: Path, seed: int) -> Any:
    return PPOJob(
        steps=3,
        checkpoint_every=2,
        prompts_per_step=4,
        max_new_tokens=6,
        limit=8,
        lora_rank=2,
        learning_rate=1e-3,
        device="cpu",
        seed=seed,
        out=str(out),
    )


# ---- damages of bytes: each takes a random generator and the content of a file


def _flipped_bit(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _overwritten_bytes(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content) + 1)
    size = min(draw.choice((1, 4, 64, 4096)), len(content) - start)
    return content[:start] + draw.randbytes(size) + content[start + size :]


def _zeroed_bytes(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content) + 1)
    size = min(draw.choice((8, 512, 4096, len(content))), len(content))
    return content[:start] + bytes(size) + content[start + size :]


def _truncated(draw: random.Random, content: bytes) -> bytes:
    size = draw.choice((0, len(content) - 1, draw.randrange(len(content) + 1)))
    return content[: max(0, size)]


def _extended(draw: random.Random, content: bytes) -> bytes:
    return content + draw.choice((b"\n", b"\0", b" ", draw.randbytes(16), bytes(512)))


def _repeated(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content) + 1)] + content


# ---- damages of files: each takes a random generator, the folder, the name of a file in it, and the tested folder


def _lost_file(_: random.Random, folder: Path, victim: str, __: TestedFolder) -> None:
    (folder / victim).unlink()


def _renamed_file(draw: random.Random, folder: Path, victim: str, _: TestedFolder) -> None:
    path = folder / victim
    names = [path.name + ".bak", path.name.replace("0", "7"), f"{path.stem}-copy{path.suffix}"]
    path.rename(path.with_name(draw.choice(names)))


def _added_file(draw: random.Random, folder: Path, victim: str, _: TestedFolder) -> None:
    path = folder / victim
    names = [
        "part-00099.parquet",
        "part-00004.parquet",
        "part-extra.safetensors",
        "step-zzz",
        path.name + ".txt",
    ]
    shutil.copy(path, path.with_name(draw.choice(names)))


def _swapped_files(draw: random.Random, folder: Path, victim: str, _: TestedFolder) -> None:
    other = draw.choice(_alike(folder, folder, victim))
    first, second = (folder / victim).read_bytes(), other.read_bytes()
    (folder / victim).write_bytes(second)
    other.write_bytes(first)


def _other_part(draw: random.Random, folder: Path, victim: str, _: TestedFolder) -> None:
    shutil.copy(draw.choice(_alike(folder, folder, victim)), folder / f"{victim}.new")
    (folder / f"{victim}.new").replace(folder / victim)


def _other_run(draw: random.Random, folder: Path, victim: str, tested: TestedFolder) -> None:
    source = draw.choice(tested.donors)
    same = source / victim
    replacement = (
        same if same.exists() and draw.random() < 0.7 else draw.choice(_alike(source, folder, victim))
    )
    (folder / victim).write_bytes(replacement.read_bytes())


def _changed_lines(draw: random.Random, folder: Path, victim: str, _: TestedFolder) -> None:
    path = _one_of(draw, folder, victim, ".jsonl")
    if path is None:
        return
    lines = path.read_bytes().splitlines(keepends=True)
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            del lines[at:]
    path.write_bytes(b"".join(lines))


def _changed_json(draw: random.Random, folder: Path, victim: str, _: TestedFolder) -> None:
    path = _one_of(draw, folder, victim, ".json")
    if path is None:
        return
    document: Any = {"": json.loads(path.read_text())}
    holder, key = document, ""
    while isinstance(holder[key], (dict, list)) and holder[key] and draw.random() < 0.9:
        holder = holder[key]
        key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
    old = holder[key]
    new = [10**30, -1, 0.5, 2**63, "Infinity", "x", None, True, [], {}, [[]], "", 1e308]
    if isinstance(old, float | int) and not isinstance(old, bool):
        new += [old + 1, old * 2, -old, float(old) * 1.000001] * 3
    if key and draw.random() < 0.3:
        del holder[key]
    else:
        holder[key] = draw.choice(new)
    path.write_text(json.dumps(document[""], indent=2))


def _one_of(draw: random.Random, folder: Path, victim: str, suffix: str) -> Path | None:
    if Path(victim).suffix == suffix:
        return folder / victim
    candidates = sorted(path for path in folder.rglob(f"*{suffix}") if path.stat().st_size)
    return draw.choice(candidates) if candidates else None


def _alike(source: Path, folder: Path, victim: str) -> list[Path]:
    """The other files of the victim's kind; if there are none, the victim itself."""
    path = folder / victim
    files = sorted(file for file in source.rglob(f"*{path.suffix}") if file.is_file() and file != path)
    return files or [path]


OF_BYTES = (_flipped_bit, _flipped_bit, _overwritten_bytes, _zeroed_bytes, _truncated, _extended, _repeated)
OF_FILES = (
    *(_lost_file, _renamed_file, _added_file, _swapped_files, _other_part, _other_run),
    *(_changed_lines, _changed_json, _changed_json),
)


KINDS: dict[str, tuple[Callable[[Path, int], Path], Callable[[Path, Path], Callable[[Path], str]]]] = {
    "run": (_make_run, _reader_of_run),
    "cache": (_make_cache, lambda *_: read_cache),
    "training": (_make_training, _reader_of_training),
}
"""Kind of folder -> a function that makes one from a path and a seed; one that returns a reader, from two folders."""


def make_folders(root: Path, kinds: Iterable[str] = KINDS) -> dict[str, TestedFolder]:
    """Make the folders in ``root``; each with the function that reads it, by kind."""
    folders: dict[str, TestedFolder] = {}
    for kind in kinds:
        make, reader_of = KINDS[kind]
        pristine, other = (make(root / f"{kind}-{seed}", seed) for seed in (0, 1))
        folders[kind] = TestedFolder(pristine=pristine, read=reader_of(pristine, other), donors=(other,))
    return folders


def main() -> int:
    """Damage folders of each kind, print the counts, and write them to benchmarks/results/damage.json."""
    parser = parser_of(__doc__, damages=1000, seed=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    results, bad = dict[str, Any](), 0
    with tempfile.TemporaryDirectory() as temporary:
        for kind, tested in make_folders(Path(temporary), options.kinds).items():
            outcomes: Counter[str] = Counter()
            for name, victim, outcome, words in damages(tested, options.damages, options.seed):
                outcomes[outcome] += 1
                if outcome in ("silent", "traceback"):
                    bad += 1
                    print(f"{kind}: {name} of {victim}: {outcome}\n{words}", file=sys.stderr)
            results[kind] = dict(outcomes)
            print(f"{kind}: {results[kind]}", flush=True)
            write_result("damage", {"damages": options.damages, "seed": options.seed, "kinds": results})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
