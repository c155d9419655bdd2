"""The steps of a training run as they lie on disk: a line each, that is there whole or is not read."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kleash.errors import RunFolderError
from kleash.records.atomic import cannot_write, write_atomically
from kleash.records.codec import decode, encode

STEPS, SAMPLES = "steps.jsonl", "samples.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepWarning:
    """Something in a run that looks like reward hacking."""

    kind: str
    """A word for it: "far_from_target", "runaway", "entropy_collapse", "repetition", "heavy_tail"."""
    sentence: str
    """What was seen, with its numbers."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A line of ``steps.jsonl``."""

    step: int
    """From 1."""
    metrics: Mapping[str, float]
    """By kleash's names; ``METRICS`` says what they are."""
    events: tuple[str, ...] = ()
    """What else happened: beta was bounded, the updates were ended early."""
    warnings: tuple[StepWarning, ...] = ()
    """What the watch said."""


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


def read_steps(folder: Path) -> tuple[StepRecord, ...]:
    """The steps that a run's folder holds.

    Raises:
        RunFolderError: if a line but the last is damaged.
    """
    return tuple(_read(folder / STEPS, StepRecord))


def read_samples(folder: Path) -> tuple[SampleRecord, ...]:
    """The sampled responses that a run's folder holds.

    Raises:
        RunFolderError: if a line but the last is damaged.
    """
    return tuple(_read(folder / SAMPLES, SampleRecord))


def append_step(folder: Path, record: StepRecord, samples: Sequence[Sample]) -> None:
    """Add a step and its samples; when this returns they are on the disk.

    Raises:
        RunFolderError: if they cannot be written.
    """
    kept = [SampleRecord(step=record.step, sample=sample) for sample in samples]
    if kept:
        _append(folder / SAMPLES, kept)
    _append(folder / STEPS, [record])


def keep_steps(folder: Path, last: int) -> None:
    """Cut off what lies after step ``last``, and a line that was half written when a run was killed.

    Raises:
        RunFolderError: if a line but the last is damaged, or the files cannot be written.
    """
    for name, kind in ((STEPS, StepRecord), (SAMPLES, SampleRecord)):
        path = folder / name
        if path.exists():
            kept = [_line(record) for record in _read(path, kind) if record.step <= last]
            write_atomically(path, "".join(kept))


def _read(path: Path, kind: type[T]) -> list[T]:
    try:
        text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}") from error
    whole, _, _ = text.rpartition("\n")  # what has no line break after it was half written
    return [_record(path, number, line, kind) for number, line in enumerate(whole.split("\n"), 1) if line]


def _record(path: Path, number: int, line: str, kind: type[T]) -> T:
    try:
        data: Any = json.loads(line)
        return decode(kind, data)
    except (ValueError, TypeError, KeyError) as error:
        raise RunFolderError(
            f"{path}, line {number}, cannot be read: {error}; mend it or take it out"
        ) from error


def _line(record: object) -> str:
    return json.dumps(encode(record), allow_nan=False, ensure_ascii=False) + "\n"


def _append(path: Path, records: Sequence[object]) -> None:
    try:
        with path.open("ab") as file:
            file.write("".join(_line(record) for record in records).encode(errors="replace"))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from error
