"""Reading the files of an untrusted checkpoint: its settings, which may fetch no code, and its safetensors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from kleash.errors import ModelError, summarise_error
from kleash.extras import import_extra
from kleash.precision import bitwise_equal
from kleash.store.codec import parse_json
from kleash.store.file_hashes import require_unchanged_files

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_NAME_CHARACTERS = 200
MEGATRON = "megatron.core"
"""Module name that PEFT writes into every adapter's settings and imports only with a megatron_config."""
MAX_SHOWN_CHARACTERS = 80
BITS = {
    name: bits
    for bits, names in {
        4: "F4",
        6: "F6_E2M3 F6_E3M2",
        8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        16: "U16 I16 F16 BF16",
        32: "U32 I32 F32",
        64: "U64 I64 F64 C64",
    }.items()
    for name in names.split()
}
"""Bits per element for each dtype name of safetensors."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: where it is, and how it is stored."""

    name: str
    path: Path
    kind: str
    """Name of the type in its format: "BF16", "F8_E4M3"; in GGUF files "F32", "Q4_K"."""
    shape: tuple[int, ...]
    """In the order of torch: rows before columns."""
    num_bytes: int
    offset: int = 0
    """Of the first byte in a GGUF file."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file, whose header the library checks: dtypes, shapes, and offsets without gaps or overlaps.

    Its tensors are read and not mapped: the kernel ends a process that reads a mapped file beyond its end (SIGBUS).

    Raises:
        ModelError: if it is damaged or cannot be read.
        ChangedInputError: if it was written to since it was found.
    """
    with _reading(path):
        return import_extra("safetensors", "models").safe_open(path, framework="pt", backend="pread")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Context in which a safetensors file is read, with errors that say whether it has changed since it was found."""
    try:
        yield
    except (OSError, import_extra("safetensors", "models").SafetensorError) as error:
        require_unchanged_files()
        raise ModelError(
            f"{path} is not a whole safetensors file ({summarise_error(error)}); fetch or make it again"
        ) from error


class SafetensorsFiles(dict[str, StoredTensor]):
    """The tensors of several safetensors files by name, each read when it is asked for."""

    def __init__(self, paths: Iterable[Path], beside: Iterable[Path] = ()) -> None:
        """Read the headers of the files.

        Args:
            paths: the files.
            beside: further files, whose tensors must be the same where they have the same names.

        Raises:
            ModelError: if a file is damaged, or two files hold different contents under one name.
        """
        super().__init__()
        self._files: dict[Path, Any] = {}
        own_paths = list(paths)
        for path in dict.fromkeys((*own_paths, *beside)):
            file = self._files[path] = open_safetensors(path)
            for name in file.keys():  # noqa: SIM118  no mapping
                first = self.get(name)
                if first is not None and not bitwise_equal(self.read(name), file.get_tensor(name)):
                    raise ModelError(
                        f"{first.path} and {path.name} hold the tensor {name[:MAX_NAME_CHARACTERS]} with different "
                        "contents; remove the file that does not belong to it, or fetch the checkpoint again"
                    )
                if first is None and path in own_paths:
                    part = file.get_slice(name)
                    kind, shape = part.get_dtype(), tuple(part.get_shape())
                    num_bytes = prod(shape) * BITS[kind] // 8
                    self[name] = StoredTensor(
                        name=name, path=path, kind=kind, shape=shape, num_bytes=num_bytes
                    )

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows, on the CPU, in the dtype that it is stored in.

        Raises:
            ModelError, ChangedInputError: if the file has become shorter.
        """
        path = self[name].path
        with _reading(path):
            file = self._files[path]
            return file.get_tensor(name) if rows is None else file.get_slice(name)[rows]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ModelError: if the file is not JSON, or holds another type.
    """
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {summarise_error(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object and holds a {type(content).__name__}")
    return content


def open_model_files(folder: Path) -> SafetensorsFiles:
    """The tensors that transformers would read of a model's folder: of one file, of the files of its index, or of all.

    Where a folder has both a single file and the files of an index, programs differ in which of them they read.

    Raises:
        ModelError: if a file is damaged, or two files hold different contents under one name.
    """
    single = folder / SINGLE_FILE
    indexed = read_index(folder / INDEX) if (folder / INDEX).is_file() else []
    if single.is_file():
        return SafetensorsFiles([single], beside=indexed)
    return SafetensorsFiles(indexed or sorted(folder.glob("*.safetensors")))


def check_model_settings(path: Path, settings: dict[str, Any]) -> None:
    """Refuse a config.json that makes transformers fetch and run kernels, or read weights that are not safetensors.

    Raises:
        ModelError: naming the setting.
    """
    for name, value in iterate_settings(settings):
        if "implementation" in name and isinstance(value, str) and ("/" in value or "\\" in value):
            raise ModelError(
                f"{path} takes {name} from {_abbreviate(value)}, whose code would be fetched and run; set it to null "
                "or to an implementation of transformers, such as 'sdpa'"
            )
    weights = settings.get("transformers_weights")
    if weights not in (None, "model.safetensors"):
        raise ModelError(
            f"{path} takes its weights from {_abbreviate(weights)}; name the file model.safetensors and remove "
            "transformers_weights"
        )


def read_index(path: Path) -> list[Path]:
    """The files of an index of shards, which are safetensors in its folder.

    Raises:
        ModelError: naming a file that is not.
    """
    index = read_json(path)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards or not isinstance(index.get("metadata", {}), dict):
        raise ModelError(f"{path} has no weight_map from tensors to files; fetch or make it again")
    present = {file.name for file in path.parent.glob("*.safetensors")}
    missing = next((shard for shard in shards.values() if str(shard) not in present), None)
    if missing is not None:
        raise ModelError(
            f"{path} leads to {_abbreviate(missing)}, which is no .safetensors file in the same folder; fetch the "
            "checkpoint again"
        )
    return [path.parent / name for name in sorted(set(shards.values()))]


def check_adapter_files(name: str, folder: Path, settings: dict[str, Any]) -> None:
    """Refuse an adapter that makes PEFT import a module, or whose weights are not in adapter_model.safetensors.

    Raises:
        ModelError: naming the setting or the file.
    """
    core = settings.get("megatron_core")
    if settings.get("megatron_config") is not None or core not in (None, MEGATRON):
        raise ModelError(
            f"the adapter {name} has a megatron_config, for which the module {_abbreviate(core)} would be imported "
            "and run; set megatron_config to null and megatron_core to 'megatron.core' in adapter_config.json"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        has_pickle = (folder / "adapter_model.bin").exists()
        raise ModelError(
            f"the adapter {name} has no {ADAPTER_WEIGHTS}"
            + (", only adapter_model.bin, a pickle that can run code when opened" if has_pickle else "")
            + "; where you trust it, load it with PEFT and save it again with save_pretrained"
        )


def iterate_settings(settings: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the leaf values of nested settings, each with the name of its key."""
    stack = [("", settings)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict):
            # The keys of an implementation or pattern setting are module names, so the setting's name is added.
            stack += [
                (f"{key} of {name}" if "implementation" in name or "pattern" in name else str(key), child)
                for key, child in value.items()
            ]
        elif isinstance(value, list):
            stack += [(name, item) for item in value]
        else:
            yield name, value


def _abbreviate(value: Any) -> str:
    """The first 80 characters of a value's ``repr``, for errors."""
    return repr(value)[:MAX_SHOWN_CHARACTERS]
