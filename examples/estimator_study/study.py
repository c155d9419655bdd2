"""The whole study, and its tables as text."""

from pathlib import Path

from estimator_study.markov import LOGIT_NOISE, markov_case
from estimator_study.normals import SHIFTS, noise_curves, normal_case
from estimator_study.page import FIT_HEADER, HEADER, fit_cells, row_cells
from estimator_study.positions import position_cases
from estimator_study.results import Study
from estimator_study.samples import measured_case
from estimator_study.two_modes import two_mode_cases, two_modes
from kleash import __version__

Cells = tuple[str, ...]


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
    return Study(kleash=__version__, cases=cases, normals=noise_curves(), two_modes=fits)


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
