"""The tokens of the worst sequences, as the page's heat map needs them."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kleash.records import Drifted, Measurement, RunFolder
from kleash.reports.formatting import excerpt, visible

MAX_SEQUENCES = 50
MAX_TOKENS_OF_SEQUENCE = 1000
MAX_TOKENS = 25_600
"""What is drawn at most. Nothing is left out of what is counted."""
BEFORE, AFTER = 60, 30
"""Tokens that are drawn around a drifted one whose sequence is not drawn, or not as far."""
MAX_PROMPT = 4000
STEPS = 8
"""Colours besides none."""

COLUMNS = (
    "position",
    "token_id",
    "kl_policy_reference",
    "kl_reference_policy",
    "jensen_shannon",
    "total_variation",
    "logp_policy",
    "logp_reference",
    "entropy_policy",
    "entropy_reference",
    "rank_reference",
)
Key = tuple[int, int]
"""prompt_id and sample_id."""


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """One sequence's tokens, in order: columns of ``tokens/``, and their texts."""

    texts: list[str]
    columns: Mapping[str, np.ndarray]

    def place_of(self, position: int | None) -> int | None:
        """Where among its tokens the one at ``position`` is; None if it is not there."""
        if position is None:
            return None
        found = np.flatnonzero(self.columns["position"] == position)
        return int(found[0]) if found.size else None


def read_sequences(folder: RunFolder, wanted: Iterable[Key]) -> dict[Key, Sequence]:
    """The tokens of the ``wanted`` sequences."""
    keys = np.unique(np.array([_code(*key) for key in wanted], dtype=np.int64))
    found: dict[Key, Sequence] = {}
    if not keys.size:
        return found
    for part in folder.token_parts(["prompt_id", "sample_id", "text", *COLUMNS]):
        codes = _code(part["prompt_id"].astype(np.int64), part["sample_id"].astype(np.int64))
        rows = np.flatnonzero(np.isin(codes, keys))
        for code in np.unique(codes[rows]):
            mine = rows[codes[rows] == code]
            mine = mine[np.argsort(part["position"][mine], kind="stable")]
            found[_key(int(code))] = Sequence(
                texts=[part["text"][row] for row in mine],
                columns={name: part[name][mine] for name in COLUMNS},
            )
    return found


def _code(prompt_id: Any, sample_id: Any) -> Any:
    return (prompt_id << 32) + sample_id


def _key(code: int) -> Key:
    return code >> 32, code & 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """What is drawn, and what had to be left out."""

    sequences: tuple[dict[str, Any], ...]
    """For each: what the page's script reads."""
    thresholds: tuple[float, ...]
    """KL in nats from which the first, second, … colour is taken."""
    from_ordinary: bool
    """Whether the first of them is the KL that three quarters of all tokens stay below."""
    shortened: int
    """Sequences of which only the beginning is drawn."""
    pieces: tuple[dict[str, Any], ...] = ()
    """Likewise, the surroundings of the most drifted tokens that lie elsewhere."""

    @property
    def drawn(self) -> tuple[dict[str, Any], ...]:
        """The sequences, and then the pieces of others."""
        return (*self.sequences, *self.pieces)


def heat_map(folder: RunFolder, measurement: Measurement, tokens: Mapping[Key, Sequence]) -> HeatMap:
    """The worst sequences of a measurement, with the alternatives of both models at each position."""
    lengths: dict[Key, int] = {}
    left = MAX_TOKENS
    for drift in measurement.worst_sequences:
        size = len(tokens[key_of(drift)].texts) if key_of(drift) in tokens else 0
        length = min(size, MAX_TOKENS_OF_SEQUENCE, left)
        if length and len(lengths) < MAX_SEQUENCES:
            lengths[key_of(drift)] = length
            left -= length
    around = surroundings(measurement.worst_tokens, tokens, lengths)
    spans = {key: [range(length)] for key, length in lengths.items()}
    for key, span in around:
        spans.setdefault(key, []).append(span)
    prompts = read_prompts(folder, spans.keys())
    others = read_alternatives(folder, spans.keys(), tokens)
    drawn = tuple(
        _payload(drift.kl, key_of(drift), tokens, range(lengths[key_of(drift)]), prompts, others)
        for drift in measurement.worst_sequences
        if key_of(drift) in lengths
    )
    pieces = tuple(
        _payload(
            float(np.sum(tokens[key].columns["kl_policy_reference"], dtype=np.float64)),
            key,
            tokens,
            span,
            prompts,
            others,
        )
        for key, span in around
    )
    kls = [value for sequence in (*drawn, *pieces) for value in sequence["kl"] if 0 < value < math.inf]
    ladder = measurement.quantiles.get("kl_policy_reference", {})
    ordinary = ladder["75"].value if "75" in ladder else math.nan
    steps = thresholds(max(kls, default=1.0), ordinary)
    return HeatMap(
        sequences=drawn,
        thresholds=steps,
        from_ordinary=math.isclose(steps[0], ordinary, rel_tol=0.1),
        shortened=sum(len(sequence["text"]) < sequence["tokens"] for sequence in drawn),
        pieces=pieces,
    )


