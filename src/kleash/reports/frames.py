"""Results as data frames of pandas."""

from pathlib import Path
from typing import Any, NamedTuple

from kleash.errors import OptionError
from kleash.extras import import_extra
from kleash.store import Measurement, RunFolder
from kleash.store.number_rows import NumericResult, number_rows
from kleash.store.tables import OPTIONAL_COLUMNS, SEQUENCE_COLUMNS, TOKEN_COLUMNS


class RunFrames(NamedTuple):
    """The tables of a run as data frames; ``prompt_id`` and ``sample_id`` join them."""

    tokens: Any
    """A row for each scored position, with the columns of ``tokens/``; null is NaN."""
    sequences: Any
    """A row for each response or window, with the columns of ``sequences/``."""


def to_pandas(result: Any) -> Any:
    """The tables of a measurement, as ``RunFrames``, or the numbers of another result.

    Raises:
        OptionError: if it is the result of a training run, whose numbers are those of its steps.
        RunFolderError: if a measurement was not read from its folder, or a file there is missing or damaged.
        MissingExtraError: if pandas is not installed.
    """
    pandas = import_extra("pandas", "datasets")
    if not isinstance(result, Measurement):
        if not isinstance(result, NumericResult):
            raise OptionError(
                "the numbers of a training run are those of its steps: kleash.records.read_steps(folder)"
            )
        return pandas.DataFrame(map(vars, number_rows(result)))
    files = RunFolder(Path(result)).require_shards(result.counts.shards)
    there = files.token_columns()
    names = [name for name in (*TOKEN_COLUMNS, *OPTIONAL_COLUMNS) if name in there]
    tables = (files.parts("tokens", names), files.parts("sequences", list(SEQUENCE_COLUMNS)))
    return RunFrames(*(pandas.concat(map(pandas.DataFrame, parts), ignore_index=True) for parts in tables))
