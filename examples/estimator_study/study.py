"""The whole study, and its tables as Markdown."""

from estimator_study.markov import LOGIT_NOISE, markov_case
from estimator_study.normals import SHIFTS, noise_crossing, normal_case
from estimator_study.positions import position_case
from estimator_study.results import EstimatorRow, GaussianFit, Study, StudyCase
from estimator_study.two_modes import two_mode_cases, two_modes
from kleash.reports.formatting import UNKNOWN, format_value

Cells = tuple[str, ...]
HEADER: Cells = ("Estimator", "Mean, nats", "Bias / KL", "SD / KL", "Below 0", "Gradient error")
FIT_HEADER: Cells = ("Gaussian", "Mean", "SD", "KL(fit ‖ target)", "KL(target ‖ fit)")
ROUNDING = 1e-9
"""Relative to the KL: a smaller bias is rounding."""


def estimator_study() -> Study:
    """Bias, standard deviation, negative values and gradient of every estimator of KL(p || q), case by case.

    By enumeration, quadrature or dynamic programming; a few seconds.
    """
    fits = two_modes()
    cases = (
        *(normal_case(shift) for shift in SHIFTS),
        position_case(),
        *(markov_case(noise) for noise in LOGIT_NOISE),
        *two_mode_cases(fits),
    )
    return Study(cases=cases, noise_crossing=noise_crossing(), two_modes=fits)


def markdown(study: Study) -> str:
    """Every table as Markdown: the tables of README.md."""
    fits = study.two_modes
    fit_rows = [fit_cells(fit) for fit in (fits.start, *fits.projections, *fits.descents)]
    tables: list[tuple[str, Cells, list[Cells], Cells]] = [
        (
            f"{case.title}: KL {case.kl:.4g} nats",
            HEADER,
            [row_cells(case, row) for row in case.rows],
            case.notes,
        )
        for case in study.cases
    ]
    tables.append(("One Gaussian for two modes: where each estimator leads", FIT_HEADER, fit_rows, ()))
    parts: list[str] = []
    for title, header, rows, notes in tables:
        lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        text = "; ".join(notes)
        parts.append(f"### {title}\n\n{table}" + (f"\n\n{text[:1].upper()}{text[1:]}." if text else ""))
    return "\n\n".join(parts)


def row_cells(case: StudyCase, row: EstimatorRow) -> Cells:
    """An estimator's line in the table of a case, as text."""
    bias = row.bias / case.kl
    return (
        row.name,
        format_value(row.value, 4),
        "0" if abs(bias) <= ROUNDING else f"{format_value(100 * bias, 4)} %",
        _number(row.standard_deviation / case.kl),
        "0" if row.negative_share == 0 else f"{100 * row.negative_share:.2f} %",
        UNKNOWN if row.gradient_error is None else _share(row.gradient_error),
    )


def fit_cells(fit: GaussianFit) -> Cells:
    """The row of a fit, as text."""
    numbers = (fit.mean, fit.standard_deviation, fit.kl_fit_target, fit.kl_target_fit)
    return (fit.name, *(format_value(number) for number in numbers))


def _number(value: float) -> str:
    return "0" if value == 0 else format_value(value, 4)


def _share(value: float) -> str:
    return "0" if value < ROUNDING else f"{format_value(100 * value, 3)} %"
