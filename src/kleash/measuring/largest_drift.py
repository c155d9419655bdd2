"""The tokens, sequences and prompts with the largest KL, and both models' likeliest tokens in the sequences.

The likeliest tokens (``alternatives``) are taken while a shard is scored, for those of its sequences that are among
the largest so far: about 50 · (1 + log(N / 50)) of N in all. The largest of the whole run are among them, so nothing
is computed twice and an interrupted run can be resumed.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kleash.measuring.sequence_clusters import sequence_rows, sequence_spans, sequence_starts
from kleash.models.tokenizers import token_texts
from kleash.store import RunFolder
from kleash.store.measurement import Drifted, PromptDrift
from kleash.store.statistics import KL_POLICY_REFERENCE
from kleash.store.tables import ALTERNATIVE_COLUMNS, TOP_COLUMNS

MAX_TOKENS = 50
MAX_SEQUENCES = 50
MAX_PROMPTS = 500
MAX_TEXT = 400
"""Characters of a prompt's text that are reported."""
NUM_ALTERNATIVES = 5
"""Likeliest tokens of each model that are stored for each position."""


class Largest:
    """The rows with the largest KL among those that were added, in falling order; of equal ones the run's first."""

    def __init__(self, size: int) -> None:
        """Keep ``size`` rows."""
        self.size = size
        self.columns: dict[str, NDArray[Any]] = {}

    def add(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Add rows, which need not be the run's next ones.

        Args:
            rows: the columns ``kl``, where NaN counts as the smallest, ``prompt_id``, ``sample_id``, perhaps
                ``position``, and others that are kept.
        """
        merged = {
            name: np.concatenate([self.columns.get(name, values[:0]), values])
            for name, values in rows.items()
        }
        merged["kl"] = np.where(np.isnan(merged["kl"]), -np.inf, merged["kl"])
        places = [merged[name] for name in ("position", "sample_id", "prompt_id") if name in merged]
        order = np.lexsort([*places, -merged["kl"]])[: self.size]
        self.columns = {name: values[order] for name, values in merged.items()}

    def drifted(self) -> tuple[Drifted, ...]:
        """The rows as records."""
        lists = [values.tolist() for values in self.columns.values()]
        return tuple(Drifted(**dict(zip(self.columns, row, strict=True))) for row in zip(*lists, strict=True))


class LargestDrift:
    """Collects the tokens, sequences and prompts with the largest KL, one shard at a time."""

    def __init__(self, column: str = KL_POLICY_REFERENCE) -> None:
        """Begin without tokens; ``column`` is the KL, as a column of ``tokens/``."""
        self.column = column
        self.tokens, self.sequences = Largest(MAX_TOKENS), Largest(MAX_SEQUENCES)
        self._sequences: list[NDArray[np.float64]] = []
        """Of each shard, rows of prompt, tokens, KL and largest KL of a token, a column for each sequence."""

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a shard, from its token columns."""
        kl = part[self.column].astype(np.float64)
        ids = {name: part[name] for name in ("prompt_id", "sample_id", "position")}
        self.tokens.add({"kl": kl, **ids, "text": np.array(part["text"], dtype=object)})
        rows = sequence_rows(part, kl)
        self.sequences.add(rows)
        largest = np.maximum.reduceat(kl, sequence_starts(part["prompt_id"], part["sample_id"]))
        self._sequences.append(np.stack([rows["prompt_id"], rows["tokens"], rows["kl"], largest]))

    def worst_prompts(self, folder: RunFolder, *, on_text: bool) -> tuple[PromptDrift, ...]:
        """The prompts with the largest KL per token, in falling order, with their texts.

        On text these are documents; their text is the first window's prompt and response joined.
        """
        prompt, tokens, kl, largest = np.concatenate([np.zeros((4, 0)), *self._sequences], axis=1)
        ids, group, sequences = np.unique(prompt, return_inverse=True, return_counts=True)
        tokens, kl = (np.bincount(group, weights=values) for values in (tokens, kl))
        kl_max = np.full(len(ids), -np.inf)
        np.maximum.at(kl_max, group, largest)
        rows = np.lexsort((ids, -kl / tokens))[:MAX_PROMPTS]
        columns = ["prompt", "response"] if on_text else ["prompt"]
        texts = first_texts(folder, set(ids[rows].astype(int).tolist()), columns)
        return tuple(
            PromptDrift(
                prompt_id=int(ids[row]),
                prompt=texts[int(ids[row])],
                sequences=int(sequences[row]),
                tokens=int(tokens[row]),
                kl_per_token=float(kl[row] / tokens[row]),
                kl_per_sequence=float(kl[row] / sequences[row]),
                kl_max=float(kl_max[row]),
            )
            for row in rows
        )


def first_texts(folder: RunFolder, prompts: Collection[int], columns: Sequence[str]) -> dict[int, str]:
    """The beginning of the text of each of these prompts' first sequence, by the prompt's id.

    Args:
        folder: of the run.
        prompts: their ids.
        columns: of ``sequences/``, whose texts are joined: "prompt", "response".
    """
    texts: dict[int, str] = {}
    for part in folder.parts("sequences", ["prompt_id", *columns]):
        for prompt_id, *parts in zip(*part.values(), strict=True):
            if prompt_id in prompts:
                texts.setdefault(int(prompt_id), shorten_text("".join(parts)))
    return texts


def shorten_text(text: str) -> str:
    """The first ``MAX_TEXT`` characters of a text, with an ellipsis at the end if it was longer."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def alternatives_of_shard(
    largest: Largest, tokens: Mapping[str, NDArray[Any]], likeliest: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The columns ``TOP_COLUMNS`` of those sequences of a shard that are among the ``largest``.

    Args:
        largest: the sequences with the largest KL so far, this shard's included.
        tokens: the shard's token columns.
        likeliest: ids and probabilities of each model's likeliest tokens, [token, place].
    """
    prompt, sample = tokens["prompt_id"], tokens["sample_id"]
    keys = {(row.prompt_id, row.sample_id) for row in largest.drifted()}
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
        RunFolderError: if a file of theirs is missing or damaged.
    """
    rank_of = {(sequence.prompt_id, sequence.sample_id): rank for rank, sequence in enumerate(sequences)}
    parts: dict[int, dict[str, NDArray[Any]]] = {}
    for part in folder.parts("alternatives", list(TOP_COLUMNS)):
        for begin, end in sequence_spans(part["prompt_id"], part["sample_id"]):
            rank = rank_of.get((int(part["prompt_id"][begin]), int(part["sample_id"][begin])))
            if rank is not None:
                parts[rank] = {name: values[begin:end] for name, values in part.items()}
    columns: dict[str, Any] = {
        name: np.concatenate([np.zeros(0, dtype=dtype), *(parts[rank][name] for rank in sorted(parts))])
        for name, dtype in TOP_COLUMNS.items()
    }
    columns |= {
        f"text_{model}": token_texts(tokenizer, columns[f"token_id_{model}"].tolist())
        for model in ("policy", "reference")
    }
    folder.write_alternatives({name: columns[name] for name in ALTERNATIVE_COLUMNS})
