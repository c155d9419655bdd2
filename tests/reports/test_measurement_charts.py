"""What the charts draw is what was measured."""

import json
import math
from typing import Any

import pytest
from synthetic_run import synthetic_comparison

from kleash.records import Measurement, Number
from kleash.reports.comparison import describe_difference, describe_direction, differences_chart, runs_chart
from kleash.reports.figures import escape
from kleash.reports.measurement import bar_share, noise_floor_note
from kleash.reports.measurement_charts import bin_chart, convergence_chart, estimators_chart, quantiles_chart
from kleash.store.measurement import Bin, ConvergencePoint, EstimatorRecord
from kleash.store.measurement_summary import statistic_rows


def number(value: float, low: float, high: float) -> Number:
    return Number(value=value, unit="nats", standard_error=(high - low) / 4, ci95=(low, high))


def measurement(run: Any, **changes: Any) -> Measurement:
    return Measurement(**{**vars(run[1]), **changes})


def test_the_quantiles_chart_has_each_quantile_with_its_interval(run: Any) -> None:
    ladder = {
        "50": number(0.1, 0.08, 0.15),
        "99.9": number(4.0, 3.0, 6.0),
        "max": number(9.0, math.nan, math.nan),
    }
    chart = quantiles_chart(measurement(run, quantiles={"kl_policy_reference": ladder}))
    assert chart is not None
    (trace,) = chart.figure["data"]
    assert trace["x"] == [0.1, 4.0, 9.0]
    assert trace["error_x"]["array"] == pytest.approx([0.05, 2.0, None])
    assert trace["error_x"]["arrayminus"] == pytest.approx([0.02, 1.0, None])
    axis = chart.figure["layout"]["xaxis"]
    assert (axis["type"], axis["tickvals"]) == ("log", [0.1, 1.0, 10.0])
    assert chart.figure["layout"]["yaxis"]["ticktext"] == ["50 %", "99.9 %", "max"]
    assert chart.rows[1] == ("99.9 %", "4.00 (3.00 to 6.00)")
    assert chart.description == "50 % of tokens lie at or below 0.100 nats; the largest is 9.00 nats."


def test_quantiles_with_a_zero_have_a_linear_axis(run: Any) -> None:
    steps = {"50": number(0.0, 0.0, 0.0), "99": number(2.0, 1.0, 3.0)}
    ladder = {**steps, "max": number(math.inf, math.nan, math.nan)}
    chart = quantiles_chart(measurement(run, quantiles={"kl_policy_reference": ladder}))
    assert chart is not None
    assert "type" not in chart.figure["layout"]["xaxis"]
    assert chart.figure["data"][0]["x"] == [0.0, 2.0, None]
    assert chart.rows[2] == ("max", "∞")
    json.dumps(chart.figure, allow_nan=False)


def test_both_directions_are_in_the_quantiles_chart(run: Any) -> None:
    chart = quantiles_chart(run[1])
    assert chart is not None
    names = [trace["name"] for trace in chart.figure["data"]]
    assert names == ["KL(policy ‖ reference)", "KL(reference ‖ policy)"]
    first, second = (trace["y"] for trace in chart.figure["data"])
    assert all(one < other for one, other in zip(first, second, strict=True))
    assert chart.figure["layout"]["yaxis"]["range"][0] > chart.figure["layout"]["yaxis"]["range"][1]
    expected = [quantile.value for quantile in run[1].quantiles["kl_reference_policy"].values()]
    assert chart.figure["data"][1]["x"] == expected


def test_the_bin_chart_has_means_and_both_shares() -> None:
    bins = (
        Bin(low=0.0, high=1.0, tokens=10, share_of_kl=0.5, kl=number(2.0, 1.5, 3.0)),
        Bin(low=1.0, high=4.0, tokens=30, share_of_kl=0.2, kl=number(0.4, 0.3, 0.5)),
        Bin(low=4.0, high=math.inf, tokens=60, share_of_kl=0.3, kl=number(0.3, 0.2, 0.4)),
    )
    chart = bin_chart("position", "By position", bins, "position", is_integer=True)
    assert chart is not None
    means, tokens, kl = chart.figure["data"]
    assert means["x"] == ["0", "1–3", "4+"]
    assert means["y"] == [2.0, 0.4, 0.3]
    assert means["error_y"]["array"] == pytest.approx([1.0, 0.1, 0.1])
    assert means["error_y"]["arrayminus"] == pytest.approx([0.5, 0.1, 0.1])
    assert (tokens["name"], tokens["y"]) == ("share of the tokens", [0.1, 0.3, 0.6])
    assert (kl["name"], kl["y"]) == ("share of the KL", [0.5, 0.2, 0.3])
    assert chart.description.startswith("The mean is highest at 0: 2.00 nats per token.")
    assert "50.0\u202f%, lies at 0." in chart.description


def test_confidence_has_fractions_for_ranges_and_whole_ranges_are_told_by_what_is_in_them() -> None:
    half = number(0.4, 0.3, 0.5)
    parts = tuple(
        Bin(low=low, high=high, tokens=1, share_of_kl=0.5, kl=half)
        for low, high in ((0.0, 0.25), (0.25, 1.0))
    )
    chart = bin_chart("confidence", "title", parts, "what")
    assert chart is not None
    assert chart.figure["data"][0]["x"] == ["0–0.25", "0.25–1"]
    whole = tuple(
        Bin(low=low, high=high, tokens=1, share_of_kl=0.5, kl=half) for low, high in ((0.0, 2.0), (2.0, 4.0))
    )
    chart = bin_chart("position", "title", whole, "what", is_integer=True)
    assert chart is not None
    assert chart.figure["data"][0]["x"] == ["0–1", "2–3"]
    assert bin_chart("position", "title", (), "what") is None


