"""Parsing of the command line by argparse; an error is one sentence with the nearest word and a help command."""

import inspect
import re
import shutil
import sys
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, HelpFormatter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from kleash.cli.config_files import options_of_file
from kleash.cli.parser_arguments import PATHS, StoreOnce, arguments_of
from kleash.errors import OptionError
from kleash.extras import import_extra
from kleash.jobs import CacheJob, MeasureJob, SweepJob, TrainJob
from kleash.jobs.algorithms import ALGORITHMS
from kleash.jobs.reading_jobs import AuditJob, CompareJob, DoctorJob, EnvJob, MismatchJob, ReportJob
from kleash.jobs.train import SHIPPED_REWARD
from kleash.version import __version__

Command = (
    MeasureJob
    | SweepJob
    | ReportJob
    | CompareJob
    | MismatchJob
    | DoctorJob
    | CacheJob
    | TrainJob
    | AuditJob
    | EnvJob
)


@dataclass(frozen=True)
class DryRun:
    """A command that says what its job would load and read."""

    job: MeasureJob | SweepJob | CacheJob


DRY_RUNS = ("measure", "sweep", "cache")
"""Commands with --dry-run."""
SUBCOMMANDS: Mapping[str, tuple[str, ...]] = {
    "": (
        *("measure", "sweep", "report", "compare", "mismatch", "doctor", "cache", "audit"),
        *("train", "env"),
    ),
    "train": tuple(ALGORITHMS),
}
RECORDS: Mapping[str, type[Command]] = {
    "measure": MeasureJob,
    "sweep": SweepJob,
    "report": ReportJob,
    "compare": CompareJob,
    "mismatch": MismatchJob,
    "doctor": DoctorJob,
    "cache": CacheJob,
    "audit": AuditJob,
    "env": EnvJob,
    **{f"train {name}": job for name, job in ALGORITHMS.items()},
}
DESCRIPTIONS: Mapping[str, str] = {
    **{name: (inspect.getdoc(record) or "").partition("\n\n>>>")[0] for name, record in RECORDS.items()},
    "": "KL divergence between language models: measured exactly and with error bars.",
    "train": "Train a language model with a KL penalty to its reference.",
}
EPILOGS: Mapping[str, str] = {
    "": "kleash COMMAND --help explains a command. Without options, measure, cache, audit and train work on the small "
    "models that ship with kleash.",
    "train": "kleash train ALGORITHM --help shows the options of an algorithm.",
}
EXAMPLES: Mapping[str, str] = {
    "": "kleash measure",
    "measure": "kleash measure --policy shipped:policy --reference shipped:reference --prompts shipped:prompts "
    "--limit 64 --out drift/",
    "sweep": "kleash sweep --reference shipped:reference --candidates shipped:policy --text shipped:text "
    "--at-most 0.02",
    "report": "kleash report drift/ --format markdown",
    "compare": "kleash compare before/ after/",
    "mismatch": "kleash mismatch rollouts.jsonl --at-most 0.001",
    "doctor": "kleash doctor rollouts.jsonl --policy tuned/ --reference base/",
    "cache": "kleash cache --reference shipped:reference --text shipped:text --out cache/",
    "audit": "kleash audit my_losses:kl_penalty --convention loss --fail-on fault",
    "env": "kleash env",
    "train": "kleash train ppo --steps 10",
    **{
        f"train {name}": f"kleash train {name} --policy shipped:reference --prompts shipped:prompts --reward "
        f"{SHIPPED_REWARD} --target-nats 4 --controller pid --out run/"
        for name in ("ppo", "grpo", "rloo")
    },
    "train dpo": "kleash train dpo --policy P --pairs pairs.jsonl --eval-pairs held_out.jsonl --out run/",
    "train distill": "kleash train distill --policy shipped:reference --teacher shipped:policy "
    "--prompts shipped:prompts --out run/",
}
"""Command -> a first call of it, with what ships with kleash unless it reads a run, rollouts, pairs or code."""
FEW_OPTIONS = 16
"""Options up to which --help shows them all."""
SHELLS = ("bash", "zsh", "fish")
SYNONYMS = {
    **dict.fromkeys(("--model", "--candidate", "--target-model"), "--policy"),
    **dict.fromkeys(("--models", "--policies"), "--candidates"),
    **dict.fromkeys(("--base", "--base-model", "--ref", "--ref-model"), "--reference"),
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
    **dict.fromkeys(("--output-format", "--fmt"), "--format"),
    "--watch": "--on-hacking",
    "--max-steps": "--steps",
    "--kl-coef": "--beta",
}
"""Names of options in other programs, and kleash's names for them."""
TRL_FIELDS = {"--clip-range": "epsilon", "--max-gradient-norm": "max_grad_norm"}
"""Options of ppo -> the fields of TRL's configuration that say the same."""
LOST = {
    "demonstration": "the demonstration is now an example: python examples/leash_demonstration.py",
    "merge": "kleash merge is gone, since nothing is left to merge: start kleash measure with the same options and one "
    "--out in every array task, and the last one makes the measurement",
    "logits": "kleash logits is now kleash measure --policy MODEL --reference-cache FILE (with --format llama.cpp for "
    "its statistics alone); kleash cache --format llama.cpp --reference MODEL --text FILE --out FILE writes the file",
    "--shard": "--shard is gone: start the same command with one --out in every array task, and each scores shards "
    "that no other has",
}
"""Former commands and options, and what to use instead."""
COMPINIT = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }"
"""First line of a zsh script, which starts the completion system if it is not running."""
NEGATIVE_NUMBER = re.compile(r"-(\d|\.\d|inf$|nan$)")
MAX_HELP_COLUMNS = 100


