"""A reference that is read from its cache and never loaded."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError, RunFolderError
from kleash.extras import import_extra
from kleash.linear import Head
from kleash.models.cache.hidden_states import HiddenStateStore, save_tensors, sequence_key
from kleash.models.cache.reference_cache import check_same_model
from kleash.models.checkpoints.resolution import (
    HUB_ID,
    Checkpoint,
    find_checkpoint,
    list_input_files,
    resolve_commit,
)
from kleash.models.compat import summarise_error
from kleash.models.pair import Model
from kleash.models.sequences import TokenSequence
from kleash.models.tokenizers import load_tokenizer, tokenizer_folder
from kleash.records import CacheContents
from kleash.records.atomic import cannot_write
from kleash.records.caching import CONTENTS, REMAKE_CACHE, cache_checksums, read_contents, read_label
from kleash.records.checksums import Checksums, write_checked
from kleash.records.codec import to_json

HEAD = "head.safetensors"
TOKENIZER = "tokenizer"
NO_TOKENIZER = (".safetensors", ".index.json", ".bin")


class StoredReference:
    """A finished cache: hidden states, head and tokenizer of a reference, which itself is not needed."""

    def __init__(self, folder: Path) -> None:
        """Open what ``finish_cache`` has written.

        Raises:
            ModelError: if a part of it is damaged.
            RunFolderError: if it cannot be read, or another version of kleash wrote it.
        """
        self.folder = folder
        self.label = read_label(folder)
        self.contents = read_contents(folder)
        self.states = HiddenStateStore(folder)
        self._device = torch.device("cpu")

    @staticmethod
    def exists_in(folder: Path) -> bool:
        """Whether ``folder`` holds a finished cache."""
        return (folder / CONTENTS).is_file()

    @property
    def checksums(self) -> Checksums:
        """The checksums of the cache's files as they are now."""
        return cache_checksums(self.folder)

    def check(self, name: str, revision: str | None, dtype: str) -> None:
        """See that the reference that is asked for is the one that is here.

        A folder is told by its fingerprint, a hub id by its commit, for which no weights are fetched. The name
        of the cache itself stands for whatever it holds.

        Args:
            name: the reference as it was asked for.
            revision: its revision.
            dtype: in which it is to run; "auto" for the one that is here.

        Raises:
            ModelError: if it is another one, naming both.
        """
        there = self.label.reference
        dtype = there.dtype if dtype == "auto" else dtype
        if Path(name).expanduser().resolve() == self.folder.resolve():
            check_same_model(self.folder, self.label, name, there.fingerprint, dtype)
        elif name == there.path and there.revision and HUB_ID.fullmatch(name) and not Path(name).exists():
            commit = resolve_commit(name, revision)
            if commit != there.revision:
                raise ModelError(
                    f"{self.folder} holds hidden states of {name} at commit {there.revision} and the reference is "
                    f"at {commit}; give that as --revision-reference, or another cache"
                )
            check_same_model(self.folder, self.label, name, there.fingerprint, dtype)
        else:
            found = find_checkpoint(name, revision).fingerprint()
            check_same_model(self.folder, self.label, name, found, dtype)

    def tokenizer(self, trust_remote_code: bool) -> Any:
        """The reference's.

        Raises:
            ModelError: if it is missing or cannot be loaded.
        """
        side = Checkpoint(name=self.label.reference.path, folder=self.folder / TOKENIZER)
        if not side.folder.is_dir():
            raise ModelError(f"{side.folder} is missing; give the kleash cache command again")
        checksums = self.checksums
        checksums.check_all(lambda name: name.startswith(f"{TOKENIZER}/"), REMAKE_CACHE)
        for path in sorted(side.folder.rglob("*")):
            if path.is_file() and not checksums.covers(path):
                raise ModelError(
                    f"{path} was not written by kleash cache and would change the tokenizer; delete it"
                )
        return load_tokenizer(side, "reference", trust_remote_code)

    def model(self, device: torch.device, tokenizer: Any) -> Model:
        """The reference as one side of a pair, its head on ``device``.

        Raises:
            ModelError: if the head is damaged.
        """
        there, contents = self.label.reference, self.contents
        safetensors, torch_side = (
            import_extra("safetensors", "models"),
            import_extra("safetensors.torch", "models"),
        )
        try:
            tensors = torch_side.load_file(self.folder / HEAD, device=str(device))
            weight = tensors["weight"]
        except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
            raise ModelError(
                f"the head in {self.folder} cannot be read ({summarise_error(error)}); give the kleash cache command "
                "again"
            ) from error
        self.checksums.check(self.folder / HEAD, REMAKE_CACHE)
        self._device = device
        head = Head(
            weight=weight,
            bias=tensors.get("bias"),
            scale=contents.scale,
            softcap=contents.softcap,
        )
        return Model(
            role="reference",
            path=there.path,
            revision=there.revision,
            dtype=getattr(torch, there.dtype),
            device=device,
            parameters=there.parameters,
            vocab_size=there.vocabulary,
            context_length=contents.context,
            eos_token_ids=(),
            head=head,
            fingerprint=there.fingerprint,
            tokenizer=tokenizer,
            network=None,
            backbone=None,
            stored=self,
        )

    def read(self, batch: Sequence[TokenSequence]) -> Float[Tensor, "tokens dim"]:
        """Final hidden states at the scored positions of a batch, one sequence after the other.

        Raises:
            ModelError: if one is not there, naming it.
        """
        parts: list[Tensor] = []
        for one in batch:
            key = sequence_key(one)
            if key not in self.states:
                raise ModelError(
                    f"{self.folder} holds no hidden states of {one.name}; give the kleash cache command again"
                )
            parts.append(self.states.get(key, len(one.response_ids)))
        return torch.cat(parts).to(self._device)

    def count_missing(self, sequences: Iterable[TokenSequence]) -> tuple[int, int, str]:
        """How many of ``sequences`` are not there, of how many, and the name of the first of them."""
        missing, asked, first = 0, 0, ""
        for one in sequences:
            asked += 1
            if sequence_key(one) not in self.states:
                first = first or one.name
                missing += 1
        return missing, asked, first

    def rounding_columns(self, what: str, temperature: float) -> dict[str, np.ndarray] | None:
        """The token columns of the "noise" or the dtype's "gap" that were taken when the cache was made.

        Raises:
            ModelError: if they are damaged.
        """
        path = _rounding_path(self.folder, what, temperature)
        checksums = self.checksums
        if not path.is_file() and not checksums.expects(path):
            return None
        safetensors = import_extra("safetensors", "models")
        try:
            columns = dict(import_extra("safetensors.numpy", "models").load_file(path))
        except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
            raise ModelError(
                f"{path} cannot be read ({summarise_error(error)}); give the kleash cache command again"
            ) from error
        checksums.check(path, REMAKE_CACHE)
        return columns


