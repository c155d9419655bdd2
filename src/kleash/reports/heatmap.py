"""The tokens of the sequences with the largest KL, as the page's token view reads them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kleash.reports.formatting import keep_beginning, make_visible
from kleash.store import Measurement, RunFolder
from kleash.store.measurement import Drifted
from kleash.store.statistics import KL_DIRECTIONS, kl_directions

MAX_TOKENS_OF_SEQUENCE = 500
MAX_TOKENS = 5_000
"""Limits of what is drawn of a measurement's worst sequences. All tokens are counted in the statistics."""
MAX_PROMPT = 4000
NUM_COLOURS = 8
"""Colours beside none."""

COLUMNS = (
    "position",
    "token_id",
    *KL_DIRECTIONS,
    "jensen_shannon",
    "total_variation",
    "logp_policy",
    "logp_reference",
    "entropy_policy",
    "entropy_reference",
    "rank_reference",
)
SequenceKey = tuple[int, int]
"""prompt_id and sample_id."""
Alternatives = dict[int, tuple[list[tuple[str, float]], list[tuple[str, float]]]]
"""Position -> (text, probability) of the likeliest tokens of the policy and of the reference."""


@dataclass(frozen=True, kw_only=True)
class SequenceTokens:
    """The tokens of one sequence in order: their texts and columns of ``tokens/``."""

    texts: list[str]
    columns: Mapping[str, np.ndarray]


def read_sequences(folder: RunFolder, keys: Iterable[SequenceKey]) -> dict[SequenceKey, SequenceTokens]:
    """The tokens of the sequences ``keys``."""
    codes = np.unique(np.array([_code(*key) for key in keys], dtype=np.int64))
    sequences: dict[SequenceKey, SequenceTokens] = {}
    if not codes.size:
        return sequences
    for part in folder.parts("tokens", ["prompt_id", "sample_id", "text", *COLUMNS]):
        part_codes = _code(part["prompt_id"].astype(np.int64), part["sample_id"].astype(np.int64))
        rows = np.flatnonzero(np.isin(part_codes, codes))
        for code in np.unique(part_codes[rows]):
            token_rows = rows[part_codes[rows] == code]
            token_rows = token_rows[np.argsort(part["position"][token_rows], kind="stable")]
            key = int(code) >> 32, int(code) & 0xFFFFFFFF
            sequences[key] = SequenceTokens(
                texts=[part["text"][row] for row in token_rows],
                columns={name: part[name][token_rows] for name in COLUMNS},
            )
    return sequences


def _code(prompt_id: Any, sample_id: Any) -> Any:
    """Prompt id and sample id as one 64-bit number."""
    return (prompt_id << 32) + sample_id


def heat_map(
    folder: RunFolder, measurement: Measurement, tokens: Mapping[SequenceKey, SequenceTokens]
) -> dict[str, Any]:
    """The variables of the token view: sequences with the largest KL, the colours, and what is left out.

    There is an object for each sequence, for the page's script, with the likeliest tokens of both models at each
    position; and the number of sequences of which only the beginning is drawn.

    Args:
        folder: of the run.
        measurement: of the run.
        tokens: of its ``worst_sequences``.
    """
    lengths: dict[SequenceKey, int] = {}
    budget = MAX_TOKENS
    for drift in measurement.worst_sequences:
        key = key_of(drift)
        if length := min(len(tokens[key].texts), MAX_TOKENS_OF_SEQUENCE, budget):
            lengths[key] = length
            budget -= length
    payload = partial(
        _payload,
        tokens=tokens,
        prompts=read_prompt_texts(folder, lengths),
        alternatives=read_alternatives(folder, lengths, tokens),
        kl_names=kl_directions(measurement.headline),
    )
    sequences = tuple(
        payload(drift.kl, key_of(drift), lengths[key_of(drift)])
        for drift in measurement.worst_sequences
        if key_of(drift) in lengths
    )
    kls = [value for sequence in sequences for value in sequence["kl"] if 0 < value < math.inf]
    quantiles = measurement.quantiles.get(measurement.headline, {})
    upper_quartile = quantiles["75"].value if "75" in quantiles else math.nan
    thresholds = colour_thresholds(max(kls, default=1.0), upper_quartile)
    return {
        "sequences": sequences,
        "thresholds": thresholds,
        "starts_at_upper_quartile": math.isclose(thresholds[0], upper_quartile, rel_tol=0.1),
        "shortened": sum(len(sequence["text"]) < sequence["tokens"] for sequence in sequences),
    }


def key_of(drift: Drifted) -> SequenceKey:
    """The key of a sequence, or of the sequence that a token is in."""
    return drift.prompt_id, drift.sample_id