class ParagraphFormatter(HelpFormatter):
    """Formats help in at most ``MAX_HELP_COLUMNS`` columns and keeps the paragraphs of a description."""

    def __init__(self, prog: str) -> None:
        """Format the help of ``prog``."""
        super().__init__(
            prog, max_help_position=26, width=min(shutil.get_terminal_size().columns, MAX_HELP_COLUMNS)
        )

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(fill(paragraph, width, indent) for paragraph in text.split("\n\n"))


class Show(Action):
    """The action that prints the text that its ``const`` makes of the parser and the option's value, and exits."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Print the text."""
        sys.stdout.write(self.const(parser, values))
        parser.exit()


GENERAL_OPTIONS: tuple[tuple[Collection[str], tuple[str, ...], Mapping[str, Any]], ...] = (
    (DESCRIPTIONS, ("-h", "--help"), {"action": "help", "help": "Show the help of kleash or of a command."}),
    (
        RECORDS,
        ("--help-all",),
        {
            "action": Show,
            "nargs": 0,
            "const": lambda parser, _: parser.format_help(shows_all=True),
            "help": "Show all options.",
        },
    ),
    (
        RECORDS,
        ("--config",),
        {
            "type": Path,
            "action": StoreOnce,
            "metavar": "FILE",
            "help": "A file with options, as limit: 64 on a line (YAML), JSON, or the run.json of a run. Options that "
            "are given here win.",
        },
    ),
    (
        DRY_RUNS,
        ("--dry-run",),
        {
            "action": "store_true",
            "help": "Say what would be loaded and read, with memory and tokens, and end: no weights are read, nothing "
            "is written.",
        },
    ),
    (
        ("",),
        ("-V", "--version"),
        {"action": "version", "version": f"kleash {__version__}", "help": "Show the version."},
    ),
    (
        ("",),
        ("--completion",),
        {
            "action": Show,
            "metavar": "SHELL",
            "const": lambda _, shell: completion_script(shell),
            "help": "Print a completion script for bash, zsh or fish.",
        },
    ),
)
"""Commands, and an option that they have beside those of their record: its strings, arguments of ``add_argument``."""


