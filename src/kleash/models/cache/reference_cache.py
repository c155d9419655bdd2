"""A cache of the reference's final hidden states, filled by ``score`` or by ``kleash cache``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError, OptionError, RunFolderError
from kleash.models.cache.hidden_states import HiddenStateStore, sequence_key
from kleash.models.generation import ignore
from kleash.models.pair import Model
from kleash.sources.sequences import TokenSequence, batch_by_length
from kleash.store.atomic import require_utf8, writing
from kleash.store.cache import LABEL, CachedSource, CacheLabel, read_label
from kleash.store.checksums import CHECKSUMS, begin_checksums, write_checked
from kleash.store.codec import to_json
from kleash.store.file_hashes import require_unchanged_files
from kleash.store.job_folder import holds_job
from kleash.store.locks import LOCK
from kleash.version import __version__

LEFTOVERS = (LOCK, CHECKSUMS)
"""Files that an interrupted start of a cache can leave in its folder, beside unfinished ones."""


class ReferenceCache:
    """A folder of one model's hidden states, looked up by the token ids of a sequence.

    Each call of ``score`` with new sequences adds one file. Hidden states are stored in the model's dtype: a token
    takes hidden size × bytes of the dtype, 31 to 148 times less than its logits.
    """

    def __init__(
        self, folder: Path, model: Model, source: CachedSource | None = None, *, from_engine: bool = False
    ) -> None:
        """Open ``folder`` or create it.

        Args:
            folder: created if it does not exist.
            model: the reference, whose hidden states are stored.
            source: the job's source if ``kleash cache`` fills it; None if measurements do.
            from_engine: whether the hidden states are those that a serving engine saved.

        Raises:
            ModelError: if the folder holds another model's hidden states, naming both, or is damaged.
            OptionError: if the model is measured through its logits, which are too large to store.
            RunFolderError: if the folder cannot be written, or holds another source's hidden states.
        """
        if model.head.weight is None:
            raise OptionError(
                f"the {model.role} {model.path} is measured through its logits, which are too many to keep; "
                "it cannot have a reference cache"
            )
        check_cache_folder(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        label = CacheLabel(
            kleash=__version__, reference=model.record(), source=source, from_engine=from_engine
        )
        if (folder / LABEL).is_file():
            label = _merge_labels(folder, read_label(folder), label)
        else:
            begin_checksums(folder)
        if label is not None:
            write_checked(folder, folder / LABEL, to_json(label))
        self.folder = folder
        self.states = HiddenStateStore(folder)
        """The hidden states on disk."""
        self._device = model.device
        self._unsaved: dict[bytes, Tensor] = {}
        """Hidden states that are not on disk yet, by key."""

    def __contains__(self, sequence: TokenSequence) -> bool:
        """Whether the hidden states of a sequence are in the cache."""
        key = sequence_key(sequence)
        return key in self._unsaved or key in self.states

    def read_or_add(
        self,
        read: Callable[[Sequence[TokenSequence]], Float[Tensor, "tokens dim"]],
        batch: Sequence[TokenSequence],
    ) -> Float[Tensor, "tokens dim"]:
        """The hidden states of a batch, with those that are not in the cache added to it by ``read``."""
        missing = [sequence for sequence in batch if sequence not in self]
        if missing:
            self.add(missing, read(missing))
        return torch.cat([self._get(sequence) for sequence in batch]).to(self._device)

    def fill(
        self,
        read: Callable[[Sequence[TokenSequence]], Float[Tensor, "tokens dim"]],
        sequences: Sequence[TokenSequence],
        batch_tokens: int,
        on_scored: Callable[[int, int], object] = ignore,
    ) -> None:
        """Compute and store the hidden states of ``sequences``, in the batches that ``score`` would use.

        If any is missing, all are computed, since the batches affect rounding. ``on_scored`` is called as by ``score``;
        it is not called for what is stored already.
        """
        if all(map(self.__contains__, sequences)):
            return
        for batch in batch_by_length([sequence.num_input_tokens for sequence in sequences], batch_tokens):
            batch_sequences = [sequences[index] for index in batch]
            self.add(batch_sequences, read(batch_sequences))
            on_scored(len(batch), sum(len(sequence.response_ids) for sequence in batch_sequences))
        self.save()

    def add(self, batch: Sequence[TokenSequence], hidden: Float[Tensor, "tokens dim"]) -> None:
        """Keep the hidden states of a batch in memory until ``save``."""
        parts = hidden.cpu().split([len(sequence.response_ids) for sequence in batch])
        for sequence, part in zip(batch, parts, strict=True):
            if sequence not in self:
                self._unsaved[sequence_key(sequence)] = part

    def save(self) -> None:
        """Write the hidden states added since the last call to one file, atomically.

        Raises:
            RunFolderError: if it cannot be written.
            ChangedInputError: if a file of the reference or the source has changed.
        """
        require_unchanged_files()
        if self._unsaved:
            self.states.write(self._unsaved)
            self._unsaved = {}

    def _get(self, sequence: TokenSequence) -> Tensor:
        key = sequence_key(sequence)
        return (
            self._unsaved[key] if key in self._unsaved else self.states.get(key, len(sequence.response_ids))
        )


def check_cache_folder(folder: Path) -> None:
    """Check, without writing, that ``folder`` is a cache or can become one.

    Raises:
        RunFolderError: if it is a file, or holds other files.
    """
    require_utf8(folder)
    holds_job(folder, "reference cache", {LABEL}, LEFTOVERS)


def check_same_model(folder: Path, label: CacheLabel, name: str, fingerprint: str, dtype: str) -> None:
    """Check that a cache holds the hidden states of a given model.

    Raises:
        ModelError: if not, naming both.
    """
    cached = label.reference
    if (cached.fingerprint, cached.dtype) != (fingerprint, dtype):
        advice = f"--dtype {cached.dtype}" if cached.fingerprint == fingerprint else "that reference"
        raise ModelError(
            f"{folder} holds hidden states of {cached.path} (fingerprint {cached.fingerprint}, {cached.dtype}) and "
            f"the reference is {name} (fingerprint {fingerprint}, {dtype}); give {advice}, or another cache"
        )


def _merge_labels(folder: Path, stored: CacheLabel, label: CacheLabel) -> CacheLabel | None:
    """The label to write to the folder of a cache that has one; None if the stored label stays.

    Raises:
        ModelError: if the stored label is of another model.
        RunFolderError: if it is of another source, or of an engine and not of kleash, or the reverse.
    """
    reference = label.reference
    check_same_model(folder, stored, reference.path, reference.fingerprint, reference.dtype)
    if label.source is None:
        return None
    if stored.source is not None and not stored.source.agrees(label.source):
        raise RunFolderError(
            f"{folder} holds hidden states of {stored.source} and the source is now {label.source}; "
            "give another --out"
        )
    if stored.from_engine != label.from_engine:
        words = {True: "that an engine saved", False: "that kleash computed"}
        raise RunFolderError(
            f"{folder} holds hidden states {words[stored.from_engine]} and would get some {words[label.from_engine]}; "
            "give another --out"
        )
    return replace(stored, reference=reference, source=label.source)
