"""A measurement for a model card of the Hugging Face hub: metadata (``model-index``) and a section in Markdown.

The metadata follow https://huggingface.co/docs/hub/model-cards and huggingface_hub's ``EvalResult``.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from kleash.estimate import Estimate
from kleash.extras import import_extra
from kleash.reports.formatting import as_sentence, measure_command
from kleash.reports.text_formats import escape_text, markdown_code, markdown_table
from kleash.store.measurement import Measurement, describe_storage
from kleash.store.measurement_summary import all_warnings, headline, headline_name, upper_bound
from kleash.store.number import with_interval
from kleash.store.statistics import ALL_STATISTICS, label_of
from kleash.store.summary_tables import Summary, plain_text, summarize

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
DATA_SUFFIX = re.compile(
    r"\.(jsonl?|ndjson|csv|tsv|parquet|pq|arrow|feather|ipc|txt|gz|zst|gguf)$", re.IGNORECASE
)
SOURCES = {
    "text": "the texts",
    "responses": "the given responses",
    "prompts": "the policy's responses to the prompts",
}
"""What is scored, by the option that names the source."""


def model_card(measurement: Measurement) -> str:
    """The metadata block and the section of a model card of the policy.

    Of local models and files only the last part of the path is named, except in the command.

    Raises:
        MissingExtraError: if PyYAML is not installed.
    """
    yaml = import_extra("yaml", "models")
    index = yaml.safe_dump(
        {"model-index": model_index(measurement)}, allow_unicode=True, sort_keys=False, width=1000
    )
    return plain_text(f"---\n{index}---\n\n{card_section(measurement)}")


def model_index(measurement: Measurement) -> list[dict[str, Any]]:
    """The entry ``model-index`` of the metadata: one result, with a metric for each statistic that has a value."""
    kind, source = source_of(measurement.job)
    metrics = [
        metric_entry(name, number)
        for name, number in measurement.statistics().items()
        if name in ALL_STATISTICS and ALL_STATISTICS[name].in_summary and not math.isnan(number.value)
    ]
    dataset: dict[str, Any] = {"type": published_name(source), "name": f"{published_name(source)} ({kind})"}
    for key, option in (("config", "dataset_config"), ("split", "split")):
        if measurement.job.get(option) is not None:
            dataset[key] = plain_text(str(measurement.job[option]))
    dataset["args"] = {"sha256": measurement.source_sha256}
    return [
        {
            "name": published_name(measurement.models["policy"].path),
            "results": [
                {
                    "task": {"type": "text-generation", "name": "Text Generation"},
                    "dataset": dataset,
                    "metrics": [
                        {
                            **metric,
                            "args": {
                                **metric["args"],
                                "reference": published_name(measurement.models["reference"].path),
                                "tokens": measurement.counts.tokens,
                                "clusters": measurement.counts.clusters,
                                "kleash": measurement.kleash,
                            },
                        }
                        for metric in metrics
                    ],
                }
            ],
        }
    ]


def metric_entry(name: str, number: Estimate) -> dict[str, Any]:
    """A statistic as a metric of ``model-index``; what is not known of its error is left out."""
    low, high = number.ci95
    known = {"standard_error": number.standard_error, "ci95_low": low, "ci95_high": high}
    unit = "" if number.unit == "none" else f", {number.unit}"
    return {
        "type": name,
        "name": f"{label_of(name)}{unit}",
        "value": number.value,
        "args": {key: value for key, value in known.items() if math.isfinite(value)},
    }


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
    parts = [
        "## Drift from the reference",
        card_sentence(measurement),
        markdown_table(table),
        escape_text(as_sentence(_with_published_names(measurement.estimand, measurement))),
        *remarks,
        f"Measured with kleash {escape_text(measurement.kleash)}. The command that repeats it:",
        code_block(measure_command(measurement.job)),
    ]
    return "\n\n".join(parts) + "\n"


def card_sentence(measurement: Measurement) -> str:
    """What was measured against what, on what, and the KL with its interval, in Markdown."""
    kind, source = source_of(measurement.job)
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
        f"{kl}, over {counts.tokens:,} tokens in {counts.clusters:,} independent "
        f"cluster{'' if counts.clusters == 1 else 's'}."
    )


def _per_token(number: Estimate) -> str:
    """A number in nats per token with its interval."""
    return escape_text(with_interval(number).replace(" nats", " nats per token", 1))


def code_block(text: str) -> str:
    """A fenced block of code; the fence is longer than any in ``text``."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}bash\n{text}\n{fence}"


def source_of(job: Mapping[str, Any]) -> tuple[str, str]:
    """The option that names the source of a measurement, and its value."""
    for kind in ("text", "responses"):
        if job.get(kind) is not None:
            return kind, str(job[kind])
    return "prompts", str(job.get("prompts") or "shipped:prompts")


def _with_published_names(text: str, measurement: Measurement) -> str:
    """A sentence, in which models, the source and a cache are called as they are published."""
    _, source = source_of(measurement.job)
    models = measurement.models.values()
    named = (source, *(path for model in models for path in (model.path, model.base)))
    options = (measurement.job.get(name) for name in ("reference_cache", "tokenizer"))
    for path in sorted({str(path) for path in (*named, *options) if path}, key=len, reverse=True):
        text = text.replace(path, published_name(path))
    return text


def published_name(path: str) -> str:
    """The name under which a model or data set is published: a name on the hub as it is, of a path the last part."""
    is_on_hub = HUB_NAME.fullmatch(path) and not DATA_SUFFIX.search(path) and not Path(path).exists()
    if is_on_hub or path.startswith(("shipped:", "http://", "https://")):
        return plain_text(path)
    return plain_text(PurePath(path.rstrip("/\\")).name or path)
