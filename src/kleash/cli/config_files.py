"""``--config``: the options of a command from a file, YAML or JSON, or from the ``run.json`` of a run."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kleash.errors import KleashError, OptionError, summarise_error
from kleash.extras import import_extra
from kleash.jobs.options import checked_option, flag
from kleash.registry import look_up
from kleash.store.codec import parse_json


def options_of_file(
    path: Path, command: str, record: type, converters: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    """The options in a file, by the names of the record's fields.

    The names are those of the command line, with ``-`` or ``_``. Of a ``run.json`` the settings are taken, which are
    those of the run without what says where its results went.

    Args:
        path: the file.
        command: such as "measure" or "train ppo".
        record: the class of the command's job.
        converters: field -> what makes a value of a word on the command line; YAML takes 1e-4 for a text.

    Raises:
        OptionError: naming the file, if it cannot be read, is of another command, or has an option that there is not,
            with the nearest, or of another type.
    """
    options: dict[str, Any] = {str(name).replace("-", "_"): value for name, value in _mapping(path).items()}
    if isinstance(settings := options.get("settings"), Mapping):  # a run.json
        options = {str(name): value for name, value in settings.items()}
    algorithm = options.pop("algorithm", None)
    if algorithm is not None and f"train {algorithm}" != command:
        raise OptionError(f"{path} is of kleash train {algorithm}, and this is kleash {command}")
    types = {field.name: field.type for field in fields(record)}
    values: dict[str, Any] = {}
    for name, value in options.items():
        try:
            hint = look_up(types, name, f"option of kleash {command}")
            value = converters[name](value) if isinstance(value, str) and name in converters else value
            values[name] = checked_option(name, value, hint)
        except ArgumentTypeError as error:
            raise OptionError(f"{path}: {flag(name)} {error}") from error
        except KleashError as error:
            raise OptionError(f"{path}: {error}") from error
    return values


def _mapping(path: Path) -> Mapping[Any, Any]:
    """What a file of options holds.

    Raises:
        OptionError: if that is no mapping.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        is_json = text.lstrip().startswith("{")
        content = parse_json(text) if is_json else import_extra("yaml", "models").safe_load(text)
    except KleashError:
        raise
    except OSError as error:
        raise OptionError(f"--config {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the decoder's, or one of PyYAML
        raise OptionError(f"--config {path} is neither JSON nor YAML: {summarise_error(error)}") from error
    if not isinstance(content, Mapping):
        raise OptionError(
            f"--config {path} holds {type(content).__name__} and no names with values; write them as limit: 64"
        )
    return content
