"""Axes say what they are, every drifted token can be shown, and words fit what was read."""

import math
from dataclasses import replace

import pytest
from drawn_charts import dots, drawn, legend, ticks
from histories import healthy
from synthetic_run import synthetic_comparison, synthetic_sweep
from synthetic_sweep import attribution

from kleash.records import Number
from kleash.reports.comparison import comparison_charts
from kleash.reports.drawing import format_tick, log_ticks
from kleash.reports.measurement import charts, describe_sample_size, source_nouns
from kleash.reports.sweep import attribution_chart, pairs_in_order, sweep_charts
from kleash.reports.training_charts import run_charts
from kleash.store.measurement_summary import all_warnings


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0.19, 2.19), [0.2, 0.5, 1, 2]),  # a single power of ten lies between
        ((0.3, 0.7), [0.3, 0.4, 0.5, 0.7]),
        ((0.1, 9.0), [0.1, 0.2, 0.5, 1, 2, 5]),
        ((1e-4, 30.0), [1e-4, 1e-3, 1e-2, 0.1, 1, 10]),
        ((3e-12, 8e-11), [5e-12, 1e-11, 2e-11, 5e-11]),
        ((1e-12, 1.0), [10.0**power for power in range(-12, 1, 2)]),
        ((4.1, 4.3), []),  # no round number lies between
    ],
)
def test_a_logarithmic_axis_has_three_to_seven_round_ticks_where_possible(ends, expected):
    assert log_ticks(*ends) == pytest.approx(expected)


def test_numbers_at_ticks_are_short():
    expected = {0.1 + 0.2: "0.3", 1e-5: "10⁻⁵", 5e-12: "5 × 10⁻¹²", -2.0: "−2", 250_000.0: "250000"}
    assert {value: format_tick(value) for value in expected} == expected


def all_charts(run, sweep):
    of_training = run_charts(healthy(20), target=3.0).values()
    of_comparison = comparison_charts(synthetic_comparison()).values()
    by_group = (attribution_chart(sweep, attribution(grouping), "q8") for grouping in ("layers", "modules"))
    return [*charts(run[1]).values(), *of_comparison, *of_training, *sweep_charts(sweep), *by_group]


def test_every_axis_of_every_chart_has_a_title(run):
    logarithmic = 0
    for chart in all_charts(run, synthetic_sweep()):
        axes = drawn(chart)
        assert axes[-1].get_xlabel(), chart.name
        for panel in axes:
            has_rows = not panel.get_title("left")
            assert not has_rows or panel.get_ylim()[0] > panel.get_ylim()[1], chart.name
            for scale, title in (
                (panel.get_xscale(), axes[-1].get_xlabel()),
                (panel.get_yscale(), panel.get_title("left")),
            ):
                logarithmic += scale == "log"
                assert title.endswith("log scale") is (scale == "log"), chart.name
    assert logarithmic >= 4


def test_no_text_of_a_chart_lies_beyond_it(run):
    """Titles, labels of ticks and legends, with long names of runs and candidates."""
    long = replace(synthetic_sweep(("W" * 300, "q8")), reference="W" * 300)
    for chart in all_charts(run, long):
        panels = drawn(chart)
        width, height = panels[0].figure.bbox.size
        boxes = [panel.get_tightbbox() for panel in panels]
        assert all(box.x0 > -1 and box.x1 < width + 1 for box in boxes), chart.name
        assert all(box.y0 > -1 and box.y1 < height + 1 for box in boxes), chart.name


def on_text(run, **counts):
    measurement = run[1]
    job = {**measurement.job, "text": "t.txt"}
    return replace(measurement, job=job, counts=replace(measurement.counts, truncated_sequences=0, **counts))


