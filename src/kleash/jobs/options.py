"""The base class of jobs: a field has the type of an option, its allowed values, default and help."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import index
from pathlib import Path, PurePath
from types import NoneType
from typing import Annotated, Any, NamedTuple, SupportsFloat, SupportsIndex, TypeVar, get_args, get_origin

from kleash.errors import OptionError
from kleash.registry import look_up

JobT = TypeVar("JobT")
TYPE_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    tuple: "a list of texts",
    Path: "a path",
}
CONVERSIONS: Mapping[Any, tuple[tuple[type, ...], tuple[type, ...], Callable[[Any], Any]]] = {
    str: ((str, PurePath), (), str),
    Path: ((str, PurePath), (), Path),
    bool: ((bool,), (), bool),
    int: ((SupportsIndex,), (bool,), index),
    float: ((SupportsFloat,), (bool, str), lambda x: x if isinstance(x, int | float) else float(x)),
    tuple: ((), (), tuple),  # no other value than a sequence, whose parts are converted one by one
}
"""Type of an option -> the types of values that it takes, those among them that it does not, and what converts them."""
MAX_SHOWN = 60
"""Characters of a value in an error."""


@dataclass(frozen=True)
class Allowed:
    """The values of a type that an option may have."""

    words: str
    """What the value must be, in an error."""
    holds: Callable[[Any], bool] = field(repr=False)


def one_of(words: Sequence[str], otherwise: str = "") -> Allowed:
    """One of these words; ``otherwise`` says what another option is for."""
    return Allowed(f"one of {', '.join(words)}{otherwise}", words.__contains__)


BELOW_2_63 = Allowed("below 2^63", lambda n: n < 2**63)
Count = Annotated[int, Allowed("at least 1", lambda n: n >= 1), BELOW_2_63]
CountOrZero = Annotated[int, Allowed("at least 0", lambda n: n >= 0), BELOW_2_63]
Positive = Annotated[float, Allowed("a number above 0", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, Allowed("a number of 0 or more", lambda x: 0 <= x < math.inf)]
Share = Annotated[float, Allowed("a number between 0 and 1", lambda x: 0 < x < 1)]
Limit = Annotated[float, Allowed("a number of nats, at least 0", lambda x: 0 <= x < math.inf)]
Name = Annotated[str, Allowed("a name; give one, or leave it out", bool)]


class Refusal(NamedTuple):
    """A combination of options that is refused."""

    applies: object
    """Whether the options are so combined."""
    reason: str
    """What is wrong, and then what to do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options, or a job, which consists of several groups."""

    def __post_init__(self) -> None:
        """Give each option the type that its annotation says, and refuse options that do not go together.

        A ``Path``, dtype or device becomes the text that it is on the command line and in records, a list a tuple, a
        NumPy integer an int.

        Raises:
            OptionError: naming the option, its value and what it must be.
        """
        for option in fields(self):
            value = getattr(self, option.name)
            object.__setattr__(self, option.name, checked_option(option.name, value, option.type))
        for group in reversed(type(self).__mro__):
            for refusal in vars(group)["_refusals"](self) if "_refusals" in vars(group) else ():
                if refusal.applies:
                    raise OptionError(refusal.reason)

    def _refusals(self) -> Iterable[Refusal]:
        """The combinations that a group or job refuses by itself, in order; those of its bases are refused before."""
        return (
            Refusal(
                getattr(self, "resume", False) and getattr(self, "out", None) is None,
                "--resume continues the run in a folder; give the folder as --out",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class JsonOption(Options):
    """Whether a result is printed as JSON."""

    json: bool = False
    """Print the result as JSON instead of a summary."""

    @property
    def output_format(self) -> str | None:
        """The format that is printed; None for a summary in words."""
        return "json" if self.json else None


def checked_option(name: str, value: Any, annotation: Any) -> Any:
    """``value`` in the type of an annotation.

    Raises:
        OptionError: naming the option, its value and what it must be.
    """
    try:
        return _converted(value, annotation)
    except ValueError as error:
        words, wrong = error.args
        wrong = str(wrong) if isinstance(wrong, PurePath) else wrong
        is_plain = isinstance(wrong, str | int | float | None) or type(wrong) in (tuple, list)
        shown = repr(wrong)[:MAX_SHOWN] if is_plain else f"a {type(wrong).__name__}"
        advice = (
            "; save it with save_pretrained and give its folder" if hasattr(wrong, "save_pretrained") else ""
        )
        raise OptionError(f"{flag(name)} must be {words}; it is {shown}{advice}") from error


def _converted(value: Any, annotation: Any) -> Any:
    """``value`` in the type of an annotation.

    Raises:
        ValueError: with two arguments, words for what it must be, and the value that is wrong: itself or a part of it.
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        value = _converted(value, parts[0])
        for allowed in parts[1:]:
            if not allowed.holds(value):
                raise ValueError(allowed.words, value)
        return value
    kind = origin or annotation
    if kind is tuple and type(value) in (list, tuple):
        return tuple(_converted(part, parts[0]) for part in value)
    if NoneType in parts:
        return None if value is None else _converted(value, parts[0])
    if kind is str and type(value).__module__ == "torch":  # torch.bfloat16, torch.device("cpu")
        value = str(value).removeprefix("torch.")
    taken, refused, convert = CONVERSIONS[kind]
    if isinstance(value, taken) and not isinstance(value, refused):
        return convert(value)
    raise ValueError(TYPE_NAMES[kind], value)


def flag(name: str) -> str:
    """The option of a field, as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def job_of(kind: type[JobT], options: Mapping[str, Any]) -> JobT:
    """The job of options that were given as keyword arguments.

    Raises:
        UnknownNameError: if there is no option of a name, with the nearest.
        OptionError: if a value is not allowed.
    """
    names = dict.fromkeys(inspect.signature(kind).parameters)
    for name in options:
        look_up(names, name, "option")
    return kind(**options)


def shared_options(job: Options, kind: type[Options], without: Collection[str] = ()) -> dict[str, Any]:
    """The options of a job that jobs of another kind have as well, but for those in ``without``."""
    names = {field.name for field in fields(kind)} - set(without)
    return {field.name: getattr(job, field.name) for field in fields(job) if field.name in names}


def changed_options(job: Any, names: Iterable[str]) -> list[str]:
    """Those of ``names`` whose fields of the job do not have their default."""
    defaults = {field.name: field.default for field in fields(job)}
    return [name for name in names if getattr(job, name) != defaults[name]]
