"""Former names of fields in files that kleash reads back."""

from collections.abc import Mapping
from typing import Any

RENAMED_FIELDS: Mapping[str, Mapping[str, str]] = {
    # Until schema 1 of run folders.
    "Number": {"doubts": "warnings"},
    "EstimatorRecord": {"doubts": "warnings"},
    "Measurement": {"doubts": "warnings"},
    # Training folders have no schema; their files are of the same time.
    "StepRecord": {"warnings": "alerts"},
    "TrainingResult": {"warnings": "alerts"},
    "Progress": {"warnings": "alerts"},
}
"""Record -> former name of a field -> its name today.

A reader ignores keys that it does not know, so a field that was renamed without an entry here would be read as
its default, in silence.
"""


def with_current_names(record: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a record in a file, under their names of today.

    Args:
        record: the name of the record's class.
        data: the fields as they stand in the file; a current name wins over a former one.
    """
    renamed = RENAMED_FIELDS.get(record)
    if renamed is None or not any(former in data for former in renamed):
        return data
    return {**{renamed[name]: value for name, value in data.items() if name in renamed}, **data}
