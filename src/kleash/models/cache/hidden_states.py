"""Files of hidden states, indexed by the token ids of their sequences."""

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.checkpoints.files import SafetensorsFiles
from kleash.errors import KleashError, ModelError, summarise_error
from kleash.extras import import_extra
from kleash.sources.sequences import TokenSequence
from kleash.store.cache import REMAKE_CACHE
from kleash.store.checksums import Checksums, write_checked
from kleash.store.file_hashes import WatchedFiles, watch_files

KEY_BYTES = 16
START_BITS = 40
"""Low bits of an index entry: offset of the sequence in its file. The high bits are the file's number."""


def sequence_key(sequence: TokenSequence) -> bytes:
    """A hash of the input tokens and of the length of the prompt."""
    ids = (len(sequence.prompt_ids), *sequence.prompt_ids, *sequence.response_ids)
    return blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=KEY_BYTES).digest()


class HiddenStateStore:
    """The files ``part-*.safetensors`` of a folder, each with the concatenated hidden states of many sequences.

    A file holds ``hidden`` [tokens, dim] and, for each of its sequences, a row of ``keys`` and of ``lengths``. Only
    keys and lengths are read when the folder is opened, and the hidden states of a sequence when they are asked for.
    The index takes about 200 bytes of memory per sequence.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index of all files and verify their checksums.

        Raises:
            ModelError: if a file is damaged, naming it.
            RunFolderError: if a file differs from its checksum, or is missing.
        """
        self._folder = folder
        self._paths: list[Path] = []
        self._index: dict[bytes, int] = {}
        self._open_file: tuple[int, SafetensorsFiles] | None = None
        """Number of the file that was read last, and the file."""
        self.tokens = 0
        """Total number of positions."""
        self._watched, checksums = WatchedFiles(), Checksums.read(folder)
        for path in sorted(folder.glob("part-*.safetensors")):
            if checksums.expects(path):
                watch_files([path])
                self._watched.add([path])
                self._add_to_index(path)
        checksums.check_all({path.name for path in self._paths}.__contains__, REMAKE_CACHE)

    def __contains__(self, key: bytes) -> bool:
        """Whether a sequence with this key is stored."""
        return key in self._index

    def __len__(self) -> int:
        """Number of stored sequences."""
        return len(self._index)

    @property
    def size_bytes(self) -> int:
        """Total size of the files."""
        return sum(path.stat().st_size for path in self._paths)

    def get(self, key: bytes, length: int) -> Float[Tensor, "tokens dim"]:
        """The hidden states of a sequence, on the CPU, in the stored dtype.

        Raises:
            ChangedInputError: if a file is no longer the one that was opened.
        """
        entry = self._index[key]
        number, start = entry >> START_BITS, entry & ((1 << START_BITS) - 1)
        if self._open_file is None or self._open_file[0] != number:
            self._open_file = number, SafetensorsFiles([self._paths[number]])
        states = self._open_file[1].read("hidden", slice(start, start + length))
        self._watched.require_unchanged()
        return states

    def write(self, parts: Mapping[bytes, Float[Tensor, "_ dim"]]) -> None:
        """Write the hidden states of sequences to one new file, atomically.

        Raises:
            RunFolderError: if it cannot be written.
        """
        content_hash = blake2b(b"".join(sorted(parts)), digest_size=8).hexdigest()
        path = self._folder / f"part-{content_hash}.safetensors"
        save_tensors(
            path,
            {
                "hidden": torch.cat(list(parts.values())),
                "keys": torch.tensor([list(key) for key in parts], dtype=torch.uint8),
                "lengths": torch.tensor([len(part) for part in parts.values()]),
            },
            root=self._folder,
        )
        self._add_to_index(path)

    def _add_to_index(self, path: Path) -> None:
        """Index the sequences of a file.

        Raises:
            ModelError: if the file is damaged.
        """
        try:
            stored = SafetensorsFiles([path])
            lengths, keys = stored.read("lengths").tolist(), stored.read("keys").numpy()
            rows = stored["hidden"].shape[0]
            if sum(lengths) != rows or min(lengths) < 0 or keys.shape != (len(lengths), KEY_BYTES):
                raise ModelError(f"{path} holds {rows} hidden states and a list of {sum(lengths)}")
        except (KleashError, KeyError, ValueError, TypeError, IndexError) as error:
            raise ModelError(
                f"{summarise_error(error)}: this part of the reference cache is damaged; delete {path} and give the "
                "kleash cache command again"
            ) from error
        number, start = len(self._paths), 0
        self._paths.append(path)
        for key, length in zip(keys, lengths, strict=True):
            # the first file that has a sequence is read
            self._index.setdefault(key.tobytes(), number << START_BITS | start)
            start += length
        self.tokens += start


def save_tensors(path: Path, tensors: dict[str, Tensor], *, root: Path) -> None:
    """Write a safetensors file atomically.

    Args:
        path: the file.
        tensors: by their names.
        root: the folder in whose list the checksum is recorded.

    Raises:
        RunFolderError: if the disk is full or the folder cannot be written.
    """
    write_checked(root, path, import_extra("safetensors.torch", "models").save(tensors))