def test_the_band_is_the_interval_and_early_ones_do_not_squash_the_rest() -> None:
    steps = [ConvergencePoint(tokens=10, mean=1.0, ci95=(-90.0, 92.0))]
    steps += [ConvergencePoint(tokens=10 * at, mean=1.1, ci95=(1.0, 1.3)) for at in range(2, 9)]
    chart = convergence_chart(steps)
    assert chart is not None
    low, high, mean = chart.figure["data"]
    assert low["y"] == [-90.0] + [1.0] * 7
    assert high["y"] == [92.0] + [1.3] * 7
    assert high["fill"] == "tonexty"
    assert mean["y"] == [1.0] + [1.1] * 7
    assert chart.figure["layout"]["yaxis"]["range"] == pytest.approx([0.985, 1.315])
    assert (
        "After 80 tokens the mean is 1.10 nats, with a 95 % interval from 1.00 to 1.30." in chart.description
    )
    assert len(chart.rows) == 8
    assert convergence_chart([]) is None


def test_an_infinite_running_mean_is_drawn() -> None:
    chart = convergence_chart([ConvergencePoint(tokens=2, mean=math.inf, ci95=(math.nan, math.nan))])
    assert chart is not None
    json.dumps(chart.figure, allow_nan=False)
    assert chart.rows == (("2", "∞", "NaN to NaN"),)


def test_the_estimators_chart_has_the_exact_value_first() -> None:
    exact = number(0.2, 0.15, 0.25)
    records = {
        name: EstimatorRecord(**vars(number(value, value - 0.1, value + 0.2)), bias=number(value - 0.2, -1.0, 1.0),
                              spread=0.7)
        for name, value in (("k1", 0.22), ("abs", 0.9))
    }  # fmt: skip
    chart = estimators_chart(exact, records)
    assert chart is not None
    first, others = chart.figure["data"]
    assert (first["x"], others["x"]) == ([0.2], [0.22, 0.9])
    assert (first["y"], list(others["y"])) == ([0], [1, 2])
    assert others["error_x"]["array"] == pytest.approx([0.2, 0.2])
    assert chart.figure["layout"]["yaxis"]["ticktext"] == ["exact", "k1", "abs"]
    box, line = chart.figure["layout"]["shapes"]
    assert (box["x0"], box["x1"], line["x0"]) == (0.15, 0.25, 0.2)
    assert "abs is furthest from it, by 0.700" in chart.description
    assert estimators_chart(exact, {}) is None


@pytest.mark.parametrize(
    ("floor", "said"),
    [(0.0, "no rounding difference"), (0.05, "is 4.0 times as large"), (0.3, "the KL is not above it")],
)
def test_the_noise_floor_note_compares_it_with_the_kl(run: Any, floor: float, said: str) -> None:
    per_token = {"kl_policy_reference": number(0.2, 0.1, 0.3)}
    changed = measurement(run, per_token=per_token, noise_floor=number(floor, floor, floor))
    assert said in noise_floor_note(changed)


def test_bar_lengths_are_shares_of_the_longest(run: Any) -> None:
    share = bar_share(run[1])
    assert share(run[1].prompts[0].kl_per_token) == "100.0"
    assert float(share(run[1].prompts[0].kl_per_token / 4)) == pytest.approx(25.0, abs=0.06)
    assert (share(math.inf), share(math.nan)) == ("100.0", "0")


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.1, 0.2, "further from its reference"),
        (-0.2, -0.1, "closer to its reference"),
        (-0.1, 0.2, "no significant difference"),
        (0.0, 0.0, "no significant difference"),
        (math.nan, math.nan, "direction unknown"),
    ],
)
def test_a_difference_has_a_direction_only_if_its_interval_excludes_zero(
    low: float, high: float, said: str
) -> None:
    assert describe_direction(number((low + high) / 2, low, high)) == said


def test_a_run_without_the_kl_is_not_compared() -> None:
    difference = synthetic_comparison().differences[0]
    assert (
        describe_difference(
            type(difference)(**{**vars(difference), "differences": {}}), "kl_policy_reference"
        )
        == "not compared, on 200 shared prompts"
    )


def test_only_the_chart_of_differences_has_a_line_at_zero() -> None:
    comparison = synthetic_comparison()
    line = differences_chart(comparison).figure["layout"]["shapes"]
    assert [(shape["x0"], shape["x1"]) for shape in line] == [(0, 0)]
    runs = runs_chart(comparison).figure
    assert runs["layout"]["shapes"] == []
    assert runs["data"][1]["x"] == [run.numbers["kl_reference_policy"].value for run in comparison.runs]
    assert runs["layout"]["yaxis"]["ticktext"][2] == "…t&gt;alert('run')&lt;/script&gt;"


def test_plotly_markup_is_escaped() -> None:
    assert escape("<b>a</b> &lt; %{y}") == "&lt;b&gt;a&lt;/b&gt; &amp;lt; %&#123;y}"


def test_every_statistic_has_its_label(run: Any) -> None:
    numbers = {row.label: row.number for row in statistic_rows(run[1])}
    perplexity, change = run[1].perplexity, run[1].probability_change
    assert numbers["Perplexity of the policy"] is perplexity["policy"]
    assert numbers["Perplexity of the reference"] is perplexity["reference"]
    assert numbers["Perplexity ratio"] is perplexity["ratio"]
    assert numbers["Δp of the observed token, RMS"] is change["rms"]
    assert numbers["KL(reference ‖ policy)"] is run[1].per_token["kl_reference_policy"]
    assert numbers["Top-1 agreement"] is run[1].top1_agreement
    assert len(numbers) == len(run[1].per_token) + 1 + 3 + 2
