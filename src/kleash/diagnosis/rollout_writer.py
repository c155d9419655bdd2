"""Writes rollouts as JSONL, in the fields that ``kleash mismatch`` and ``kleash doctor`` read."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kleash.diagnosis.rollout_records import (
    ATTENTION_MASK,
    FIELD_NAMES,
    PROMPT_MASKS,
    RESPONSE_MASKS,
    SEQUENCES,
)
from kleash.errors import OptionError
from kleash.store.atomic import write_atomically


def write_rollouts(path: str | Path, batch: Mapping[str, Any], **of_each: int | float | str) -> None:
    """Write the rollouts of a batch as JSONL, a line for each response; the file is there whole or not at all.

    Args:
        path: the file; its folder is made.
        batch: columns [responses, time] under the names of ``kleash mismatch`` (docs/mismatch.md): a batch of TRL,
            verl's ``DataProto.batch``, or ``vars`` of an ``Experience`` of OpenRLHF. Other entries are left out.
        **of_each: further fields of each line, such as ``version=step``.

    Raises:
        OptionError: if token ids or one of the two columns of log-probabilities are missing.
        RunFolderError: if the file cannot be written.
    """
    names = {name for group in FIELD_NAMES.values() for name in group}
    names |= {*RESPONSE_MASKS, *PROMPT_MASKS, ATTENTION_MASK, SEQUENCES.ids, SEQUENCES.mask}
    columns = {name: value for name in names if isinstance(value := batch.get(name, None), Tensor)}
    for field, group in FIELD_NAMES.items():
        is_ids = field.endswith("token_ids")
        if field == "reference_logprobs" or (is_ids and SEQUENCES.ids in columns):
            continue
        if not columns.keys() & set(group):
            raise OptionError(
                f"the batch has no {' or '.join(map(repr, group))}, which a rollout needs; it has "
                f"{', '.join(map(repr, batch.keys()))}"
            )
    rows = zip(*(column.detach().cpu().tolist() for column in columns.values()), strict=True)
    lines = [json.dumps({**of_each, **dict(zip(columns, map(_finite, row), strict=True))}) for row in rows]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def _finite(values: list[Any]) -> list[Any]:
    """The values, null for those that are not finite, which JSON does not have."""
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]
