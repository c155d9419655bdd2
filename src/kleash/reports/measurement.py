"""The report of a measurement."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kleash.reports.drawing import Chart
from kleash.reports.formatting import format_value, make_visible, repeating_command, with_narrow_spaces
from kleash.reports.gate_verdicts import describe_gate
from kleash.reports.heatmap import (
    SequenceKey,
    SequenceTokens,
    heat_map,
    key_of,
    read_sequences,
)
from kleash.reports.measurement_charts import bin_chart, convergence_chart, means_chart, quantiles_chart
from kleash.reports.page import write_page
from kleash.store import Measurement, RunFolder
from kleash.store.anchors import scale_sentence
from kleash.store.measurement import Drifted
from kleash.store.measurement_summary import (
    all_warnings,
    describe_sample_size,
    headline,
    headline_name,
    headline_warnings,
    left_out_sentences,
    source_nouns,
    upper_bound,
)
from kleash.store.statistics import ALL_STATISTICS, kl_directions, label_of

CONTEXT_BEFORE, CONTEXT_AFTER = 10, 4
"""Tokens shown around a token with large KL in the table of them."""


def write_report(folder: Path, measurement: Measurement | None = None) -> Path:
    """Write ``report.html`` of a run folder from its files, in place of an existing one.

    The page is a single file that needs no network. The number of drawn sequences, tokens and prompts is limited, and
    the page says where; all tokens are counted.

    Args:
        folder: of a finished run.
        measurement: that of the folder, such as with the verdict for another limit; None to read it.

    Returns:
        The report's path.

    Raises:
        RunFolderError: if the run has not finished, a file of it is missing or damaged, or the report cannot be
            written.
        MissingExtraError: if Jinja2, Matplotlib or pyarrow is not installed.
    """
    measurement = Measurement.read(folder) if measurement is None else measurement
    files = RunFolder(folder).require_shards(measurement.counts.shards)
    return write_page(
        folder / "report.html",
        "measurement.html",
        ("tables.js", "heatmap.js"),
        **report_context(files, measurement),
    )


def report_context(files: RunFolder, measurement: Measurement) -> dict[str, Any]:
    """The variables of the report's template."""
    tokens = read_sequences(files, map(key_of, (*measurement.worst_tokens, *measurement.worst_sequences)))
    heat = heat_map(files, measurement, tokens)
    shown = {
        (sequence["prompt_id"], sequence["sample_id"], position)
        for sequence in heat["sequences"]
        for position in sequence["position"]
    }
    return {
        "measurement": measurement,
        "headline": headline(measurement),
        "headline_label": label_of(headline_name(measurement)),
        "kl_labels": [label_of(name) for name in kl_directions(measurement.headline)],
        "upper_bound": upper_bound(measurement),
        "scale": scale_sentence(measurement),
        "left_out": left_out_sentences(measurement),
        "means": [
            (label_of(name), ALL_STATISTICS[name].explanation if name in ALL_STATISTICS else "", number)
            for name, number in measurement.statistics().items()
        ],
        "charts": charts(measurement),
        "heat": heat,
        "worst_tokens": [token_row(drift, tokens, shown) for drift in measurement.worst_tokens],
        "prompts": measurement.prompts,
        "command": repeating_command(measurement),
        "warnings": headline_warnings(measurement),
        "gate": None if measurement.gate is None else describe_gate(measurement.gate),
        "has_warnings": bool(all_warnings(measurement)),
        "noise_floor_note": noise_floor_note(measurement),
        "nouns": source_nouns(measurement),
        "sample_size": with_narrow_spaces(describe_sample_size(measurement)),
    }


def noise_floor_note(measurement: Measurement) -> str:
    """The ratio of the KL to the noise floor, in words; empty if there is no noise floor."""
    if measurement.noise_floor is None:
        return ""
    floor, value = measurement.noise_floor.value, headline(measurement).value
    definition = "the reference against itself in another batch layout"
    subject = "the KL" if upper_bound(measurement) is None else "the lower bound of the KL"
    if floor == 0:
        return f"{definition}: no rounding difference"
    if not value > floor:
        return f"{definition}; {subject} is not above it"
    return f"{definition}; {subject} is {format_value(value / floor, 2)} times as large"


def charts(measurement: Measurement) -> dict[str, Chart]:
    """The charts that the measurement has numbers for, by name; that of the means alone is there for any."""
    candidates = (
        means_chart(measurement),
        quantiles_chart(measurement),
        bin_chart(
            "position",
            "KL by position",
            measurement.by_position,
            "position of the token, from 0",
            is_integer=True,
        ),
        bin_chart(
            "confidence",
            "KL by the reference's confidence",
            measurement.by_confidence,
            "the reference's probability of its most likely token",
        ),
        convergence_chart(measurement.convergence),
    )
    return {chart.name: chart for chart in candidates if chart is not None}


def picture_charts(measurement: Measurement) -> list[Chart]:
    """The charts of a measurement's picture: without that of the confidence, and a running mean of at least two."""
    has_running_mean = len(measurement.convergence) > 1
    return [
        chart
        for name, chart in charts(measurement).items()
        if name != "confidence" and (name != "convergence" or has_running_mean)
    ]


def token_row(
    drift: Drifted,
    tokens: Mapping[SequenceKey, SequenceTokens],
    shown: Collection[tuple[int, int, int]],
) -> dict[str, Any]:
    """A token with large KL with the text around it and both models' probabilities of it.

    Args:
        drift: the token.
        tokens: its sequence, and others.
        shown: prompt, sample and position of each token of the token view.
    """
    key = key_of(drift)
    texts, columns = tokens[key].texts, tokens[key].columns
    row = int(np.flatnonzero(columns["position"] == drift.position)[0])
    return {
        "drift": drift,
        "is_shown": (*key, drift.position) in shown,
        "before": join_tokens(texts[max(0, row - CONTEXT_BEFORE) : row]),
        "after": join_tokens(texts[row + 1 : row + 1 + CONTEXT_AFTER]),
        "p": math.exp(columns["logp_policy"][row]),
        "q": math.exp(columns["logp_reference"][row]),
        "rank": int(columns["rank_reference"][row]),
    }


def join_tokens(texts: list[str]) -> str:
    """Tokens joined to running text, with all invisible characters but spaces made visible."""
    text = "".join(texts)
    return make_visible(text).replace("␣", " ") if text else ""
