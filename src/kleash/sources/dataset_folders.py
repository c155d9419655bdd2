"""Data sets of several files: folders that ``save_to_disk`` wrote, folders in the hub's layout, and the hub itself."""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kleash.errors import SourceError, summarise_error
from kleash.extras import import_extra, is_installed, suppress_library_output
from kleash.jobs.reading import ReadOptions
from kleash.sources.compression import SUFFIXES, uncompressed_suffix
from kleash.sources.source_records import shorten

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""A data set on the hub, as "user/name"."""
STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files of a folder that ``save_to_disk`` wrote: of one split, and of several."""
DATA_FILES = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.json", "*.csv", "*.arrow", "*.txt")
"""Patterns of data files in a folder of the hub's layout."""
FILE_SUFFIXES = SUFFIXES.union(
    (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".parquet", ".pq", ".arrow", ".feather", ".ipc")
)
"""Suffixes of files; a name that ends with one is no data set's."""
NO_DATA_SET = ("config.json", "run.json", "measurement.json", "reference.json", "steps.jsonl")
"""Files of folders that hold a model or a result of kleash."""
METADATA = ("dataset_infos.json", "dataset_info.json", "metadata.json", "state.json")
"""Files of folders that hold a data set and describe it."""
PREFERRED_SPLIT = "train"
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)")
MAX_SHOWN_SPLITS = 12


class DatasetFiles(NamedTuple):
    """The files of one split of a data set."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...]
    """Which split is read, if no option names it and there are several."""


def find_dataset(name: str, reading: ReadOptions) -> DatasetFiles | None:
    """The files of a data set; None if ``name`` is neither a folder of one nor the name of one on the hub.

    Args:
        name: a folder, which takes precedence, or "user/name" on the hub.
        reading: its ``split`` and ``dataset_config`` are used.

    Raises:
        SourceError: if there is no such split or configuration, or the hub cannot be reached.
        MissingExtraError: if the package datasets is needed and not installed.
    """
    path = Path(name).expanduser()
    try:
        is_folder, exists = path.is_dir(), path.exists()
        has_splits, has_state = (path / SPLITS).is_file(), (path / STATE).is_file()
        has_data_files = is_folder and _has_data_files(path)
    except (OSError, ValueError):  # such as a prompt given as a name; opening the file says what is wrong
        return None
    if has_splits:
        return _saved_splits(name, path, reading)
    if has_state:
        return _saved_split(name, path, reading)
    if has_data_files:
        splits = _splits_of_folder(name, str(path), reading.dataset_config)
        files = _files_of_split(name, splits, reading)
        return files._replace(notes=(*files.notes, *_unread_formats(name, path, splits)))
    if exists or HUB_ID.fullmatch(name) is None or path.suffix.lower() in FILE_SUFFIXES:
        return None
    return _files_of_split(name, _splits_of_hub(name, reading.dataset_config), reading)


def _saved_splits(name: str, folder: Path, reading: ReadOptions) -> DatasetFiles:
    """The files of a split of a folder with several, as ``DatasetDict.save_to_disk`` writes it."""
    splits = _read_json(folder / SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(map(_is_file_name, splits)):
        raise SourceError(f"{folder / SPLITS} names no splits; save the data set again with save_to_disk")
    _refuse_config(name, reading)
    split, notes = _choose_split(name, splits, reading.split)
    return DatasetFiles(_arrow_files(folder / split), notes)


def _saved_split(name: str, folder: Path, reading: ReadOptions) -> DatasetFiles:
    """The files of a folder with one split, as ``Dataset.save_to_disk`` writes it."""
    _refuse_config(name, reading)
    split = _read_json(folder / STATE).get("_split")
    if reading.split is not None and reading.split != split:
        raise SourceError(
            f"{name} is one split, {shorten(str(split)) if split else 'without a name'}; leave --split "
            f"{shorten(reading.split)} out, or name the folder of that split"
        )
    return DatasetFiles(_arrow_files(folder), ())


def _arrow_files(folder: Path) -> tuple[Path, ...]:
    """The Arrow files of a split, in the order of its ``state.json``."""
    state = folder / STATE
    entries = _read_json(state).get("_data_files")
    entries = entries if isinstance(entries, list) else []
    names: list[Any] = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    if not names:
        raise SourceError(
            f"{state} names no files: the data set is empty, or was not saved whole; save it again with save_to_disk"
        )
    bad = [entry for entry in names if not _is_file_name(entry)]
    if bad:
        raise SourceError(
            f"{state} names {shorten(str(bad[0]))} as a file; save the data set again with save_to_disk"
        )
    missing = [entry for entry in names if not (folder / entry).is_file()]
    if missing:
        raise SourceError(f"{folder} lacks {missing[0]}, which its {STATE} names; save the data set again")
    return tuple(folder / entry for entry in names)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a small file of a data set.

    Raises:
        SourceError: if it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(
            f"{path} cannot be read: {summarise_error(error)}; save the data set again"
        ) from error
    return content if isinstance(content, dict) else {}


def _is_file_name(value: Any) -> bool:
    """Whether a value is the name of a file or folder within its folder."""
    return isinstance(value, str) and value not in ("", ".", "..") and Path(value).name == value


def _refuse_config(name: str, reading: ReadOptions) -> None:
    if reading.dataset_config is not None:
        raise SourceError(
            f"{name} was written by save_to_disk and has no configuration {shorten(reading.dataset_config)}; leave "
            "--dataset-config out"
        )


def _has_data_files(folder: Path) -> bool:
    """Whether a folder looks like a data set in the hub's layout, not like a model or a run."""
    if any((folder / name).is_file() for name in NO_DATA_SET):
        return False
    return any(next(folder.rglob(pattern), None) is not None for pattern in DATA_FILES)


