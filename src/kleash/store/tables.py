"""The columns of the run folder's Parquet files."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from kleash.errors import RunFolderError, summarise_error
from kleash.extras import import_extra

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
"""``position`` counts from 0 at the first response token; ``logp_sampled`` is null where it is unknown. Where one model
is behind a server, so is every column that needs its whole distribution."""

KL_BOUND_COLUMNS: Mapping[str, str] = {
    "kl_policy_reference_lower": "float32",
    "kl_policy_reference_upper": "float32",
    "kl_reference_policy_lower": "float32",
    "kl_reference_policy_upper": "float32",
}
"""Certified bounds of both KLs, where one distribution is known within bounds."""

BOUND_COLUMNS: Mapping[str, str] = {
    **KL_BOUND_COLUMNS,
    "jensen_shannon_lower": "float32",
    "jensen_shannon_upper": "float32",
    "total_variation_lower": "float32",
    "total_variation_upper": "float32",
    "kl_of_listed": "float32",
    "listed_probability": "float32",
    "token_is_listed": "float32",
}
"""Further columns of ``tokens/`` where one model is behind a server that lists its likeliest tokens: certified bounds,
the terms of KL(policy || reference) of the listed tokens, their probability under that model, and whether the scored
token is among them (1 or 0)."""

PADDING_COLUMNS: Mapping[str, str] = {
    "is_padding": "float32",
    "padding_probability_policy": "float32",
    "padding_probability_reference": "float32",
    "kl_policy_reference_over_tokens": "float32",
    "kl_reference_policy_over_tokens": "float32",
    "kl_policy_reference_over_rows": "float32",
    "kl_reference_policy_over_rows": "float32",
}
"""Further columns of ``tokens/`` where a head has rows that are no tokens of the tokenizer: whether the scored token is
one (1 or 0), their probability, and the KL over the tokens alone and over all rows."""

LLAMA_CPP_COLUMNS: Mapping[str, str] = {
    **KL_BOUND_COLUMNS,
    "llama_cpp_kld": "float32",
    "is_clipped": "float32",
}
"""Further columns of ``tokens/`` where the reference is a file of llama.cpp's base logits: bounds; the KL of the
reference from the policy as llama.cpp computes it, without tokens of a log-probability of -16 or less; and whether
``logp_reference`` is an upper bound, as the code of the scored token stands for all that are as unlikely (1 or 0)."""

PADDING_BOUND_COLUMNS: Mapping[str, str] = {
    f"{name}_over_{part}_{end}": "float32"
    for name in ("kl_reference_policy", "kl_policy_reference")
    for part in ("tokens", "rows")
    for end in ("lower", "upper")
}
"""In place of the last four of ``PADDING_COLUMNS``, where one distribution is known within bounds."""

SAMPLER_COLUMNS: Mapping[str, str] = {"acceptance_of_sampler": "float32"}
"""A further column of ``tokens/`` where responses are generated greedily or from a truncated distribution."""

OPTIONAL_COLUMNS: Mapping[str, str] = {
    **BOUND_COLUMNS,
    **LLAMA_CPP_COLUMNS,
    **PADDING_COLUMNS,
    **PADDING_BOUND_COLUMNS,
    **SAMPLER_COLUMNS,
}
"""Columns of ``tokens/`` that only some runs have."""

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


REMAKE = "delete it and run again with --resume to make it anew"


def encode_table(columns: Mapping[str, Any], kinds: Mapping[str, str]) -> bytes:
    """The bytes of a Parquet file.

    Args:
        columns: values by name; others than those of ``kinds`` are left out.
        kinds: the columns in their order -> "int32", "float32" or "string".
    """
    arrow, parquet = (import_extra(module, "models") for module in ("pyarrow", "pyarrow.parquet"))
    arrays = [arrow.array(columns[name], type=kind, from_pandas=False) for name, kind in kinds.items()]
    file = BytesIO()
    parquet.write_table(arrow.Table.from_arrays(arrays, names=list(kinds)), file, compression="zstd")
    return file.getvalue()


def read_columns(path: Path, names: list[str], read: Callable[[Path, str], bytes]) -> dict[str, Any]:
    """The named columns of a Parquet file: numpy arrays for numbers, with NaN for null, lists for text.

    Args:
        path: the file.
        names: of the columns.
        read: gives the file's bytes, verified, or raises with the advice that it is given.

    Raises:
        RunFolderError: if the file is missing or damaged.
    """
    with _parquet_file(path, read) as (arrow, file):
        # Not read_table: its threads may end after the interpreter does, which aborts the process (apache/arrow 34314).
        table = file.read(columns=names, use_threads=False)
        columns = {name: table.column(name).combine_chunks() for name in names}
        texts = {
            name: column.to_pylist() for name, column in columns.items() if column.type == arrow.string()
        }
        # asarray, which has NaN for null, imports pandas wherever it is installed: half a second.
        numbers = {
            name: np.asarray(column) if column.null_count else np.from_dlpack(column)
            for name, column in columns.items()
            if name not in texts
        }
        return {**columns, **texts, **numbers}


def column_names(path: Path, read: Callable[[Path, str], bytes]) -> frozenset[str]:
    """The names of the columns of a Parquet file; arguments and errors as for ``read_columns``."""
    with _parquet_file(path, read) as (_, file):
        return frozenset(file.schema_arrow.names)


@contextmanager
def _parquet_file(path: Path, read: Callable[[Path, str], bytes]) -> Generator[tuple[Any, Any]]:
    """Context with pyarrow and a Parquet file, in which errors of a damaged file are raised as RunFolderError."""
    arrow, parquet = (import_extra(module, "models") for module in ("pyarrow", "pyarrow.parquet"))
    content = read(path, REMAKE)
    try:
        yield arrow, parquet.ParquetFile(arrow.BufferReader(content))
    except (OSError, ValueError, LookupError, MemoryError, arrow.ArrowException) as error:
        reason = getattr(error, "strerror", None) or summarise_error(error)
        raise RunFolderError(f"{path} cannot be read ({reason}); {REMAKE}") from error
