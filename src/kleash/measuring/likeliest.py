"""Both models' likeliest tokens in the sequences that drifted most, gathered while these are scored.

With each shard are kept those of its sequences that are among the worst so far: about 50 · (1 + log(N / 50)) of N in
all, and the worst of the whole run among them. So nothing is computed twice, and an interrupted run goes on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kleash.errors import RunFolderError
from kleash.measuring.rows import sequence_spans
from kleash.measuring.worst import Largest
from kleash.models import token_texts
from kleash.records import Drifted, RunFolder
from kleash.records.tables import ALTERNATIVE_COLUMNS, TOP_COLUMNS

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
