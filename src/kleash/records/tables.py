"""The columns of the run folder's Parquet files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kleash.errors import RunFolderError
from kleash.extras import need
from kleash.records.atomic import write_atomically

TOKEN_COLUMNS: Mapping[str, str] = {
    "prompt_id": "int32",
    "sample_id": "int32",
    "position": "int32",
    "token_id": "int32",
    "text": "string",
    "logp_policy": "float32",
    "logp_reference": "float32",
    "logp_sampled": "float32",
    "kl_policy_reference": "float32",
    "kl_reference_policy": "float32",
    "jensen_shannon": "float32",
    "total_variation": "float32",
    "entropy_policy": "float32",
    "entropy_reference": "float32",
    "top1_policy": "int32",
    "top1_reference": "int32",
    "top1_probability_policy": "float32",
    "top1_probability_reference": "float32",
    "rank_reference": "int32",
}
"""``position`` counts from 0 at the first response token; ``logp_sampled`` is null where it is unknown."""

SEQUENCE_COLUMNS: Mapping[str, str] = {
    "prompt_id": "int32",
    "sample_id": "int32",
    "prompt_hash": "string",
    "prompt": "string",
    "response": "string",
    "finish_reason": "string",
    "tokens": "int32",
}

ALTERNATIVE_COLUMNS: Mapping[str, str] = {
    "prompt_id": "int32",
    "sample_id": "int32",
    "position": "int32",
    "place": "int32",
    "token_id_policy": "int32",
    "text_policy": "string",
    "probability_policy": "float32",
    "token_id_reference": "int32",
    "text_reference": "string",
    "probability_reference": "float32",
}
"""``place`` 0 to 4: each model's likeliest tokens, likeliest first."""

TOP_COLUMNS: Mapping[str, str] = {
    name: kind for name, kind in ALTERNATIVE_COLUMNS.items() if kind != "string"
}
"""``ALTERNATIVE_COLUMNS`` without the texts: what a shard keeps of its sequences that drifted most."""


def write_table(path: Path, columns: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Write ``columns`` as the Parquet file ``path``, whole or not at all.

    Args:
        path: the file.
        columns: an array or list for each name in ``kinds``; None is null.
        kinds: the type of each column.
    """
    arrow = need("pyarrow", "models")
    parquet = need("pyarrow.parquet", "models")
    types = {"int32": arrow.int32(), "float32": arrow.float32(), "string": arrow.string()}
    arrays = [arrow.array(columns[name], type=types[kind], from_pandas=False) for name, kind in kinds.items()]
    table = arrow.Table.from_arrays(arrays, names=list(kinds))
    write_atomically(path, lambda unfinished: parquet.write_table(table, unfinished, compression="zstd"))


def read_columns(path: Path, names: list[str]) -> dict[str, Any]:
    """The named columns of a Parquet file: numpy arrays for numbers, with NaN for null, lists for text.

    Raises:
        RunFolderError: if the file is missing or damaged.
    """
    arrow = need("pyarrow", "models")
    parquet = need("pyarrow.parquet", "models")
    try:
        table = parquet.read_table(path, columns=names, partitioning=None)
    except (OSError, arrow.ArrowException) as error:
        reason = str(error).strip().splitlines()[0]
        raise RunFolderError(
            f"{path} cannot be read ({reason}); delete it and run again with --resume to make it anew"
        ) from error
    return {name: _plain(table.column(name)) for name in names}


def read_parts(paths: list[Path], names: list[str]) -> Iterator[dict[str, Any]]:
    """``read_columns`` of one file after the other, so that only one is in memory."""
    for path in paths:
        yield read_columns(path, names)


def _plain(column: Any) -> Any:
    if str(column.type) == "string":
        return column.to_pylist()
    return np.asarray(column.to_numpy())