def surroundings(
    worst: Iterable[Drifted], tokens: Mapping[Key, Sequence], lengths: Mapping[Key, int]
) -> list[tuple[Key, range]]:
    """Where the ``worst`` tokens lie that are not drawn anyway: a sequence, and a range of places in it.

    Args:
        worst: tokens, the most drifted first.
        tokens: of their sequences.
        lengths: for each sequence that is drawn, how much of it.
    """
    found: list[tuple[Key, range]] = []
    for drift in worst:
        key = key_of(drift)
        place = tokens[key].place_of(drift.position) if key in tokens else None
        if place is None or place < lengths.get(key, 0):
            continue
        if not any(key == other and place in span for other, span in found):
            size = len(tokens[key].texts)
            found.append((key, range(max(0, place - BEFORE), min(size, place + AFTER + 1))))
    return found


def key_of(drift: Drifted) -> Key:
    """Which sequence it is, or lies in."""
    return drift.prompt_id, drift.sample_id


def thresholds(largest: float, ordinary: float) -> tuple[float, ...]:
    """KL in nats at which the colours begin: equal ratios from ``ordinary`` towards ``largest``, ``STEPS`` of them.

    With three quarters of all tokens below ``ordinary``, what has a colour is what stands out. Where that is
    not above 0 or too close to ``largest`` to tell steps apart, each colour begins at a third of the next.

    Args:
        largest: the largest KL that is drawn.
        ordinary: the KL at which the first colour begins.
    """
    if not 0 < ordinary < largest / 1.1**STEPS:
        ordinary = largest / 3**STEPS
    ratio = (largest / ordinary) ** (1 / STEPS)
    return tuple(float(f"{ordinary * ratio**step:.2g}") for step in range(STEPS))


def read_prompts(folder: RunFolder, wanted: Collection[Key]) -> dict[Key, str]:
    """The prompts of the ``wanted`` sequences."""
    found: dict[Key, str] = {}
    for part in folder.sequence_parts(["prompt_id", "sample_id", "prompt"]):
        for prompt, sample, text in zip(part["prompt_id"], part["sample_id"], part["prompt"], strict=True):
            key = int(prompt), int(sample)
            if key in wanted:
                found[key] = text or ""
    return found


def read_alternatives(
    folder: RunFolder, wanted: Collection[Key], tokens: Mapping[Key, Sequence]
) -> dict[Key, Any]:
    """For each sequence and position: (text, probability) of the policy's likeliest tokens, and of the other's."""
    found: dict[Key, dict[int, Any]] = {key: {} for key in wanted}
    if not any(key in tokens for key in wanted):
        return found
    table = folder.alternatives()
    order = np.lexsort([table[name] for name in ("place", "position", "sample_id", "prompt_id")])
    sides = [(table[f"text_{who}"], table[f"probability_{who}"]) for who in ("policy", "reference")]
    places = zip(
        table["prompt_id"][order], table["sample_id"][order], table["position"][order], order, strict=True
    )
    for prompt, sample, position, row in places:
        of_sequence = found.get((int(prompt), int(sample)))
        if of_sequence is None:
            continue
        both = of_sequence.setdefault(int(position), ([], []))
        for side, (texts, probabilities) in zip(both, sides, strict=True):
            if texts[row] is not None:
                side.append((visible(texts[row]), rounded(probabilities[row])))
    return found


# More arguments than elsewhere: one sequence, and what is known of all.
def _payload(
    total: float,
    key: Key,
    tokens: Mapping[Key, Sequence],
    span: range,
    prompts: Mapping[Key, str],
    others: Mapping[Key, Any],
) -> dict[str, Any]:
    """The tokens of a sequence in ``span``, as the page's script reads them."""
    sequence = tokens[key]
    columns = {name: values[span.start : span.stop] for name, values in sequence.columns.items()}
    words: dict[str, int] = {}

    def side(pairs: list[tuple[str, float]]) -> list[int | float]:
        return [part for text, p in pairs for part in (words.setdefault(text, len(words)), p)]

    alternatives = [
        [side(pairs) for pairs in others[key].get(int(position), ([], []))]
        for position in columns["position"]
    ]
    return {
        "prompt_id": key[0],
        "sample_id": key[1],
        "total": rounded(total),
        "tokens": len(sequence.texts),
        "before": span.start,
        "prompt": excerpt(prompts.get(key, ""), MAX_PROMPT),
        "text": [visible(text) for text in sequence.texts[span.start : span.stop]],
        "kl": [rounded(value) for value in columns["kl_policy_reference"]],
        "p": [rounded(math.exp(value)) for value in columns["logp_policy"]],
        "q": [rounded(math.exp(value)) for value in columns["logp_reference"]],
        "reverse": [rounded(value) for value in columns["kl_reference_policy"]],
        "jensen_shannon": [rounded(value) for value in columns["jensen_shannon"]],
        "total_variation": [rounded(value) for value in columns["total_variation"]],
        "entropy_p": [rounded(value) for value in columns["entropy_policy"]],
        "entropy_q": [rounded(value) for value in columns["entropy_reference"]],
        "rank": [int(value) for value in columns["rank_reference"]],
        "position": [int(value) for value in columns["position"]],
        "token_id": [int(value) for value in columns["token_id"]],
        "alternatives": alternatives,
        "words": list(words),
    }


def rounded(value: Any) -> float:
    """To four significant digits, which is what a page shows."""
    return float(f"{value:.4g}")
