"""Results as CSV, with a row for each number, as Markdown, and as a model card, with every text of others escaped."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from kleash.estimate import Estimate
from kleash.extras import import_extra
from kleash.jobs.option_groups import is_gguf
from kleash.reports.formatting import as_sentence, make_visible, repeating_command
from kleash.sources.dataset_folders import HUB_ID, has_data_suffix
from kleash.sources.records import COMPRESSED_SUFFIXES
from kleash.store.codec import encode
from kleash.store.measurement import Measurement, describe_storage
from kleash.store.measurement_summary import all_warnings, headline, headline_name, upper_bound
from kleash.store.number_rows import NumberRow
from kleash.store.statistics import ALL_STATISTICS, label_of
from kleash.store.summary import Name, Summary, SummaryTable, counted, plain_text, summarize, with_interval

CSV_COLUMNS = (
    *("run", "minus", "name", "value", "standard_error", "ci95_low", "ci95_high", "unit"),
    *("tokens", "clusters", "warnings"),
)
PLAIN_NAME = re.compile(r"[\w./:+=, -]*[\w./:+=,-]", re.ASCII)
"""Texts that a code span of Markdown shows as they are, also in a table."""
MARKS = re.compile(r"[\\`*_\[\]|~$#]")
"""Characters that can mean something to Markdown, which a backslash takes from them."""
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "@&#8203;"}
"""Of characters of HTML, and of a mention of a person, which the invisible character prevents."""
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of a cell that spreadsheets take for a formula."""
SOURCES = {
    "text": "the texts",
    "responses": "the given responses",
    "prompts": "the policy's responses to the prompts",
}
"""What is scored, by the option that names the source."""
LIST_MARK = re.compile(r"(\s*)(?:([-+])|(\d{1,9})([.)]))(?=\s|$)")


