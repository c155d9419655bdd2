"""The tokens, sequences and prompts with the largest KL, and both models' likeliest tokens in the sequences.

The likeliest tokens (``alternatives``) are taken while a shard is scored, for those of its sequences that are among
the largest so far: about 50 · (1 + log(N / 50)) of N in all. The largest of the whole run are among them, so nothing
is computed twice and an interrupted run can be resumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappush, heappushpop
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kleash.errors import RunFolderError
from kleash.measuring.sequence_clusters import sequence_spans
from kleash.models.tokenizers import token_texts
from kleash.store import RunFolder
from kleash.store.measurement import Drifted, PromptDrift
from kleash.store.tables import ALTERNATIVE_COLUMNS, TOP_COLUMNS

MAX_TOKENS = 50
MAX_SEQUENCES = 50
MAX_PROMPTS = 500
MAX_TEXT = 400
"""Characters of a prompt's text that are reported."""
NUM_ALTERNATIVES = 5
"""Likeliest tokens of each model that are stored for each position."""


class Entry(NamedTuple):
    """A token or a sequence, ordered by its KL; of equal ones the earliest is the largest."""

    kl: float
    minus_prompt_id: int
    minus_sample_id: int
    minus_position: int = 0
    tokens: int = 1
    text: str = ""


@dataclass(kw_only=True)
class TopEntries:
    """The ``size`` largest entries added so far."""

    size: int
    column: str = "kl_policy_reference"
    """The KL that is summed over sequences, as a column of ``tokens/``."""
    heap: list[Entry] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Add an entry, and drop the smallest if there are too many."""
        if len(self.heap) < self.size:
            heappush(self.heap, entry)
        elif entry > self.heap[0]:
            heappushpop(self.heap, entry)

    def add_sequences(self, tokens: Mapping[str, Any]) -> None:
        """Add a shard's sequences, each with its summed KL.

        Args:
            tokens: the shard's columns ``prompt_id``, ``sample_id`` and ``column``.
        """
        prompt, sample, kl = (np.asarray(tokens[name]) for name in ("prompt_id", "sample_id", self.column))
        kl = kl.astype(np.float64)
        for begin, end in sequence_spans(prompt, sample):
            self.add(
                Entry(
                    kl=float(kl[begin:end].sum()),
                    minus_prompt_id=-int(prompt[begin]),
                    minus_sample_id=-int(sample[begin]),
                    tokens=int(end - begin),
                )
            )

    def largest_first(self) -> list[Entry]:
        """The entries in falling order."""
        return sorted(self.heap, reverse=True)


@dataclass(kw_only=True)
class PromptTotals:
    """Sums over all sequences of one prompt."""

    sequences: int = 0
    tokens: int = 0
    kl: float = 0.0
    kl_max: float = 0.0


@dataclass(kw_only=True)
class LargestDrift:
    """Collects the tokens, sequences and prompts with the largest KL, one shard at a time."""

    column: str = "kl_policy_reference"
    """The KL, as a column of ``tokens/``."""
    tokens: TopEntries = field(default_factory=lambda: TopEntries(size=MAX_TOKENS))
    sequences: TopEntries = field(init=False)
    prompts: dict[int, PromptTotals] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin without sequences."""
        self.sequences = TopEntries(size=MAX_SEQUENCES, column=self.column)

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a shard, from its token columns."""
        prompt, sample = part["prompt_id"], part["sample_id"]
        kl = part[self.column].astype(np.float64)
        sort_keys = np.where(np.isnan(kl), -np.inf, kl)
        for row in np.argsort(-sort_keys, kind="stable")[: self.tokens.size]:
            self.tokens.add(
                Entry(
                    kl=float(sort_keys[row]),
                    minus_prompt_id=-int(prompt[row]),
                    minus_sample_id=-int(sample[row]),
                    minus_position=-int(part["position"][row]),
                    text=part["text"][row],
                )
            )
        self.sequences.add_sequences(part)
        for begin, end in sequence_spans(prompt, sample):
            totals = self.prompts.setdefault(int(prompt[begin]), PromptTotals())
            totals.sequences += 1
            totals.tokens += int(end - begin)
            totals.kl += float(kl[begin:end].sum())
            totals.kl_max = max(totals.kl_max, float(kl[begin:end].max()))

    def worst_tokens(self) -> tuple[Drifted, ...]:
        """The tokens with the largest KL, in falling order."""
        return tuple(
            Drifted(
                prompt_id=-entry.minus_prompt_id,
                sample_id=-entry.minus_sample_id,
                kl=entry.kl,
                position=-entry.minus_position,
                text=entry.text,
            )
            for entry in self.tokens.largest_first()
        )

    def worst_sequences(self) -> tuple[Drifted, ...]:
        """The sequences with the largest summed KL, in falling order."""
        return tuple(
            Drifted(
                prompt_id=-entry.minus_prompt_id,
                sample_id=-entry.minus_sample_id,
                kl=entry.kl,
                tokens=entry.tokens,
            )
            for entry in self.sequences.largest_first()
        )

    def worst_prompts(self, folder: RunFolder, *, on_text: bool) -> tuple[PromptDrift, ...]:
        """The prompts with the largest KL per token, in falling order, with their texts.

        On text these are documents; their text is the first window's prompt and response joined.
        """
        prompts = sorted(self.prompts.items(), key=lambda item: (-item[1].kl / item[1].tokens, item[0]))
        records = {
            prompt_id: PromptDrift(
                prompt_id=prompt_id,
                prompt="",
                sequences=totals.sequences,
                tokens=totals.tokens,
                kl_per_token=totals.kl / totals.tokens,
                kl_per_sequence=totals.kl / totals.sequences,
                kl_max=totals.kl_max,
            )
            for prompt_id, totals in prompts[:MAX_PROMPTS]
        }
        for part in folder.sequence_parts(["prompt_id", "prompt", "response"]):
            for key, prompt, response in zip(
                part["prompt_id"], part["prompt"], part["response"], strict=True
            ):
                prompt_id = int(key)
                if prompt_id in records and not records[prompt_id].prompt:
                    text = shorten_text(prompt + response if on_text else prompt)
                    records[prompt_id] = replace(records[prompt_id], prompt=text)
        return tuple(records.values())


def shorten_text(text: str) -> str:
    """The first ``MAX_TEXT`` characters of a text, with an ellipsis at the end if it was longer."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def alternatives_of_shard(
    largest: TopEntries, tokens: Mapping[str, NDArray[Any]], likeliest: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The columns ``TOP_COLUMNS`` of those sequences of a shard that are among the ``largest``.

    Args:
        largest: the sequences with the largest KL so far, this shard's included.
        tokens: the shard's token columns.
        likeliest: ids and probabilities of each model's likeliest tokens, [token, place].
    """
    prompt, sample = tokens["prompt_id"], tokens["sample_id"]
    keys = {(-entry.minus_prompt_id, -entry.minus_sample_id) for entry in largest.heap}
    rows = [
        np.arange(begin, end)
        for begin, end in sequence_spans(prompt, sample)
        if (int(prompt[begin]), int(sample[begin])) in keys
    ]
    selected_rows = np.concatenate([np.zeros(0, dtype=np.int64), *rows])
    count = next(iter(likeliest.values())).shape[1]
    columns = {
        name: np.repeat(tokens[name][selected_rows], count) for name in ("prompt_id", "sample_id", "position")
    }
    columns["place"] = np.tile(np.arange(count, dtype=np.int32), len(selected_rows))
    return columns | {name: values[selected_rows].reshape(-1) for name, values in likeliest.items()}


def write_alternatives(folder: RunFolder, sequences: Sequence[Drifted], tokenizer: Any) -> None:
    """Write ``alternatives.parquet`` of these sequences, in their order, from the files of the shards.

    Args:
        folder: of the run.
        sequences: those with the largest KL.
        tokenizer: for the tokens' texts.

    Raises:
        RunFolderError: if a sequence's alternatives are missing or damaged.
    """
    rank_of = {(sequence.prompt_id, sequence.sample_id): rank for rank, sequence in enumerate(sequences)}
    parts: dict[int, dict[str, NDArray[Any]]] = {}
    for part in folder.top_parts(list(TOP_COLUMNS)):
        for begin, end in sequence_spans(part["prompt_id"], part["sample_id"]):
            rank = rank_of.get((int(part["prompt_id"][begin]), int(part["sample_id"][begin])))
            if rank is not None:
                parts[rank] = {name: values[begin:end] for name, values in part.items()}
    missing = [sequence for rank, sequence in enumerate(sequences) if rank not in parts]
    if missing:
        raise RunFolderError(
            f"{folder.root / 'alternatives'} lacks prompt {missing[0].prompt_id}, sample {missing[0].sample_id}; "
            "measure again with another --out"
        )
    columns: dict[str, Any] = {
        name: np.concatenate([np.zeros(0, dtype=dtype), *(parts[rank][name] for rank in sorted(parts))])
        for name, dtype in TOP_COLUMNS.items()
    }
    for model in ("policy", "reference"):
        columns[f"text_{model}"] = token_texts(tokenizer, columns[f"token_id_{model}"].tolist())
    folder.write_alternatives({name: columns[name] for name in ALTERNATIVE_COLUMNS})
