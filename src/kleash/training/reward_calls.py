"""Calls of reward functions, and checks of what they return: one number for each response."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from jaxtyping import Float64

from kleash.arguments import check_reward_order
from kleash.errors import CannotRunError, NonFiniteError, OptionError, ShapeError, summarise_error
from kleash.training.reward_models import Dialogue

RESPONSES = ("responses", "completions")
"""Names of the responses among the arguments of a reward."""
TEXTS = ("prompts", *RESPONSES, "completion_ids")
"""Arguments made from prompts and responses, never from a column of the prompts' file."""
TRL_TEXTS = ("prompts", "completions", "completion_ids")
"""Arguments that TRL passes to every reward besides the columns."""
PROMPT = "prompt"
"""The column with the prompts, which is passed only to a reward that names it."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
SHOWN_COLUMNS = 12


@dataclass(frozen=True, kw_only=True)
class RewardSignature:
    """The arguments of a reward function.

    | the function | is called as |
    |---|---|
    | ``f(prompts, responses)``, whatever the two are called | ``f(prompts, responses)`` |
    | ``f(prompts, responses, answer)`` | ``f(prompts, responses, answer=[…])`` |
    | ``f(prompts, responses, **columns)`` | the same with every column of the prompts |
    | ``f(completions, answer, **columns)``, as TRL's rewards are written | everything by keyword |
    """

    positional: int
    """Number of texts passed by position: 2 (prompts and responses), or 0 if they are passed by name."""
    texts: tuple[str, ...] = ()
    """The names in ``TEXTS`` that are passed by name."""
    required: tuple[str, ...] = ()
    """Columns without a default value."""
    optional: tuple[str, ...] = ()
    """Columns with a default value, passed if they exist."""
    every_column: bool = False
    """Whether it takes all other columns: ``**columns``."""
    by_position: tuple[str, ...] = ()
    """Names of the arguments that are passed by position."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "RewardSignature":
        """The arguments of ``function``; two by position if its signature is unknown."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return cls(positional=2)
        every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        named = [
            parameter
            for parameter in parameters
            if parameter.kind in (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
        ]
        by_name = _takes_texts_by_name(parameters)
        in_order = [parameter.name for parameter in named if parameter.kind in POSITIONAL]
        by_position = () if by_name else tuple(in_order[:2])
        rest = [
            parameter
            for parameter in named
            if parameter.name not in by_position
            and parameter.name not in getattr(function, "keywords", ())  # bound by functools.partial
        ]
        columns = [parameter for parameter in rest if parameter.name not in TEXTS]
        texts = [parameter.name for parameter in rest if parameter.name in TEXTS]
        if every and "responses" not in (*by_position, *texts) and (by_name or "completions" in by_position):
            # a reward written for TRL: its **columns contain what TRL passes
            texts += [name for name in TRL_TEXTS if name not in (*by_position, *texts)]
        return cls(
            positional=0 if by_name else 2,
            texts=tuple(texts),
            required=tuple(
                parameter.name for parameter in columns if parameter.default is inspect.Parameter.empty
            ),
            optional=tuple(
                parameter.name for parameter in columns if parameter.default is not inspect.Parameter.empty
            ),
            every_column=every,
            by_position=by_position,
        )

    def require_columns(self, spec: str, columns: Sequence[str], source: str) -> None:
        """Check that the prompts have the columns that the reward needs.

        Args:
            spec: the reward, for the error.
            columns: columns of the prompts.
            source: name of the prompts, for the error.

        Raises:
            OptionError: naming the columns that are missing and those that exist.
        """
        missing = [name for name in self.required if name not in columns]
        if missing:
            raise OptionError(
                f"the reward {spec} needs {_listed(missing)}, which {source} does not have; "
                f"{_existing(columns)}{_near(missing[0], columns)}"
            )
        passed = [name for name in columns if name != PROMPT] if self.every_column else []
        clash = [name for name in passed if name in (*self.by_position, *TEXTS)]
        if clash:
            raise OptionError(
                f"{source} has a column {clash[0]!r}, and the reward {spec} has an argument of that name for something "
                "else; rename the column"
            )

    def call(self, function: Callable[..., Any], dialogues: Sequence[Dialogue]) -> Any:
        """Call ``function`` with these dialogues; a coroutine is awaited."""
        texts = {
            "prompts": lambda: [dialogue.prompt for dialogue in dialogues],
            "responses": lambda: [dialogue.response for dialogue in dialogues],
            "completions": lambda: [dialogue.response for dialogue in dialogues],
            "completion_ids": lambda: [list(dialogue.token_ids or ()) for dialogue in dialogues],
        }
        if any(dialogue.token_ids is None for dialogue in dialogues):
            del texts["completion_ids"]
        known = dict.fromkeys(name for dialogue in dialogues for name in dialogue.columns)
        column_names = [name for name in (*self.required, *self.optional) if name in known]
        if self.every_column:
            column_names += [
                name for name in known if name not in (*column_names, PROMPT, *TEXTS, *self.by_position)
            ]
        if missing := [name for name in self.required if name not in known]:
            raise OptionError(f"it needs {_listed(missing)}; {_existing(list(known))}")
        # copies, since a reward may change its arguments
        columns = {
            name: [deepcopy(dialogue.columns.get(name)) for dialogue in dialogues] for name in column_names
        }
        by_name = {name: texts[name]() for name in self.texts if name in texts}
        by_position = (texts["prompts"](), texts["responses"]()) if self.positional else ()
        returned = function(*by_position, **by_name, **columns)
        return asyncio.run(_await(returned)) if inspect.isawaitable(returned) else returned


@dataclass(frozen=True, eq=False, kw_only=True)
class RewardFunction:
    """A reward function with its signature, callable with dialogues."""

    function: Callable[..., Any]
    signature: RewardSignature

    def __call__(self, dialogues: Sequence[Dialogue]) -> Any:
        """Call the function with these dialogues."""
        return self.signature.call(self.function, dialogues)


def reward_values(
    spec: str, function: Callable[[Sequence[Dialogue]], Any], dialogues: Sequence[Dialogue]
) -> Float64[np.ndarray, " responses"]:
    """Call a reward; returns a number for each response, NaN where it returns None (it does not apply).

    Args:
        spec: the option that names the reward, for errors.
        function: the reward; returns a sequence, an iterator, an array or a tensor of one dimension.
        dialogues: prompts and responses.

    Raises:
        CannotRunError: if the reward raises, or returns anything but numbers.
        ShapeError: if there is not one number for each response.
        NonFiniteError: if a number is NaN or infinite.
    """
    returned = _call_reward(spec, function, dialogues)
    if len(returned) != len(dialogues):
        raise ShapeError(
            f"the reward {spec} returned {len(returned)} numbers for {len(dialogues)} responses; "
            "it must return one each"
        )
    numbers = [_number(spec, dialogue, value) for dialogue, value in zip(dialogues, returned, strict=True)]
    values = np.array([np.nan if value is None else value for value in numbers], np.float64)
    wrong = [at for at, value in enumerate(numbers) if value is not None and not np.isfinite(value)]
    if wrong:
        raise NonFiniteError(
            f"the reward {spec} is {values[wrong[0]]} for {dialogues[wrong[0]].name} and {len(wrong)} of "
            f"{len(values)} responses in all; it must be a finite number"
        )
    return values


def _call_reward(
    spec: str, function: Callable[[Sequence[Dialogue]], Any], dialogues: Sequence[Dialogue]
) -> list[Any]:
    """Call a reward; returns its values as a list."""
    try:
        returned = function(dialogues)
        check_reward_order(spec, returned)
        return list(returned.tolist() if hasattr(returned, "tolist") else returned)
    except (CannotRunError, NonFiniteError):
        raise
    except OptionError as error:
        raise CannotRunError(f"the reward {spec} cannot be called: {error}") from error
    except Exception as error:  # a reward may raise anything
        reason = f"{type(error).__name__}: {summarise_error(error)}"
        raise CannotRunError(f"the reward {spec} raises {reason}") from error


def _number(spec: str, dialogue: Dialogue, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (str, bytes, bytearray)):
        try:
            return float(value.item() if hasattr(value, "item") else value)
        except OverflowError:
            return float("inf")
        except (TypeError, ValueError, RuntimeError):  # not a number
            pass
    raise CannotRunError(
        f"the reward {spec} returned a {type(value).__name__} for {dialogue.name}; it must return numbers"
    )


def _takes_texts_by_name(parameters: list[inspect.Parameter]) -> bool:
    """Whether prompts and responses are passed by name, as by TRL.

    This is so if an argument named as in ``RESPONSES`` is not the second one, or if only ``**columns`` can take them. A
    function of one argument gets two, so that Python's own error names the problem.
    """
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.POSITIONAL_ONLY in kinds or inspect.Parameter.VAR_POSITIONAL in kinds:
        return False
    every = inspect.Parameter.VAR_KEYWORD in kinds
    names = [
        parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    in_order = [parameter.name for parameter in parameters if parameter.kind in POSITIONAL]
    if len(names) < 2 and not every:
        return False
    return any(name in names and in_order[1:2] != [name] for name in RESPONSES) or (
        every and set(names) <= {"prompts", "completion_ids"}
    )


async def _await(result: Any) -> Any:
    return await result


def _listed(names: Sequence[str]) -> str:
    return " and ".join(repr(name) for name in names)


def _existing(columns: Sequence[str]) -> str:
    if not columns:
        return "there are no columns: plain text has none, JSONL has"
    shown = ", ".join(repr(name) for name in columns[:SHOWN_COLUMNS])
    more = len(columns) - SHOWN_COLUMNS
    return f"the columns are {shown}" + (f" and {more} more" if more > 0 else "")


def _near(name: str, columns: Sequence[str]) -> str:
    near = get_close_matches(name, columns, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
