"""The report of a measurement."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kleash.errors import RunFolderError
from kleash.records import STATISTICS, Drifted, Measurement, Number, RunFolder
from kleash.records.statistics import label_of
from kleash.reports.figures import Chart
from kleash.reports.formatting import command_line, count, plain, visible
from kleash.reports.heatmap import Key, Sequence, heat_map, key_of, read_sequences, rounded
from kleash.reports.measurement_charts import by_bin, convergence, estimators, quantile_ladder
from kleash.reports.page import write_page

FIGURE = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?%?")
MOST_NAMES = 3
MAX_PROMPTS = 500
MAX_WORST_TOKENS = 50
WORDS_BEFORE, WORDS_AFTER = 10, 4


def write_report(folder: Path) -> Path:
    """Make ``report.html`` of a run folder from its files, in place of the one that is there.

    One file that needs nothing else: it can be mailed, and opens without a network. What is drawn
    is capped, and the page says where; what is counted is not.

    Args:
        folder: of a finished run.

    Returns:
        The report's path.

    Raises:
        RunFolderError: if the run has not finished, a file of it is missing or damaged, or the report
            cannot be written.
        MissingExtraError: if Jinja2, Plotly or pyarrow is not installed.
    """
    measurement = Measurement.read(folder)
    files = RunFolder(folder)
    files.require_shards(measurement.counts.shards)
    worst_tokens = measurement.worst_tokens[:MAX_WORST_TOKENS]
    tokens = read_sequences(files, map(key_of, (*worst_tokens, *measurement.worst_sequences)))
    heat = heat_map(files, measurement, tokens)
    drawn = {
        (part["prompt_id"], part["sample_id"], position)
        for part in heat.drawn
        for position in part["position"]
    }
    context = {
        "measurement": measurement,
        "headline": headline(measurement),
        "means": statistic_rows(measurement),
        "charts": charts(measurement),
        "heat": heat,
        "worst_tokens": [in_context(drift, tokens, drawn) for drift in worst_tokens],
        "prompts": measurement.prompts[:MAX_PROMPTS],
        "command": command_line(measurement.job),
        "warnings": headline_warnings(measurement),
        "warned": all_warnings(measurement) != headline_warnings(measurement),
        "floor_in_words": above_the_floor(measurement),
        "words": vocabulary(measurement),
        "amount": measured_on(measurement),
        "share_of": share_of(measurement),
        "sorted_by": "kl_per_token" if sorted_by_kl_per_token(measurement) else "",
    }
    scripts = ("tables.js", "heatmap.js", "plotly", "charts.js")
    return write_page(folder / "report.html", "measurement.html", context, scripts)


def headline(measurement: Measurement) -> Number:
    """KL(policy || reference) per token.

    Raises:
        RunFolderError: if the measurement has none.
    """
    try:
        return measurement.per_token["kl_policy_reference"]
    except KeyError as error:
        raise RunFolderError(
            "measurement.json has no kl_policy_reference under per_token; measure again"
        ) from error


def headline_warnings(measurement: Measurement) -> list[str]:
    """What is held against the run as a whole and against its headlines, each said once."""
    said = [*measurement.warnings, *headline(measurement).warnings]
    if measurement.per_sequence is not None:
        of_sequences = measurement.per_sequence.kl_policy_reference.warnings
        said += [f"on the KL per sequence: {warning}" for warning in of_sequences if warning not in said]
    return list(dict.fromkeys(said))


def all_warnings(measurement: Measurement) -> list[str]:
    """``headline_warnings``, and those about single means, which the report shows beside them.

    Sentences that differ in nothing but a number are made one: "on Total variation and 3 others: one cluster
    carries 21% to 35% of the variance".
    """
    said = headline_warnings(measurement)
    return [*said, *together(numbers(measurement), said)]


def together(numbered: Iterable[tuple[str, Number]], said: Collection[str] = ()) -> list[str]:
    """The warnings of several numbers, each said once with the names of those that it is about.

    Args:
        numbered: names and their numbers.
        said: warnings that are left out.
    """
    alike: dict[str, dict[str, str]] = {}
    for name, number in numbered:
        for warning in number.warnings:
            if warning not in said:
                alike.setdefault(FIGURE.sub("#", warning), {})[name] = warning
    return [f"on {_names(list(each))}: {_merged(list(each.values()))}" for each in alike.values()]


def _names(names: list[str]) -> str:
    if len(names) <= MOST_NAMES:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{', '.join(names[: MOST_NAMES - 1])} and {len(names) - MOST_NAMES + 1} others"


def _merged(sentences: list[str]) -> str:
    """Sentences of one pattern as one, with the range of each figure that differs."""
    columns = zip(*(FIGURE.findall(sentence) for sentence in sentences), strict=True)
    ordered = [sorted(set(column), key=lambda text: float(text.rstrip("%"))) for column in columns]
    ranges = iter(each[0] if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in ordered)
    return FIGURE.sub(lambda _: next(ranges), sentences[0])


def numbers(measurement: Measurement) -> list[tuple[str, Number]]:
    """The numbers whose warnings a report shows beside them, with their names."""
    more = {"the noise floor": measurement.noise_floor, "the gap to float32": measurement.dtype_gap}
    return [
        *((row.label, row.number) for row in statistic_rows(measurement)),
        *((name, number) for name, number in more.items() if number is not None),
        *((f"the estimator {name}", record.number) for name, record in measurement.estimators.items()),
    ]


def above_the_floor(measurement: Measurement) -> str:
    """How the headline stands to what rounding alone makes."""
    if measurement.noise_floor is None:
        return ""
    floor, value = measurement.noise_floor.value, headline(measurement).value
    if floor == 0:
        return "the reference against itself, batched otherwise: rounding changes nothing"
    if not value > floor:
        return "the reference against itself, batched otherwise; the KL is not above it"
    return f"the reference against itself, batched otherwise; the KL is {plain(value / floor, 2)} times that"


def vocabulary(measurement: Measurement) -> Mapping[str, str]:
    """What this run's prompts and sequences are called."""
    if measurement.job.get("text") is not None:
        text = {"prompt": "document", "prompts": "documents"}
        if measurement.counts.sequences == measurement.counts.prompts:  # no document was longer than a window
            return {**text, "sequence": "document", "sequences": "documents"}
        return {**text, "sequence": "window", "sequences": "windows"}
    return {"prompt": "prompt", "prompts": "prompts", "sequence": "response", "sequences": "responses"}


