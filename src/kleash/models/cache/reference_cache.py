"""The reference's final hidden states, kept so that a second run need not compute them again."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError, OptionError, RunFolderError
from kleash.models.cache.hidden_states import HiddenStateStore, sequence_key
from kleash.models.pair import Model
from kleash.models.sequences import TokenSequence, batch_by_length
from kleash.records import CachedSource, CacheLabel
from kleash.records.atomic import TEMPORARY, cannot_write, require_utf8
from kleash.records.caching import LABEL, read_label
from kleash.records.checksums import CHECKSUMS, begin_checksums, write_checked
from kleash.records.codec import to_json
from kleash.records.folder import KIND_OF_FINGERPRINT
from kleash.version import __version__

BEFORE_A_CACHE = (".lock", CHECKSUMS, TEMPORARY)
"""How the names begin of what a cache may leave behind that was killed before it had begun."""


class ReferenceCache:
    """A folder of hidden states of one model, found again by the token ids they belong to.

    One file for each call of ``score`` that had something new. Hidden states are kept in the model's dtype:
    one token takes as many bytes as its hidden size times the dtype's, 31 to 148 times fewer than its logits.
    """

    def __init__(self, folder: Path, model: Model, source: CachedSource | None = None) -> None:
        """Open ``folder``, or begin it.

        Args:
            folder: made if it is missing.
            model: whose hidden states these are: the reference.
            source: what it is made of, where a job makes it; None where measurements fill it.

        Raises:
            ModelError: if the folder holds another model's hidden states, naming both, or is damaged.
            OptionError: if the model can only be measured through its logits, which are too many to keep.
            RunFolderError: if the folder cannot be written, or holds another source's hidden states.
        """
        if model.head.weight is None:
            raise OptionError(
                f"the {model.role} {model.path} is measured through its logits, which are too many to keep; "
                "it cannot have a reference cache"
            )
        check_cache_folder(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        label = CacheLabel(kleash=__version__, reference=model.record(), source=source)
        if (folder / LABEL).is_file():
            label = _agreed(folder, read_label(folder), label)
        else:
            begin_checksums(folder)
        if label is not None:
            write_checked(folder, folder / LABEL, to_json(label))
        self.folder = folder
        self.states = HiddenStateStore(folder)
        """What is on disk."""
        self._device = model.device
        self._new: dict[bytes, Tensor] = {}
        self.hits = 0
        """Sequences that came out of the folder."""

    def __contains__(self, sequence: TokenSequence) -> bool:
        """Whether its hidden states are there."""
        key = sequence_key(sequence)
        return key in self._new or key in self.states

    def cached_reader(
        self, read: Callable[[Sequence[TokenSequence]], Float[Tensor, "tokens dim"]]
    ) -> Callable[[Sequence[TokenSequence]], Float[Tensor, "tokens dim"]]:
        """``num_input_tokens``, but only of what is not in the folder yet."""

        def read_or_find(batch: Sequence[TokenSequence]) -> Tensor:
            missing = [one for one in batch if one not in self]
            if missing:
                self.add(missing, read(missing))
            self.hits += len(batch) - len(missing)
            return torch.cat([self._get(one) for one in batch]).to(self._device)

        return read_or_find

    def fill(
        self,
        read: Callable[[Sequence[TokenSequence]], Float[Tensor, "tokens dim"]],
        sequences: Sequence[TokenSequence],
        batch_tokens: int,
    ) -> None:
        """Read ``sequences`` in the batches in which ``score`` would, and write what was not there before.

        If one is missing all are read: the batches decide the last bits.
        """
        if all(one in self for one in sequences):
            return
        for batch in batch_by_length([one.num_input_tokens for one in sequences], batch_tokens):
            chosen = [sequences[index] for index in batch]
            self.add(chosen, read(chosen))
        self.save()

    def add(self, batch: Sequence[TokenSequence], hidden: Float[Tensor, "tokens dim"]) -> None:
        """Remember hidden states until they are saved."""
        parts = hidden.cpu().split([len(one.response_ids) for one in batch])
        for one, part in zip(batch, parts, strict=True):
            if one not in self:
                self._new[sequence_key(one)] = part

    def save(self) -> None:
        """Write what was computed since the last time, as one file that is there whole or not at all.

        Raises:
            RunFolderError: if it cannot be written.
        """
        if self._new:
            self.states.write(self._new)
            self._new = {}

    def _get(self, sequence: TokenSequence) -> Tensor:
        key = sequence_key(sequence)
        return self._new[key] if key in self._new else self.states.get(key, len(sequence.response_ids))


def check_cache_folder(folder: Path) -> None:
    """See, without touching anything, that ``folder`` is a cache or can become one.

    Raises:
        RunFolderError: if it is a file, or holds something else.
    """
    require_utf8(folder)
    try:
        taken = folder.exists() and not folder.is_dir()
        labelled = taken or not folder.exists() or (folder / LABEL).is_file()
        found = [] if labelled else [path.name for path in folder.iterdir()]
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise cannot_write(folder, error) from error
    if taken:
        raise RunFolderError(f"{folder} is a file, and a reference cache is a folder; give another name")
    strangers = sorted(name for name in found if not name.startswith(BEFORE_A_CACHE))
    if strangers:
        raise RunFolderError(
            f"{folder} holds {strangers[0]} and no {LABEL}, so it is no reference cache; give another folder"
        )


def check_same_model(folder: Path, found: CacheLabel, name: str, fingerprint: str, dtype: str) -> None:
    """See that a folder is of the model that is asked for.

    Raises:
        ModelError: if not, naming both.
    """
    there = found.reference
    if there.fingerprint != fingerprint and not there.fingerprint.startswith(KIND_OF_FINGERPRINT):
        raise ModelError(
            f"{folder} was made by an older kleash, whose fingerprint of {there.path} reads only samples of the "
            f"weights, so that nothing proves that {name} is that model; make the cache again with kleash cache, in "
            "another folder"
        )
    if (there.fingerprint, there.dtype) != (fingerprint, dtype):
        raise ModelError(
            f"{folder} holds hidden states of {there.path} (fingerprint {there.fingerprint}, {there.dtype}) and "
            f"the reference is {name} (fingerprint {fingerprint}, {dtype}); give that reference, or another cache"
        )


def _agreed(folder: Path, found: CacheLabel, label: CacheLabel) -> CacheLabel | None:
    """The label to write over the one that was found; None if that one stays."""
    ours = label.reference
    check_same_model(folder, found, ours.path, ours.fingerprint, ours.dtype)
    if label.source is None:
        return None
    if found.source is not None and not found.source.agrees(label.source):
        raise RunFolderError(
            f"{folder} holds hidden states of {found.source} and the source is now {label.source}; "
            "give another --out"
        )
    return replace(found, reference=ours, source=label.source)
