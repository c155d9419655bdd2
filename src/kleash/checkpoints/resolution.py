"""A checkpoint with what was read of its files, and how a model's name is resolved to one."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from kleash.checkpoints.files import (
    ADAPTER_WEIGHTS,
    INDEX,
    SafetensorsFiles,
    StoredTensor,
    check_adapter_files,
    check_model_settings,
    open_model_files,
    open_safetensors,
    read_index,
    read_json,
)
from kleash.checkpoints.gguf_files import HUB_FILE, GGUFFiles, list_part_names, open_gguf
from kleash.errors import ModelError, summarise_error
from kleash.extras import hub_errors, import_extra, suppress_library_output
from kleash.jobs.option_groups import is_endpoint, is_gguf, shown_endpoint
from kleash.shipped import shipped_folder
from kleash.store.cache import LABEL
from kleash.store.checksums import is_there, reading
from kleash.store.file_hashes import hash_files, watch_files
from kleash.store.job_folder import KIND_OF_FINGERPRINT

HUB_ID = re.compile(r"[\w][\w.-]{0,95}(/[\w][\w.-]{0,95})?")
COMMIT = re.compile(r"[0-9a-f]{40}")
FETCHED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
IGNORED_FILES = ["*/*", "consolidated*"]
FETCHED_BESIDE_GGUF = [
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "config.json",
]
"""Files that are fetched beside a GGUF file."""
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATES = "additional_chat_templates"
OLD_SETTINGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files with the settings of checkpoints that were written before config.json had them, and their formats."""
MLX_SETTINGS, ACTIVATIONS = "quantization", "quantize_activations"
"""Settings in the config.json of MLX, which do not name the format; others of its name stand beside them."""
MODELOPT_SETTINGS = "hf_quant_config.json"
MAX_METHOD_CHARACTERS = 40
NON_INPUT_FILES = re.compile(
    r"(all|train|eval|test|predict)_results\.json|trainer_state\.json|training_args.*|LICENSE.*|NOTICE.*|README.*"
    r"|checksums\.jsonl|consolidated.*"
)
"""Names of files in a model's folder that change neither its computation nor its tokenizer."""
NETWORK_FILES = re.compile(r"(adapter_|generation_)?config\.json|.*\.safetensors(\.index\.json)?")
"""Names of the other files that say nothing of its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk: the folder of its weights, and the folder of an adapter over it, if any.

    What is read of the files is kept: the settings, and the headers of the tensors.
    """

    role: str = "model"
    """What the model is in a comparison, for errors: "policy"."""
    name: str
    """The name that was resolved."""
    folder: Path
    """Folder of config.json and the weights; of an adapter, its base's folder."""
    revision: str | None = None
    """Commit of a hub id; None for a folder."""
    adapter: Path | None = None
    """Folder of the PEFT adapter; None without an adapter."""
    base: str = ""
    """The base's name in adapter_config.json."""
    gguf: tuple[Path, ...] = ()
    """The files of a GGUF model, in order; empty for safetensors."""

    def __str__(self) -> str:
        """The role and the name, for errors: "the policy NAME"."""
        return f"the {self.role} {self.name}"

    @property
    def adapter_subject(self) -> str:
        """The adapter, for errors."""
        return f"the adapter {self.name} of the {self.role}"

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; empty for a GGUF model."""
        return {} if self.gguf else read_json(self.folder / "config.json")

    @cached_property
    def quantisation(self) -> Mapping[str, Any]:
        """How the weights are quantised, by config.json or older files, with ``quant_method``; empty if they are not.

        Raises:
            ModelError: if a file is not JSON, or the settings are no object.
        """
        mlx_settings = self.config.get(MLX_SETTINGS)
        if isinstance(mlx_settings, dict) and {"bits", "group_size"} <= set(mlx_settings):
            return {**mlx_settings, "quant_method": "mlx", ACTIVATIONS: self.config.get(ACTIVATIONS)}
        text_config = self.config.get("text_config")
        for settings in (self.config, text_config if isinstance(text_config, dict) else {}):
            for name in ("quantization_config", "compression_config"):
                value = settings.get(name)
                if value is not None and not isinstance(value, dict):
                    raise ModelError(
                        f"{self.folder / 'config.json'} has a {name} that is a {type(value).__name__}, and not an "
                        "object; correct it"
                    )
                if value:
                    return value
        for name, method in OLD_SETTINGS.items():
            if (self.folder / name).is_file():
                return {"quant_method": method, **read_json(self.folder / name)}
        if (self.folder / MODELOPT_SETTINGS).is_file():
            value = read_json(self.folder / MODELOPT_SETTINGS).get("quantization")
            return {"quant_method": "modelopt", **(value if isinstance(value, dict) else {})}
        return {}

    @cached_property
    def quant_method(self) -> str | None:
        """The name of the format of a quantised checkpoint; None if it is not quantised."""
        if not self.quantisation:
            return None
        return str(self.quantisation.get("quant_method", "unknown")).lower()[:MAX_METHOD_CHARACTERS]

    @cached_property
    def safetensors(self) -> SafetensorsFiles:
        """The tensors of the folder of the weights.

        Raises:
            ModelError: if a file is damaged.
        """
        return open_model_files(self.folder)

    @cached_property
    def gguf_files(self) -> GGUFFiles:
        """The settings and tensors of a GGUF model.

        Raises:
            ModelError: if a header is damaged.
        """
        return open_gguf(self.gguf)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Where each tensor is, by its name in the files; without those of an adapter."""
        return {tensor.name: tensor for tensor in self.gguf_files.tensors} if self.gguf else self.safetensors

    @cached_property
    def adapter_settings(self) -> dict[str, Any]:
        """adapter_config.json; empty without an adapter."""
        return {} if self.adapter is None else read_json(self.adapter / "adapter_config.json")

    @cached_property
    def adapter_tensors(self) -> SafetensorsFiles:
        """The tensors of the adapter's file; none without an adapter."""
        return SafetensorsFiles([] if self.adapter is None else [self.adapter / ADAPTER_WEIGHTS])

    @property
    def all_tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors of the weights, and those of an adapter."""
        return (*self.tensors.values(), *self.adapter_tensors.values())

    def fingerprint(self, *, of_generation: bool = False) -> str:
        """Hash of every byte of weights, configuration, tokenizer and adapter: "sha256:" and 32 hex digits.

        Chat templates and Python files of the model are included, by their roles and names. ``generation_config.json``
        is not, since no probability depends on it.

        Args:
            of_generation: whether to hash that file instead, which names the tokens at which a response ends.

        Raises:
            ModelError: if a file cannot be read.
        """
        files = [file for file in self.input_files() if (file[2].name == GENERATION_CONFIG) == of_generation]
        values = hash_files([path for _, _, path in files])
        return fingerprint_of(
            (role, path.relative_to(folder).as_posix(), value)
            for (role, folder, path), value in zip(files, values, strict=True)
        )

    def input_files(self) -> list[tuple[str, Path, Path]]:
        """The files that change the model's computation, tokenisation or generation: role, folder and path of each."""
        if self.gguf:
            return [("gguf", self.folder, path) for path in self.gguf]
        folders = (("base", self.folder), ("adapter", self.adapter))
        return [
            (role, folder, path)
            for role, folder in folders
            if folder is not None
            for path in list_input_files(folder)
        ]

    def watch(self) -> None:
        """Watch the input files, where ``watching_files`` is active."""
        watch_files(path for _, _, path in self.input_files())