class CommandParser(ArgumentParser):
    """The parser of one command, or of ``kleash`` itself, whose name is empty."""

    def __init__(self, name: str) -> None:
        """Add the options of the command's record, or the words that may follow."""
        super().__init__(
            prog=f"kleash {name}".strip(),
            description=DESCRIPTIONS[name],
            epilog="\n\n".join(filter(None, (EPILOGS.get(name), f"Example: {EXAMPLES[name]}"))),
            formatter_class=ParagraphFormatter,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
            argument_default=SUPPRESS,
        )
        self.name = name
        self.color = False  # Python 3.14 would write control sequences, which the streams escape
        self._negative_number_matcher = NEGATIVE_NUMBER  # argparse's does not match -1e-3
        self.options: dict[str, Action] = {}
        """The options of the record by option string."""
        self.positionals: list[Action] = []
        self.groups: dict[str, Any] = {}
        if name in SUBCOMMANDS:
            self.group("algorithms" if name else "commands")._group_actions += [
                Action([], word, help=_summary(f"{name} {word}")) for word in SUBCOMMANDS[name]
            ]
        if name in RECORDS:
            self._add_record(RECORDS[name])
        words = [
            action.metavar if self.requires(action) else f"[{action.metavar}]" for action in self.positionals
        ]
        words += {"": ["COMMAND"], "train": ["ALGORITHM"]}.get(name, [])
        self.usage = " ".join([self.prog, *map(str, words), "[options]"])
        for names, flags, settings in GENERAL_OPTIONS:
            if name in names:
                self.group("options").add_argument(*flags, **settings)

    def requires(self, positional: Action) -> bool:
        """Whether the command needs a positional argument, from the command line or from ``--config``."""
        return RECORDS[self.name].__dataclass_fields__[positional.dest].default is MISSING

    def group(self, title: str) -> Any:
        """The group of arguments under one heading of the help, created on first use."""
        if title not in self.groups:
            self.groups[title] = self.add_argument_group(title)
        return self.groups[title]

    def format_help(self, *, shows_all: bool = False) -> str:
        """The help, of many options with the essential ones unless it ``shows_all``."""
        hides = len(self.options) > FEW_OPTIONS and not shows_all
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        for title, group in self.groups.items():
            if not hides or title in ("arguments", "essentials", "options"):
                formatter.start_section(title)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        if hides:
            formatter.add_text(f"{self.prog} --help-all shows all {len(self.options)} options.")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _add_record(self, record: type) -> None:
        """Add the options and positional arguments of a record."""
        for title, flag, settings in arguments_of(record):
            action = self.group(title).add_argument(flag, **settings)
            if action.option_strings:
                self.options[flag] = action
                self._option_string_actions[f"--{flag[2:].replace('-', '_')}"] = action
            else:
                self.positionals.append(action)

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """The values of the fields that ``words`` set.

        Raises:
            OptionError: if a word cannot be read.
        """
        try:
            namespace, extra_words = self.parse_known_intermixed_args(words)
        except ArgumentError as error:
            self.error(f"{error.argument_name or ''} {error.message}".strip())
        unknown = [word for word in extra_words if re.match("-.", word) and not NEGATIVE_NUMBER.match(word)]
        if unknown or (extra_words and not self.name):
            option = (unknown or extra_words)[0].partition("=")[0].replace("_", "-")
            self.error(self._unknown_option_message(option))
        if extra_words:
            allowed = "no further" if self.positionals else "no"
            self.error(
                f"{self.name} takes {allowed} word without an option, and was given {extra_words[0]!r}"
            )
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in vars(namespace).items()
        }

    def error(self, message: str) -> NoReturn:
        """Raise an error about the command line.

        Raises:
            OptionError: with ``message`` and the command that shows the help.
        """
        raise OptionError(f"{message}{'' if message.endswith(('?', '.')) else '.'} See {self.prog} --help")

    def _unknown_option_message(self, option: str) -> str:
        """The message about an unknown option, with the nearest known one, or the commands that have it."""
        if self.name in SUBCOMMANDS:
            return f"there is no option {option} here; a command and its algorithm come first, and their options after"
        if option in LOST:
            return LOST[option]
        synonym = SYNONYMS.get(option)
        commands = ", ".join(name for name in RECORDS if option in parser_of(name).options)
        nearest = synonym if synonym in self.options else _nearest(option, () if commands else self.options)
        hint = (
            f"; did you mean {nearest}?" if nearest else f", which is one of {commands}" if commands else ""
        )
        is_by_trl = self.name.startswith("train ") and self.name != "train ppo"
        if is_by_trl and (option in TRL_FIELDS or not (nearest or commands)):
            field = TRL_FIELDS.get(option, option[2:].replace("-", "_"))
            hint = f"; a field of TRL's configuration is given by --set {field}=VALUE"
        return f"{self.name} has no option {option}{hint}"

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write help to standard output; argparse's version ignores errors of writing."""
        (file or sys.stdout).write(message)


