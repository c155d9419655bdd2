"""Former names of fields in files that kleash reads back."""

from collections.abc import Mapping
from typing import Any

RENAMED_FIELDS: Mapping[str, Mapping[str, str]] = {
    # Until schema 2 of run folders.
    "Bin": {"kl_policy_reference": "kl"},
    # Until schema 1 of run folders.
    "Number": {"doubts": "warnings"},
    "EstimatorRecord": {"doubts": "warnings"},
    "Measurement": {"doubts": "warnings"},
    # Training folders have no schema; their files are of the same time.
    "StepRecord": {"warnings": "alerts"},
    "TrainingResult": {"warnings": "alerts"},
    "TrainingState": {"warnings": "alerts"},
    "LeashSetting": {"said": "description"},
    "settings": {
        "discount": "gamma",
        "decay": "gae_lambda",
        "clip": "clip_range",
        "value_clip": "clip_range_value",
        "value_coefficient": "vf_coef",
        "entropy_coefficient": "ent_coef",
        "trackers": "report_to",
        "watch": "on_hacking",
    },
    # Until schema 2 of audits.
    "ValueRow": {"world": "pair"},
    "GradientRow": {"world": "pair"},
    "ZoneRow": {"of": "kind"},
    "AccuracyRow": {"forced": "unavoidable_error"},
}
"""Record -> former name of a field -> its current name; "settings" are a job's options in ``run.json``.

A reader ignores keys that it does not know, so a field that was renamed without an entry here would be read as
its default, in silence.
"""

RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "on_hacking": {"say": "warn", "halve_learning_rate": "halve-lr"},
}
"""Option -> a former value -> the current one."""


def with_current_names(record: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a record in a file, under their names of today.

    Args:
        record: the name of the record's class.
        data: the fields as they stand in the file; a current name wins over a former one.
    """
    renamed = RENAMED_FIELDS.get(record)
    if renamed is None or not any(former in data for former in renamed):
        return data
    former = {renamed[name]: value for name, value in data.items() if name in renamed}
    current = {name: value for name, value in data.items() if name not in renamed}
    return former | current


def with_current_options(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a job in a file, under their current names and with the current words for their values."""
    renamed = with_current_names("settings", settings)
    return {
        name: RENAMED_VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value
        for name, value in renamed.items()
    }