def colour_thresholds(largest: float, first: float) -> tuple[float, ...]:
    """KL in nats at which each of the ``NUM_COLOURS`` colours begins: equal ratios from ``first`` towards ``largest``.

    If ``first`` is the upper quartile, a colour marks an unusual token. If it is not positive, or too close to
    ``largest`` for distinct colours, each colour begins at a third of the next.

    Args:
        largest: the largest KL that is drawn.
        first: the KL at which the first colour begins.
    """
    if not 0 < first < largest / 1.1**NUM_COLOURS:
        first = largest / 3**NUM_COLOURS
    ratio = (largest / first) ** (1 / NUM_COLOURS)
    return tuple(float(f"{first * ratio**index:.2g}") for index in range(NUM_COLOURS))


def read_prompt_texts(folder: RunFolder, keys: Collection[SequenceKey]) -> dict[SequenceKey, str]:
    """The prompts of the sequences ``keys``."""
    return {
        key: text or ""
        for part in folder.parts("sequences", ["prompt_id", "sample_id", "prompt"])
        for prompt, sample, text in zip(part["prompt_id"], part["sample_id"], part["prompt"], strict=True)
        if (key := (int(prompt), int(sample))) in keys
    }


def read_alternatives(
    folder: RunFolder, lengths: Mapping[SequenceKey, int], tokens: Mapping[SequenceKey, SequenceTokens]
) -> dict[SequenceKey, Alternatives]:
    """The likeliest tokens of both models at the first positions of sequences, ``lengths`` of each."""
    alternatives: dict[SequenceKey, Alternatives] = {key: {} for key in lengths}
    if not lengths:
        return alternatives
    table = folder.alternatives()
    last = {key: tokens[key].columns["position"][length - 1] for key, length in lengths.items()}
    places = list(
        zip(*(table[name].tolist() for name in ("prompt_id", "sample_id", "position")), strict=True)
    )
    models = [
        (table[f"text_{name}"], table[f"probability_{name}"].tolist()) for name in ("policy", "reference")
    ]
    for row in np.argsort(table["place"], kind="stable").tolist():
        prompt, sample, position = places[row]
        if position <= last.get((prompt, sample), -1):
            lists = alternatives[prompt, sample].setdefault(position, ([], []))
            for likeliest, (texts, probabilities) in zip(lists, models, strict=True):
                likeliest.append((make_visible(texts[row]), round_for_display(probabilities[row])))
    return alternatives


def _payload(
    total: float,
    key: SequenceKey,
    length: int,
    *,
    tokens: Mapping[SequenceKey, SequenceTokens],
    prompts: Mapping[SequenceKey, str],
    alternatives: Mapping[SequenceKey, Alternatives],
    kl_names: Sequence[str],
) -> dict[str, Any]:
    """The first ``length`` tokens of a sequence as an object for the page's script, with these columns as KLs.

    Texts of alternatives repeat, so they are stored once in ``texts`` and referred to by index.
    """
    sequence = tokens[key]
    columns = {name: values[:length].tolist() for name, values in sequence.columns.items()}
    texts: dict[str, int] = {}

    def flatten(likeliest: list[tuple[str, float]]) -> list[int | float]:
        return [part for text, p in likeliest for part in (texts.setdefault(text, len(texts)), p)]

    return {
        "prompt_id": key[0],
        "sample_id": key[1],
        "total": round_for_display(total),
        "tokens": len(sequence.texts),
        "prompt": keep_beginning(prompts.get(key, ""), MAX_PROMPT),
        "text": [make_visible(text) for text in sequence.texts[:length]],
        "kl": [round_for_display(value) for value in columns[kl_names[0]]],
        "p": [round_for_display(math.exp(value)) for value in columns["logp_policy"]],
        "q": [round_for_display(math.exp(value)) for value in columns["logp_reference"]],
        "reverse": [round_for_display(value) for value in columns[kl_names[1]]],
        "jensen_shannon": [round_for_display(value) for value in columns["jensen_shannon"]],
        "total_variation": [round_for_display(value) for value in columns["total_variation"]],
        "entropy_p": [round_for_display(value) for value in columns["entropy_policy"]],
        "entropy_q": [round_for_display(value) for value in columns["entropy_reference"]],
        "rank": columns["rank_reference"],
        "position": columns["position"],
        "token_id": columns["token_id"],
        "alternatives": [
            [flatten(likeliest) for likeliest in alternatives[key].get(position, ([], []))]
            for position in columns["position"]
        ],
        "texts": list(texts),
    }


def round_for_display(value: Any) -> float:
    """``value`` to the three significant digits that pages show, so that it is rounded once."""
    return float(f"{value:.3g}")
