"""``--config``: the options of a command from a file, YAML or JSON, or from the ``run.json`` or result of a run."""

import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from kleash.errors import KleashError, OptionError, summarise_error
from kleash.extras import import_extra
from kleash.jobs.options import checked_option, flag
from kleash.registry import grouped, look_up


def options_of_file(
    path: Path, command: str, record: type, converters: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    """The options in a file, by the names of the record's fields.

    The names are those of the command line, with ``-`` or ``_``. Of a ``run.json``, ``measurement.json`` or
    ``sweep.json`` the settings are taken, without what says where the results went.

    Args:
        path: the file.
        command: such as "measure" or "train ppo".
        record: the class of the command's job.
        converters: field -> what makes a value of a word on the command line; YAML takes 1e-4 for a text.

    Raises:
        OptionError: naming the file, if it cannot be read, is of another command, gives an option twice, or has an
            option that there is not, with the nearest, or of another type.
    """
    types = {field.name: field.type for field in fields(record)}
    values: dict[str, Any] = {}
    try:
        for name, value in _options_for(command, _mapping(path)).items():
            hint = look_up(types, name, f"option of kleash {command}")
            try:
                value = converters[name](value) if isinstance(value, str) and name in converters else value
            except ArgumentTypeError as error:
                raise OptionError(f"{flag(name)} {error}") from error
            values[name] = checked_option(name, value, hint)
    except KleashError as error:
        raise OptionError(f"--config {path}: {error}") from error
    return values


def _options_for(command: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options in the content of a file, which is refused if it is ``run.json`` or the result of another command."""
    options, of_command = dict(content), command
    if isinstance(settings := content.get("settings", content.get("job")), Mapping):
        options, of_command = dict(settings), "sweep" if "candidates" in settings else "measure"
    if (algorithm := options.pop("algorithm", None)) is not None:  # which the settings of training have
        of_command = f"train {algorithm}"
    if of_command != command:
        raise OptionError(f"it is of kleash {of_command}, and this is kleash {command}")
    return options


def _mapping(path: Path) -> Mapping[str, Any]:
    """What a file of options holds.

    Raises:
        OptionError: if that is no mapping, or a name is in it twice.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            return json.loads(text, object_pairs_hook=_unique)
        yaml = import_extra("yaml", "cli")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise OptionError("it has no options; write each on a line of its own, as limit: 64")
        value_of = partial(loader.construct_object, deep=True)
        return _unique((value_of(key), value_of(value)) for key, value in node.value)
    except KleashError:
        raise
    except OSError as error:
        raise OptionError(f"it cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the decoder's, or one of PyYAML
        raise OptionError(f"it is neither JSON nor YAML: {summarise_error(error)}") from error


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """Values by their names, written with ``_``; raises OptionError if two of them have one name."""
    values_by_name = grouped((str(key).replace("-", "_"), value) for key, value in pairs)
    for name, values in values_by_name.items():
        if len(values) > 1:
            raise OptionError(f"it gives {name} twice; give it once")
    return {name: value for name, (value,) in values_by_name.items()}
