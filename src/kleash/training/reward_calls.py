"""How a reward function is called, and what it may return: one number for each response."""

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Float64

from kleash.arguments import check_reward_order
from kleash.errors import CannotRunError, NonFiniteError, OptionError, ShapeError
from kleash.training.reward_models import Dialogue

RESPONSES = ("responses", "completions")
"""What a reward may call the responses."""
TEXTS = ("prompts", *RESPONSES, "completion_ids")
"""Arguments that are made from prompts and responses, and never from a column of the prompts' file."""
TRL_TEXTS = ("prompts", "completions", "completion_ids")
"""What TRL passes to every reward besides the columns."""
PROMPT = "prompt"
"""The column that "prompts" are: it is passed on only to a reward that names it."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
SHOWN_COLUMNS = 12


@dataclass(frozen=True, kw_only=True)
class RewardSignature:
    """Which arguments a reward function takes.

    | the function | is called as |
    |---|---|
    | ``f(prompts, responses)``, whatever the two are called | ``f(prompts, responses)`` |
    | ``f(prompts, responses, answer)`` | ``f(prompts, responses, answer=[…])`` |
    | ``f(prompts, responses, **columns)`` | the same with every column of the prompts |
    | ``f(completions, answer, **columns)``, as TRL's rewards are written | everything by keyword |
    """

    positional: int
    """How many of prompts and responses are passed by position: 2, or 0 where they are passed by name."""
    texts: tuple[str, ...] = ()
    """Those of ``TEXTS`` that are passed by name."""
    required: tuple[str, ...] = ()
    """Columns without which it cannot be called."""
    optional: tuple[str, ...] = ()
    """Columns that it takes where they exist."""
    every_column: bool = False
    """Whether it takes all other columns too: ``**columns``."""
    taken: tuple[str, ...] = ()
    """Names of the arguments that are passed by position."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "RewardSignature":
        """The arguments of ``function``; two by position where Python does not know its signature."""
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
        taken = () if by_name else tuple(in_order[:2])
        rest = [
            parameter
            for parameter in named
            if parameter.name not in taken and not _is_bound(function, parameter.name)
        ]
        columns = [parameter for parameter in rest if parameter.name not in TEXTS]
        texts = [parameter.name for parameter in rest if parameter.name in TEXTS]
        if every and "responses" not in (*taken, *texts) and (by_name or "completions" in taken):
            # **columns of a reward that is written for TRL: it gets what TRL passes
            texts += [name for name in TRL_TEXTS if name not in (*taken, *texts)]
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
            taken=taken,
        )

    def require_columns(self, spec: str, columns: Sequence[str], source: str) -> None:
        """See that the prompts have what the reward needs.

        Args:
            spec: the reward, for the error.
            columns: those of the prompts.
            source: what the prompts are called, for the error.

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
        clash = [name for name in passed if name in (*self.taken, *TEXTS)]
        if clash:
            raise OptionError(
                f"{source} has a column {clash[0]!r}, and the reward {spec} has an argument of that name for something "
                "else; rename the column"
            )

    def call(self, function: Callable[..., Any], dialogues: Sequence[Dialogue]) -> Any:
        """What ``function`` returns for these dialogues; a coroutine is awaited."""
        texts = {
            "prompts": lambda: [each.prompt for each in dialogues],
            "responses": lambda: [each.response for each in dialogues],
            "completions": lambda: [each.response for each in dialogues],
            "completion_ids": lambda: [_ids(each) for each in dialogues],
        }
        known = dict.fromkeys(name for each in dialogues for name in each.columns)
        column_names = [name for name in (*self.required, *self.optional) if name in known]
        if self.every_column:
            column_names += [
                name for name in known if name not in (*column_names, PROMPT, *TEXTS, *self.taken)
            ]
        if missing := [name for name in self.required if name not in known]:
            raise OptionError(f"it needs {_listed(missing)}; {_existing(list(known))}")
        # a reward may change what it is given: the next call is to see the file's values again
        columns = {name: [deepcopy(each.columns.get(name)) for each in dialogues] for name in column_names}
        by_name = {
            name: texts[name]() for name in self.texts if name != "completion_ids" or _have_ids(dialogues)
        }
        by_position = (texts["prompts"](), texts["responses"]()) if self.positional else ()
        returned = function(*by_position, **by_name, **columns)
        return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


@dataclass(frozen=True, eq=False, kw_only=True)
class RewardFunction:
    """A function that rewards, as ``Rewards`` call one."""

    function: Callable[..., Any]
    signature: RewardSignature

    def __call__(self, dialogues: Sequence[Dialogue]) -> Any:
        """What the function returns for these dialogues."""
        return self.signature.call(self.function, dialogues)


def reward_values(
    spec: str, of: Callable[[Sequence[Dialogue]], Any], dialogues: Sequence[Dialogue]
) -> Float64[np.ndarray, " responses"]:
    """One number for each response, as a reward returns them; NaN where it returns None: it does not apply.

    Args:
        spec: the reward, for errors.
        of: what returns the numbers: a sequence, an iterator, an array or a tensor of one dimension.
        dialogues: what is rewarded.

    Raises:
        CannotRunError: if the reward raises, or returns something else than numbers.
        ShapeError: if there is not one number for each response.
        NonFiniteError: if a number is NaN or infinite.
        KeyboardInterrupt: as the reward lets it through.
    """
    returned = _returned(spec, of, dialogues)
    if len(returned) != len(dialogues):
        raise ShapeError(
            f"the reward {spec} returned {_count(returned, len(dialogues))} numbers for {len(dialogues)} responses; "
            "it must return one each"
        )
    numbers = [_number(spec, each, value) for each, value in zip(dialogues, returned, strict=True)]
    values = np.array([np.nan if value is None else value for value in numbers], np.float64)
    wrong = [at for at, value in enumerate(numbers) if value is not None and not np.isfinite(value)]
    if wrong:
        raise NonFiniteError(
            f"the reward {spec} is {values[wrong[0]]} for {dialogues[wrong[0]].name} and {len(wrong)} of "
            f"{len(values)} responses in all; it must be a finite number"
        )
    return values


def described(error: BaseException) -> str:
    """An exception in one line: its type, and the first line of what it says."""
    try:
        message = str(error).strip()
    except Exception:
        message = ""
    kind = type(error).__name__
    return f"{kind}: {message.splitlines()[0]}" if message else kind


class _TooMany(list[Any]):
    """The first values of an iterator that has more of them than there are responses."""


def _count(returned: list[Any], needed: int) -> str:
    return f"more than {needed}" if isinstance(returned, _TooMany) else str(len(returned))


def _returned(spec: str, of: Callable[[Sequence[Dialogue]], Any], dialogues: Sequence[Dialogue]) -> list[Any]:
    """What a reward returned, as a list."""
    process = os.getpid()
    try:
        returned = of(dialogues)
        check_reward_order(spec, returned)
        values = (
            returned.tolist() if hasattr(returned, "tolist") else returned
        )  # a tensor may carry a gradient
        if hasattr(values, "__len__"):
            return list(values)
        several = list(islice(values, len(dialogues) + 1))  # an iterator may never end
        return _TooMany(several) if len(several) > len(dialogues) else several
    except (CannotRunError, NonFiniteError, KeyboardInterrupt):
        raise
    except OptionError as error:
        raise CannotRunError(f"the reward {spec} cannot be called: {error}") from error
    except BaseException as error:  # a reward is other people's code, and may raise anything
        raise CannotRunError(f"the reward {spec} raises {described(error)}") from error
    finally:
        if os.getpid() != process:  # two processes must not write one run
            sys.stderr.write(
                f"kleash: the reward {spec} forked this process, and the copy came back; the copy ends here\n"
            )
            sys.stderr.flush()
            os._exit(1)


def _number(spec: str, dialogue: Dialogue, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (str, bytes, bytearray)):
        try:
            return float(value.item() if hasattr(value, "item") else value)
        except OverflowError:
            return float("inf")
        except KeyboardInterrupt:
            raise
        except BaseException:  # whatever it is, it is no number
            pass
    raise CannotRunError(
        f"the reward {spec} returned a {type(value).__name__} for {dialogue.name}; it must return numbers"
    )


def _takes_texts_by_name(parameters: list[inspect.Parameter]) -> bool:
    """Whether prompts and responses are passed by name, as TRL does.

    They are where the responses' name stands anywhere but in second place, and where there is no place for them
    but ``**columns``. A function of one argument alone gets two, an error that Python names best.
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


def _is_bound(function: Any, name: str) -> bool:
    """Whether ``functools.partial`` has filled the argument already."""
    return name in getattr(function, "keywords", ())


def _have_ids(dialogues: Sequence[Dialogue]) -> bool:
    return all(each.token_ids is not None for each in dialogues)


def _ids(dialogue: Dialogue) -> list[int]:
    return list(dialogue.token_ids or ())


async def _awaited(result: Any) -> Any:
    return await result


def _listed(names: Sequence[str]) -> str:
    return " and ".join(repr(name) for name in names)


def _existing(columns: Sequence[str]) -> str:
    if not columns:
        return "there is no column: plain text has none, JSONL has"
    shown = ", ".join(repr(name) for name in columns[:SHOWN_COLUMNS])
    more = len(columns) - SHOWN_COLUMNS
    return f"the columns are {shown}" + (f" and {more} more" if more > 0 else "")


def _near(name: str, columns: Sequence[str]) -> str:
    near = get_close_matches(name, columns, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