def fingerprint_of(files: Iterable[tuple[str, ...]]) -> str:
    """Hash of what is said of each file, such as its name and the hash of its bytes: "sha256:" and 32 hex digits."""
    lines = "".join(f"{' '.join(words)}\n" for words in files)
    return f"{KIND_OF_FINGERPRINT}{sha256(lines.encode('utf-8', 'backslashreplace')).hexdigest()[:32]}"


def list_input_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's folder that can change a model's computation or its tokenisation."""
    paths = {path for pattern in FETCHED_FILES for path in folder.glob(pattern)}
    paths |= set((folder / CHAT_TEMPLATES).glob("*.jinja"))
    return sorted(path for path in paths if path.is_file() and not NON_INPUT_FILES.fullmatch(path.name))


def hash_tokenizer_files(folder: Path) -> list[tuple[str, str]]:
    """Name and hash of each file of a tokenizer's folder."""
    paths = [path for path in list_input_files(folder) if not NETWORK_FILES.fullmatch(path.name)]
    return list(zip([str(path.relative_to(folder)) for path in paths], hash_files(paths), strict=True))


def find_checkpoint(name: str, revision: str | None = None, role: str = "model") -> Checkpoint:
    """Resolve ``name`` to a checkpoint: a folder, a hub id, a shipped model, an adapter's folder, or a GGUF file.

    Its files are watched from then on, where ``watching_files`` is active.

    Args:
        name: path or hub id, "shipped:policy", or "owner/name:file.gguf" for a file of the hub.
        revision: branch, tag or commit, for a hub id.
        role: what the model is in a comparison, for errors.

    Raises:
        ModelError: if it is a server's address, there is no configuration or no safetensors, or a check of the
            settings fails.
    """
    if is_endpoint(name):
        raise ModelError(
            f"{shown_endpoint(name)} is the address of a server, and the model itself is needed here; name its folder "
            "or hub id"
        )
    find = _find_gguf if is_gguf(name) else _find_in_folder
    checkpoint = find(name, revision, role)
    checkpoint.watch()
    return checkpoint


