"""The whole study, and its tables as text."""

import math
from pathlib import Path

from estimator_study.markov import LOGIT_NOISE, markov_case
from estimator_study.normals import SHIFTS, noise_crossing, normal_case
from estimator_study.positions import position_cases
from estimator_study.results import EstimatorRow, GaussianFit, Study, StudyCase
from estimator_study.samples import measured_case
from estimator_study.two_modes import two_mode_cases, two_modes
from kleash import __version__
from kleash.records import Number
from kleash.reports.formatting import UNKNOWN, format_value, typographic

Cells = tuple[str, ...]
HEADER = ("Estimator", "Mean, nats", "Bias / KL", "SD / KL", "Below 0", "Gradient error")
FIT_HEADER = ("Gaussian", "Mean", "SD", "KL(fit ‖ target)", "KL(target ‖ fit)")
ROUNDING = 1e-9
"""Relative to the KL: a smaller bias is rounding."""


def estimator_study(run: Path | None = None) -> Study:
    """Bias, standard deviation, negative values and gradient of every estimator of KL(p || q), case by case.

    By enumeration, quadrature or dynamic programming wherever that is possible, so that most numbers are
    exact; what was sampled carries its error. Takes a few seconds.

    Args:
        run: a folder of ``kleash measure``, to add the estimators on your own models.

    Raises:
        RunFolderError: if ``run`` is no finished run.
        OptionError: if no average over its tokens estimates the KL.
    """
    measured = () if run is None else (measured_case(run),)
    fits = two_modes()
    cases = (
        *(normal_case(shift) for shift in SHIFTS),
        *position_cases(),
        *(markov_case(noise) for noise in LOGIT_NOISE),
        *two_mode_cases(fits),
        *measured,
    )
    return Study(kleash=__version__, cases=cases, noise_crossing=noise_crossing(), two_modes=fits)


def tables_of(study: Study) -> list[tuple[str, Cells, list[Cells], Cells]]:
    """Title, header, rows and notes of each table."""
    tables = [
        (
            f"{case.title}: KL {case.kl.value:.4g} nats",
            HEADER,
            [row_cells(case, row) for row in case.rows],
            case.notes,
        )
        for case in study.cases
    ]
    fits = study.two_modes
    rows = [fit_cells(fit) for fit in (fits.start, *fits.projections, *fits.descents)]
    return [*tables, ("One Gaussian for two modes: where each estimator leads", FIT_HEADER, rows, ())]


def markdown(study: Study) -> str:
    """Every table as Markdown: the tables of README.md."""
    parts: list[str] = []
    for title, header, rows, notes in tables_of(study):
        lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        text = "; ".join(notes)
        parts.append(f"### {title}\n\n{table}" + (f"\n\n{text[:1].upper()}{text[1:]}." if text else ""))
    return "\n\n".join(parts)


def row_cells(case: StudyCase, row: EstimatorRow) -> tuple[str, ...]:
    """An estimator's line in the table of a case, as text."""
    kl = case.kl.value
    return (
        row.name,
        _with_error(row.value, 1.0, ""),
        _with_error(row.bias, 100 / kl, " %", rounding=100 * ROUNDING),
        _with_error(row.standard_deviation, 1 / kl, ""),
        _with_error(row.negative_share, 100.0, " %"),
        UNKNOWN if row.gradient_error is None else _share(row.gradient_error),
    )


def fit_cells(fit: GaussianFit) -> tuple[str, ...]:
    """The row of a fit, as text."""
    numbers = (fit.mean, fit.standard_deviation, fit.kl_fit_target, fit.kl_target_fit)
    return (fit.name, *(format_value(number) for number in numbers))


def _with_error(number: Number, scale: float, unit: str, *, rounding: float = 0.0) -> str:
    """A scaled number: with four digits where it is exact, with its standard error where it was sampled."""
    if number.standard_error == 0:
        value = scale * number.value
        return "0" if abs(value) <= rounding else format_value(value, 4) + unit
    value, error = scale * number.value, scale * number.standard_error
    if not (math.isfinite(value) and math.isfinite(error)):
        return format_value(value, 4) + unit
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{typographic(f'{value:.{digits}f}')} ± {error:.{digits}f}{unit}"


def _share(value: float) -> str:
    return "0" if value < ROUNDING else f"{format_value(100 * value, 3)} %"
