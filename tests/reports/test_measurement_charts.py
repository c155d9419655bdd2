"""What the charts draw is what was measured."""

import math
from itertools import pairwise

import pytest
from drawn_charts import bands, curves, dots, drawn, intervals, legend, ticks
from synthetic_run import synthetic_comparison

from kleash.records import Measurement, Number
from kleash.reports.comparison import comparison_charts
from kleash.reports.formatting import format_with_interval
from kleash.reports.measurement import noise_floor_note
from kleash.reports.measurement_charts import bin_chart, convergence_chart, means_chart, quantiles_chart
from kleash.store.measurement import Bin, ConvergencePoint, EstimatorRecord
from kleash.store.statistics import label_of


def number(value, low, high):
    return Number(value=value, unit="nats", standard_error=(high - low) / 4, ci95=(low, high))


def measurement(run, **changes):
    return Measurement(**{**vars(run[1]), **changes})


def test_the_quantiles_chart_has_each_quantile_with_its_interval(run):
    ladder = {
        "50": number(0.1, 0.08, 0.15),
        "99.9": number(4.0, 3.0, 6.0),
        "max": number(9.0, math.nan, math.nan),
    }
    chart = quantiles_chart(measurement(run, quantiles={"kl_policy_reference": ladder}))
    (axes,) = drawn(chart)
    assert dots(axes) == [[(0.1, 0), (4.0, 1), (9.0, 2)]]
    assert intervals(axes) == [[(0.08, 0.15), (3.0, 6.0), (9.0, 9.0)]], "the maximum has none"
    assert ticks(axes.yaxis) == ["50 %", "99.9 %", "max"] and axes.get_ylim() == (2.5, -0.5)
    assert ticks(axes.xaxis) == ["0.1", "1", "10"]
    assert axes.get_xlabel() == "KL of a token, nats, log scale"
    assert chart.rows[1] == ("99.9 %", "4.00 (3.00 to 6.00)")


def test_quantiles_with_a_zero_have_a_linear_axis(run):
    steps = {"50": number(0.0, 0.0, 0.0), "99": number(2.0, 1.0, 3.0)}
    ladder = {**steps, "max": number(math.inf, math.nan, math.nan)}
    chart = quantiles_chart(measurement(run, quantiles={"kl_policy_reference": ladder}))
    (axes,) = drawn(chart)
    assert axes.get_xscale() == "linear" and axes.get_xlabel() == "KL of a token, nats"
    assert dots(axes) == [[(0.0, 0), (2.0, 1)]], "what is not finite is not drawn"
    assert chart.rows[2] == ("max", "∞")


def test_both_directions_are_in_the_quantiles_chart(run):
    (axes,) = drawn(quantiles_chart(run[1]))
    assert legend(axes) == ["KL(policy ‖ reference)", "KL(reference ‖ policy)"]
    names = ("kl_policy_reference", "kl_reference_policy")
    expected = [[each.value for each in run[1].quantiles[name].values()] for name in names]
    assert [[x for x, _ in series] for series in dots(axes)] == expected
    first, second = ([y for _, y in series] for series in dots(axes))
    assert all(
        row - 0.5 < one < other < row + 0.5
        for row, (one, other) in enumerate(zip(first, second, strict=True))
    )


def test_the_bin_chart_has_means_and_both_shares():
    bins = (
        Bin(low=0.0, high=1.0, tokens=10, share_of_kl=0.5, kl=number(2.0, 1.5, 3.0)),
        Bin(low=1.0, high=4.0, tokens=30, share_of_kl=0.2, kl=number(0.4, 0.3, 0.5)),
        Bin(low=4.0, high=math.inf, tokens=60, share_of_kl=0.3, kl=number(0.3, 0.2, 0.4)),
    )
    chart = bin_chart("position", "By position", bins, "position", is_integer=True)
    means, shares = drawn(chart)
    assert dots(means) == [[(0, 2.0), (1, 0.4), (2, 0.3)]]
    assert intervals(means) == [[(1.5, 3.0), (0.3, 0.5), (0.2, 0.4)]]
    assert means.get_ylim()[0] == 0 and means.get_xlim() == shares.get_xlim()
    assert ticks(shares.xaxis) == ["0", "1–3", "4+"] and shares.get_xlabel() == "position"
    assert legend(shares) == ["share of the tokens", "share of the KL"]
    heights = [[bar.get_height() for bar in container] for container in shares.containers]
    assert heights == [[0.1, 0.3, 0.6], [0.5, 0.2, 0.3]]
    assert ticks(shares.yaxis)[1].endswith(" %")


def test_confidence_has_fractions_for_ranges_and_whole_ranges_are_told_by_what_is_in_them():
    half = number(0.4, 0.3, 0.5)
    for edges, is_integer, labels in (
        ((0.0, 0.25, 1.0), False, ["0–0.25", "0.25–1"]),
        ((0.0, 2.0, 4.0), True, ["0–1", "2–3"]),
    ):
        parts = tuple(
            Bin(low=low, high=high, tokens=1, share_of_kl=0.5, kl=half) for low, high in pairwise(edges)
        )
        chart = bin_chart("confidence", "title", parts, "what", is_integer=is_integer)
        assert ticks(drawn(chart)[1].xaxis) == labels
    assert bin_chart("position", "title", (), "what") is None