def _find_in_folder(name: str, revision: str | None, role: str) -> Checkpoint:
    """The checkpoint of a folder, a hub id, a shipped model or an adapter's folder."""
    folder, commit = _find_folder(name, revision)
    if not (folder / "adapter_config.json").is_file():
        return _checked(name, Checkpoint(role=role, name=name, folder=folder, revision=commit))
    settings = read_json(folder / "adapter_config.json")
    check_adapter_files(name, folder, settings)
    open_safetensors(folder / ADAPTER_WEIGHTS)
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"the adapter {name} does not name its base in adapter_config.json; write it there")
    try:
        # a folder relative to the current directory or to the adapter, or a hub id
        folders = [path for path in (Path(base).expanduser(), folder / base) if path.is_dir()]
        base_folder = folders[0] if folders else _find_folder(base, settings.get("revision"))[0]
        if (base_folder / "adapter_config.json").is_file():
            raise ModelError(
                f"{base} is an adapter itself; merge that into its base, and name the folder here"
            )
        checkpoint = Checkpoint(
            role=role, name=name, folder=base_folder, revision=commit, adapter=folder, base=base
        )
        return _checked(base, checkpoint)
    except ModelError as error:
        raise ModelError(
            f"the adapter {name} lies over the base {base}, but {error} (adapter_config.json names the base as "
            "base_model_name_or_path)"
        ) from error


def _find_gguf(name: str, revision: str | None, role: str) -> Checkpoint:
    """The checkpoint of a GGUF file on disk or on the hub, with all files of a split model.

    Raises:
        ModelError: if there is no such file, or a header is damaged.
    """
    path = Path(name).expanduser()
    match = HUB_FILE.fullmatch(name)
    # no name is too long to ask
    if match is not None and not os.path.exists(path):  # noqa: PTH110
        part_names = list_part_names(match[2])
        folder, commit = _fetch(match[1], revision, part_names)
        paths = tuple(folder / part for part in part_names)
    else:
        if revision is not None:
            raise ModelError(f"{name} is a file, which has no revision {revision!r}; leave the revision out")
        commit = None
        paths = tuple(path.parent / part for part in list_part_names(path.name))
    for part in paths:
        if not os.path.isfile(part):  # noqa: PTH113
            raise ModelError(
                f"there is no file {part}; give a GGUF file, all parts of it if it is split, or "
                "owner/name:file.gguf of the hub"
            )
    open_gguf(paths)
    return Checkpoint(role=role, name=name, folder=paths[0].parent, revision=commit, gguf=paths)


