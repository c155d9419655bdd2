"""A finished reference cache, used instead of the reference model."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.checkpoints.files import SafetensorsFiles
from kleash.checkpoints.resolution import (
    HUB_ID,
    Checkpoint,
    find_checkpoint,
    list_input_files,
    resolve_commit,
)
from kleash.errors import ModelError
from kleash.linear import Head
from kleash.models.cache.hidden_states import HiddenStateStore, save_tensors, sequence_key
from kleash.models.cache.reference_cache import check_same_model
from kleash.models.pair import Model
from kleash.models.tokenizers import load_tokenizer, tokenizer_folder
from kleash.sources.sequences import TokenSequence
from kleash.store import CacheContents
from kleash.store.atomic import writing
from kleash.store.cache import CONTENTS, LABEL, REMAKE_CACHE, read_contents, read_label
from kleash.store.checksums import Checksums, write_checked
from kleash.store.codec import to_json
from kleash.store.file_hashes import watch_files

HEAD = "head.safetensors"
TOKENIZER = "tokenizer"
NON_TOKENIZER_SUFFIXES = (".safetensors", ".index.json", ".bin")


class StoredReference:
    """A finished cache: hidden states, head and tokenizer of a reference that is not loaded."""

    def __init__(self, folder: Path) -> None:
        """Open a cache that ``finish_cache`` completed.

        Raises:
            ModelError: if a part of it is damaged.
            RunFolderError: if it cannot be read, or another version of kleash wrote it.
        """
        self.folder = folder
        watch_files([folder / LABEL, folder / CONTENTS])
        self.label = read_label(folder)
        self.contents = read_contents(folder)
        self.states = HiddenStateStore(folder)
        self._device = torch.device("cpu")

    @classmethod
    def find(cls, folder: Path) -> "StoredReference | None":
        """The finished cache in ``folder``; None if there is none. Raises as ``StoredReference``."""
        return cls(folder) if (folder / CONTENTS).is_file() else None

    @property
    def checksums(self) -> Checksums:
        """The checksums of the cache's files as they are now."""
        return Checksums.read(self.folder)

    def check_reference(self, name: str, revision: str | None, dtype: str) -> None:
        """Check that the requested reference is the cached one.

        A folder is compared by fingerprint, a hub id by commit, for which no weights are fetched. The path of the
        cache itself stands for the cached reference.

        Args:
            name: the requested reference.
            revision: its revision.
            dtype: the requested dtype; "auto" for the cached one.

        Raises:
            ModelError: if they differ, naming both.
        """
        cached = self.label.reference
        fingerprint = cached.fingerprint
        if name == cached.path and cached.revision and HUB_ID.fullmatch(name) and not Path(name).exists():
            commit = resolve_commit(name, revision)
            if commit != cached.revision:
                raise ModelError(
                    f"{self.folder} holds hidden states of {name} at commit {cached.revision} and the reference is "
                    f"at {commit}; give that as --revision-reference, or another cache"
                )
        elif Path(name).expanduser().resolve() != self.folder.resolve():
            fingerprint = find_checkpoint(name, revision).fingerprint()
        check_same_model(
            self.folder, self.label, name, fingerprint, cached.dtype if dtype == "auto" else dtype
        )

    def tokenizer(self, trust_remote_code: bool) -> Any:
        """Load the reference's tokenizer from the cache.

        Raises:
            ModelError: if it is missing or cannot be loaded.
        """
        checkpoint = Checkpoint(name=self.label.reference.path, folder=self.folder / TOKENIZER)
        checkpoint.watch()
        self.checksums.check_all(lambda name: name.startswith(f"{TOKENIZER}/"), REMAKE_CACHE)
        return load_tokenizer(checkpoint, trust_remote_code)

    def as_model(self, device: torch.device, tokenizer: Any) -> Model:
        """The reference as a ``Model`` without a network, with its head on ``device``.

        Raises:
            ModelError: if the head is damaged.
        """
        cached, contents = self.label.reference, self.contents
        watch_files([self.folder / HEAD])
        self.checksums.check(self.folder / HEAD, REMAKE_CACHE)
        tensors = SafetensorsFiles([self.folder / HEAD])
        parts = {name: tensors.read(name).to(device) for name in tensors}
        self._device = device
        head = Head(
            weight=parts["weight"],
            bias=parts.get("bias"),
            scale=contents.scale,
            softcap=contents.softcap,
        )
        return Model(
            role="reference",
            path=cached.path,
            revision=cached.revision,
            dtype=getattr(torch, cached.dtype),
            device=device,
            parameters=cached.parameters,
            vocab_size=cached.vocabulary,
            context_length=contents.context,
            eos_token_ids=(),
            head=head,
            fingerprint=cached.fingerprint,
            weights=cached.weights,
            base=cached.base,
            tokenizer=tokenizer,
            network=None,
            backbone=None,
            stored=self,
        )

    def read(self, batch: Sequence[TokenSequence]) -> Float[Tensor, "tokens dim"]:
        """Final hidden states at the scored positions of a batch, one sequence after the other.

        Raises:
            ModelError: if a sequence is not in the cache, naming it.
        """
        parts: list[Tensor] = []
        for sequence in batch:
            key = sequence_key(sequence)
            if key not in self.states:
                raise ModelError(
                    f"{self.folder} holds no hidden states of {sequence.name}; give the kleash cache command again"
                )
            parts.append(self.states.get(key, len(sequence.response_ids)))
        return torch.cat(parts).to(self._device)

    def require_all(self, sequences: Iterable[TokenSequence], source: str, advice: str) -> None:
        """Check that the cache holds all of some sequences.

        Args:
            sequences: of a source.
            source: what they are of, for the error.
            advice: what to do.

        Raises:
            ModelError: if it lacks some, with their number and the name of the first.
        """
        names = [None if sequence_key(each) in self.states else each.name for each in sequences]
        missing = [name for name in names if name is not None]
        if missing:
            raise ModelError(
                f"{self.folder} lacks {len(missing)} of the {len(names)} {source}, the first being {missing[0]}; "
                f"{advice}"
            )

    def rounding_columns(self, kind: str, temperature: float) -> dict[str, np.ndarray] | None:
        """The token columns of the "noise" floor or the dtype "gap", computed when the cache was made.

        Raises:
            ModelError: if they are damaged.
        """
        path = _rounding_path(self.folder, kind, temperature)
        checksums = self.checksums
        if not path.is_file() and not checksums.expects(path):
            return None
        checksums.check(path, REMAKE_CACHE)
        columns = SafetensorsFiles([path])
        return {name: columns.read(name).numpy() for name in columns}


