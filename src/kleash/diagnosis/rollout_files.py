"""The files of rollouts: one, several such as one for each rank, or a folder of them, read in a stable order."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, islice, zip_longest
from pathlib import Path, PurePath

import numpy as np

from kleash.diagnosis.rollout_records import (
    ATTENTION_MASK,
    PROMPT_MASKS,
    RESPONSE_MASKS,
    SEQUENCES,
    RolloutRecord,
    padded,
    read_rollout,
)
from kleash.errors import SourceError
from kleash.leash import mismatch
from kleash.models import find_source
from kleash.sources.dataset_folders import SPLITS, STATE
from kleash.sources.files import STANDARD_INPUT
from kleash.sources.records import first_names, shorten, uncompressed_suffix
from kleash.sources.sequences import LEAST_PADDING_RUN, ROUNDING_NATS, is_padded, padding_length
from kleash.store.steps import STEPS
from kleash.uncertainty import Estimate

SUFFIXES_OF_ROLLOUTS = (".jsonl", ".ndjson", ".parquet", ".pq", ".arrow", ".feather", ".ipc")
"""Suffixes of the files of a folder that are read; files that end with .json only if there are no others."""
MAX_NAMED_FILES = 3
"""Files that a note names; the others are counted."""


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
        return first_names(list(self.sizes), 1)

    def kl_by_file(self) -> dict[str, Estimate]:
        """KL(engine ‖ trainer) per token of each file of several; empty if a value is no log-probability."""
        highest = (np.maximum(each.trainer, each.engine)[each.is_counted] for each in self.rollouts)
        if len(self.sizes) == 1 or any((values > ROUNDING_NATS).any() for values in highest):
            return {}
        kl: dict[str, Estimate] = {}
        for name in self.sizes:
            rollouts = [each for each in self.rollouts if each.file == name and each.is_counted.any()]
            if rollouts:
                values = padded(rollouts)
                measured = mismatch(values.trainer, values.engine, values.is_counted, prompts=values.prompts)
                kl[name] = measured.kl_engine_trainer
        return kl


def read_rollouts(
    names: str | PurePath | Sequence[str | PurePath], *, allow_logits: bool = False, limit: int | None = None
) -> list[RolloutRecord]:
    """Read rollouts from JSONL, a JSON array or Parquet, in the field names of kleash, verl, TRL and others.

    Args:
        names: a file, a folder of files, a pattern such as "logs/rank-*.jsonl", or several of them; "-" is standard
            input. Files are read in the order of the names, each once.
        allow_logits: whether values that are no log-probabilities are accepted: those above 0, and those of padding
            that no mask marks.
        limit: largest number of rollouts to read, of several files in turn; None for all.

    Raises:
        SourceError: at the first record that is not a rollout, with what was expected, if no token counts, or if
            responses are padded and have no mask.
    """
    return read_rollout_files(names, allow_logits=allow_logits, limit=limit).rollouts


def read_rollout_files(
    names: str | PurePath | Sequence[str | PurePath], *, allow_logits: bool = False, limit: int | None = None
) -> RolloutFiles:
    """``read_rollouts`` with what a reader should know of the files."""
    given_names = [str(names)] if isinstance(names, str | PurePath) else list(map(str, names))
    files = [label for name in given_names for label in _files_of(name)]
    labels = list({Path(label).expanduser().resolve(): label for label in files}.values())
    parts: list[list[RolloutRecord]] = []
    share, responses = (None, math.inf) if limit is None else (-(-limit // max(1, len(labels))), limit)
    # One file after the other, since a process may have few open, and again where some hold less than their share.
    for most in dict.fromkeys((share, limit)):
        if sum(map(len, parts)) < responses:
            parts = [
                list(islice(_rollouts_of(label, allow_logits, len(labels) > 1), most)) for label in labels
            ]
    in_turn = (rollout for turn in zip_longest(*parts) for rollout in turn if rollout is not None)
    places = {label: place for place, label in enumerate(labels)}
    rollouts = sorted(islice(in_turn, limit), key=lambda rollout: places[rollout.file])
    if not rollouts:
        raise SourceError(f"{', '.join(given_names)} holds no rollout; give a record for each response")
    if not any(rollout.is_counted.any() for rollout in rollouts):
        raise SourceError(
            f"{', '.join(given_names)} has {len(rollouts)} rollouts and no token that counts; look at the masks "
            f"({', '.join(RESPONSE_MASKS)})"
        )
    notes = _note_on_padding(rollouts)
    if notes and not allow_logits:
        raise SourceError(f"{notes[0]}; kleash doctor says more about this file")
    sizes = dict.fromkeys(labels, 0) | Counter(rollout.file for rollout in rollouts)
    empty = [label for label, size in sizes.items() if not size]
    if empty and limit is None:
        notes.append(f"no rollout in {first_names(empty, MAX_NAMED_FILES)}")
    rollouts, notes_on_prompts = _without_padded_prompts(rollouts)
    return RolloutFiles(rollouts=rollouts, sizes=sizes, notes=(*notes, *notes_on_prompts))


def note_on_one_sided_files(kl: Mapping[str, Estimate]) -> tuple[str, ...]:
    """A note if the mismatch of some files lies above that of all others, by their 95 % intervals."""
    ordered = sorted(kl, key=lambda name: -kl[name].value)
    for count in range(1, len(ordered) // 2 + 1):
        high, low = ordered[:count], ordered[count:]
        smallest, largest = (min(kl[name].ci95[0] for name in high), max(kl[name].ci95[1] for name in low))
        if smallest > largest:
            sentence = (
                f"KL(engine ‖ trainer) per token of {first_names(high, MAX_NAMED_FILES)} is at least {smallest:.3g} "
                f"nats, and of every other file at most {largest:.3g} (95 % intervals); diagnose "
                f"{'it' if count == 1 else 'them'} alone"
            )
            return (sentence,)
    return ()


def _rollouts_of(label: str, allow_logits: bool, may_be_empty: bool) -> Iterator[RolloutRecord]:
    """Iterate over the rollouts of a file, with the padding of those without a mask."""
    path = Path(label).expanduser()
    if may_be_empty and os.path.isfile(path) and not path.stat().st_size:  # noqa: PTH113
        return
    masks = (*RESPONSE_MASKS, ATTENTION_MASK, SEQUENCES.mask)
    for record in find_source(label, "rollouts").records():
        rollout = replace(read_rollout(record, allow_logits), file=label)
        if all(record.fields.get(name) is None for name in masks):
            columns = rollout.trainer, rollout.engine
            rollout = replace(rollout, padding=padding_length(rollout.response_ids, columns))
        yield rollout


def _files_of(name: str) -> list[str]:
    """The files that a name stands for, in the order of their names.

    Raises:
        SourceError: if it is a folder without a file of rollouts, or a pattern that no file matches.
    """
    path = Path(name).expanduser()
    # no name is too long to ask; opening the file says what is wrong
    exists = name == STANDARD_INPUT or os.path.exists(path)  # noqa: PTH110
    is_run = exists and (path / STEPS).is_file()
    path = path / "rollouts" if is_run else path
    if is_run or (exists and path.is_dir() and not any((path / mark).is_file() for mark in (SPLITS, STATE))):
        below = [
            file for file in path.rglob("*") if file.is_file() and "/." not in f"/{file.relative_to(path)}"
        ]
        files = [str(file) for file in below if uncompressed_suffix(file) in SUFFIXES_OF_ROLLOUTS] or [
            str(file) for file in below if uncompressed_suffix(file) == ".json"
        ]
        expected = (
            f"{name} is a folder without a file of rollouts ({', '.join(SUFFIXES_OF_ROLLOUTS)}, .json)"
            + ("; kleash.attach(trainer, rollouts_every=…) writes those of a training run" if is_run else "")
        )
    elif not exists and re.search(r"[*?[]", name):
        root = Path(path.anchor)
        files = [label for match in root.glob(str(path.relative_to(root))) for label in _files_of(str(match))]
        expected = f"no file matches {shorten(name)}"
    else:
        return [name]
    if not files:
        raise SourceError(expected)
    return sorted(files)


def _note_on_padding(rollouts: Sequence[RolloutRecord]) -> list[str]:
    """A note if many responses without a mask end with placeholders."""
    ending = [each for each in rollouts if each.padding]
    if not is_padded(len(ending), len(rollouts)):
        return []
    first, tokens = ending[0], sum(each.padding for each in ending)
    sentence = (
        f"{len(ending)} of {len(rollouts)} responses end with {tokens} tokens in all that look like padding without a "
        f"mask: at the last {first.padding} of {first.location} the trainer's values are all {first.trainer[-1]:g} and "
        f"the engine's {first.engine[-1]:g}; give {RESPONSE_MASKS[0]!r} with 1 for each token that the engine drew, or "
        "leave the padding out"
    )
    return [sentence]


def _without_padded_prompts(rollouts: list[RolloutRecord]) -> tuple[list[RolloutRecord], list[str]]:
    """The rollouts without the padding before their prompts that no mask marks, and a note that says so.

    Read as text, it would make two prompts of two paddings of one, and give the models another context.
    """
    run = LEAST_PADDING_RUN
    padded_prompts = [
        each
        for each in rollouts
        if len(each.prompt_ids) >= run and len(set(each.prompt_ids[:run])) == 1 and not each.has_prompt_mask
    ]
    padding = {each.prompt_ids[0] for each in padded_prompts}
    if len(padding) != 1 or not is_padded(len(padded_prompts), len(rollouts)):
        return rollouts, []
    unpadded = [
        each
        if each.has_prompt_mask
        else replace(
            each, prompt_ids=tuple(dropwhile(padding.__contains__, each.prompt_ids)) or each.prompt_ids[-1:]
        )
        for each in rollouts
    ]
    note = (
        f"{len(padded_prompts)} of {len(rollouts)} prompts begin with the token {min(padding)} several times, as that "
        f"of {padded_prompts[0].location}: padding without a mask, which is left out; give {ATTENTION_MASK!r} or "
        f"{PROMPT_MASKS[0]!r} if it was read"
    )
    return unpadded, [note]
