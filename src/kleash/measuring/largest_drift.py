"""What drifted most: tokens, sequences and prompts, found in one pass with little memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappush, heappushpop
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kleash.errors import RunFolderError
from kleash.measuring.sequence_clusters import sequence_spans
from kleash.models import token_texts
from kleash.records import Drifted, PromptDrift, RunFolder
from kleash.records.tables import ALTERNATIVE_COLUMNS, TOP_COLUMNS

WORST_TOKENS = 50
WORST_SEQUENCES = 50
WORST_PROMPTS = 500
LONGEST_TEXT = 400

Entry = tuple[float, int, int, int, int, str]


@dataclass(kw_only=True)
class Largest:
    """The entries with the largest keys seen so far; of equal ones the first."""

    most: int
    heap: list[Entry] = field(default_factory=list)

    def offer(self, entry: Entry) -> None:
        """Keep ``entry`` if it is among the largest."""
        if len(self.heap) < self.most:
            heappush(self.heap, entry)
        elif entry > self.heap[0]:
            heappushpop(self.heap, entry)

    def best(self) -> list[Entry]:
        """What was kept, largest first."""
        return sorted(self.heap, reverse=True)


def offer_sequences(largest: Largest, part: Mapping[str, Any]) -> None:
    """Enter a shard's sequences, each with its summed KL.

    Args:
        largest: the sequences with the largest so far.
        part: the shard's columns ``prompt_id``, ``sample_id`` and ``kl_policy_reference``.
    """
    prompt, sample, kl = (
        np.asarray(part[name]) for name in ("prompt_id", "sample_id", "kl_policy_reference")
    )
    kl = kl.astype(np.float64)
    for begin, end in sequence_spans(prompt, sample):
        total = float(kl[begin:end].sum())
        largest.offer((total, -int(prompt[begin]), -int(sample[begin]), 0, int(end - begin), ""))


@dataclass(kw_only=True)
class Worst:
    """Collects, shard by shard, what drifted most."""

    tokens: Largest = field(default_factory=lambda: Largest(most=WORST_TOKENS))
    sequences: Largest = field(default_factory=lambda: Largest(most=WORST_SEQUENCES))
    prompts: dict[int, list[float]] = field(default_factory=dict)
    """Of each prompt: sequences, tokens, summed KL, largest KL."""

    def add(self, part: Mapping[str, Any]) -> None:
        """Look through a shard's tokens."""
        prompt, sample, kl = (
            part["prompt_id"],
            part["sample_id"],
            part["kl_policy_reference"].astype(np.float64),
        )
        ranked = np.where(np.isnan(kl), -np.inf, kl)
        for row in np.argsort(-ranked, kind="stable")[: self.tokens.most]:
            place = int(part["position"][row])
            self.tokens.offer(
                (float(ranked[row]), -int(prompt[row]), -int(sample[row]), -place, 1, part["text"][row])
            )
        offer_sequences(self.sequences, part)
        for begin, end in sequence_spans(prompt, sample):
            total, who = float(kl[begin:end].sum()), int(prompt[begin])
            held = self.prompts.setdefault(who, [0.0, 0.0, 0.0, 0.0])
            held[0] += 1
            held[1] += float(end - begin)
            held[2] += total
            held[3] = max(held[3], float(kl[begin:end].max()))

    def worst_tokens(self) -> tuple[Drifted, ...]:
        """The tokens with the largest KL, largest first."""
        return tuple(
            Drifted(prompt_id=-who, sample_id=-sample, kl=kl, position=-place, text=text)
            for kl, who, sample, place, _, text in self.tokens.best()
        )

    def worst_sequences(self) -> tuple[Drifted, ...]:
        """The sequences with the largest summed KL, largest first."""
        return tuple(
            Drifted(prompt_id=-who, sample_id=-sample, kl=kl, tokens=count)
            for kl, who, sample, _, count, _ in self.sequences.best()
        )

    def worst_prompts(self, folder: RunFolder, *, on_text: bool) -> tuple[PromptDrift, ...]:
        """The prompts with the largest KL per token, largest first, with their texts.

        On text these are documents, whose first window is split into what was read and what was scored.
        """
        ranked = sorted(self.prompts.items(), key=lambda item: (-item[1][2] / item[1][1], item[0]))
        found = {
            who: PromptDrift(
                prompt_id=who,
                prompt="",
                sequences=int(sequences),
                tokens=int(tokens),
                kl_per_token=total / tokens,
                kl_per_sequence=total / sequences,
                kl_max=largest,
            )
            for who, (sequences, tokens, total, largest) in ranked[:WORST_PROMPTS]
        }
        for part in folder.sequence_parts(["prompt_id", "prompt", "response"]):
            for who, prompt, response in zip(
                part["prompt_id"], part["prompt"], part["response"], strict=True
            ):
                if int(who) in found and not found[int(who)].prompt:
                    text = shortened(prompt + response if on_text else prompt)
                    found[int(who)] = replace(found[int(who)], prompt=text)
        return tuple(found.values())