@cache
def parser_of(name: str) -> CommandParser:
    """The parser of a command such as "train ppo"; of ``kleash`` itself if ``name`` is empty."""
    return CommandParser(name)


def read_words(words: Sequence[str]) -> Command | DryRun:
    """Parse the words after "kleash" into a command's record.

    Raises:
        OptionError: with the invalid word, the nearest valid one, and the command that shows the help.
        SystemExit: after help, the version or a completion script has been printed.
    """
    name = ""
    # "kleash" and "kleash help WORDS" are "kleash WORDS --help"
    rest = [*words[1:], "--help"] if not words or words[0] == "help" else list(words)
    while rest and name in SUBCOMMANDS and not rest[0].startswith("-"):
        name = _subcommand(name, rest.pop(0))
    rest = ["--help"] if name in SUBCOMMANDS and not rest else rest
    parser = parser_of(name)
    values = parser.read(rest)
    if (config := values.pop("config", None)) is not None:
        actions = parser.options.values()
        converters = {action.dest: action.type for action in actions if callable(action.type)}
        values = {**options_of_file(config, name, RECORDS[name], converters), **values}
    missing = [
        str(each.metavar) for each in parser.positionals if parser.requires(each) and each.dest not in values
    ]
    if missing:
        parser.error(f"{name} needs {', '.join(missing)}")
    is_dry = values.pop("dry_run", False)
    job: Any = RECORDS[name](**values)
    return DryRun(job) if is_dry else job


def _subcommand(name: str, word: str) -> str:
    """The name of the command ``word`` under the command ``name``.

    Raises:
        OptionError: if there is none.
    """
    words = SUBCOMMANDS[name]
    if word in words:
        return f"{name} {word}".strip()
    if not name and word in ALGORITHMS:
        raise OptionError(f"{word} is a way to train: kleash train {word}")
    if word in LOST:
        raise OptionError(LOST[word])
    nearest = _nearest(word, words)
    hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(words)}"
    parser_of(name).error(f"{parser_of(name).prog} has no command {word!r}; {hint}")


def _summary(name: str) -> str:
    """The first paragraph of a command's description, on one line."""
    return " ".join(DESCRIPTIONS[name.strip()].split("\n\n")[0].split())


def _nearest(word: str, words: Iterable[str]) -> str | None:
    """The most similar of ``words``; None if none is similar. That both begin with dashes is no likeness."""
    by_name = {each.lstrip("-"): each for each in words}
    return next((by_name[name] for name in get_close_matches(word.lstrip("-"), by_name, n=1)), None)


def completion_script(shell: str) -> str:
    """A script by shtab that completes commands, options and paths in ``shell``.

    Raises:
        OptionError: if ``shell`` is not one of ``SHELLS``.
        MissingExtraError: if shtab is not installed.
    """
    if shell not in SHELLS:
        raise OptionError(f"--completion takes {', '.join(SHELLS)}; it is {shell!r}")
    shtab: Any = import_extra("shtab", "cli")
    root = ArgumentParser("kleash", parents=[parser_of("")], add_help=False)
    commands = {"": root.add_subparsers()}
    for name in (*filter(None, SUBCOMMANDS), *RECORDS):
        parent, _, word = name.rpartition(" ")
        parser = parser_of(name)
        for action in (*parser.options.values(), *parser.positionals):
            if str(action.metavar).partition(" ")[0] in PATHS:
                vars(action)["complete"] = shtab.FILE
        copy = commands[parent].add_parser(
            word, parents=[parser], add_help=False, description=_summary(name), help=_summary(name)
        )
        if name in SUBCOMMANDS:
            commands[name] = copy.add_subparsers()
    # with "(*)" zsh would complete only the first folder
    return shtab.complete(root, shell, preamble={"zsh": COMPINIT}).replace('"(*):', '"*:')
