"""Help and completion scripts, made from the table of commands."""

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING
from itertools import groupby

from kleash.cli.options import GROUPS, OTHERS, CommandHelp, Option, commands

WIDEST = 100
INDENT = 26
GENERAL = (
    ("-h, --help", "Show the help of kleash or of a command."),
    ("--version", "Show the version."),
    ("--completion SHELL", "Print a completion script for bash, zsh or fish."),
)


def help_of(name: str = "") -> str:
    """The help of a command, or of kleash itself, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = _overview(width) if not name else _command_help(commands()[name], width)
    return "\n".join(lines) + "\n"


def _overview(width: int) -> list[str]:
    tops = [command for command in commands().values() if len(command.words) == 1]
    return [
        "usage: kleash COMMAND [options]",
        "",
        *_folded("KL divergence between language models: measured exactly and with error bars.", width),
        "",
        "commands",
        *_rows([(command.name, _first_sentence(command.explained)) for command in tops], width, 12),
        "",
        "options",
        *_rows(GENERAL, width, 22),
        "",
        *_folded("kleash COMMAND --help explains a command. Without options, measure, cache, audit and train work "
                 "on the small models that ship with kleash.", width),
    ]  # fmt: skip


def _command_help(command: CommandHelp, width: int) -> list[str]:
    if command.name == "train":
        return _train_help(command, width)
    words = [
        option.metavar if option.default is MISSING else f"[{option.metavar}]"
        for option in command.positionals
    ]
    lines = [
        " ".join(["usage: kleash", command.name, *words, "[options]"]),
        "",
        *_folded(command.explained, width),
    ]
    if command.positionals:
        lines += ["", "arguments", *_rows([_described(option) for option in command.positionals], width)]
    titles = [*dict.fromkeys(title for title, _ in GROUPS), OTHERS]
    named = sorted(command.named.values(), key=lambda option: (titles.index(option.group), _place(option)))
    for title, options in groupby(named, key=lambda option: option.group):
        lines += ["", title, *_rows([_described(option) for option in options], width)]
    return lines


def _train_help(train: CommandHelp, width: int) -> list[str]:
    kinds = [command for command in commands().values() if command.words[:-1] == train.words]
    return [
        "usage: kleash train [ALGORITHM] [options]",
        "",
        *_folded(train.explained, width),
        "",
        "algorithms",
        *_rows([(command.words[-1], _first_sentence(command.explained)) for command in kinds], width, 16),
        "",
        *_folded("kleash train ALGORITHM --help shows the options of each; those of the demonstration may follow "
                 "\"kleash train\" at once.", width),
    ]  # fmt: skip


def _place(option: Option) -> int:
    names = [name for _, group in GROUPS for name in group]
    return names.index(option.name) if option.name in names else len(names)


def _described(option: Option) -> tuple[str, str]:
    """The two columns of an option's row."""
    left = option.typed if option.positional or option.is_flag else f"{option.typed} {option.metavar}"
    shown = not any(option.default is one for one in (None, False, True, MISSING)) and option.default != ()
    return left, option.explained + (f" [{option.default}]" if shown else "")


def _rows(rows: Iterable[tuple[str, str]], width: int, indent: int = INDENT) -> list[str]:
    lines: list[str] = []
    for left, right in rows:
        text = textwrap.wrap(right, width - indent) or [""]
        if len(left) + 4 > indent:
            lines.append(f"  {left}")
        else:
            lines.append(f"  {left:<{indent - 2}}{text.pop(0)}")
        lines += [" " * indent + line for line in text]
    return lines


def _folded(text: str, width: int) -> list[str]:
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(textwrap.fill(part, width) for part in paragraphs).split("\n")


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def completion_script(shell: str) -> str:
    """A script that completes commands and options in a shell, "bash", "zsh" or "fish"."""
    words = {
        command.name: " ".join([*_next_words(command), *command.named, "--help"])
        for command in commands().values()
    }
    tops = " ".join([*(name for name in words if " " not in name), "--help", "--version", "--completion"])
    if shell == "fish":
        return _fish(words, tops)
    cases = "\n".join(f'    "{name}") words="{those}" ;;' for name, those in words.items())
    script = (
        "_kleash() {\n"
        '  local current="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words\n'
        '  if [ "$COMP_CWORD" -gt 2 ] && [ "$command" = train ]; then\n'
        '    case "${COMP_WORDS[2]}" in -*) ;; *) command="train ${COMP_WORDS[2]}" ;; esac\n'
        "  fi\n"
        '  [ "$COMP_CWORD" -eq 1 ] && command=\n'
        '  case "$command" in\n'
        f'    "") words="{tops}" ;;\n{cases}\n'
        "  esac\n"
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))\n'
        "}\n"
        "complete -o default -F _kleash kleash\n"
    )
    return (
        f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{script}"
        if shell == "zsh"
        else script
    )


def _next_words(command: CommandHelp) -> list[str]:
    if command.name != "train":
        return []
    return [other.words[1] for other in commands().values() if len(other.words) == 2]


def _fish(words: dict[str, str], tops: str) -> str:
    lines = [f"complete -c kleash -n __fish_use_subcommand -a '{tops}'"]
    for name, those in words.items():
        seen = " ".join(f"; and __fish_seen_subcommand_from {word}" for word in name.split())
        lines.append(f"complete -c kleash -n '{seen.removeprefix('; and ')}' -a '{those}'")
    return "\n".join(lines) + "\n"