def test_the_band_is_the_interval_and_early_ones_do_not_squash_the_rest():
    steps = [ConvergencePoint(tokens=10, mean=1.0, ci95=(-90.0, 92.0))]
    steps += [ConvergencePoint(tokens=10 * at, mean=1.1, ci95=(1.0, 1.3)) for at in range(2, 9)]
    chart = convergence_chart(steps)
    (axes,) = drawn(chart)
    assert bands(axes) == [([-90.0] + [1.0] * 7, [92.0] + [1.3] * 7)]
    ((tokens, means),) = curves(axes).values()
    assert (tokens, means) == ([10 * at for at in range(1, 9)], [1.0] + [1.1] * 7)
    assert axes.get_ylim() == pytest.approx((0.985, 1.315))
    assert len(chart.rows) == 8 and convergence_chart([]) is None


def test_the_chart_of_means_has_the_estimators_below_what_they_estimate(run):
    exact, other = number(0.2, 0.15, 0.25), number(0.3, 0.2, 0.4)
    records = {
        name: EstimatorRecord(**vars(number(value, value - 0.1, value + 0.2)), bias=number(value - 0.2, -1.0, 1.0),
                              spread=0.7)
        for name, value in (("k1", 0.22), ("abs", 0.9))
    }  # fmt: skip
    per_token = {"kl_policy_reference": exact, "kl_reference_policy": other}
    chart = means_chart(measurement(run, per_token=per_token, estimators=records))
    (axes,) = drawn(chart)
    assert dots(axes) == [[(0.2, 0), (0.3, 1)], [(0.22, 2), (0.9, 3)]]
    assert intervals(axes)[1] == [records[name].ci95 for name in ("k1", "abs")]
    assert ticks(axes.yaxis) == ["KL(policy ‖ reference)", "KL(reference ‖ policy)", "k1", "abs"]
    (box,), (line, *_) = axes.patches, axes.lines
    assert (box.get_x(), box.get_x() + box.get_width()) == pytest.approx(exact.ci95)
    assert line.get_xdata()[0] == 0.2
    assert chart.rows[3] == ("abs", "0.900 (0.800 to 1.100)", "0.70 (−1.00 to 1.00)", "0.700 nats")


def test_bounds_of_a_served_model_are_in_the_chart_of_means(run):
    bounds = {
        f"kl_policy_reference_{end}": number(value, value - 2e-6, value + 2e-6)
        for end, value in (("lower", 0.15), ("upper", 0.45))
    }
    chart = means_chart(measurement(run, per_token=bounds, estimators={}))
    (axes,) = drawn(chart)
    assert dots(axes)[0] == [(0.15, 0), (0.45, 1)] and "lower bound" in ticks(axes.yaxis)[0]


def test_an_interval_without_ends_is_not_drawn_and_nor_is_a_number_that_is_not_finite(run):
    per_token = {
        "kl_policy_reference": number(0.5, -math.inf, math.inf),
        "kl_reference_policy": number(math.inf, math.nan, math.nan),
    }
    (axes,) = drawn(means_chart(measurement(run, per_token=per_token, estimators={})))
    assert dots(axes)[0] == [(0.5, 0)] and intervals(axes)[0] == [(0.5, 0.5)]
    assert not axes.patches, "no band without an interval"


@pytest.mark.parametrize(
    ("floor", "said"),
    [(0.0, "no rounding difference"), (0.05, "is 4.0 times as large"), (0.3, "the KL is not above it")],
)
def test_the_noise_floor_note_compares_it_with_the_kl(run, floor, said):
    per_token = {"kl_policy_reference": number(0.2, 0.1, 0.3)}
    changed = measurement(run, per_token=per_token, noise_floor=number(floor, floor, floor))
    assert said in noise_floor_note(changed)


def test_only_the_chart_of_differences_has_a_line_at_zero():
    comparison = synthetic_comparison()
    charts_of = comparison_charts(comparison)
    (differences,), (runs,) = (drawn(charts_of[name]) for name in ("differences", "runs"))
    lines = [
        [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "-"]
        for axes in (differences, runs)
    ]
    assert lines == [[0], []]
    assert runs.get_xlim()[0] <= 0 < differences.get_xlim()[1]
    kls = [run.numbers["kl_reference_policy"] for run in comparison.runs]
    assert [x for x, _ in dots(runs)[1]] == [kl.value for kl in kls]
    assert [row[2] for row in charts_of["runs"].rows] == list(map(format_with_interval, kls))
    assert ticks(runs.yaxis)[2] == "…t>alert('run')</script>"


def test_every_statistic_has_its_label(run):
    numbers = {label_of(name): number for name, number in run[1].statistics().items()}
    perplexity, change = run[1].perplexity, run[1].probability_change
    assert numbers["Perplexity of the policy"] is perplexity["policy"]
    assert numbers["Perplexity of the reference"] is perplexity["reference"]
    assert numbers["Perplexity ratio"] is perplexity["ratio"]
    assert numbers["Δp of the observed token, RMS"] is change["rms"]
    assert numbers["KL(reference ‖ policy)"] is run[1].per_token["kl_reference_policy"]
    assert numbers["Top-1 agreement"] is run[1].top1_agreement
    assert len(numbers) == len(run[1].per_token) + 1 + 3 + 2
