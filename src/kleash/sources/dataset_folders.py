"""Data sets of several files: folders that ``save_to_disk`` wrote, folders in the hub's layout, and the hub itself."""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from kleash.errors import SourceError, summarise_error
from kleash.extras import import_extra, is_installed, suppress_library_output
from kleash.jobs.reading import ReadOptions
from kleash.registry import grouped
from kleash.sources.records import first_names, shorten, uncompressed_suffix
from kleash.store.checksums import is_there

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""A data set on the hub, as "user/name"."""
STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files of a folder that ``save_to_disk`` wrote: of one split, and of several."""
DATA_SUFFIXES = frozenset(
    {
        *(".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt"),
        *(".parquet", ".pq", ".arrow", ".feather", ".ipc"),
    }
)
"""Suffixes of data files, also compressed; a name that ends with one is no data set's."""
NO_DATA_SET = ("config.json", "run.json", "measurement.json", "reference.json", "steps.jsonl")
"""Files of folders that hold a model or a result of kleash."""
METADATA = ("dataset_infos.json", "dataset_info.json", "metadata.json", "state.json")
"""Files of folders that hold a data set and describe it."""
PREFERRED_SPLIT = "train"
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)")
MAX_SHOWN_SPLITS = 12


def find_dataset(name: str, reading: ReadOptions) -> tuple[tuple[Path, ...], tuple[str, ...]] | None:
    """The files of a split of a data set, and notes on it; None if ``name`` is no folder and no data set on the hub.

    Args:
        name: a folder, which takes precedence, or "user/name" on the hub.
        reading: its ``split`` and ``dataset_config`` are used.

    Raises:
        SourceError: if there is no such split or configuration, the hub cannot be reached, or the package datasets is
            needed and not installed.
    """
    path = Path(name).expanduser()
    try:
        exists, has_splits, has_state = is_there(path), (path / SPLITS).is_file(), (path / STATE).is_file()
        is_of_another_kind = any((path / file).is_file() for file in NO_DATA_SET)  # a model, or a run
        files = frozenset(_data_files(path) if path.is_dir() and not is_of_another_kind else ())
    except (OSError, ValueError):  # such as a prompt given as a name; opening the file says what is wrong
        return None
    if has_splits or has_state:
        return _saved_files(name, path, reading)
    is_on_hub = not exists and HUB_ID.fullmatch(name) is not None and not has_data_suffix(path)
    if not (files or is_on_hub):
        return None
    if not is_installed("datasets"):
        raise SourceError(
            f"{name} is no file, and the package datasets reads data sets of several files and those of the hub; run: "
            "pip install 'kleash[datasets]', or name a file"
        )
    splits = _splits(name, name if is_on_hub else str(path.resolve()), reading.dataset_config, files)
    split, notes = _choose_split(name, list(splits), reading.split)
    urls = splits[split]
    if not urls:
        raise SourceError(f"the split {shorten(split)} of {name} has no files")
    paths = tuple(map(Path, _fetch(name, urls) if "://" in urls[0] else urls))
    _require_all_shards(name, paths)
    return paths, notes if is_on_hub else (*notes, *_unread_formats(name, path, splits))


def _saved_files(name: str, folder: Path, reading: ReadOptions) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The files, and notes, of a split of a folder that ``save_to_disk`` wrote: a data set, or a dictionary of splits.

    Raises:
        SourceError: if it is damaged, has no such split, or names a file that is not in the folder.
    """
    if reading.dataset_config is not None:
        raise SourceError(
            f"{name} was written by save_to_disk and has no configuration {shorten(reading.dataset_config)}; leave "
            "--dataset-config out"
        )
    try:
        saved = import_extra("datasets", "datasets").load_from_disk(str(folder))
    except Exception as error:  # the package raises exceptions of many types
        raise SourceError(
            f"{name} cannot be read: {summarise_error(error)}; save the data set again"
        ) from error
    splits = saved if isinstance(saved, dict) else {str(saved.split or "the only one"): saved}
    split, notes = _choose_split(name, list(splits), reading.split)
    paths = tuple(Path(file["filename"]) for file in splits[split].cache_files)
    for path in paths:
        if path.resolve().parent != (folder / split if isinstance(saved, dict) else folder).resolve():
            raise SourceError(
                f"{name} names the file {shorten(str(path))}, which is not in it; save it again"
            )
    return paths, notes


def has_data_suffix(path: Path) -> bool:
    """Whether the name of a path ends as that of a data file, perhaps compressed."""
    return uncompressed_suffix(path) in DATA_SUFFIXES


def _data_files(folder: Path) -> Iterator[Path]:
    """Iterate over the data files below a folder, relative to it, without hidden ones and those that describe it."""
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if has_data_suffix(path) and path.name not in METADATA and not is_hidden:
            yield relative


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


def _unread_formats(name: str, folder: Path, splits: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """A note if a folder has files of other formats than those of its splits; datasets reads the commonest format."""
    suffixes = {uncompressed_suffix(Path(file)) for files in splits.values() for file in files}
    unread = sorted(str(path) for path in _data_files(folder) if uncompressed_suffix(path) not in suffixes)
    if not unread:
        return ()
    return (f"files of another format in {name} are not read: {first_names(list(map(shorten, unread)), 1)}",)


def _require_all_shards(name: str, paths: tuple[Path, ...]) -> None:
    """Check that no file of a numbered series, such as train-00000-of-00002.parquet, is missing."""
    matches = filter(None, (SHARD.fullmatch(str(path)) for path in paths))
    series = grouped(((match[1], match[3], match[4]), match[2]) for match in matches)
    for (stem, count, suffix), numbers in series.items():
        if len(set(numbers)) != int(count):
            raise SourceError(
                f"{name} has {len(set(numbers))} of the {int(count)} files {Path(stem).name}-*-of-{count}{suffix}; "
                "fetch the others"
            )


@lru_cache(maxsize=8)
def _splits(name: str, folder: str, config: str | None, files: frozenset[Path]) -> dict[str, tuple[str, ...]]:
    """The files of each split of a folder or a data set of the hub, by the names of its files or its README.

    They are those in the local cache if the hub cannot be reached. ``files`` are those of a folder, which is looked at
    again when it has others.
    """
    datasets = import_extra("datasets", "datasets")
    try:
        with suppress_library_output():
            builder = datasets.load_dataset_builder(folder, config)
    except ConnectionError as error:
        return _splits(name, _cached_folder(name, error), config, files)
    except Exception as error:  # the package raises exceptions of many types
        raise SourceError(
            f"{name} cannot be read as a data set: {summarise_error(error)}; --dataset-config names a configuration"
        ) from error
    return {str(split): tuple(map(str, urls)) for split, urls in (builder.config.data_files or {}).items()}


def _cached_folder(name: str, error: Exception) -> str:
    """The folder of a data set in the local cache of the hub, which cannot be reached because of ``error``."""
    hub = import_extra("huggingface_hub", "datasets")
    try:
        return hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
    except Exception:  # not in the cache, whatever the package raises
        raise SourceError(
            f"there is no file {name}, and the hub cannot be asked for a data set of that name: "
            f"{summarise_error(error)}"
        ) from error


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
