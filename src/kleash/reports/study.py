"""The page of the study: a table and a picture for each case."""

import math
from pathlib import Path

from kleash.records import Number
from kleash.records.study import EstimatorRow, Fit, SpreadCurves, Study, StudyCase, TwoModes
from kleash.reports.figures import ACCENT, ACCENT_BAND, INK, MUTED, Chart, dots, figure, rows_of
from kleash.reports.formatting import UNKNOWN, count, plain, threshold, typeset
from kleash.reports.measurement_charts import decades
from kleash.reports.page import write_page

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


IN_SIGHT = 30.0
"""Standard deviations beyond so many KLs leave the picture, so that the others can be seen in it."""


def noise_chart(curves: SpreadCurves) -> Chart:
    """Standard deviation of one draw over the KL, as the KL grows."""
    styles = {"k1": (INK, "dash"), "k2": (MUTED, "solid"), "k3": (ACCENT, "solid")}
    data = [
        _line(curves.kl, spread, name, color=styles[name][0], dash=styles[name][1])
        for name, spread in curves.spread.items()
    ]
    known = [value for spread in curves.spread.values() for value in spread if value < 100]
    at = {"type": "line", "x0": curves.crossing, "x1": curves.crossing, "y0": 0, "y1": 1, "yref": "paper"}
    every = max(1, len(curves.kl) // 12)
    return Chart(
        name="noise",
        title="How noisy one draw is, as the two move apart",
        figure=figure(
            data,
            height=380,
            x="KL between two normals, nats",
            y="standard deviation, KLs",
            xaxis=decades(curves.kl),
            yaxis={**decades(known), "range": [-0.5, 2]},
            showlegend=True,
            shapes=[{**at, "layer": "below", "line": {"color": MUTED, "width": 1, "dash": "dot"}}],
        ),
        described=f"k3 varies less than k1 below {plain(curves.crossing)} nats (dotted), and more above; its "
        "standard deviation then grows like the exponential of the KL.",
        header=("KL, nats", *curves.spread),
        rows=tuple(
            (plain(kl), *(plain(spread[place]) for spread in curves.spread.values()))
            for place, kl in enumerate(curves.kl)
            if place % every == 0
        ),
    )


def case_chart(case: StudyCase) -> Chart:
    """A single estimate of each kind: its mean, and one standard deviation to both sides, in KLs."""
    kl = case.kl.value
    shown = [_one_estimate(row.value.value / kl, row.spread.value / kl) for row in case.rows]
    names = [row.name for row in case.rows]
    ends = [end for number in shown if number.standard_error <= IN_SIGHT for end in number.ci95]
    margin = 0.06 * (max(ends) - min(ends))
    beyond = [
        row.name for row, number in zip(case.rows, shown, strict=True) if number.standard_error > IN_SIGHT
    ]
    line = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    noisiest = max(case.rows, key=lambda row: row.spread.value)
    left_out = f" The standard deviation of {' and '.join(beyond)} leaves the picture." if beyond else ""
    return Chart(
        name=f"chart-{case.name}",
        title=f"One estimate: {case.title}",
        figure=figure(
            [dots(shown, range(len(shown)), name="mean ± one standard deviation", across=True, text=names)],
            height=70 + 34 * len(names),
            x="multiples of the KL",
            y="estimator",
            xaxis={"range": [min(ends) - margin, max(ends) + margin], "nticks": 7},
            yaxis=rows_of(names),
            shapes=[{**line, "line": {"color": MUTED, "width": 1}}],
        ),
        described="One estimate: its mean (dot) and one standard deviation to both sides, in multiples of the KL "
        f"(line). {noisiest.name} is the noisiest, at {plain(noisiest.spread.value / kl)} times the KL.{left_out}",
        header=("Estimator", "Mean, KLs", "Standard deviation, KLs"),
        rows=tuple(
            (name, plain(number.value, 4), plain(number.standard_error, 4))
            for name, number in zip(names, shown, strict=True)
        ),
    )


def _one_estimate(mean: float, spread: float) -> Number:
    return Number(value=mean, unit="none", standard_error=spread, ci95=(mean - spread, mean + spread))


def densities_chart(found: TwoModes) -> Chart:
    """The target, and the Gaussians that imitate it in either direction."""
    covering, seeking = found.projections
    area = {
        "type": "scatter",
        "mode": "lines",
        "name": "target",
        "x": list(found.x),
        "y": list(found.target),
        "fill": "tozeroy",
        "fillcolor": ACCENT_BAND,
        "line": {"color": MUTED, "width": 1},
        "hoverinfo": "skip",
    }
    data = [
        area,
        _density(found, found.start, MUTED, "dot"),
        _density(found, covering, INK, "dash"),
        _density(found, seeking, ACCENT, "solid"),
    ]
    fits = (found.start, *found.projections)
    return Chart(
        name="densities",
        title="One Gaussian for two modes",
        figure=figure(data, height=400, x="x", y="density", yaxis={"rangemode": "tozero"}, showlegend=True),
        described=f"Averaging over the target covers both modes (mean {plain(covering.mean)}, standard deviation "
        f"{plain(covering.standard_deviation)}); averaging over the fit seeks one (mean {plain(seeking.mean)}, "
        f"standard deviation {plain(seeking.standard_deviation)}).",
        header=("Gaussian", "Mean", "Standard deviation"),
        rows=tuple((fit.name, plain(fit.mean), plain(fit.standard_deviation)) for fit in fits),
    )


def _density(found: TwoModes, fit: Fit, color: str, dash: str) -> dict[str, object]:
    return _line(found.x, fit.density, fit.name, color=color, dash=dash)


def _line(
    x: tuple[float, ...], y: tuple[float, ...], name: str, *, color: str, dash: str
) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": color, "width": 2, "dash": dash},
        "hovertemplate": f"%{{x:.4~g}}: %{{y:.4~g}}<extra>{name}</extra>",
    }
