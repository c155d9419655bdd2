"""Where a model's name leads: a folder with a configuration, safetensors, and perhaps an adapter on top."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.checkpoints.config_checks import (
    check_adapter_files,
    check_index,
    check_model_settings,
)
from kleash.models.checkpoints.file_hashes import hashes_of
from kleash.models.checkpoints.files import INDEX, read_json, safetensors_header
from kleash.models.compat import first_line, quiet
from kleash.records.folder import KIND_OF_FINGERPRINT
from kleash.shipped import shipped_folder

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
COMMIT = re.compile(r"[0-9a-f]{40}")
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
UNWANTED = ["*/*", "consolidated*"]
GENERATION = "generation_config.json"
CHAT_TEMPLATES = "additional_chat_templates"
NO_INPUT = re.compile(
    r"(all|train|eval|test|predict)_results\.json|trainer_state\.json|training_args.*|LICENSE.*|NOTICE.*|README.*"
    r"|checksums\.jsonl|consolidated.*"
)
"""Names of files that lie beside a model and are no part of it."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One side as it lies on disk."""

    name: str
    """As it was asked for."""
    folder: Path
    """Where config.json and the weights are: the base's folder for an adapter."""
    revision: str | None = None
    """The commit that a hub id led to; None for a folder."""
    adapter: Path | None = None
    """The folder of the PEFT adapter on top, if there is one."""
    base: str = ""
    """What the adapter calls its base."""

    def fingerprint(self) -> str:
        """ "sha256:" and 32 hex digits that stand for every byte of weights, configuration, tokenizer and adapter.

        Chat templates and Python files that come with the model are part of it; ``generation_config.json`` is not,
        since no probability depends on it: ``generation_fingerprint`` tells it.

        Raises:
            ModelError: if a file cannot be read.
        """
        return _hash_of(
            (role, folder, path)
            for role, folder in self._folders()
            for path in inputs_of(folder)
            if path.name != GENERATION
        )

    def generation_fingerprint(self) -> str:
        """The same of ``generation_config.json``, which says at which tokens a response ends.

        Raises:
            ModelError: if the file cannot be read.
        """
        return _hash_of(
            (role, folder, folder / GENERATION)
            for role, folder in self._folders()
            if (folder / GENERATION).is_file()
        )

    def _folders(self) -> list[tuple[str, Path]]:
        folders = [("base", self.folder), ("adapter", self.adapter)]
        return [(role, folder) for role, folder in folders if folder is not None]


def inputs_of(folder: Path) -> list[Path]:
    """The files of a checkpoint's folder that can change what a model computes or how its text is cut."""
    found = {path for pattern in WANTED for path in folder.glob(pattern)}
    found |= set((folder / CHAT_TEMPLATES).glob("*.jinja"))
    return sorted(path for path in found if path.is_file() and not NO_INPUT.fullmatch(path.name))


def _hash_of(files: Iterable[tuple[str, Path, Path]]) -> str:
    """One hash of files: of their roles, of their names in their folders, and of their content."""
    named = list(files)
    digest = sha256()
    for (role, folder, path), value in zip(named, hashes_of([path for _, _, path in named]), strict=True):
        digest.update(
            f"{role} {path.relative_to(folder).as_posix()} {value}\n".encode("utf-8", "backslashreplace")
        )
    return f"{KIND_OF_FINGERPRINT}{digest.hexdigest()[:32]}"


def find_checkpoint(name: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint called ``name``: a folder, a hub id, one that ships with kleash, or an adapter's folder.

    Args:
        name: path or hub id, or "shipped:policy".
        revision: branch, tag or commit, for a hub id.

    Raises:
        ModelError: if it does not lead to a configuration and safetensors.
    """
    folder, commit = _find_folder(name, revision)
    if not (folder / "adapter_config.json").is_file():
        _check_model_folder(name, folder)
        return Checkpoint(name=name, folder=folder, revision=commit)
    settings = read_json(folder / "adapter_config.json")
    check_adapter_files(name, folder, settings)
    _check_weights(name, folder)
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"the adapter {name} does not name its base in adapter_config.json; write it there")
    try:
        base_folder, _ = _find_base(base, settings.get("revision"), folder)
        if (base_folder / "adapter_config.json").is_file():
            raise ModelError(
                f"{base} is an adapter itself; merge that into its base, and name the folder here"
            )
        _check_model_folder(base, base_folder)
    except ModelError as error:
        raise ModelError(f"the adapter {name} lies over the base {base}, but {error}") from error
    return Checkpoint(name=name, folder=base_folder, revision=commit, adapter=folder, base=base)


def hub_commit(name: str, revision: str | None) -> str:
    """The commit that a revision of a hub id stands for; nothing else is fetched.

    Raises:
        ModelError: if the hub does not say, and the model has not been fetched before.
    """
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    hub = import_extra("huggingface_hub", "models")
    try:
        return str(hub.HfApi().model_info(name, revision=revision).sha)
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        try:
            return Path(hub.snapshot_download(name, revision=revision, local_files_only=True)).name
        except (OSError, ValueError, hub.errors.HfHubHTTPError):
            raise ModelError(
                f"the hub does not say which commit {name} is at ({first_line(error)}); give the whole commit as "
                "its revision"
            ) from error


def _find_folder(name: str, revision: str | None) -> tuple[Path, str | None]:
    if name.startswith("shipped:"):
        return shipped_folder(name), None
    path = Path(name).expanduser()
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise ModelError(
            f"{name[:60]} cannot be read: {error.strerror or error}; give a folder or a hub id"
        ) from error
    if is_folder:
        if revision is not None:
            raise ModelError(
                f"{name} is a folder, which has no revision {revision!r}; leave the revision out"
            )
        return path, None
    if is_there:
        raise ModelError(f"{name} is a file; give the folder that holds config.json and the safetensors")
    if HUB_ID.fullmatch(name) is None:
        raise ModelError(f"there is no folder {name}, and it cannot be a hub id either; give one of the two")
    return _fetch(name, revision)


def _find_base(base: str, revision: str | None, adapter: Path) -> tuple[Path, str | None]:
    """The base of an adapter: a folder seen from here or from the adapter, or a hub id."""
    for path in (Path(base).expanduser(), adapter / base):
        if path.is_dir():
            return path, None
    return _find_folder(base, revision)


def _fetch(name: str, revision: str | None) -> tuple[Path, str | None]:
    hub = import_extra("huggingface_hub", "models")
    try:
        with quiet():
            folder = Path(
                hub.snapshot_download(
                    name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED
                )
            )
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{name} is not a folder here, and the hub did not give it out{at}: {first_line(error)}"
        ) from error
    return folder, folder.name


def _check_model_folder(name: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{name} has no config.json; give a folder in Hugging Face format, as save_pretrained writes it"
        )
    check_model_settings(folder / "config.json", read_json(folder / "config.json"))
    if (folder / INDEX).is_file():
        check_index(folder / INDEX, read_json(folder / INDEX))
    _check_weights(name, folder)


def _check_weights(name: str, folder: Path) -> None:
    weights = sorted(folder.glob("*.safetensors"))
    for path in weights:
        safetensors_header(path)
    if weights:
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelError(
            f"{name} has its weights as pickled files, which can run code when opened; where you trust them, "
            "load them with from_pretrained and save them again with save_pretrained, which writes "
            "safetensors"
        )
    raise ModelError(f"{name} has no weights: there is no .safetensors file in {folder}")
