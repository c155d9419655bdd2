"""The numbers of ``kleash mismatch``: from files of rollouts to statistics with errors."""

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import PurePath

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.diagnosis.rollout_files import note_on_one_sided_files, read_rollout_files
from kleash.diagnosis.rollout_records import PaddedRollouts, padded
from kleash.diagnosis.token_table import decimals_error
from kleash.jobs.reading_jobs import MismatchJob
from kleash.leash import Mismatch, mismatch
from kleash.leash.engine_mismatch import are_columns_equal
from kleash.reports.gate_verdicts import gate_of_number
from kleash.store import MismatchRecord
from kleash.store.file_hashes import require_unchanged_files, watching_files
from kleash.uncertainty import Estimate
from kleash.uncertainty.student_t import student_t_quantile
from kleash.version import __version__


@watching_files()
def measure_mismatch(
    files: str | PurePath | Sequence[str | PurePath],
    *,
    names: str | None = None,
    at_most: float | None = None,
) -> MismatchRecord:
    """Measure the mismatch between trainer and engine on the rollouts of one or several files.

    Args:
        files: a file, a folder, several of them, or "-" for standard input: see ``read_rollouts``.
        names: "verl" for ``renamed`` metrics in verl's names.
        at_most: a limit in nats for KL(engine || trainer) per token, which makes the record's ``gate``.

    Raises:
        SourceError: if a file cannot be read, or no token counts.
        OptionError: if ``names`` is unknown, or the limit is not a number of at least 0.
        ChangedInputError: if a file is written to meanwhile.
    """
    MismatchJob(rollouts=(), names=names, at_most=at_most)  # which checks them
    read = read_rollout_files(files)
    columns = padded(read.rollouts)
    measured = mismatch(columns.trainer, columns.engine, columns.is_counted, prompts=columns.prompts)
    kl, noise_floor = measured.kl_engine_trainer, _noise_floor_of_decimals(columns)
    gate = None
    if at_most is not None:
        gate = gate_of_number(
            "kl_engine_trainer",
            kl,
            at_most=at_most,
            noise_floor=noise_floor,
            clusters=kl.clusters,
            tokens=measured.tokens,
        )
    by_file = read.kl_by_file()
    require_unchanged_files()
    numbers = {field.name: getattr(measured, field.name) for field in fields(Mismatch)}
    return MismatchRecord(
        kleash=__version__,
        file=read.name,
        files=read.sizes,
        tokens=measured.tokens,
        sequences=measured.sequences,
        prompts=kl.clusters,
        numbers={name: value for name, value in numbers.items() if isinstance(value, Estimate)},
        values={
            **{name: numbers[name] for name in PLAIN_NUMBERS},
            **{f"over_sequences.{name}": value for name, value in measured.over_sequences._asdict().items()},
            **{f"probabilities.{name}": value for name, value in measured.probabilities._asdict().items()},
        },
        renamed={} if names is None else measured.renamed(names),
        kl_by_file=by_file,
        notes=(
            *read.notes,
            *note_on_one_sided_files(by_file),
            *_notes(columns, noise_floor, measured.mean_weight),
        ),
        gate=gate,
    )


PLAIN_NUMBERS = ("effective_sample_size", "effective_sequences", "largest_log_ratio", "ruled_out")
"""Numbers without an error."""
CLEAR_PROBABILITY, SMALLEST_BIAS = 0.9999997, 0.01
"""How far the mean weight is from 1 where a note is made: beyond the quantile of Student's t of this probability, five
standard errors of many clusters, and in itself."""


def _noise_floor_of_decimals(columns: PaddedRollouts) -> float | None:
    """The largest KL per token, in nats, that comes from writing the columns with few decimals; None with more.

    Rounding to steps of s nats moves a log-probability by up to s/2, and a difference of two of them by the sum; the KL
    of a difference u is about u^2 / 2.
    """
    sides = (column[columns.is_counted].numpy() for column in (columns.trainer, columns.engine))
    largest = sum(math.sqrt(12) * decimals_error(side) / 2 for side in sides)
    return largest**2 / 2 or None


def note_on_equal_columns(trainer: Float[Tensor, "tokens"], engine: Float[Tensor, "tokens"]) -> list[str]:
    """What equal columns may mean; nothing of others."""
    if not (len(trainer) and torch.equal(trainer, engine)):
        return []
    if not are_columns_equal(trainer, engine):
        return [
            f"both columns are {trainer[0]:g} at all {len(trainer)} tokens, as columns that were not filled in"
        ]
    return [
        (
            f"both columns are equal bit for bit at all {len(trainer)} tokens: either one computation gives the "
            "log-probabilities of both sides, or one column is a copy of the other, as where training takes the "
            "engine's values for its own (verl's bypass_mode)"
        )
    ]


def _notes(columns: PaddedRollouts, noise_floor: float | None, weight: Estimate) -> list[str]:
    """What a reader of the numbers should know of the columns: what they cannot show, and that they disagree."""
    notes = note_on_equal_columns(*(x[columns.is_counted] for x in (columns.trainer, columns.engine)))
    if noise_floor is not None:
        notes.append(
            f"the log-probabilities are written with few decimals, which alone makes a KL of up to {noise_floor:.1g} "
            "nats per token, the noise floor of the gate; write at least 6 decimals"
        )
    bias = abs(weight.value - 1)
    # of one cluster no error is known
    error = weight.standard_error * student_t_quantile(CLEAR_PROBABILITY, max(1, weight.clusters - 1))
    if bias > SMALLEST_BIAS and bias > error:
        notes.append(
            f"the mean weight is {weight.value:.3g}; it is 1 if both columns are log-probabilities of the same tokens, "
            "and neither is truncated or at another temperature: kleash doctor names the likely cause"
        )
    return notes
