"""A measurement in words: its headline, the numbers of its summary, and its warnings."""

import math
import re
from collections.abc import Collection, Iterable, Mapping

from kleash.errors import joined_names
from kleash.estimate import Estimate
from kleash.registry import grouped
from kleash.store.measurement import Measurement
from kleash.store.statistics import ALL_STATISTICS, label_of
from kleash.store.summary import counted
from kleash.store.sweep import Attribution

NUMERAL = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
MAX_NAMES = 3
FIELD_LABELS = {
    "quantiles": "quantiles of the KL",
    "by_position": "KL by position",
    "by_confidence": "KL by confidence",
    "convergence": "running mean",
    "worst_tokens": "tokens with the largest KL",
    "worst_sequences": "sequences with the largest KL",
    "prompts": "KL by prompt",
    "top_percent_share": "share of the top 1 %",
    "per_sequence": "KL per sequence",
}
"""Fields of a measurement that are made of the exact KL of each token, as a reader sees them."""


def headline(measurement: Measurement) -> Estimate:
    """The KL per token of ``measurement.headline``, or its lower bound if one model is behind a server."""
    return measurement.per_token[headline_name(measurement)]


def headline_name(measurement: Measurement) -> str:
    """The name of ``headline`` in ``ALL_STATISTICS``."""
    is_known = measurement.headline in measurement.per_token
    return measurement.headline if is_known else f"{measurement.headline}_lower"


def upper_bound(measurement: Measurement) -> Estimate | None:
    """The upper bound that belongs to a ``headline`` that is a lower one; None if the KL is known."""
    if headline_name(measurement) == measurement.headline:
        return None
    return measurement.per_token.get(f"{measurement.headline}_upper")


def left_out_sentences(measurement: Measurement) -> list[str]:
    """What the measurement leaves out: a sentence for each reason, with the names of all that it applies to."""
    labels = grouped(
        (reason, FIELD_LABELS.get(name) or label_of(name)) for name, reason in measurement.left_out.items()
    )
    return [f"{', '.join(names)}: {reason}" for reason, names in labels.items()]


def headline_warnings(measurement: Measurement) -> list[str]:
    """The warnings about the run and about its two KLs, each once."""
    upper = upper_bound(measurement)
    warnings = [
        *measurement.warnings,
        *headline(measurement).warnings,
        *(() if upper is None else upper.warnings),
    ]
    if measurement.per_sequence is not None:
        sequence_warnings = measurement.per_sequence.kl_policy_reference.warnings
        warnings += [
            f"on the KL per sequence: {warning}" for warning in sequence_warnings if warning not in warnings
        ]
    return list(dict.fromkeys(warnings))


def all_warnings(measurement: Measurement) -> list[str]:
    """``headline_warnings``, followed by the warnings about other numbers, but for rounding, which few clusters have.

    Warnings that differ only in a numeral are merged: "on Total variation and 3 others: 34 to 40 of 64 clusters have
    the same mean".
    """
    warnings = headline_warnings(measurement)
    rows = [(label_of(name), number) for name, number in measurement.statistics().items()]
    return [*warnings, *merge_warnings([*rows, *_estimators(measurement)], warnings)]


def merge_warnings(
    numbers: Iterable[tuple[str, Estimate | Attribution]], reported: Collection[str] = ()
) -> list[str]:
    """One sentence for each distinct warning of several numbers, with the labels of the numbers that have it.

    Warnings that differ only in numerals are one sentence, with the range of each numeral that differs.

    Args:
        numbers: labels and numbers, or attributions, which have several.
        reported: warnings to leave out.
    """
    warnings = ((label, warning) for label, number in numbers for warning in number.warnings)
    return [
        f"on {joined_labels(list(merged))}: {with_ranges(list(merged.values()))}"
        for merged in merge_labelled(
            (label, warning) for label, warning in warnings if warning not in reported
        )
    ]


