"""What ``kleash measure`` says and keeps when its disk is full, and whether ``--resume`` goes on once there is room.

    python benchmarks/full_disk.py                   # some minutes; needs the right to mount, or user namespaces
    python benchmarks/full_disk.py --ways alone --shares 0.5
    python benchmarks/full_disk.py --ways            # only the disk of one of two ranks

The output lies on a file system of its own (tmpfs) that has room for a share of the files of a finished run. The
command must end with exit code 2 and one sentence of kleash that names the disk. Then the file system is enlarged, and
the run resumed: the files ``tokens/`` and ``sequences/`` and the numbers must be those of a run that had room, and
shards that were finished must not be scored again.

Then the disk of one of two ranks fails: fsync, or the opening of new files, gives ENOSPC, EDQUOT, EIO or EROFS in
that rank after some calls. Each time a sentence must say that what was finished is kept, and two ranks must then go on
to the files and numbers of an undisturbed run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import write_result

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
OPTIONS = ("--limit", "24", "--max-new-tokens", "24", "--batch-tokens", "16", "--quiet")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "alone": ((), ()),
    "two ranks": (TORCHRUN, ()),
}
"""What precedes ``-m kleash``, and further options."""
SHARES = (0.0, 0.02, 0.1, 0.3, 0.6, 0.97)
FAULTS = (
    (1, 0, "ENOSPC", "fsync"),
    (1, 5, "EDQUOT", "fsync"),
    (0, 9, "EIO", "open"),
    (1, 2, "EROFS", "open"),
    (0, 40, "ENOSPC", "fsync"),
)
"""Rank, calls that succeed, the error of all later ones, and the function of ``os`` that fails."""
SITE_CUSTOMIZE = """
import errno, os
name, calls = os.environ["FAULT_CALL"], [0]
real = getattr(os, name)

def faulty(file, *rest, **options):
    is_descriptor = isinstance(file, int)
    path = os.readlink(f"/proc/self/fd/{file}") if is_descriptor else os.fspath(file)
    if os.environ["FAULT_FOLDER"] in str(path) and (is_descriptor or rest and rest[0] & os.O_CREAT):
        calls[0] += 1
        if calls[0] > int(os.environ["FAULT_AFTER"]):
            number = getattr(errno, os.environ["FAULT_ERROR"])
            raise OSError(number, os.strerror(number))
    return real(file, *rest, **options)

if os.environ.get("RANK") == os.environ["FAULT_RANK"]:
    setattr(os, name, faulty)
