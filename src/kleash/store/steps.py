"""The steps of a training run as they lie on disk: a line each, that is there whole or is not read.

After each step the folder's checksums have the total of each file: the size and the SHA-256 of all lines so far. The
files must begin with what the last total says; lines after it are those of a step that a kill interrupted.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from kleash.errors import RunFolderError
from kleash.registry import grouped
from kleash.store.atomic import append_lines, writing
from kleash.store.checksums import Checksums, HashSoFar, is_there, reading, record_checksums, write_checked
from kleash.store.codec import decode, encode, parse_json

STEPS, SAMPLES, PROMPTS = "steps.jsonl", "samples.jsonl", "prompts.jsonl"


@dataclass(frozen=True, kw_only=True)
class HackingAlert:
    """Something in a run that looks like reward hacking."""

    kind: str
    """A word for it: "update_too_large", "far_from_target", "below_target", "runaway", "held_out_fell", "no_signal",
    "entropy_collapse", "prompt_runaway", "repetition"."""
    sentence: str
    """What was seen, with its numbers; what is likely; and the option to change."""
    acts: bool = True
    """Whether the job's ``on_hacking`` response applies to it; if not, it is only reported."""


@dataclass(frozen=True, kw_only=True)
class LineRecord:
    """A line of a file."""

    step: int
    """From 1."""


@dataclass(frozen=True, kw_only=True)
class StepRecord(LineRecord):
    """A line of ``steps.jsonl``."""

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
class SampleRecord(LineRecord):
    """A line of ``samples.jsonl``: a response of a step."""

    sample: Sample


@dataclass(frozen=True, kw_only=True)
class PromptRecord(LineRecord):
    """A line of ``prompts.jsonl``: what a step measured on each prompt, by which runs are compared in pairs."""

    means: Mapping[str, Mapping[str, float]]
    """Metric -> hash of a prompt's text -> mean over the responses to it that have the number."""


T = TypeVar("T", bound=LineRecord)

BROKEN = "go on from a copy of the folder, or begin again in another one"


def read_steps(folder: Path | str) -> tuple[StepRecord, ...]:
    """The steps that a run's folder holds.

    Raises:
        RunFolderError: if a line but the last is damaged, or one is missing.
    """
    return tuple(_decoded(Path(folder) / STEPS, StepRecord))


def read_samples(folder: Path | str) -> tuple[SampleRecord, ...]:
    """The sampled responses that a run's folder holds.

    Raises:
        RunFolderError: if a line but the last is damaged, or one is missing.
    """
    return tuple(_decoded(Path(folder) / SAMPLES, SampleRecord))


def read_prompt_means(folder: Path | str) -> Iterator[PromptRecord]:
    """Iterate over the means by prompt that a run's folder holds, which are many numbers in a long run.

    Raises:
        RunFolderError: if a line but the last is damaged, or one is missing.
    """
    return _decoded(Path(folder) / PROMPTS, PromptRecord)


def means_by_prompt(samples: Sequence[Sample], held_out: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Metric -> hash of the prompt -> mean, of a step's responses and of those to held-out prompts.

    A response without a reward, or without a KL, does not count to its mean.
    """
    numbers = {
        "reward/score": [(each.prompt, each.reward) for each in samples],
        "kl/exact_per_sequence": [(each.prompt, each.kl) for each in samples],
        "eval/reward": [(each.prompt, each.reward) for each in held_out],
        "eval/kl_per_sequence": [(each.prompt, each.kl) for each in held_out],
    }
    by_prompt = {
        metric: grouped(
            (sha256(prompt.encode("utf-8", "backslashreplace")).hexdigest()[:16], value)
            for prompt, value in pairs
            if not math.isnan(value)
        )
        for metric, pairs in numbers.items()
    }
    return {
        metric: {prompt: fmean(each) for prompt, each in values.items()}
        for metric, values in by_prompt.items()
        if values
    }


def held_out(history: Sequence[StepRecord]) -> dict[str, float]:
    """The metrics of the last evaluation on held-out prompts or pairs; empty if there was none."""
    evaluations = (
        {name: value for name, value in record.metrics.items() if name.startswith("eval/")}
        for record in reversed(history)
    )
    return next(filter(None, evaluations), dict[str, float]())


def append_step(
    folder: Path,
    record: StepRecord,
    samples: Sequence[Sample],
    means: Mapping[str, Mapping[str, float]] | None = None,
    hashes: dict[str, HashSoFar] | None = None,
) -> None:
    """Add a step, some of its responses and its means by prompt; when this returns they are on the disk.

    Args:
        folder: of the run.
        record: the step.
        samples: the responses.
        means: metric -> hash of a prompt's text -> mean.
        hashes: as in ``record_checksums``; None to read the files again.

    Raises:
        RunFolderError: if they cannot be written.
    """
    records: dict[str, list[LineRecord]] = {
        SAMPLES: [SampleRecord(step=record.step, sample=sample) for sample in samples],
        PROMPTS: [PromptRecord(step=record.step, means=means)] if means else [],
        STEPS: [record],  # last: with its line the step is there
    }
    files = {folder / name: each for name, each in records.items() if each}
    with writing(folder / STEPS):
        for path, lines in files.items():
            append_lines(
                path, [json.dumps(encode(each), allow_nan=False, ensure_ascii=False) for each in lines]
            )
        record_checksums(folder, *files, hashes={} if hashes is None else hashes)


def keep_steps(folder: Path, last: int) -> None:
    """Cut off what lies after step ``last``, and a line that was half written when a run was killed.

    After step 0, nothing is left: a run that begins again is evaluated again before its first step.

    Raises:
        RunFolderError: if a line but the last is damaged, or the files cannot be written.
    """
    for path in (folder / STEPS, folder / SAMPLES, folder / PROMPTS):
        if path.exists():
            lines = zip(_lines(path), _decoded(path, LineRecord), strict=True)
            write_checked(folder, path, b"".join(line for line, record in lines if record.step <= last > 0))


def _decoded(path: Path, kind: type[T]) -> Iterator[T]:
    """Iterate over the records in a file."""
    for number, line in enumerate(_lines(path.expanduser()), 1):
        try:
            yield decode(kind, parse_json(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunFolderError(f"{path}, line {number}, cannot be read: {error}; {BROKEN}") from error


def _lines(path: Path) -> list[bytes]:
    """The complete lines of a file, with their line breaks.

    Raises:
        RunFolderError: if the file cannot be read, or does not begin with the lines that were written.
    """
    checksums = Checksums.read(path.parent)
    with reading(path, BROKEN):
        content = path.read_bytes() if is_there(path) or checksums.expects(path) else b""
    checksums.require_beginning(path, content, BROKEN)
    return [line + b"\n" for line in content.split(b"\n")[:-1]]