def test_the_noun_is_document_on_text_and_window_only_where_they_were_split(run):
    whole = on_text(run, prompts=24, sequences=24, clusters=24)
    assert "window" not in " ".join(source_nouns(whole).values())
    assert describe_sample_size(whole) == "24 documents; each document is an independent cluster"
    cut = on_text(run, prompts=1, sequences=24, clusters=3)
    assert describe_sample_size(cut) == "24 windows of 1 document; 3 independent clusters"
    counts = replace(run[1].counts, prompts=2, sequences=8, clusters=2, truncated_sequences=3)
    told = "8 responses to 2 prompts, 3 of them truncated; each prompt is an independent cluster"
    assert describe_sample_size(replace(run[1], counts=counts)) == told
    unsaid = replace(
        run[1], job={**run[1].job, "responses": "r"}, counts=replace(counts, truncated_sequences=0)
    )
    assert describe_sample_size(unsaid) == "8 responses to 2 prompts; each prompt is an independent cluster"
    comparison = synthetic_comparison()
    texts = replace(comparison, runs=tuple(replace(run, source="text") for run in comparison.runs))
    assert comparison_charts(texts)["differences"].title.endswith("on shared documents")
    assert comparison_charts(comparison)["differences"].title.endswith("on shared prompts")


def test_warnings_of_single_numbers_are_merged_with_their_labels(run):
    def warned(*warnings):
        return Number(value=0.1, unit="nats", standard_error=0.01, ci95=(0.08, 0.12), warnings=warnings)

    many = {"kl_policy_reference": warned("few")}
    names = ("kl_reference_policy", "jensen_shannon", "entropy_policy", "entropy_reference")
    for at, name in enumerate(names):
        many[name] = warned("few", f"one cluster carries {20 + at} % of the variance")
    bare = {"estimators": {}, "noise_floor": warned("tied"), "per_sequence": None, "warnings": ("whole",)}
    reported = all_warnings(replace(run[1], per_token=many, **bare))
    named = "on KL(reference ‖ policy), Jensen–Shannon and 2 others"
    assert reported == ["whole", "few", f"{named}: one cluster carries 20 to 23 % of the variance"]


def test_axes_of_a_sweep_have_ticks_for_any_candidates():
    """Also for one size, for KLs within a power of ten, and for a KL of 0, which a logarithmic axis leaves out."""
    sweep = synthetic_sweep()
    first, second, *_ = sweep.candidates
    at_zero = Number(value=0.0, unit="nats", standard_error=0.0, ci95=(0.0, 0.0))
    near = Number(value=0.28, unit="nats", standard_error=0.01, ci95=(0.23, 0.3))
    candidates = tuple(
        replace(candidate, numbers={**candidate.numbers, sweep.rank_by: number}, bytes_on_disk=4_130_000)
        for candidate, number in ((first, at_zero), (second, near))
    )
    ranking, size, bits = sweep_charts(replace(sweep, candidates=candidates, pairs=()))
    for chart in (size, bits):
        (axes,) = drawn(chart)
        low, high = axes.get_ylim()
        assert low < 0.23 < 0.3 < high and len(ticks(axes.yaxis)) >= 2
        assert [text.get_text() for text in axes.texts] == ["2"], "the place of the one at 0 is not shown"
        assert chart.description.endswith("A KL of 0 has no place on a logarithmic axis.")
    low, high = drawn(size)[0].get_xlim()
    assert low < 4_130_000 < high < 2 * low and ticks(drawn(size)[0].xaxis) == ["3.5 MB", "4 MB", "4.5 MB"]
    (rows,) = drawn(ranking)
    assert [text.get_text() for text in rows.texts] == ["0"]
    (layers,) = drawn(attribution_chart(sweep, attribution("layers"), ""))
    assert ticks(layers.xaxis) == [*map(str, range(0, 40, 4)), "\nembeddings and head"]
    assert [list(line.get_ydata()) for line in layers.lines if line.get_linestyle() == "-"] == [[0, 0]]