def finish_cache(folder: Path, model: Model, contents: CacheContents) -> None:
    """Write head and tokenizer beside the hidden states, and last what makes the folder a finished cache.

    Raises:
        RunFolderError: if the folder cannot be written.
    """
    save_tensors(folder / HEAD, head_tensors(model.head), root=folder)
    source = tokenizer_folder(find_checkpoint(model.path, model.revision))
    try:
        (folder / TOKENIZER).mkdir(exist_ok=True)
        for path in list_input_files(source):
            if not path.name.endswith(NO_TOKENIZER):
                target = folder / TOKENIZER / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                write_checked(folder, target, path.read_bytes())
    except OSError as error:
        raise error if isinstance(error, RunFolderError) else cannot_write(folder, error) from error
    write_checked(folder, folder / CONTENTS, to_json(contents))


def save_rounding_columns(
    folder: Path, what: str, temperature: float, columns: Mapping[str, np.ndarray]
) -> None:
    """Keep the token columns that say how much of a drift is "noise", or the dtype's "gap".

    Raises:
        RunFolderError: if the folder cannot be written.
    """
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    save_tensors(_rounding_path(folder, what, temperature), tensors, root=folder)


def head_tensors(head: Head) -> dict[str, Tensor]:
    """What of a head is kept as tensors, on the CPU."""
    parts = {"weight": head.weight, "bias": head.bias}
    return {name: part.detach().cpu().contiguous() for name, part in parts.items() if part is not None}


def _rounding_path(folder: Path, what: str, temperature: float) -> Path:
    return folder / f"{what}-{temperature!r}.safetensors"