def finish_cache(folder: Path, model: Model, contents: CacheContents) -> None:
    """Write head and tokenizer to a cache, and last the contents file that marks it as finished.

    Raises:
        RunFolderError: if the folder cannot be written.
    """
    save_tensors(folder / HEAD, head_tensors(model.head), root=folder)
    # the tokenizer of a GGUF model is that of another folder
    checkpoint, source = model.checkpoint, Path(model.tokenizer.name_or_path)
    if checkpoint is not None and not checkpoint.gguf:
        source = tokenizer_folder(checkpoint)
    with writing(folder):
        (folder / TOKENIZER).mkdir(exist_ok=True)
        for path in list_input_files(source):
            if not path.name.endswith(NON_TOKENIZER_SUFFIXES):
                target = folder / TOKENIZER / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                write_checked(folder, target, path.read_bytes())
    write_checked(folder, folder / CONTENTS, to_json(contents))


def save_rounding_columns(
    folder: Path, kind: str, temperature: float, columns: Mapping[str, np.ndarray]
) -> None:
    """Store the token columns of the "noise" floor or the dtype "gap" in a cache.

    Raises:
        RunFolderError: if the folder cannot be written.
    """
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    save_tensors(_rounding_path(folder, kind, temperature), tensors, root=folder)


def head_tensors(head: Head) -> dict[str, Tensor]:
    """The tensors of a head by name, on the CPU."""
    parts = {"weight": head.weight, "bias": head.bias}
    return {name: part.detach().cpu().contiguous() for name, part in parts.items() if part is not None}


def _rounding_path(folder: Path, kind: str, temperature: float) -> Path:
    return folder / f"{kind}-{float(temperature)!r}.safetensors"  # a temperature of 1 is one of 1.0