def test_the_zero_of_all_candidates_leaves_a_linear_axis():
    sweep = synthetic_sweep(("q8",))
    zero = Number(value=0.0, unit="nats", standard_error=0.0, ci95=(0.0, 0.0))
    candidates = (replace(sweep.candidates[0], numbers={sweep.rank_by: zero}),)
    charts = sweep_charts(replace(sweep, candidates=candidates, pairs=()))
    assert {dots(drawn(chart)[0])[0][0][chart.name != "ranking"] for chart in charts} == {0}


def test_a_sweep_is_drawn_by_size_with_its_pareto_front():
    sweep = synthetic_sweep([f"{name}{'-of-a-model' * 5}" for name in ("q8", "q6", "q4")])
    off_front = tuple(
        replace(each, is_on_pareto_front=not each.name.startswith("q6")) for each in sweep.candidates
    )
    ranking, size, *_ = sweep_charts(replace(sweep, candidates=off_front))
    values = [candidate.numbers["kl_policy_reference"].value for candidate in sweep.ranking]
    (rows,), (axes,) = drawn(ranking), drawn(size)
    assert ticks(rows.yaxis) == ["1  q8…  a", "2  q6…  b", "3  q4…  c"], "what all have in common is cut"
    assert dots(rows) == [[(value, row) for row, value in enumerate(values)]]
    on_front = [(c.bytes_on_disk, v) for c, v in zip(sweep.ranking, values, strict=True) if c.name[1] != "6"]
    assert dots(axes) == [sorted(on_front), [(sweep.ranking[1].bytes_on_disk, values[1])]]
    assert legend(axes) == ["on the Pareto front", "not on it"]
    assert list(axes.lines[0].get_xdata()) == sorted(size for size, _ in on_front)
    assert axes.lines[0].get_drawstyle() == "steps-post"
    assert sorted(text.get_text() for text in axes.texts) == ["1", "2", "3"]


def test_labels_of_points_near_each_other_are_one():
    sweep = synthetic_sweep()
    first, *_ = sweep.candidates
    sizes = (1e9, 1.01e9, 2e9, 1e9, 1e9)
    kls = (0.01, 0.011, 0.01, 0.2, math.inf)
    candidates = tuple(
        replace(
            first,
            number=number,
            name=f"q{number}",
            bytes_on_disk=int(size),
            numbers={sweep.rank_by: replace(first.numbers[sweep.rank_by], value=kl, ci95=(kl, kl))},
        )
        for number, (size, kl) in enumerate(zip(sizes, kls, strict=True), 1)
    )
    charts_of_sweep = sweep_charts(replace(sweep, candidates=candidates, pairs=()))
    (axes,) = drawn(charts_of_sweep[1])
    places = {name: place for place, name in ((row[0], row[1]) for row in charts_of_sweep[0].rows)}
    expected = [f"{places['q1']}, {places['q2']}", places["q3"], places["q4"]]
    assert sorted(text.get_text() for text in axes.texts) == sorted(expected)


def test_a_difference_of_candidates_is_that_of_the_nearer_minus_the_other():
    sweep = synthetic_sweep()
    nearest, farthest = sweep.ranking[0].number, sweep.ranking[-1].number
    turned = replace(
        sweep.pairs[0],
        first=farthest,
        second=nearest,
        difference=replace(sweep.pairs[0].difference, value=0.5, warnings=("few", "one")),
        simultaneous_ci95=(0.4, 0.7),
    )
    (pair,) = pairs_in_order(replace(sweep, pairs=(turned,), warnings=("few",)))
    number = pair.difference
    assert (pair.first, pair.second) == (nearest, farthest)
    assert (number.value, number.ci95, number.warnings) == (-0.5, (-0.7, -0.4), ("one",))


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_an_axis_of_steps_has_few_ticks_at_whole_steps(steps):
    (axes,) = drawn(run_charts(healthy(steps))["entropy"])
    at = ticks(axes.xaxis)
    assert len(set(at)) == len(at) <= 7 and all("." not in text for text in at)
