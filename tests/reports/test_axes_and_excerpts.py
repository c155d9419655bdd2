"""Axes say what they are, every drifted token can be shown, and words fit what was read."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from histories import healthy
from synthetic_run import synthetic_comparison, synthetic_sweep, write_synthetic_run

from kleash.records import Measurement, Number, RunFolder
from kleash.reports import heatmap
from kleash.reports.comparison import describe_difference, differences_chart, runs_chart
from kleash.reports.figures import axis, log_axis, step_axis
from kleash.reports.heatmap import heat_map, key_of, read_sequences
from kleash.reports.measurement import charts, describe_sample_size, source_nouns, write_report
from kleash.reports.pictures import _near_each_other
from kleash.reports.sweep import byte_axis, nearer_minus_farther, sweep_charts
from kleash.reports.training_charts import run_charts
from kleash.store.measurement_summary import all_warnings


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.19, 2.19], [0.2, 0.5, 1, 2]),  # a single power of ten lies between
        ([0.3, 0.7], [0.5]),
        ([2.0, 9.0], [2, 5]),
        ([0.1, 9.0], [0.1, 1]),
        ([1e-4, 30.0], [1e-4, 1e-3, 1e-2, 0.1, 1, 10]),
        ([3e-12, 8e-11], [5e-12, 1e-11, 2e-11, 5e-11]),
    ],
)
def test_a_logarithmic_axis_has_at_least_two_ticks_where_possible(
    values: list[float], ticks: list[float]
) -> None:
    log_options = log_axis([*values, math.nan, 0.0, math.inf])
    visible_ticks = [tick for tick in log_options["tickvals"] if min(values) <= tick <= max(values)]
    assert visible_ticks == pytest.approx(ticks)
    assert len(log_options["ticktext"]) == len(log_options["tickvals"])
    assert log_axis([]) == {"type": "log"}


def test_the_title_of_a_logarithmic_axis_says_so() -> None:
    assert axis("nats", type="log")["title"]["text"] == "nats, logarithmic scale"
    assert axis("", type="log")["title"]["text"] == "logarithmic scale"
    assert axis("nats")["title"]["text"] == "nats"


def test_every_axis_of_every_chart_has_a_title(run: tuple[Path, Measurement]) -> None:
    comparison = synthetic_comparison()
    all_charts = [*charts(run[1]).values(), runs_chart(comparison), differences_chart(comparison)]
    history = [
        replace(record, metrics={**record.metrics, "beta": 2.0**record.step}) for record in healthy(20)
    ]
    all_charts += [*run_charts(healthy(20)).values(), *run_charts(history, target=3.0).values()]
    logarithmic = 0
    for chart in all_charts:
        for name, made in chart.figure["layout"].items():
            if name.startswith(("xaxis", "yaxis")):
                assert made["title"]["text"], (chart.name, name)
                logarithmic += made.get("type") == "log"
                assert ("logarithmic" in made["title"]["text"]) is (made.get("type") == "log")
    assert logarithmic >= 2


def test_a_constant_beta_is_drawn_above_zero() -> None:
    assert run_charts(healthy(5))["beta"].figure["layout"]["yaxis"]["rangemode"] == "nonnegative"


def made(folder: Path, measurement: Measurement) -> heatmap.HeatMap:
    keys = [key_of(drift) for drift in (*measurement.worst_sequences, *measurement.worst_tokens)]
    return heat_map(RunFolder(folder), measurement, read_sequences(RunFolder(folder), keys))


def test_a_large_kl_token_outside_the_drawn_sequences_gets_an_excerpt(
    run: tuple[Path, Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, measurement = run
    assert made(folder, measurement).excerpts == () or measurement.counts.sequences > 50
    monkeypatch.setattr(heatmap, "MAX_TOKENS_OF_SEQUENCE", 20)
    monkeypatch.setattr(heatmap, "MAX_TOKENS", 100)
    monkeypatch.setattr(heatmap, "CONTEXT_BEFORE", 6)
    monkeypatch.setattr(heatmap, "CONTEXT_AFTER", 3)
    heat = made(folder, measurement)
    assert len(heat.sequences) == 5 and len(heat.excerpts) > 10
    drawn = {(part["prompt_id"], part["sample_id"], at) for part in heat.drawn for at in part["position"]}
    assert all((*key_of(drift), drift.position) in drawn for drift in measurement.worst_tokens)
    for part in heat.excerpts:
        assert len(part["text"]) <= 10 and part["position"] == list(
            range(part["before"], part["before"] + len(part["text"]))
        )
        assert part["total"] >= max(part["kl"])


def test_every_large_kl_token_has_a_button(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heatmap, "MAX_TOKENS", 60)
    folder = tmp_path / "run"
    measurement = write_synthetic_run(folder, prompts=30, samples=3, tokens=40, hostile=False)
    page = write_report(folder).read_text(encoding="utf-8")
    assert page.count('class="show"') == len(measurement.worst_tokens)
    assert "and the context of the tokens with the largest KL in other responses" in page


def on_text(run: tuple[Path, Measurement], **counts: int) -> Measurement:
    measurement = run[1]
    job = {**measurement.job, "text": "t.txt"}
    return replace(measurement, job=job, counts=replace(measurement.counts, **counts))


def test_the_noun_is_window_only_where_documents_were_split(run: tuple[Path, Measurement]) -> None:
    whole = on_text(run, prompts=24, sequences=24, clusters=24)
    assert "window" not in " ".join(source_nouns(whole).values())
    assert describe_sample_size(whole) == "24 documents; 24 independent clusters"
    cut = on_text(run, prompts=1, sequences=24, clusters=3)
    assert describe_sample_size(cut) == "24 windows to 1 document; 3 independent clusters"
    on_prompts = replace(
        run[1], counts=replace(run[1].counts, prompts=2, sequences=8, clusters=2, truncated_sequences=3)
    )
    assert (
        describe_sample_size(on_prompts)
        == "8 responses to 2 prompts, 3 of them truncated; 2 independent clusters"
    )


def test_a_comparison_on_text_uses_the_noun_document() -> None:
    comparison = synthetic_comparison()
    texts = replace(comparison, runs=tuple(replace(run, source="text") for run in comparison.runs))
    assert differences_chart(texts).title.endswith("on shared documents")
    assert differences_chart(comparison).title.endswith("on shared prompts")
    assert describe_difference(comparison.differences[0], "kl_policy_reference", "documents").endswith(
        "on 200 shared documents"
    )


def test_warnings_of_single_numbers_are_merged_with_their_labels(run: tuple[Path, Measurement]) -> None:
    def warned(*warnings: str) -> Number:
        return Number(value=0.1, unit="nats", standard_error=0.01, ci95=(0.08, 0.12), warnings=warnings)

    many = {
        "kl_policy_reference": warned("few"),
        **{
            name: warned("few", f"one cluster carries {20 + at}% of the variance")
            for at, name in enumerate(
                ("kl_reference_policy", "jensen_shannon", "entropy_policy", "entropy_reference")
            )
        },
    }
    bare: dict[str, Any] = {
        "estimators": {},
        "noise_floor": None,
        "per_sequence": None,
        "warnings": ("whole",),
    }
    reported = all_warnings(replace(run[1], per_token=many, **bare))
    assert reported == [
        "whole",
        "few",
        "on KL(reference ‖ policy), Jensen–Shannon and 2 others: one cluster carries 20% to 23% of the variance",
    ]


def test_axes_of_a_sweep_have_ticks_for_any_candidates() -> None:
    """Also for one size, for KLs within a power of ten, and for a KL of 0, which a logarithmic axis leaves out."""
    sweep = synthetic_sweep()
    first, second, *_ = sweep.candidates
    at_zero = Number(value=0.0, unit="nats", standard_error=0.0, ci95=(0.0, 0.0))
    near = Number(value=0.28, unit="nats", standard_error=0.01, ci95=(0.23, 0.3))
    candidates = tuple(
        replace(candidate, numbers={**candidate.numbers, sweep.rank_by: number}, bytes_on_disk=4_130_000)
        for candidate, number in ((first, at_zero), (second, near))
    )
    for chart in sweep_charts(replace(sweep, candidates=candidates, pairs=())):
        axis = chart.figure["layout"]["yaxis"]
        low, high = axis["range"]
        assert low < math.log10(0.23) and math.log10(0.3) < high
        assert sum(low <= math.log10(tick) <= high for tick in axis["tickvals"]) >= 2
        assert chart.description.endswith("A KL of 0 has no place on a logarithmic axis.")
    low, high = byte_axis([4_130_000.0])["range"]
    assert 10**low < 4_130_000 < 10**high < 2 * 10**low
    assert "range" not in byte_axis([1e9, 1e10])


def test_labels_of_candidates_at_one_place_do_not_lie_on_each_other() -> None:
    sweep = synthetic_sweep()
    first, *_ = sweep.candidates
    candidates = tuple(
        replace(first, number=number, name=f"q{number}", bytes_on_disk=4_130_000) for number in range(1, 6)
    )
    for chart in sweep_charts(replace(sweep, candidates=candidates, pairs=())):
        trace = chart.figure["data"][-1]
        places = [place for text, place in zip(trace["text"], trace["textposition"], strict=True) if text]
        assert len(places) == len(set(places)) == 4
        assert trace["hovertext"] == ["q1", "q2", "q3", "q4", "q5"]
    points = [(1, 1e9, 0.01), (2, 1.01e9, 0.011), (3, 2e9, 0.01), (4, 1e9, 0.2), (5, 1e9, math.inf)]
    assert [places for places, _, _ in _near_each_other(points)] == [[1, 2], [3], [4]]


def test_a_difference_of_candidates_is_that_of_the_nearer_minus_the_other() -> None:
    pair = synthetic_sweep().pairs[0]
    turned = replace(
        pair,
        difference=replace(pair.difference, value=0.5, warnings=("few", "one")),
        simultaneous_ci95=(0.4, 0.7),
    )
    number = nearer_minus_farther(turned, ("few",))
    assert (number.value, number.ci95, number.warnings) == (-0.5, (-0.7, -0.4), ("one",))


def test_an_axis_of_few_steps_has_no_tick_twice() -> None:
    assert step_axis([1, 2])["dtick"] == step_axis([])["dtick"] == 1
    assert "dtick" not in step_axis(range(1, 40))