def _choose_split(name: str, splits: list[str], requested_split: str | None) -> tuple[str, tuple[str, ...]]:
    """The split to read, and a note if it was chosen from several."""
    shown = ", ".join(shorten(split) for split in splits[:MAX_SHOWN_SPLITS])
    if requested_split is not None:
        if requested_split not in splits:
            part = "; --limit reads the first records" if "[" in requested_split else ""
            raise SourceError(f"{name} has no split {shorten(requested_split)}; there are {shown}{part}")
        return requested_split, ()
    if len(splits) == 1:
        return splits[0], ()
    if PREFERRED_SPLIT not in splits:
        raise SourceError(f"{name} has the splits {shown}; name one by --split")
    return PREFERRED_SPLIT, (
        f"the split '{PREFERRED_SPLIT}' of {name} is read, of {shown}; --split names another",
    )


def _files_of_split(name: str, splits: dict[str, tuple[str, ...]], reading: ReadOptions) -> DatasetFiles:
    """The files of the split that is read, fetched from the hub if they lie there."""
    split, notes = _choose_split(name, list(splits), reading.split)
    urls = splits[split]
    if not urls:
        raise SourceError(f"the split {shorten(split)} of {name} has no files")
    paths = tuple(map(Path, _fetch(name, urls))) if "://" in urls[0] else tuple(map(Path, urls))
    _require_all_shards(name, paths)
    return DatasetFiles(paths, notes)


def _unread_formats(name: str, folder: Path, splits: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """A note if a folder has files of other formats than those of its splits; datasets reads the commonest format."""
    suffixes = {uncompressed_suffix(Path(file)) for files in splits.values() for file in files}
    paths = [path.relative_to(folder) for pattern in DATA_FILES for path in folder.rglob(pattern)]
    unread = sorted(
        str(path)
        for path in paths
        if path.name not in METADATA
        and uncompressed_suffix(path) not in suffixes
        and not any(part.startswith(".") for part in path.parts)
    )
    if not unread:
        return ()
    more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
    return (f"files of another format in {name} are not read: {shorten(unread[0])}{more}",)


def _require_all_shards(name: str, paths: tuple[Path, ...]) -> None:
    """Check that no file of a numbered series, such as train-00000-of-00002.parquet, is missing."""
    matches = [match for path in paths if (match := SHARD.fullmatch(str(path)))]
    for match in matches:
        stem, _, count, suffix = match.groups()
        numbers = {other[2] for other in matches if (other[1], other[3], other[4]) == (stem, count, suffix)}
        if len(numbers) != int(count):
            raise SourceError(
                f"{name} has {len(numbers)} of the {int(count)} files {Path(stem).name}-*-of-{count}{suffix}; fetch "
                "the others"
            )


@lru_cache(maxsize=8)
def _splits_of_folder(name: str, folder: str, config: str | None) -> dict[str, tuple[str, ...]]:
    """The files of each split of a folder or a data set of the hub, by the names of its files or its README."""
    if not is_installed("datasets"):
        raise SourceError(
            f"{name} is a data set of several files, whose splits the package datasets finds; run: pip install "
            "'kleash[datasets]', or name one of its files"
        )
    datasets = import_extra("datasets", "datasets")
    try:
        with suppress_library_output():
            builder = datasets.load_dataset_builder(folder, config)
    except ConnectionError:
        raise
    except Exception as error:  # the package raises exceptions of many types
        raise SourceError(
            f"{name} cannot be read as a data set: {summarise_error(error)}; --dataset-config names a configuration"
        ) from error
    files = builder.config.data_files
    if not files:
        raise SourceError(f"{name} names no data files; name a file of it")
    return {str(split): tuple(map(str, urls)) for split, urls in files.items()}


@lru_cache(maxsize=8)
def _splits_of_hub(name: str, config: str | None) -> dict[str, tuple[str, ...]]:
    """The files of each split of a data set on the hub, or in the local cache if the hub cannot be reached."""
    if not is_installed("datasets"):
        raise SourceError(
            f"there is no file {name}; if it is a data set on the hub, the package datasets reads it: run pip install "
            "'kleash[datasets]'"
        )
    try:
        return _splits_of_folder(name, name, config)
    except ConnectionError as error:
        hub = import_extra("huggingface_hub", "datasets")
        try:
            cached = hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
        except Exception:  # not in the cache, whatever the package raises
            raise SourceError(
                f"there is no file {name}, and the hub cannot be asked for a data set of that name: "
                f"{summarise_error(error)}"
            ) from error
        return _splits_of_folder(name, cached, config)


@lru_cache(maxsize=8)
def _fetch(name: str, urls: tuple[str, ...]) -> tuple[str, ...]:
    """The files of a data set on the hub, downloaded."""
    datasets = import_extra("datasets", "datasets")
    try:
        with suppress_library_output():
            return tuple(map(str, datasets.DownloadManager().download(list(urls))))
    except Exception as error:  # the package raises exceptions of many types
        raise SourceError(
            f"the files of {name} cannot be fetched from the hub: {summarise_error(error)}"
        ) from error
