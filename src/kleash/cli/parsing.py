"""The words of the command line, read as a request; what cannot be read is answered in one sentence."""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from typing import Any

from kleash.cli.commands import ALGORITHMS, Command, Demonstrate, Train
from kleash.cli.options import CommandHelp, Option, commands
from kleash.errors import OptionError

HELP = ("--help", "-h")
SHELLS = ("bash", "zsh", "fish")
LARGEST = 2**63
SYNONYMS = {
    **dict.fromkeys(("--model", "--candidate", "--target-model"), "--policy"),
    **dict.fromkeys(("--base", "--base-model", "--ref", "--ref-model", "--reference-model"), "--reference"),
    **dict.fromkeys(("--output", "--output-dir", "-o"), "--out"),
    **dict.fromkeys(("--input", "--data", "--dataset"), "--prompts"),
    **dict.fromkeys(("--max-tokens", "--max-length", "--max-completion-length"), "--max-new-tokens"),
    **dict.fromkeys(("--num-samples", "--num-generations", "-n"), "--samples-per-prompt"),
    **dict.fromkeys(("--batch-size", "--per-device-train-batch-size"), "--batch-tokens"),
    "--lr": "--learning-rate",
    "--lam": "--gae-lambda",
    "--discount": "--gamma",
    "--decay": "--gae-lambda",
    "--cliprange": "--clip-range",
    "--clip": "--clip-range",
    "--cliprange-value": "--clip-range-value",
    "--value-clip": "--clip-range-value",
    "--value-coefficient": "--vf-coef",
    "--entropy-coefficient": "--ent-coef",
    "--trackers": "--report-to",
    "--watch": "--on-hacking",
    "--max-steps": "--steps",
    "--kl-coef": "--beta",
}
"""What other programs call an option, and what it is called here."""


@dataclass(frozen=True, kw_only=True)
class HelpRequest:
    """Show the help of a command; of kleash itself if the name is empty."""

    name: str = ""


