"""The pictures of the study."""

from kleash.records import Number
from kleash.records.study import Fit, SpreadCurves, StudyCase, TwoModes
from kleash.reports.drift_charts import decades
from kleash.reports.figures import ACCENT, ACCENT_BAND, INK, MUTED, Chart, dots, figure, rows_of
from kleash.reports.words import plain

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