def shortened(text: str) -> str:
    """``text``, or its beginning where it is long."""
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


TOP = 5
"""Tokens of each model at each position."""


def top_rows(
    worst: Largest, tokens: Mapping[str, NDArray[Any]], likeliest: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The columns ``TOP_COLUMNS`` of a shard's sequences that are among the ``worst``.

    Args:
        worst: the sequences with the largest KL so far, this shard's included.
        tokens: the shard's token columns.
        likeliest: for each of its tokens a row of ``TOP`` ids and probabilities of each model.
    """
    prompt, sample = tokens["prompt_id"], tokens["sample_id"]
    wanted = {(-who, -which) for _, who, which, *_ in worst.heap}
    rows = [
        np.arange(begin, end)
        for begin, end in sequence_spans(prompt, sample)
        if (int(prompt[begin]), int(sample[begin])) in wanted
    ]
    chosen = np.concatenate([np.zeros(0, dtype=np.int64), *rows])
    top = next(iter(likeliest.values())).shape[1]
    columns = {name: np.repeat(tokens[name][chosen], top) for name in ("prompt_id", "sample_id", "position")}
    columns["place"] = np.tile(np.arange(top, dtype=np.int32), len(chosen))
    return columns | {name: values[chosen].reshape(-1) for name, values in likeliest.items()}


def write_alternatives(folder: RunFolder, worst: Sequence[Drifted], tokenizer: Any) -> None:
    """Write ``alternatives.parquet`` of the ``worst`` sequences, in their order, from what the shards have kept.

    Raises:
        RunFolderError: if that is missing or damaged.
    """
    order = {(one.prompt_id, one.sample_id): place for place, one in enumerate(worst)}
    parts: dict[int, dict[str, NDArray[Any]]] = {}
    for part in folder.top_parts(list(TOP_COLUMNS)):
        for begin, end in sequence_spans(part["prompt_id"], part["sample_id"]):
            place = order.get((int(part["prompt_id"][begin]), int(part["sample_id"][begin])))
            if place is not None:
                parts[place] = {name: values[begin:end] for name, values in part.items()}
    missing = [one for place, one in enumerate(worst) if place not in parts]
    if missing:
        raise RunFolderError(
            f"{folder.root / 'alternatives'} lacks prompt {missing[0].prompt_id}, sample {missing[0].sample_id}; "
            "measure again with another --out"
        )
    columns: dict[str, Any] = {
        name: np.concatenate([np.zeros(0, dtype=kind), *(parts[place][name] for place in sorted(parts))])
        for name, kind in TOP_COLUMNS.items()
    }
    for side in ("policy", "reference"):
        columns[f"text_{side}"] = token_texts(tokenizer, columns[f"token_id_{side}"].tolist())
    folder.write_alternatives({name: columns[name] for name in ALTERNATIVE_COLUMNS})