def resolve_commit(name: str, revision: str | None) -> str:
    """The commit of a revision of a hub id; fetches nothing else.

    Raises:
        ModelError: if the hub cannot be asked and the model is not in the local cache.
    """
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    hub = import_extra("huggingface_hub", "models")
    try:
        return str(hub.HfApi().model_info(name, revision=revision).sha)
    except (OSError, ValueError, *hub_errors()) as error:
        try:
            return Path(hub.snapshot_download(name, revision=revision, local_files_only=True)).name
        except (OSError, ValueError, *hub_errors()):
            raise ModelError(
                f"the hub does not say which commit {name} is at ({summarise_error(error)}); give the whole commit as "
                "its revision"
            ) from error


def repository_of(name: str) -> str | None:
    """The repository of the hub that a name means; None for a file or folder, and for what cannot be a hub id."""
    is_here = name.startswith("shipped:") or os.path.exists(Path(name).expanduser())  # noqa: PTH110
    match = None if is_here else (HUB_FILE if is_gguf(name) else HUB_ID).fullmatch(name)
    if match is None:
        return None
    return match[1] if is_gguf(name) else name


def _find_folder(name: str, revision: str | None) -> tuple[Path, str | None]:
    """The folder of a model, downloaded if necessary, and the commit of a hub id."""
    if name.startswith("shipped:"):
        return shipped_folder(name), None
    path = Path(name).expanduser()
    with reading(Path(name[:60]), "give a folder or a hub id", ModelError):
        if is_there(path) and not path.is_dir():
            raise ModelError(f"{name} is a file; give the folder that holds config.json and the safetensors")
    if path.is_dir():
        if revision is not None:
            raise ModelError(
                f"{name} is a folder, which has no revision {revision!r}; leave the revision out"
            )
        return path, None
    if HUB_ID.fullmatch(name) is None:
        raise ModelError(
            f"there is no folder {name}, and it cannot be a hub id either; give one of the two"
            + (", or the address of a server, which begins with http:// or https://" if ":" in name else "")
        )
    return _fetch(name, revision)


def _fetch(name: str, revision: str | None, gguf_names: Sequence[str] = ()) -> tuple[Path, str | None]:
    """Download a model from the hub, or GGUF files with the tokenizer beside them; return its folder and commit."""
    hub = import_extra("huggingface_hub", "models")
    try:
        with suppress_library_output():
            folder = Path(
                hub.snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=[*gguf_names, *FETCHED_BESIDE_GGUF] if gguf_names else FETCHED_FILES,
                    ignore_patterns=None if gguf_names else IGNORED_FILES,
                )
            )
    except (OSError, ValueError, *hub_errors()) as error:
        version = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{name} is not a folder here, and the hub did not give it out{version}: {summarise_error(error)}"
        ) from error
    return folder, folder.name


def _checked(name: str, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, if its folder has a configuration and safetensors, and the settings pass the checks.

    Raises:
        ModelError: about the model called ``name``, if not.
    """
    folder = checkpoint.folder
    if not (folder / "config.json").is_file():
        gguf_file = next(iter(sorted(folder.glob("*.gguf"))), None)
        if gguf_file is not None:
            raise ModelError(f"{name} holds GGUF files; name one of them, such as {gguf_file}")
        if (folder / LABEL).is_file():
            raise ModelError(
                f"{name} holds the hidden states of a reference, not its weights; give --reference-cache {name} as well"
            )
        # policy/ of a training run, a checkpoint of a trainer's output
        within = sorted(folder.glob("*/config.json")) + sorted(folder.glob("*/adapter_config.json"))
        raise ModelError(
            f"{name} has no config.json; give "
            + (
                f"the folder of a model in it, such as {within[0].parent}"
                if within
                else "a folder in Hugging Face format, as save_pretrained writes it"
            )
        )
    check_model_settings(folder / "config.json", checkpoint.config)
    if (folder / INDEX).is_file():
        read_index(folder / INDEX)  # refused here, before another model is loaded
    if any(folder.glob("*.safetensors")):
        return checkpoint
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelError(
            f"{name} has its weights as pickled files, which can run code when opened; where you trust them, "
            "load them with from_pretrained and save them again with save_pretrained, which writes "
            "safetensors"
        )
    raise ModelError(f"{name} has no weights: there is no .safetensors file in {folder}")
