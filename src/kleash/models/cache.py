"""The reference's final hidden states on disk, so that a second run need not compute them again."""

import json
from collections.abc import Callable
from collections.abc import Sequence as Many
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError, OptionError
from kleash.extras import need
from kleash.models.checkpoints import read_json, safetensors_header
from kleash.models.pairs import Model
from kleash.models.sequences import Sequence
from kleash.records import write_atomically
from kleash.records.atomic import cannot_write

LABEL = "reference.json"


class ReferenceCache:
    """A folder of hidden states of one model, found again by the token ids they belong to.

    One file for each call of ``score`` that had something new; an index of what there is is read from the
    files' headers when the folder is opened. Hidden states are kept in the model's dtype: one token takes as
    many bytes as its hidden size times the dtype's, 31 to 148 times fewer than its logits.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        """Open ``folder``, or begin it.

        Args:
            folder: made if it is missing.
            model: whose hidden states these are: the reference.

        Raises:
            ModelError: if the folder holds another model's hidden states, naming both.
            OptionError: if the model can only be measured through its logits, which are too many to keep.
            RunFolderError: if the folder cannot be written.
        """
        if model.head.weight is None:
            raise OptionError(
                f"the {model.role} {model.path} is measured through its logits, which are too many to keep; "
                "leave out --reference-cache"
            )
        label = {"path": model.path, "fingerprint": model.fingerprint, "dtype": str(model.dtype)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        if (folder / LABEL).is_file():
            _check_label(folder, read_json(folder / LABEL), label)
        else:
            write_atomically(folder / LABEL, json.dumps(label, indent=2) + "\n")
        self._folder = folder
        self._open = need("safetensors", "models").safe_open
        self._device = model.device
        self._index = {
            key: path for path in sorted(folder.glob("*.safetensors")) for key in safetensors_header(path)
        }
        self._new: dict[str, Tensor] = {}
        self.found = 0
        """Sequences that came out of the folder."""

    def reader(
        self, read: Callable[[Many[Sequence]], Float[Tensor, "tokens dim"]]
    ) -> Callable[[Many[Sequence]], Float[Tensor, "tokens dim"]]:
        """``read``, but only of what is not in the folder yet."""

        def read_or_find(batch: Many[Sequence]) -> Tensor:
            keys = [_key(one) for one in batch]
            missing = [place for place, key in enumerate(keys) if key not in self._index]
            if missing:
                hidden = read([batch[place] for place in missing])
                parts = hidden.split([len(batch[place].response_ids) for place in missing])
                self._new |= {keys[place]: part.cpu() for place, part in zip(missing, parts, strict=True)}
            self.found += len(batch) - len(missing)
            return torch.cat([self._get(key) for key in keys])

        return read_or_find

    def save(self) -> None:
        """Write what was computed since the last time, as one file that is there whole or not at all."""
        if not self._new:
            return
        tensors = {key: part.contiguous() for key, part in self._new.items()}
        path = (
            self._folder
            / f"{blake2b(''.join(sorted(tensors)).encode(), digest_size=8).hexdigest()}.safetensors"
        )
        save_file = need("safetensors.torch", "models").save_file
        write_atomically(path, lambda unfinished: save_file(tensors, unfinished))
        self._index |= dict.fromkeys(tensors, path)
        self._new = {}

    def _get(self, key: str) -> Tensor:
        if key in self._new:
            return self._new[key].to(self._device)
        with self._open(self._index[key], framework="pt") as file:
            return file.get_tensor(key).to(self._device)


def _key(sequence: Sequence) -> str:
    """Stands for the tokens that are read and for how many of them are scored."""
    text = f"{len(sequence.prompt_ids)}:{sequence.prompt_ids}{sequence.response_ids}"
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _check_label(folder: Path, found: dict[str, Any], wanted: dict[str, str]) -> None:
    if any(found.get(name) != wanted[name] for name in ("fingerprint", "dtype")):
        raise ModelError(
            f"{folder} holds hidden states of {found.get('path')} (fingerprint {found.get('fingerprint')}, "
            f"{found.get('dtype')}) and the reference is {wanted['path']} (fingerprint "
            f"{wanted['fingerprint']}, {wanted['dtype']}); give another --reference-cache folder"
        )
