"""The numbers of ``kleash mismatch``: from files of rollouts to statistics with errors."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import PurePath

from kleash.diagnosis.rollout_files import note_on_one_sided_files, read_rollout_files
from kleash.diagnosis.rollout_records import padded
from kleash.jobs.option_groups import require_limit, require_word
from kleash.jobs.rollout_jobs import METRIC_NAMES
from kleash.leash import Mismatch, mismatch
from kleash.reports.gate_verdicts import gate_of_number
from kleash.store import MismatchRecord, Number
from kleash.uncertainty import Estimate
from kleash.version import __version__


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
    """
    require_limit(at_most)
    if names is not None:
        require_word("--names", names, METRIC_NAMES)
    read = read_rollout_files(files)
    columns = padded(read.rollouts)
    measured = mismatch(columns.trainer, columns.engine, columns.is_counted, prompts=columns.prompts)
    kl = measured.kl_engine_trainer
    gate = None
    if at_most is not None:
        gate = gate_of_number(
            "kl_engine_trainer",
            Number.of(kl),
            at_most=at_most,
            noise_floor=None,
            clusters=kl.clusters,
            tokens=measured.tokens,
        )
    by_file = read.kl_by_file()
    return MismatchRecord(
        kleash=__version__,
        file=read.name,
        files=read.sizes,
        tokens=measured.tokens,
        sequences=measured.sequences,
        prompts=kl.clusters,
        numbers={
            field.name: Number.of(value)
            for field in fields(Mismatch)
            if isinstance(value := getattr(measured, field.name), Estimate)
        },
        values=_values(measured),
        renamed={} if names is None else measured.renamed(names),
        kl_by_file=by_file,
        notes=(*read.notes, *note_on_one_sided_files(by_file), *_note_on_mean_weight(measured.mean_weight)),
        gate=gate,
    )


CLEAR_STANDARD_ERRORS, SMALLEST_BIAS = 5.0, 0.01
"""How far the mean weight is from 1 where a note is made: in standard errors, and in itself."""


def _note_on_mean_weight(weight: Estimate) -> list[str]:
    """A note if the columns are not log-probabilities of the same tokens under two similar distributions."""
    bias = abs(weight.value - 1)
    if not bias > max(SMALLEST_BIAS, CLEAR_STANDARD_ERRORS * weight.standard_error):
        return []
    note = (
        f"the mean weight is {weight.value:.3g}; it is 1 if both columns are log-probabilities of the same tokens, and "
        "neither is truncated or at another temperature: kleash doctor names the likely cause"
    )
    return [note]


def _values(measured: Mismatch) -> dict[str, float]:
    """The statistics without an error, by name."""
    return {
        "effective_sample_size": measured.effective_sample_size,
        "effective_sequences": measured.effective_sequences,
        "largest_log_ratio": measured.largest_log_ratio,
        "ruled_out": measured.ruled_out,
        **{f"over_sequences.{name}": value for name, value in measured.over_sequences._asdict().items()},
        **{f"probabilities.{name}": value for name, value in measured.probabilities._asdict().items()},
    }