"""
"""Read by Python at its start; it replaces a function of ``os`` in one rank."""
TIMES = ("seconds", "finished")
ROOM = "256m"
IN_NAMESPACE = "KLEASH_IN_NAMESPACE"


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A file system of so many bytes."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def enlarge(disk: Path) -> None:
    """Give a file system room for the whole run."""
    subprocess.run(["mount", "-o", f"remount,size={ROOM}", str(disk)], check=True)


def run(way: str, out: Path, *more: str, **variables: str) -> tuple[int, list[str]]:
    """The exit code and the sentences of kleash of one command, with further environment variables."""
    launcher, options = WAYS[way]
    command = [sys.executable, *launcher, "-m", "kleash", "measure", *OPTIONS, *options, *more]
    ended = subprocess.run(
        [*command, "--out", str(out)],
        env=ENVIRONMENT | variables,
        capture_output=True,
        text=True,
    )
    if "/src/kleash/" in ended.stderr:  # a traceback of kleash; torchrun prints one of its own
        raise AssertionError(ended.stderr[-3000:])
    return ended.returncode, [line for line in ended.stderr.splitlines() if line.startswith("kleash: ")]


def contents(out: Path) -> dict[str, Any]:
    """What does not depend on the time of a run."""
    files = {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*.parquet"))
        if path.parent.name in ("tokens", "sequences") or path.name == "alternatives.parquet"
    }
    measured = out / "measurement.json"
    numbers = json.loads(measured.read_text()) if measured.exists() else {}
    return {**files, **{name: value for name, value in numbers.items() if name not in TIMES}}


def one_case(way: str, share: float, whole: Path, size: int) -> dict[str, Any]:
    """Fill the disk, make room, resume, compare."""
    with small_disk(str(max(4096, int(share * size)))) as disk:
        out = disk / "run"
        code, sentences = run(way, out)
        expected = 1 if way == "two ranks" else 2  # that of torchrun
        assert code == expected and sentences, (way, share, code, sentences)
        assert any("no space is left" in sentence for sentence in sentences), sentences
        finished = {path: path.stat().st_mtime_ns for path in out.rglob("sequences/part-*")}
        enlarge(disk)
        code, later = run(way, out, *(("--resume",) if (out / "run.json").exists() or finished else ()))
        assert code == 0, (way, share, code, later)
        assert contents(out) == contents(whole), (way, share)
        again = [path.name for path, changed in finished.items() if path.stat().st_mtime_ns != changed]
        assert not again, (way, share, again)
    return {
        "sentences": [sentence.replace(str(disk), "…") for sentence in sentences],
        "kept shards": len(finished),
    }


def case_of_one_rank(rank: int, after: int, error: str, call: str, whole: Path) -> dict[str, Any]:
    """Let the disk of one of two ranks fail, resume, compare."""
    with tempfile.TemporaryDirectory() as temporary:
        out, site = Path(temporary) / "run", Path(temporary) / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
        fault = {"FAULT_RANK": str(rank), "FAULT_AFTER": str(after), "FAULT_ERROR": error, "FAULT_CALL": call}
        search_path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
        code, sentences = run("two ranks", out, **fault, FAULT_FOLDER=str(out), PYTHONPATH=search_path)
        assert code == 1 and any("what was finished is kept" in sentence for sentence in sentences), sentences
        finished = len(list(out.rglob("sequences/part-*")))
        code, later = run("two ranks", out, *(("--resume",) if (out / "run.json").exists() else ()))
        assert code == 0 and contents(out) == contents(whole), (code, later)
    shown = [sentence.replace(temporary, "…") for sentence in sentences]
    return {"sentences": shown, "kept shards": finished}


def main() -> int:
    """Run the cases and write ``results/full_disk.json``; the exit code is the number of failures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="*", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    options = parser.parse_args()
    if os.geteuid() != 0 and IN_NAMESPACE not in os.environ:
        namespace = ["unshare", "--user", "--map-root-user", "--mount"]
        command = [*namespace, sys.executable, *sys.argv]
        return subprocess.run(command, env={**os.environ, IN_NAMESPACE: "1"}).returncode
    figures: dict[str, Any] = {}
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        for way in options.ways:
            whole = Path(temporary) / way
            assert run(way, whole) == (0, [])
            size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
            for share in options.shares:
                name = f"{way}, room for {share:.0%} of {size / 1e6:.1f} MB"
                try:
                    figures[name] = one_case(way, share, whole, size)
                except AssertionError as error:
                    failures += 1
                    figures[name] = {"FAILED": str(error)[-2000:]}
                print(name, json.dumps(figures[name]), flush=True)
        whole = Path(temporary) / "undisturbed"
        assert run("alone", whole) == (0, [])
        for rank, after, error, call in FAULTS:
            name = f"rank {rank} of 2, {error} from {call} after {after} calls"
            try:
                figures[name] = case_of_one_rank(rank, after, error, call, whole)
            except AssertionError as failure:
                failures += 1
                figures[name] = {"FAILED": str(failure)[-2000:]}
            print(name, json.dumps(figures[name]), flush=True)
    if not failures and tuple(options.ways) == tuple(WAYS):
        write_result("full_disk", figures, packages=("torch", "transformers"))
    return failures


if __name__ == "__main__":
    sys.exit(main())
