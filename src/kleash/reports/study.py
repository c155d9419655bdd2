"""The page of the study: a table and a picture for each case."""

import math
from pathlib import Path

from kleash.records import Number
from kleash.records.study import EstimatorRow, Fit, Study, StudyCase
from kleash.reports.page import write_page
from kleash.reports.study_charts import case_chart, densities_chart, noise_chart
from kleash.reports.words import UNKNOWN, count, plain, threshold, typeset

HEADER = ("Estimator", "Mean, nats", "Bias / KL", "SD / KL", "Below 0", "Gradient error")
FIT_HEADER = ("Gaussian", "Mean", "SD", "KL(fit ‖ target)", "KL(target ‖ fit)")
NOTHING = 1e-9
"""Of the KL: below, a bias is the rounding of a sum."""
GROUPS = (
    ("normals", "Normals", "normals-"),
    ("positions", "Fifty positions", "positions"),
    ("markov", "Sequences", "markov-"),
    ("modes", "Two modes", "two-modes-"),
    ("run", "Your run", "run"),
)
"""Anchor, title, and how the names of a group's cases begin."""


def write_study(path: Path, study: Study) -> Path:
    """Write the page of the study.

    Args:
        path: the HTML file, in a folder that exists.
        study: what was found.

    Returns:
        ``path``.

    Raises:
        RunFolderError: if the page cannot be written.
        MissingExtraError: if Jinja2 or Plotly is not installed.
    """
    groups = [
        (anchor, title, [case for case in study.cases if case.name.startswith(begins)])
        for anchor, title, begins in GROUPS
    ]
    context = {
        "study": study,
        "groups": [group for group in groups if group[2]],
        "header": HEADER,
        "kl_of": lambda case: _with_error(case.kl, 1.0, ""),
        "cells": row_cells,
        "fit_header": FIT_HEADER,
        "fit_cells": fit_cells,
        "charts": {case.name: case_chart(case) for case in study.cases},
        "noise": noise_chart(study.normals),
        "densities": densities_chart(study.two_modes),
        "findings": findings(study),
    }
    return write_page(path, "study.html", context, ("plotly", "charts.js"))


def row_cells(case: StudyCase, row: EstimatorRow) -> tuple[str, ...]:
    """An estimator's line in the table of a case, as text."""
    kl = case.kl.value
    return (
        row.name,
        _with_error(row.value, 1.0, ""),
        _with_error(row.bias, 100 / kl, " %", nothing=100 * NOTHING),
        _with_error(row.spread, 1 / kl, ""),
        _with_error(row.negative, 100.0, " %"),
        UNKNOWN if row.gradient_error is None else _share(row.gradient_error),
    )


def fit_cells(fit: Fit) -> tuple[str, ...]:
    """Where a fit ended, as text."""
    numbers = (fit.mean, fit.standard_deviation, fit.kl_fit_target, fit.kl_target_fit)
    return (fit.name, *(plain(number) for number in numbers))


def _with_error(number: Number, scale: float, unit: str, *, nothing: float = 0.0) -> str:
    """A number in another unit: to four digits where it is exact, with its error where it was measured."""
    if number.standard_error == 0:
        value = scale * number.value
        return "0" if abs(value) <= nothing else plain(value, 4) + unit
    value, error = scale * number.value, scale * number.standard_error
    if not (math.isfinite(value) and math.isfinite(error)):
        return plain(value, 4) + unit
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{typeset(f'{value:.{digits}f}')} ± {error:.{digits}f}{unit}"


def _share(value: float) -> str:
    return "0" if value < NOTHING else f"{plain(100 * value, 3)} %"


def findings(study: Study) -> list[str]:
    """What the study shows, in sentences with its own numbers."""
    near, far = study.case("normals-0.1"), study.case("normals-3")
    sequences = [case for case in study.cases if case.name.startswith("markov-")]
    ratios = [(case.row("k1").spread.value / case.row("exact").spread.value) ** 2 for case in sequences]
    ends = {fit.name: fit for fit in study.two_modes.followed}
    missed = [_share(case.row("exact").gradient_error or 0.0) for case in sequences]
    values = (
        "The mean of k1 and of k3 is the KL. k3 is the less noisy one for close pairs, for normals below a "
        f"KL of {plain(study.normals.crossing)} nats: at {threshold(near.kl.value)} nats a single k3 varies by "
        f"{_times(near, 'k3')} times the KL and a single k1 by {_times(near, 'k1')}; at {threshold(far.kl.value)} nats "
        f"by {_times(far, 'k3')} and {_times(far, 'k1')}."
    )
    biased = (
        f"That of k2 is close where the pair is close ({_biased(near, 'k2')} too large at {threshold(near.kl.value)} "
        f"nats) and wrong where it is not ({_biased(far, 'k2')} at {threshold(far.kl.value)})."
    )
    gradients = (
        "Backpropagated, k1 gives no gradient at all, k2 that of the KL, and k3 that of the other direction: with one "
        f"Gaussian for two modes, k2 ends on one of them (standard deviation {plain(ends['k2'].standard_deviation)}) "
        f"and k3 covers both ({plain(ends['k3'].standard_deviation)})."
    )
    along = (
        f"Along sequences, summing the exact next-token KLs divides the variance of Σ k1 by {round(min(ratios))} to "
        f"{count(round(max(ratios)))}; but no per-token loss sees how a token changes the KL later on, which leaves "
        f"{missed[0]} to {missed[-1]} of the gradient wrong until the future is credited."
    )
    return [values, biased, gradients, along]


def _times(case: StudyCase, name: str) -> str:
    return plain(case.row(name).spread.value / case.kl.value)


def _biased(case: StudyCase, name: str) -> str:
    return f"{plain(100 * case.row(name).bias.value / case.kl.value)} %"