def to_csv(rows: Iterable[NumberRow]) -> str:
    """Numbers as CSV with a header line, one number a line, in full precision.

    What a number does not have is empty. Numbers that are not finite are written as in the JSON files: Infinity,
    -Infinity, NaN. Several warnings are joined by "; ". A name that a spreadsheet would run as a formula gets an
    apostrophe in front.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        run, minus, name, warnings = (
            f"'{text}" if text.startswith(FORMULA_STARTS) else text
            for text in (row.run, row.minus, row.name, "; ".join(row.warnings))
        )
        writer.writerow(
            (
                run,
                minus,
                name,
                *map(encode, row.numbers.values()),
                row.unit,
                row.tokens,
                row.clusters,
                warnings,
            )
        )
    return text.getvalue()


def to_markdown(summary: Summary, notes: Sequence[str] = ()) -> str:
    """A summary in GitHub's Markdown: headline, facts, tables, warnings, and then ``notes``, which are sentences."""
    facts = [f"- {escape_text(label)}: {markdown_text(text)}" for label, text in summary.facts]
    parts = (
        f"**{escape_text(summary.headline)}**",
        "\n".join(facts),
        *map(markdown_table, summary.tables),
        "\n".join(f"- warning: {escape_text(text)}" for text in summary.warnings),
        *map(escape_text, notes),
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown_table(table: SummaryTable) -> str:
    """A table of Markdown, its title in a line before it; columns of numbers and words are aligned to the right.

    The first column, and columns of sentences, are aligned to the left.
    """
    marks = ["---" if is_left else "---:" for is_left in table.is_left]
    lines = [list(map(markdown_text, row)) for row in (table.header, *table.rows)]
    lines.insert(1, marks)
    title = [f"{escape_text(table.title)}:", ""] if table.title else []
    return "\n".join([*title, *(f"| {' | '.join(texts)} |" for texts in lines)])


def markdown_text(text: str) -> str:
    """A text of a summary: a ``Name`` as code, another one escaped."""
    return markdown_code(text) if isinstance(text, Name) else escape_text(text)


def markdown_code(text: str) -> str:
    """A text as code that reads as ``text``, whatever it contains: also within a cell of a table.

    A plain name is a code span. In others, where no code span is right both within and outside of tables, every
    character that could be a mark is a reference in ``<code>``.
    """
    visible = make_visible(text)
    if visible == text and PLAIN_NAME.fullmatch(text):
        return f"`{text}`"
    references = (
        character if character.isalnum() or character in " -./," else f"&#{ord(character)};"
        for character in visible
    )
    return f"<code>{''.join(references)}</code>"


def escape_text(text: str) -> str:
    """A text that Markdown shows as it stands, on one line."""
    escaped = MARKS.sub(r"\\\g<0>", make_visible(text)) if text else ""
    escaped = "".join(ENTITIES.get(character, character) for character in escaped)
    return LIST_MARK.sub(r"\1\3\\\2\4", escaped, count=1) if LIST_MARK.match(escaped) else escaped


def model_card(measurement: Measurement) -> str:
    """The metadata block (``model-index``) and the section of a card of the policy on the Hugging Face hub.

    Of local models and files only the last part of the path is named, except in the command.

    Raises:
        MissingExtraError: if PyYAML is not installed.
    """
    yaml = import_extra("yaml", "cli")
    index = yaml.safe_dump(
        {"model-index": model_index(measurement)}, allow_unicode=True, sort_keys=False, width=1000
    )
    return plain_text(f"---\n{index}---\n\n{card_section(measurement)}")


def model_index(measurement: Measurement) -> list[dict[str, Any]]:
    """The entry ``model-index`` of the metadata: one result, with a metric for each statistic that has a value.

    What is not known of the error of a metric is left out.
    """
    hub = import_extra("huggingface_hub.repocard_data", "models")
    kind, source = measurement.source_kind, source_name(measurement)
    options = {name: plain_text(str(value)) for name, value in measurement.job.items() if value is not None}
    results: list[Any] = []
    for name, number in measurement.statistics().items():
        if name not in ALL_STATISTICS or not ALL_STATISTICS[name].in_summary or math.isnan(number.value):
            continue
        low, high = number.ci95
        errors = {"standard_error": number.standard_error, "ci95_low": low, "ci95_high": high}
        unit = "" if number.unit == "none" else f", {number.unit}"
        results.append(
            hub.EvalResult(
                task_type="text-generation",
                task_name="Text Generation",
                dataset_type=published_name(source),
                dataset_name=f"{published_name(source)} ({kind})",
                dataset_config=options.get("dataset_config"),
                dataset_split=options.get("split"),
                dataset_args={"sha256": measurement.source_sha256},
                metric_type=name,
                metric_name=f"{label_of(name)}{unit}",
                metric_value=number.value,
                metric_args={
                    **{key: value for key, value in errors.items() if math.isfinite(value)},
                    "reference": published_name(measurement.models["reference"].path),
                    "tokens": measurement.counts.tokens,
                    "clusters": measurement.counts.clusters,
                    "kleash": measurement.kleash,
                },
            )
        )
    index: list[dict[str, Any]] = hub.eval_results_to_model_index(
        published_name(measurement.models["policy"].path), results
    )
    return index


def card_section(measurement: Measurement) -> str:
    """The section of a model card: what was measured in a sentence, the table, warnings, notes, and the command."""
    summary: Summary = summarize(measurement)
    table = replace(summary.tables[0], header=("Statistic", *summary.tables[0].header[1:]))
    lists = {"Warnings:": all_warnings(measurement), "Notes:": measurement.notes}
    remarks = [
        part
        for heading, sentences in lists.items()
        if sentences
        for part in (
            heading,
            "\n".join(
                f"- {escape_text(as_sentence(_with_published_names(sentence, measurement)))}"
                for sentence in sentences
            ),
        )
    ]
    command = repeating_command(measurement)
    fence = max(["``", *re.findall(r"`+", command)], key=len) + "`"
    parts = [
        "## Drift from the reference",
        card_sentence(measurement),
        markdown_table(table),
        escape_text(as_sentence(_with_published_names(measurement.estimand, measurement))),
        *remarks,
        f"Measured with kleash {escape_text(measurement.kleash)}. The command that repeats it:",
        f"{fence}bash\n{command}\n{fence}",
    ]
    return "\n\n".join(parts) + "\n"


def card_sentence(measurement: Measurement) -> str:
    """What was measured against what, on what, and the KL with its interval, in Markdown."""
    kind, source = measurement.source_kind, source_name(measurement)
    policy, reference = (
        markdown_code(published_name(measurement.models[role].path)) for role in ("policy", "reference")
    )
    upper = upper_bound(measurement)
    kl = f"{escape_text(label_of(headline_name(measurement)))} is {_per_token(headline(measurement))}"
    if upper is not None:
        kl += f" and {escape_text(label_of(f'{measurement.headline}_upper'))} {_per_token(upper)}"
    counts = measurement.counts
    storage = describe_storage(measurement.models)
    if storage:
        kl += f" ({escape_text(_with_published_names(storage, measurement))})"
    return (
        f"{policy} was measured against {reference} on {SOURCES[kind]} of {markdown_code(published_name(source))}: "
        f"{kl}, over {counts.tokens:,} tokens in {counted(counts.clusters, 'independent cluster')}."
    )


def _per_token(number: Estimate) -> str:
    """A number in nats per token with its interval."""
    return escape_text(with_interval(number).replace(" nats", " nats per token", 1))


def source_name(measurement: Measurement) -> str:
    """The name of the source of a measurement."""
    return str(measurement.job.get(measurement.source_kind) or "shipped:prompts")


def _with_published_names(text: str, measurement: Measurement) -> str:
    """A sentence, in which models, the source and a cache are called as they are published."""
    models = measurement.models.values()
    named = (source_name(measurement), *(path for model in models for path in (model.path, model.base)))
    options = (measurement.job.get(name) for name in ("reference_cache", "tokenizer"))
    for path in sorted({str(path) for path in (*named, *options) if path}, key=len, reverse=True):
        text = text.replace(path, published_name(path))
    return text


def published_name(path: str) -> str:
    """The name under which a model or data set is published: a name on the hub as it is, of a path the last part."""
    is_file = is_gguf(path) or has_data_suffix(Path(path)) or Path(path).suffix.lower() in COMPRESSED_SUFFIXES
    is_on_hub = HUB_ID.fullmatch(path) and not is_file and not Path(path).exists()
    if is_on_hub or path.startswith(("shipped:", "http://", "https://")):
        return plain_text(path)
    return plain_text(PurePath(path.rstrip("/\\")).name or path)