@dataclass(frozen=True, kw_only=True)
class VersionRequest:
    """Show the version."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """Print the completion script of a shell."""

    shell: str


Request = Command | HelpRequest | VersionRequest | CompletionRequest


def read_words(words: Sequence[str]) -> Request:
    """What the words after "kleash" ask for.

    Raises:
        OptionError: naming the word that cannot be read, the nearest that can, and the help to look into.
    """
    if not words or words[0] in HELP:
        return HelpRequest()
    first, rest = words[0], list(words[1:])
    if first in ("--version", "-V") and not rest:
        return VersionRequest()
    if first.partition("=")[0] == "--completion":
        return _completion(first, rest)
    if first == "help":
        return HelpRequest(name=_command_name(rest)) if rest else HelpRequest()
    name = _command_name(words)
    rest = list(words[len(name.split()) :])
    if name == "train" and any(word in HELP for word in rest):
        return HelpRequest(name="train")
    try:
        return _record("train demonstration" if name == "train" else name, rest, name)
    except OptionError as error:
        raise OptionError(_see(str(error), f"kleash {name} --help")) from error


def _see(sentence: str, help_command: str) -> str:
    """``sentence`` with where to read more."""
    return f"{sentence}{'' if sentence.endswith(('?', '.')) else '.'} See {help_command}"


def _command_name(words: Sequence[str]) -> str:
    """The name of the command that ``words`` begin with.

    Raises:
        OptionError: if they begin with none.
    """
    first = words[0]
    tops = [name for name in commands() if " " not in name]
    if first in ALGORITHMS:
        raise OptionError(f"{first} is a way to train: kleash train {first}")
    if first.startswith("-"):
        near = _near(first.partition("=")[0], ("--help", "--version", "--completion"))
        hint = f"did you mean {near}?" if near else "a command comes first, and its options after it"
        raise OptionError(_see(f"there is no option {first} before a command; {hint}", "kleash --help"))
    if first not in tops:
        near = _near(first, (*tops, *ALGORITHMS, "--version", "--help"))
        near = f"train {near}" if near in ALGORITHMS else near
        hint = f"did you mean {near}?" if near else f"there are {', '.join(tops)}"
        raise OptionError(_see(f"there is no command {first!r}; {hint}", "kleash --help"))
    if first != "train" or len(words) < 2 or words[1].startswith("-"):
        return first
    kinds = ["demonstration", *ALGORITHMS]
    if words[1] not in kinds:
        near = _near(words[1], kinds)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(kinds)}"
        raise OptionError(_see(f"train knows no algorithm {words[1]!r}; {hint}", "kleash train --help"))
    return f"train {words[1]}"


def _completion(word: str, rest: Sequence[str]) -> CompletionRequest:
    shell = word.partition("=")[2] or (rest[0] if rest else "")
    if shell not in SHELLS:
        raise OptionError(f"--completion takes {', '.join(SHELLS)}; it is {shell!r}")
    return CompletionRequest(shell=shell)


def _record(name: str, words: list[str], called: str) -> Request:
    """The record of command ``name``, which was called ``called``, from the words after it."""
    command = commands()[name]
    if any(word in HELP for word in words):
        return HelpRequest(name=name)
    values: dict[str, Any] = {}
    bare: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-" or _is_number(word):
            bare.append(word)
            continue
        option, value = _named(command, word, called)
        if option.is_flag:
            if value is not None:
                raise OptionError(f"{option.typed} takes no value; it was given {value!r}")
            values[option.name] = option.default is not True
        elif option.several:
            values[option.name] = tuple(_convert(option, one) for one in _several(value, words))
        else:
            values[option.name] = _convert(option, _one(option, value, words))
    _place(command, bare, values)
    if name.startswith("train "):
        algorithm: Any = {"demonstration": Demonstrate, **ALGORITHMS}[command.words[1]]
        return Train(algorithm=algorithm(**values))
    return command.kind(**values)


def _named(command: CommandHelp, word: str, called: str) -> tuple[Option, str | None]:
    """The option that ``word`` names, and the value that it carries after a "=".

    Raises:
        OptionError: if there is no such option.
    """
    typed, equals, value = word.partition("=")
    typed = typed.replace("_", "-")
    if typed in command.named:
        return command.named[typed], value if equals else None
    if called == "train":
        raise OptionError(
            f"train without an algorithm is the demonstration, which has no option {typed}; name one: "
            f"{', '.join(ALGORITHMS)}"
        )
    synonym = SYNONYMS.get(typed)
    near = synonym if synonym in command.named else _near(typed, command.named)
    if near is None and typed.startswith("--no-"):
        near = _near(typed.replace("--no-", "--", 1), command.named)
    hint = f"; did you mean {near}?" if near else ""
    elsewhere = [other.name for other in commands().values() if typed in other.named]
    if near is None and elsewhere:
        hint = f"; {', '.join(elsewhere)} {'has' if len(elsewhere) == 1 else 'have'} it"
    raise OptionError(f"{called} has no option {typed}{hint}")


def _one(option: Option, value: str | None, words: list[str]) -> str:
    if value is not None:
        return value
    if not words or (words[0].startswith("--") and words[0] != "--"):
        raise OptionError(f"{option.typed} needs a value: {option.typed} {option.metavar}")
    return words.pop(0)


def _several(value: str | None, words: list[str]) -> Iterable[str]:
    taken = [] if value is None else [value]
    while words and not words[0].startswith("--"):
        taken.append(words.pop(0))
    return taken


def _place(command: CommandHelp, bare: Sequence[str], values: dict[str, Any]) -> None:
    """Put the words without a name where they belong.

    Raises:
        OptionError: if there are too few or too many of them.
    """
    left = list(bare)
    for option in command.positionals:
        if option.several:
            values[option.name] = tuple(_convert(option, word) for word in left)
            left = []
        elif left:
            values[option.name] = _convert(option, left.pop(0))
        elif option.default is MISSING:
            raise OptionError(f"{command.name} needs {option.metavar}: {option.explained}")
    if left:
        takes = "no" if not command.positionals else "no further"
        raise OptionError(f"{command.name} takes {takes} word without an option, and was given {left[0]!r}")


def _convert(option: Option, word: str) -> Any:
    """A value as its option's type.

    Raises:
        OptionError: if it is not of that type.
    """
    if option.may_be_none and word == "None":
        return None
    try:
        value = option.type(word)
    except ValueError as error:
        what = "a whole number" if option.type is int else "a number"
        raise OptionError(f"{option.typed} takes {what}; it is {word!r}") from error
    if option.type is int and not -LARGEST <= value < LARGEST:
        raise OptionError(f"{option.typed} must be a whole number below 2^63; it is {word}")
    return value


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _near(word: str, words: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(word, list(words), n=1)), None)
