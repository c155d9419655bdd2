"""The page of the study: a table and a chart for each case."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from estimator_study.results import EstimatorRow, GaussianFit, NoiseCurves, Study, StudyCase, TwoModes
from kleash.records import Number
from kleash.reports.drawing import (
    ACCENT,
    BAND,
    INK,
    MUTED,
    Chart,
    dots,
    line,
    log_axis,
    name_axes,
    name_rows,
    row_height,
)
from kleash.reports.formatting import UNKNOWN, format_count, format_threshold, format_value, typographic
from kleash.reports.page import write_page

HEADER = ("Estimator", "Mean, nats", "Bias / KL", "SD / KL", "Below 0", "Gradient error")
FIT_HEADER = ("Gaussian", "Mean", "SD", "KL(fit ‖ target)", "KL(target ‖ fit)")
ROUNDING = 1e-9
"""Relative to the KL: a smaller bias is rounding."""
TEMPLATES = Path(__file__).parent / "templates"
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
        study: the results.

    Returns:
        ``path``.

    Raises:
        RunFolderError: if the page cannot be written.
        MissingExtraError: if Jinja2 or Matplotlib is not installed.
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
    return write_page(path, "study.html", context, templates=TEMPLATES)


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


def findings(study: Study) -> list[str]:
    """The results of the study in sentences, with its own numbers."""
    near, far = study.case("normals-0.1"), study.case("normals-3")
    sequences = [case for case in study.cases if case.name.startswith("markov-")]
    ratios = [
        (case.row("k1").standard_deviation.value / case.row("exact").standard_deviation.value) ** 2
        for case in sequences
    ]
    fits = {fit.name: fit for fit in study.two_modes.descents}
    gradient_errors = [_share(case.row("exact").gradient_error or 0.0) for case in sequences]
    values = (
        "The mean of k1 and of k3 is the KL. k3 is the less noisy one for close pairs, for normals below a "
        f"KL of {format_value(study.normals.crossing)} nats: at {format_threshold(near.kl.value)} nats a single k3 "
        "varies by "
        f"{_times(near, 'k3')} times the KL and a single k1 by {_times(near, 'k1')}; at "
        f"{format_threshold(far.kl.value)} nats "
        f"by {_times(far, 'k3')} and {_times(far, 'k1')}."
    )
    biased = (
        f"That of k2 is close where the pair is close ({_biased(near, 'k2')} too large at "
        f"{format_threshold(near.kl.value)} "
        f"nats) and wrong where it is not ({_biased(far, 'k2')} at {format_threshold(far.kl.value)})."
    )
    gradients = (
        "Backpropagated, k1 gives no gradient at all, k2 that of the KL, and k3 that of the other direction: with one "
        f"Gaussian for two modes, k2 ends on one of them (standard deviation "
        f"{format_value(fits['k2'].standard_deviation)}) "
        f"and k3 covers both ({format_value(fits['k3'].standard_deviation)})."
    )
    along = (
        f"Along sequences, summing the exact next-token KLs divides the variance of Σ k1 by {round(min(ratios))} to "
        f"{format_count(round(max(ratios)))}; but no per-token loss sees how a token changes the KL later on, which "
        "leaves "
        f"{gradient_errors[0]} to {gradient_errors[-1]} of the gradient wrong until the future is credited."
    )
    return [values, biased, gradients, along]


def _times(case: StudyCase, name: str) -> str:
    return format_value(case.row(name).standard_deviation.value / case.kl.value)


def _biased(case: StudyCase, name: str) -> str:
    return f"{format_value(100 * case.row(name).bias.value / case.kl.value)} %"


LARGEST_DEVIATION = 30.0
"""In multiples of the KL: larger standard deviations are cut off, so that the others can be seen."""


def noise_chart(curves: NoiseCurves) -> Chart:
    """Standard deviation of one sample over the KL, as the KL grows."""
    every = max(1, len(curves.kl) // 12)
    return Chart(
        name="noise",
        title="How noisy one draw is, as the two move apart",
        panels=(partial(_draw_noise, curves=curves),),
        height=3.2,
        description=f"k3 varies less than k1 below {format_value(curves.crossing)} nats (dotted), and more above; its "
        "standard deviation then grows like the exponential of the KL.",
        header=("KL, nats", *curves.relative_deviation),
        rows=tuple(
            (
                format_value(kl),
                *(format_value(deviations[index]) for deviations in curves.relative_deviation.values()),
            )
            for index, kl in enumerate(curves.kl)
            if index % every == 0
        ),
    )


def _draw_noise(axes: Any, *, curves: NoiseCurves) -> None:
    """Draw a curve for each estimator, and a line where k1 and k3 are equally noisy."""
    styles = {"k1": (INK, "--"), "k2": (MUTED, "-"), "k3": (ACCENT, "-")}
    for name, deviations in curves.relative_deviation.items():
        color, dash = styles[name]
        line(axes, curves.kl, deviations, color=color, label=name, linestyle=dash)
    axes.axvline(curves.crossing, color=MUTED, linewidth=1, linestyle=":")
    log_axis(axes, "x", curves.kl)
    log_axis(axes, "y", (0.4, 80.0))
    name_axes(axes, "KL between two normals, nats", "standard deviation, multiples of the KL")


def case_chart(case: StudyCase) -> Chart:
    """Mean and standard deviation of a single estimate of each kind, in multiples of the KL."""
    kl = case.kl.value
    estimates = [_one_estimate(row.value.value / kl, row.standard_deviation.value / kl) for row in case.rows]
    names = [row.name for row in case.rows]
    ends = [end for number in estimates if number.standard_error <= LARGEST_DEVIATION for end in number.ci95]
    margin = 0.06 * (max(ends) - min(ends))
    cut_off = [
        row.name
        for row, number in zip(case.rows, estimates, strict=True)
        if number.standard_error > LARGEST_DEVIATION
    ]
    noisiest = max(case.rows, key=lambda row: row.standard_deviation.value)
    left_out = f" The standard deviation of {' and '.join(cut_off)} is cut off." if cut_off else ""
    return Chart(
        name=f"chart-{case.name}",
        title=f"One estimate: {case.title}",
        panels=(
            partial(
                _draw_case, estimates=estimates, names=names, limits=(min(ends) - margin, max(ends) + margin)
            ),
        ),
        height=row_height(len(names)),
        description="One estimate: its mean (dot) and one standard deviation to both sides, in multiples of the KL "
        f"(line). {noisiest.name} is the noisiest, at {format_value(noisiest.standard_deviation.value / kl)} times "
        "the KL."
        f"{left_out}",
        header=("Estimator", "Mean, KLs", "Standard deviation, KLs"),
        rows=tuple(
            (name, format_value(number.value, 4), format_value(number.standard_error, 4))
            for name, number in zip(names, estimates, strict=True)
        ),
    )


def _draw_case(
    axes: Any, *, estimates: Sequence[Number], names: Sequence[str], limits: tuple[float, float]
) -> None:
    """Draw a row for each estimator, and a line at the KL."""
    axes.axvline(1, color=MUTED, linewidth=1)
    dots(axes, zip(estimates, range(len(estimates)), strict=True), horizontal=True)
    name_rows(axes, names)
    axes.set_xlim(*limits)
    name_axes(axes, "multiples of the KL", "")


def _one_estimate(mean: float, deviation: float) -> Number:
    return Number(
        value=mean, unit="none", standard_error=deviation, ci95=(mean - deviation, mean + deviation)
    )


def densities_chart(fits: TwoModes) -> Chart:
    """The target, and the Gaussian that minimises each direction of the KL."""
    covering, seeking = fits.projections
    gaussians = (fits.start, *fits.projections)
    return Chart(
        name="densities",
        title="One Gaussian for two modes",
        panels=(partial(_draw_densities, fits=fits),),
        height=3.4,
        description="Averaging over the target covers both modes (mean "
        f"{format_value(covering.mean)}, standard deviation {format_value(covering.standard_deviation)}); "
        f"averaging over the fit seeks one (mean {format_value(seeking.mean)}, "
        f"standard deviation {format_value(seeking.standard_deviation)}).",
        header=("Gaussian", "Mean", "Standard deviation"),
        rows=tuple(
            (fit.name, format_value(fit.mean), format_value(fit.standard_deviation)) for fit in gaussians
        ),
    )


def _draw_densities(axes: Any, *, fits: TwoModes) -> None:
    """Draw the target as an area, and the Gaussians as curves."""
    axes.fill_between(fits.x, fits.target, color=BAND, linewidth=0, label="target")
    styles = ((MUTED, ":"), (INK, "--"), (ACCENT, "-"))
    for fit, (color, dash) in zip((fits.start, *fits.projections), styles, strict=True):
        line(axes, fits.x, fit.density, color=color, label=fit.name, linestyle=dash)
    axes.set_ylim(bottom=0)
    name_axes(axes, "x", "density")