def measured_on(measurement: Measurement) -> str:
    """On how many sequences of what a run rests, and how many of them were cut off."""
    counts, words = measurement.counts, vocabulary(measurement)
    amount = _counted(counts.sequences, words["sequence"])
    if words["sequence"] != words["prompt"]:
        amount += f" to {_counted(counts.prompts, words['prompt'])}"
    if words["sequence"] == "response":
        amount += f", of which {count(counts.truncated_sequences)} cut off before the end"
    return f"{amount}; {_counted(counts.clusters, 'independent cluster')}"


def _counted(number: int, noun: str) -> str:
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def sorted_by_kl_per_token(measurement: Measurement) -> bool:
    """Whether the prompts come in that order, which their table then says."""
    values = [prompt.kl_per_token for prompt in measurement.prompts]
    return all(one >= other for one, other in pairwise(values))


def share_of(measurement: Measurement) -> Callable[[float], str]:
    """The length of a bar, in percent of the longest."""
    finite = [p.kl_per_token for p in measurement.prompts if math.isfinite(p.kl_per_token)]
    longest = max(finite, default=0.0)

    def share(value: float) -> str:
        if math.isnan(value) or longest <= 0:
            return "0"
        return f"{100 * min(1.0, max(0.0, value / longest)):.1f}"

    return share


def charts(measurement: Measurement) -> dict[str, Chart]:
    """Every chart that there are numbers for, by its name."""
    found = (
        quantile_ladder(measurement),
        by_bin(
            "position", "By position", measurement.by_position, "position of the token, from 0", whole=True
        ),
        by_bin(
            "confidence",
            "By the reference's confidence",
            measurement.by_confidence,
            "the reference's probability of its likeliest token",
        ),
        convergence(measurement.convergence),
        estimators(headline(measurement), measurement.estimators),
    )
    return {chart.name: chart for chart in found if chart is not None}


@dataclass(frozen=True, kw_only=True)
class StatisticRow:
    """A statistic in the table of all means."""

    label: str
    explanation: str
    number: Number
    in_summary: bool


def statistic_rows(measurement: Measurement) -> list[StatisticRow]:
    """The reported statistics in the order of ``STATISTICS``; other means follow under their own names."""
    return [
        StatisticRow(
            label=label_of(name),
            explanation=STATISTICS[name].explanation if name in STATISTICS else "",
            number=number,
            in_summary=name not in STATISTICS or STATISTICS[name].in_summary,
        )
        for name, number in measurement.statistics().items()
    ]


def in_context(
    drift: Drifted, tokens: dict[Key, Sequence], drawn: set[tuple[int, int, int]]
) -> dict[str, Any]:
    """A drifted token with the words around it and both models' probabilities of it.

    Args:
        drift: the token.
        tokens: of the sequences that are read.
        drawn: prompt, sample and position of each token of the heat map.
    """
    key = drift.prompt_id, drift.sample_id
    row: dict[str, Any] = {"drift": drift, "before": "", "after": "", "p": None, "q": None, "rank": None}
    row["drawn"] = (*key, drift.position) in drawn
    at = tokens[key].place_of(drift.position) if key in tokens else None
    if at is None:
        return row
    sequence = tokens[key]
    texts = sequence.texts
    return {
        **row,
        "before": running_text(texts[max(0, at - WORDS_BEFORE) : at]),
        "after": running_text(texts[at + 1 : at + 1 + WORDS_AFTER]),
        "p": rounded(math.exp(sequence.columns["logp_policy"][at])),
        "q": rounded(math.exp(sequence.columns["logp_reference"][at])),
        "rank": int(sequence.columns["rank_reference"][at]),
    }


def running_text(texts: list[str]) -> str:
    """Tokens joined as they are read, with everything else that cannot be seen made visible."""
    text = "".join(texts)
    return visible(text).replace("␣", " ") if text else ""
