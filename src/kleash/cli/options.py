"""The commands and their options as a table, made from the records that the commands are."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from kleash.cli.commands import ALGORITHMS, Audit, Cache, Compare, Demonstrate, Measure, Report, Train

POSITIONAL = frozenset({"target", "folder", "folders"})
METAVARS: Mapping[str, str] = {
    **dict.fromkeys(("policy", "reference", "teacher"), "MODEL"),
    **dict.fromkeys(("prompts", "text", "responses", "pairs"), "FILE"),
    **dict.fromkeys(("reference_cache", "out"), "FOLDER"),
    **dict.fromkeys(("revision_policy", "revision_reference"), "REVISION"),
    "set": "NAME=VALUE ...",
    "fail_on": "KIND ...",
    "report_to": "TRACKER ...",
    "reward": "REWARD ...",
    "device": "DEVICE",
    "target": "TARGET",
    "folder": "FOLDER",
    "folders": "FOLDER FOLDER ...",
}
KINDS: Mapping[Any, str] = {int: "N", float: "X", str: "WORD", Path: "FILE"}
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("essentials", ("policy", "reference", "teacher", "prompts", "text", "responses", "pairs", "reward")),
    ("essentials", ("steps", "out")),
    ("how much is read", ("limit", "until_relative_error", "prompts_per_step", "pairs_per_step")),
    ("KL and beta", ("kl", "kl_place", "kl_scope", "divergence", "beta", "controller", "target_nats")),
    ("KL and beta", ("target_per", "horizon", "beta_min", "beta_max", "early_stop_nats")),
    ("sampling", ("samples_per_prompt", "max_new_tokens", "temperature", "top_p", "top_k")),
    ("sampling", ("min_p", "seed")),
    ("text that is read", ("window", "stride", "max_tokens")),
    ("updates", ("learning_rate", "lora_rank", "epochs", "minibatches", "clip_range", "max_gradient_norm")),
    ("updates", ("gamma", "gae_lambda", "whiten", "vf_coef", "clip_range_value", "ent_coef")),
    ("precision, device and memory", ("dtype", "device", "device_map", "batch_tokens", "reference_cache")),
    ("loading", ("revision_policy", "revision_reference", "trust_remote_code")),
    (
        "running and output",
        ("resume", "checkpoint_every", "on_hacking", "report_to", "metric_names", "json", "quiet"),
    ),
)
"""Headings of the help and what stands under each, the essential first; a heading may come again."""
OTHERS = "options"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option, or one positional argument, of a command."""

    name: str
    """The field's name, "top_p"."""
    type: Any
    """str, int, float, bool or Path: of a value, or of each of several."""
    default: Any
    """``MISSING`` if it has none."""
    several: bool
    """Whether it takes any number of values."""
    may_be_none: bool
    positional: bool
    explained: str

    @property
    def typed(self) -> str:
        """As it is typed: "--top-p"; a flag that is on by itself is typed to turn it off, "--no-whiten"."""
        if self.positional:
            return self.metavar
        return ("--no-" if self.default is True else "--") + self.name.replace("_", "-")

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.type is bool

    @property
    def metavar(self) -> str:
        """What stands for its value in help."""
        if self.type is Path and not self.positional:
            return "FILE"
        return METAVARS.get(self.name, KINDS.get(self.type, "WORD"))

    @property
    def group(self) -> str:
        """The heading that it stands under in help."""
        return next((title for title, names in GROUPS if self.name in names), OTHERS)


@dataclass(frozen=True, kw_only=True)
class CommandHelp:
    """One command: what it does and what it takes."""

    words: tuple[str, ...]
    """How it is called: ("train", "ppo")."""
    kind: type
    """The record that it is read as."""
    explained: str
    options: tuple[Option, ...]

    @property
    def name(self) -> str:
        """Its words after "kleash"."""
        return " ".join(self.words)

    @property
    def positionals(self) -> tuple[Option, ...]:
        """What it takes without a name."""
        return tuple(option for option in self.options if option.positional)

    @property
    def named(self) -> Mapping[str, Option]:
        """Its options as they are typed."""
        return {option.typed: option for option in self.options if not option.positional}


@cache
def commands() -> Mapping[str, CommandHelp]:
    """Every command by its name: "measure", "train", "train ppo" …"""
    classes: dict[tuple[str, ...], type] = {
        ("measure",): Measure,
        ("report",): Report,
        ("compare",): Compare,
        ("cache",): Cache,
        ("audit",): Audit,
        ("train",): Train,
        **{("train", name): kind for name, kind in {"demonstration": Demonstrate, **ALGORITHMS}.items()},
    }
    return {
        " ".join(words): CommandHelp(
            words=words, kind=kind, explained=inspect.getdoc(kind) or "", options=options_of(kind)
        )
        for words, kind in classes.items()
    }


def options_of(kind: type) -> tuple[Option, ...]:
    """The fields of a command's record as options."""
    if kind is Train:  # which has nothing but the choice of an algorithm
        return ()
    hints, texts = get_type_hints(kind, include_extras=True), explanations(kind)
    return tuple(_option(field, hints[field.name], texts.get(field.name, "")) for field in fields(kind))


def _option(field: "Field[Any]", hint: Any, explained: str) -> Option:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    may_be_none = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
    if may_be_none:
        (hint,) = (inner for inner in get_args(hint) if inner is not NoneType)
    several = get_origin(hint) is tuple
    return Option(
        name=field.name,
        type=get_args(hint)[0] if several else hint,
        default=field.default if field.default is not MISSING else MISSING,
        several=several,
        may_be_none=may_be_none,
        positional=field.name in POSITIONAL,
        explained=" ".join(explained.split()),
    )


def explanations(kind: type) -> dict[str, str]:
    """The docstring under each field of a record and of those that it inherits from."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        except OSError:  # installed without its source: help then lists names alone
            continue
        if not isinstance(body, ast.ClassDef):
            continue
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                value = text.value if isinstance(text, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[field.target.id] = value.value
    return found