def merge_labelled(warnings: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Groups of warnings that differ only in numerals: the warnings of a group by their labels."""
    by_pattern = grouped((NUMERAL.sub("#", warning), (label, warning)) for label, warning in warnings)
    return [dict(labelled) for labelled in by_pattern.values()]


def joined_labels(labels: list[str]) -> str:
    """Up to three labels joined by commas and "and"; of more, two and the number of the others."""
    if len(labels) <= MAX_NAMES:
        return joined_names(labels)
    return f"{', '.join(labels[: MAX_NAMES - 1])} and {len(labels) - MAX_NAMES + 1} others"


def with_ranges(warnings: list[str]) -> str:
    """Warnings of one pattern as one, with the range of each numeral that differs."""
    columns = zip(*(NUMERAL.findall(warning) for warning in warnings), strict=True)
    numerals: list[list[str]] = [sorted(set(column), key=float) for column in columns]
    ranges = iter(row[0] if len(row) == 1 else f"{row[0]} to {row[-1]}" for row in numerals)
    return NUMERAL.sub(lambda _: next(ranges), warnings[0])


def source_nouns(measurement: Measurement) -> Mapping[str, str]:
    """The nouns for this run's prompts and sequences: "prompt" and "response", or "document" and "window"."""
    if measurement.source_kind == "text":
        text = {"prompt": "document", "prompts": "documents"}
        if measurement.counts.sequences == measurement.counts.prompts:  # no document is longer than a window
            return {**text, "sequence": "document", "sequences": "documents"}
        return {**text, "sequence": "window", "sequences": "windows"}
    return {"prompt": "prompt", "prompts": "prompts", "sequence": "response", "sequences": "responses"}


def describe_sample_size(measurement: Measurement) -> str:
    """The number of sequences, prompts, truncated responses and clusters, in words.

    Given responses need not say why they end, so that none known to be truncated says nothing.
    """
    counts, nouns = measurement.counts, source_nouns(measurement)
    text = counted(counts.sequences, nouns["sequence"])
    if nouns["sequence"] != nouns["prompt"]:
        text += (
            f" {'of' if nouns['sequence'] == 'window' else 'to'} {counted(counts.prompts, nouns['prompt'])}"
        )
    if measurement.source_kind == "prompts" or counts.truncated_sequences:
        text += f", {counts.truncated_sequences:,} of them truncated"
    return f"{text}; " + (
        f"each {nouns['prompt']} is an independent cluster"
        if counts.clusters == counts.prompts
        else counted(counts.clusters, "independent cluster")
    )


def summary_numbers(measurement: Measurement) -> list[tuple[str, Estimate]]:
    """The labels and values of the numbers in a summary: statistics, KL per sequence, rounding, estimators."""
    per_sequence = measurement.per_sequence
    numbers = {
        "KL per sequence": None if per_sequence is None else per_sequence.kl_policy_reference,
        "Largest token KL per sequence": None if per_sequence is None else per_sequence.largest_token,
        "Noise floor (batching alone)": measurement.noise_floor,
        "Gap to float32": measurement.dtype_gap,
    }
    rows = [
        (label_of(name), number)
        for name, number in measurement.statistics().items()
        if name not in ALL_STATISTICS or ALL_STATISTICS[name].in_summary
    ]
    return [
        *rows,
        *((label, number) for label, number in numbers.items() if number is not None),
        *_estimators(measurement),
    ]


def _estimators(measurement: Measurement) -> list[tuple[str, Estimate]]:
    """The labels and values of the one-sample estimators."""
    return [(f"Estimator {name}, same tokens", record) for name, record in measurement.estimators.items()]


def describe_quantiles(measurement: Measurement) -> str:
    """Quantiles of the headline's KL over tokens and the share of the top 1 %; empty without quantiles."""
    quantiles = measurement.quantiles.get(measurement.headline)
    if quantiles is None:
        return ""
    levels = [("median", "50"), ("99 %", "99"), ("99.9 %", "99.9"), ("largest", "max")]
    values = ", ".join(f"{label} {quantiles[level].value:.3g}" for label, level in levels)
    share = measurement.top_percent_share
    return f"{values} nats" + (
        "" if math.isnan(share) else f"; the 1 % with the most hold {100 * share:.0f} % of the KL"
    )
