"""The files of rollouts: one, several such as one for each rank, or a folder of them, read in a stable order."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from kleash.diagnosis.rollout_records import (
    ATTENTION_MASK,
    FIELD_NAMES,
    RESPONSE_MASKS,
    ROUNDING_NATS,
    SEQUENCES,
    RolloutRecord,
    padded,
    read_rollout,
)
from kleash.errors import SourceError
from kleash.leash import mismatch
from kleash.models import find_source
from kleash.sources.compression import SUFFIXES
from kleash.sources.dataset_folders import SPLITS, STATE
from kleash.sources.files import STANDARD_INPUT
from kleash.sources.padding import is_padded, padding_length
from kleash.sources.records import SourceRecord, shorten
from kleash.store import Number

SUFFIXES_OF_ROLLOUTS = (".jsonl", ".ndjson", ".parquet", ".pq", ".arrow", ".feather", ".ipc")
"""Suffixes of the files of a folder that are read; files that end with .json only if there are no others."""
MAX_NAMED_FILES = 3
"""Files that a note names; the others are counted."""
COPIED_SHARE = 0.5
"""Share of a file's rollouts that must stand in another file for a note. Short responses are equal by chance."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutFiles:
    """The rollouts of one or several files, and what a reader should know of the files."""

    rollouts: list[RolloutRecord]
    sizes: Mapping[str, int]
    """File -> the number of rollouts that were read from it, in the order of reading."""
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the one file; of several, the first and how many more there are."""
        first, *rest = self.sizes
        return f"{first} and {len(rest)} more" if rest else first

    def kl_by_file(self) -> dict[str, Number]:
        """KL(engine ‖ trainer) per token of each file of several; empty if a value is no log-probability."""
        if len(self.sizes) == 1 or any(_largest_value(rollout) > ROUNDING_NATS for rollout in self.rollouts):
            return {}
        by_file: dict[str, list[RolloutRecord]] = {}
        for rollout in self.rollouts:
            by_file.setdefault(rollout.file, []).append(rollout)
        kl: dict[str, Number] = {}
        for name, rollouts in by_file.items():
            if any(rollout.is_counted.any() for rollout in rollouts):
                columns = padded(rollouts)
                measured = mismatch(
                    columns.trainer, columns.engine, columns.is_counted, prompts=columns.prompts
                )
                kl[name] = Number.of(measured.kl_engine_trainer)
        return kl


def read_rollouts(
    names: str | PurePath | Sequence[str | PurePath], *, allow_logits: bool = False, limit: int | None = None
) -> list[RolloutRecord]:
    """Read rollouts from JSONL, a JSON array or Parquet, in the field names of kleash, verl, TRL and others.

    Args:
        names: a file, a folder of files, a pattern such as "logs/rank-*.jsonl", or several of them; "-" is standard
            input. Files are read in the order of the names, those of a folder in natural order.
        allow_logits: whether values that are no log-probabilities are accepted: those above 0, and those of padding
            that no mask marks.
        limit: largest number of rollouts to read, of several files in turn; None for all.

    Raises:
        SourceError: at the first record that is not a rollout, with what was expected, if a file stands there twice,
            if no token counts, or if responses are padded and have no mask.
    """
    return read_rollout_files(names, allow_logits=allow_logits, limit=limit).rollouts


def read_rollout_files(
    names: str | PurePath | Sequence[str | PurePath], *, allow_logits: bool = False, limit: int | None = None
) -> RolloutFiles:
    """``read_rollouts`` with what a reader should know of the files."""
    given_names = [str(names)] if isinstance(names, str | PurePath) else list(map(str, names))
    if not given_names:
        raise SourceError("no file of rollouts was given")
    labels = [label for name in given_names for label in _files_of(name)]
    _require_different(labels)
    readers = {label: _FileReader(label, allow_logits, len(labels) > 1) for label in labels}
    if limit is None:
        rollouts = [rollout for reader in readers.values() for rollout in reader.rollouts()]
    else:
        rollouts = list(islice(_in_turn([reader.rollouts() for reader in readers.values()]), limit))
        places = {label: place for place, label in enumerate(labels)}
        rollouts.sort(key=lambda rollout: places[rollout.file])
    if not rollouts:
        raise SourceError(f"{', '.join(given_names)} holds no rollout; give a record for each response")
    if not any(rollout.is_counted.any() for rollout in rollouts):
        raise SourceError(
            f"{', '.join(given_names)} has {len(rollouts)} rollouts and no token that counts; look at the masks "
            f"({', '.join(RESPONSE_MASKS)})"
        )
    sizes = dict.fromkeys(labels, 0)
    for rollout in rollouts:
        sizes[rollout.file] += 1
    padding = _note_on_padding(readers, len(rollouts))
    if padding and not allow_logits:
        raise SourceError(f"{padding[0]}; kleash doctor says more about this file")
    notes = (*_notes_on_empty_files(readers), *_notes_on_names(readers), *_notes_on_copies(rollouts))
    return RolloutFiles(rollouts=rollouts, sizes=sizes, notes=(*padding, *(notes if len(labels) > 1 else ())))


def note_on_one_sided_files(kl: Mapping[str, Number]) -> tuple[str, ...]:
    """A note if the mismatch of some files lies above that of all others, by their 95 % intervals."""
    ordered = sorted(kl, key=lambda name: -kl[name].value)
    for count in range(1, len(ordered) // 2 + 1):
        high, low = ordered[:count], ordered[count:]
        if min(kl[name].ci95[0] for name in high) > max(kl[name].ci95[1] for name in low):
            smallest = min(kl[name].ci95[0] for name in high)
            largest = max(kl[name].ci95[1] for name in low)
            sentence = (
                f"KL(engine ‖ trainer) per token of {_listed(high)} is at least {smallest:.3g} nats, and of every "
                f"other file at most {largest:.3g} (95 % intervals); diagnose {'it' if count == 1 else 'them'} alone"
            )
            return (sentence,)
    return ()


class _FileReader:
    """Reads one file, and keeps what its records call the fields."""

    def __init__(self, label: str, allow_logits: bool, may_be_empty: bool) -> None:
        """Describe the file; an empty one is an error unless there are others."""
        self.label = label
        self._allow_logits = allow_logits
        self._may_be_empty = may_be_empty
        self.is_empty = True
        self.is_at_end = False
        self.names: dict[str, str] = {}
        """Field -> what the first record calls it; the masks that it has under their own names."""
        self.padding: list[tuple[RolloutRecord, int]] = []
        """Rollouts that no mask marks and that end like padding, and the number of these tokens."""

    def rollouts(self) -> Iterator[RolloutRecord]:
        """Iterate over the rollouts of the file."""
        if not (self._may_be_empty and _is_zero_bytes(self.label)):
            for record in find_source(self.label, "rollouts").records():
                if self.is_empty:
                    self.names = _names_in(record)
                self.is_empty = False
                rollout = replace(read_rollout(record, self._allow_logits), file=self.label)
                self._note_padding(record, rollout)
                yield rollout
        self.is_at_end = True

    def _note_padding(self, record: SourceRecord, rollout: RolloutRecord) -> None:
        """Keep a rollout that ends like padding and has no mask."""
        masks = (*RESPONSE_MASKS, ATTENTION_MASK, SEQUENCES.mask)
        if all((record.fields or {}).get(name) is None for name in masks):
            length = padding_length(rollout.response_ids, (rollout.trainer, rollout.engine))
            if length:
                self.padding.append((rollout, length))


def _files_of(name: str) -> list[str]:
    """The files that a name stands for.

    Raises:
        SourceError: if it is a folder without a file of rollouts, or a pattern that no file matches.
    """
    if name == STANDARD_INPUT:
        return [name]
    path = Path(name).expanduser()
    try:
        exists, is_folder = path.exists(), path.is_dir()
        is_data_set = is_folder and ((path / SPLITS).is_file() or (path / STATE).is_file())
    except (OSError, ValueError):  # such as a name that is too long; opening the file says what is wrong
        return [name]
    if is_folder and not is_data_set:
        return _files_of_folder(path)
    if not exists and re.search(r"[*?[]", name):
        root = Path(path.anchor)
        matches = sorted(map(str, root.glob(str(path.relative_to(root)))), key=_natural_order)
        if not matches:
            raise SourceError(f"no file matches {shorten(name)}")
        return [label for match in matches for label in _files_of(match)]
    return [name]


def _files_of_folder(folder: Path) -> list[str]:
    """The files of rollouts in a folder and those below it, in natural order: rank-2 before rank-10.

    Raises:
        SourceError: if there is none.
    """
    by_suffix: dict[bool, list[str]] = {True: [], False: []}
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        suffixes = [suffix for suffix in path.suffixes if suffix not in SUFFIXES]
        suffix = suffixes[-1].lower() if suffixes else ""
        is_visible = path.is_file() and not any(part.startswith(".") for part in parts)
        if is_visible and suffix in (*SUFFIXES_OF_ROLLOUTS, ".json"):
            by_suffix[suffix != ".json"].append(str(path))
    files = by_suffix[True] or by_suffix[False]
    if not files:
        raise SourceError(
            f"{folder} is a folder without a file of rollouts ({', '.join((*SUFFIXES_OF_ROLLOUTS, '.json'))})"
        )
    return sorted(files, key=_natural_order)


def _natural_order(name: str) -> list[Any]:
    """The order of names in which numbers count by their value."""
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    ]


def _require_different(labels: Sequence[str]) -> None:
    """Raise SourceError if a file stands there twice, under one name or two."""
    seen: dict[Path, str] = {}
    for label in labels:
        path = Path(label) if label == STANDARD_INPUT else Path(label).expanduser().resolve()
        if path in seen:
            also = "" if seen[path] == label else f", also as {seen[path]}"
            raise SourceError(f"{label} was given twice{also}; give it once")
        seen[path] = label


def _is_zero_bytes(label: str) -> bool:
    try:
        return label != STANDARD_INPUT and Path(label).expanduser().stat().st_size == 0
    except (OSError, ValueError):
        return False  # reading it says what is wrong


def _in_turn(readers: Sequence[Iterator[RolloutRecord]]) -> Iterator[RolloutRecord]:
    """Iterate over one rollout of each file, then the next of each."""
    remaining = list(readers)
    while remaining:
        for reader in list(remaining):
            rollout = next(reader, None)
            if rollout is None:
                remaining.remove(reader)
            else:
                yield rollout


def _names_in(record: SourceRecord) -> dict[str, str]:
    """What a record calls the fields of a rollout, and the masks that it has."""
    fields = record.fields or {}
    names = {
        field: name for field, names in FIELD_NAMES.items() for name in names if fields.get(name) is not None
    }
    return names | {name: name for name in RESPONSE_MASKS if fields.get(name) is not None}


def _note_on_padding(readers: Mapping[str, _FileReader], responses: int) -> list[str]:
    """A note if many responses without a mask end with placeholders."""
    padding = [ending for reader in readers.values() for ending in reader.padding]
    if not is_padded(len(padding), responses):
        return []
    (first, length), tokens = padding[0], sum(length for _, length in padding)
    sentence = (
        f"{len(padding)} of {responses} responses end with {tokens} tokens in all that look like padding without a "
        f"mask: at the last {length} of {first.location} the trainer's values are all {first.trainer[-1]:g} and the "
        f"engine's {first.engine[-1]:g}; give {RESPONSE_MASKS[0]!r} with 1 for each token that the engine drew, or "
        "leave the padding out"
    )
    return [sentence]


def _notes_on_empty_files(readers: Mapping[str, _FileReader]) -> list[str]:
    """A note if files have no rollout."""
    empty = [label for label, reader in readers.items() if reader.is_empty and reader.is_at_end]
    return [f"{_listed(empty)} {'holds' if len(empty) == 1 else 'hold'} no rollout"] if empty else []


def _notes_on_names(readers: Mapping[str, _FileReader]) -> list[str]:
    """A note for each way in which the fields of files differ from those of the first."""
    described = {label: reader.names for label, reader in readers.items() if not reader.is_empty}
    first = next(iter(described), "")
    differing: dict[str, list[str]] = {}
    for label, names in described.items():
        parts = [
            f"{names[field]!r} for {expected!r}" if field in names else f"no {expected!r}"
            for field, expected in described[first].items()
            if names.get(field) != expected
        ]
        parts += [f"{names[field]!r} as well" for field in names if field not in described[first]]
        if parts:
            differing.setdefault(", ".join(parts), []).append(label)
    return [
        f"fields unlike those of {first} in {_listed(labels)}: {difference}"
        for difference, labels in differing.items()
    ]


def _notes_on_copies(rollouts: Sequence[RolloutRecord]) -> list[str]:
    """A note if at least half of a file's rollouts stand in another one, with the same log-probabilities."""
    places: dict[Any, list[RolloutRecord]] = {}
    for rollout in rollouts:
        columns = (rollout.trainer.tobytes(), rollout.engine.tobytes())
        places.setdefault((rollout.prompt_ids, rollout.response_ids, *columns), []).append(rollout)
    copies: dict[str, list[tuple[RolloutRecord, RolloutRecord]]] = {}
    sizes: dict[str, int] = {}
    for equal in places.values():
        for rollout in equal:
            sizes[rollout.file] = sizes.get(rollout.file, 0) + 1
            other = next((other for other in equal if other.file != rollout.file), None)
            if other is not None:
                copies.setdefault(rollout.file, []).append((rollout, other))
    copied = {label: pairs for label, pairs in copies.items() if len(pairs) >= COPIED_SHARE * sizes[label]}
    if not copied:
        return []
    count = sum(len(pairs) for pairs in copied.values())
    example, copy = next(iter(copied.values()))[0]
    sentence = (
        f"{count} of {len(rollouts)} rollouts stand in more than one file with the same log-probabilities, such as "
        f"{example.location} and {copy.location}; each of them counts"
    )
    return [sentence]


def _largest_value(rollout: RolloutRecord) -> float:
    """The largest value of the tokens that count; -inf without any."""
    counted = rollout.is_counted
    return max(
        (float(column[counted].max()) for column in (rollout.trainer, rollout.engine) if counted.any()),
        default=-float("inf"),
    )


def _listed(labels: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(labels[:MAX_NAMED_FILES])
    more = len(labels) - MAX_NAMED_FILES
    return f"{shown} and {more} more" if more > 0 else shown
