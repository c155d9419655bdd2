"""The steps of a training run as they lie on disk: a line each, that is there whole or is not read.

Each line ends with a check of itself and of all lines before it, and a step's line has the check of its last sample's:
a line that was changed, lost, moved or brought in from elsewhere is noticed when the lines are read.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

from kleash.errors import RunFolderError
from kleash.store.atomic import cannot_write, write_atomically
from kleash.store.checksums import declares_checksums
from kleash.store.codec import decode, encode, parse_json

STEPS, SAMPLES = "steps.jsonl", "samples.jsonl"


@dataclass(frozen=True, kw_only=True)
class HackingAlert:
    """Something in a run that looks like reward hacking."""

    kind: str
    """A word for it: "far_from_target", "runaway", "entropy_collapse", "repetition", "heavy_tail"."""
    sentence: str
    """What was seen, with its numbers."""
    acts: bool = True
    """Whether the job's ``on_hacking`` response applies to it; if not, it is only reported."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A line of ``steps.jsonl``."""

    step: int
    """From 1."""
    metrics: Mapping[str, float]
    """By kleash's names; ``METRICS`` says what they are."""
    events: tuple[str, ...] = ()
    """What else happened: beta was bounded, the updates were ended early."""
    alerts: tuple[HackingAlert, ...] = ()
    """The alerts of the hacking monitor."""
    beta_reason: str | None = None
    """Why beta was moved after this step, in words with its numbers; None where it was not."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A response, and what came of it."""

    prompt: str
    response: str
    reward: float
    """Its score, before any KL is taken from it."""
    kl: float
    """KL(policy || reference) in nats, summed over its tokens."""


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """A line of ``samples.jsonl``: a response of a step."""

    step: int
    sample: Sample


T = TypeVar("T", bound=StepRecord | SampleRecord)

CHECK = re.compile(rb', "check": "([0-9a-f]{16})"\}$')
CHECK_BYTES = 64
SAMPLES_CHECK = "samples_check"
"""In a step's line: the check of the last line of ``samples.jsonl`` at that time."""
BROKEN = "the file is damaged: go on from a copy of the folder, or begin again in another one"


def read_steps(folder: Path) -> tuple[StepRecord, ...]:
    """The steps that a run's folder holds.

    Raises:
        RunFolderError: if a line but the last is damaged, or one is missing.
    """
    return tuple(record for record, _ in _read(folder / STEPS, StepRecord))


def read_samples(folder: Path) -> tuple[SampleRecord, ...]:
    """The sampled responses that a run's folder holds.

    Raises:
        RunFolderError: if a line but the last is damaged, or one is missing.
    """
    read = _read(folder / SAMPLES, SampleRecord)
    checks = {check for _, check in read}
    for step, line in _lines_of_steps(folder):
        expected = line.get(SAMPLES_CHECK)
        if expected and expected not in checks:
            raise RunFolderError(f"{folder / SAMPLES} lacks the responses of step {step}; {BROKEN}")
    return tuple(record for record, _ in read)


def append_step(folder: Path, record: StepRecord, samples: Sequence[Sample]) -> None:
    """Add a step and its samples; when this returns they are on the disk.

    Raises:
        RunFolderError: if they cannot be written.
    """
    try:
        check = _last_check(folder / SAMPLES)
        sample_records = [SampleRecord(step=record.step, sample=sample) for sample in samples]
        if sample_records:
            lines, check = _chained([encode(each) for each in sample_records], check)
            _append(folder / SAMPLES, lines)
        line = {**encode(record), SAMPLES_CHECK: check}
        _append(folder / STEPS, _chained([line], _last_check(folder / STEPS))[0])
    except OSError as error:
        raise cannot_write(folder / STEPS, error) from error


def keep_steps(folder: Path, last: int) -> None:
    """Cut off what lies after step ``last``, and a line that was half written when a run was killed.

    Raises:
        RunFolderError: if a line but the last is damaged, or the files cannot be written.
    """
    steps, samples = read_steps(folder), read_samples(folder)
    by_step: dict[int, str] = {}
    sample_lines: list[bytes] = []
    check = ""
    for record in samples:
        if record.step > last:
            continue
        lines, check = _chained([encode(record)], check)
        sample_lines += lines
        by_step[record.step] = check
    records: list[dict[str, Any]] = []
    check = ""
    for step in steps:
        if step.step <= last:
            check = by_step.get(step.step, check)
            records.append({**encode(step), SAMPLES_CHECK: check})
    # Steps first: lines of samples that no step knows are what a kill leaves between the two.
    for path, lines in ((folder / STEPS, _chained(records, "")[0]), (folder / SAMPLES, sample_lines)):
        if path.exists():
            write_atomically(path, b"".join(lines))


def _lines_of_steps(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    path = folder / STEPS
    lines = [cast("dict[str, Any]", parse_json(line)) for line, _ in _verified_lines(path)]
    return [(at, line) for at, line in enumerate(lines, 1)]


def _read(path: Path, kind: type[T]) -> list[tuple[T, str]]:
    """The records in a file with the checks of their lines."""
    records: list[tuple[T, str]] = []
    for number, (line, check) in enumerate(_verified_lines(path), 1):
        try:
            records.append((decode(kind, parse_json(line)), check))
        except (ValueError, TypeError, KeyError) as error:
            raise RunFolderError(
                f"{path}, line {number}, cannot be read: {error}; mend it or take it out"
            ) from error
    return records


def _verified_lines(path: Path) -> list[tuple[bytes, str]]:
    """The complete lines of a file, each with its chained hash; in files of an older kleash the hash is "".

    Raises:
        RunFolderError: if the file cannot be read, or the hash of a line does not match the lines up to it.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}") from error
    whole, _, _ = content.rpartition(b"\n")  # what has no line break after it was half written
    lines = whole.split(b"\n") if whole else []
    matches = [(line, CHECK.search(line)) for line in lines if line]
    if not any(match for _, match in matches) and not declares_checksums(path.parent):
        return [(line, "") for line, _ in matches]
    before = ""
    verified: list[tuple[bytes, str]] = []
    for number, (line, match) in enumerate(matches, 1):
        check = "" if match is None else match[1].decode()
        if match is None or check != _check_of(line[: match.start()] + b"}", before):
            raise RunFolderError(f"{path}, line {number}, cannot be read: its check does not fit; {BROKEN}")
        verified.append((line, check))
        before = check
    return verified


def _chained(records: Iterable[Any], before: str) -> tuple[list[bytes], str]:
    """The lines of encoded records that follow a line with the check ``before``, and the last one's check."""
    lines: list[bytes] = []
    for record in records:
        text = json.dumps(record, allow_nan=False, ensure_ascii=False)
        body = text.encode("utf-8", "backslashreplace")
        before = _check_of(body, before)
        lines.append(body[:-1] + f', "check": "{before}"}}\n'.encode())
    return lines, before


def _check_of(body: bytes, before: str) -> str:
    return sha256(before.encode() + body).hexdigest()[:16]


def _last_check(path: Path) -> str:
    """The check of a file's last line; "" if it has none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - CHECK_BYTES))
        match = CHECK.search(file.read().removesuffix(b"\n"))
    return "" if match is None else match[1].decode()


def _append(path: Path, lines: Sequence[bytes]) -> None:
    try:
        with path.open("ab") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from error
