"""Rewards of responses: functions by dotted path, reward models in folders, and weighted sums of them."""

import asyncio
import inspect
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from jaxtyping import Float64

from kleash.arguments import check_reward_order
from kleash.dotted import resolve_function, split_path
from kleash.errors import CannotRunError, NonFiniteError, OptionError, ShapeError, summarise_error
from kleash.jobs.reading import DatasetOptions
from kleash.models import TokenSequence
from kleash.sources.prompts import count_columns
from kleash.sources.sequences import text_after
from kleash.training.reward_models import Dialogue, load_reward_model

WEIGHTED = re.compile(r"\s*(?P<weight>[^*\s]+)\s*\*\s*(?P<what>.+)")

TRL_TEXTS = ("prompts", "completions", "completion_ids")
"""Arguments that TRL passes to every reward besides the columns."""
TEXTS = (*TRL_TEXTS, "responses")
"""Arguments made from prompts and responses, never from a column of the prompts' file."""
PROMPT = "prompt"
"""The column with the prompts, which is passed only to a reward that names it."""

DialogueReward = Callable[[Sequence[Dialogue]], Any]


class RewardFunction:
    """A reward function, callable with dialogues.

    | the function | is called as |
    |---|---|
    | ``f(prompts, responses)``, whatever the two are called | ``f(prompts, responses)`` |
    | ``f(prompts, responses, answer)`` | ``f(prompts, responses, answer=[…])`` |
    | ``f(prompts, responses, **columns)`` | the same with every column of the prompts |
    | ``f(completions, answer, **columns)``, as TRL's rewards are written | everything by keyword |
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the arguments of ``function``.

        Raises:
            OptionError: if it does not say which it takes, as some that are written in C.
        """
        self.function = function
        try:
            parameters = inspect.signature(function).parameters
        except ValueError as error:
            raise OptionError(
                f"the reward {function!r} does not say which arguments it takes; call it in a function of Python"
            ) from error
        named = {
            name: each
            for name, each in parameters.items()
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        self.takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        """Whether it takes all other columns: ``**columns``."""
        names_responses = any(
            name in named
            and (list(named)[1:2] != [name] or named[name].kind is inspect.Parameter.KEYWORD_ONLY)
            for name in ("responses", "completions")
        )
        is_by_name = names_responses or (self.takes_all and len(named) < 2)
        self.by_position = () if is_by_name else tuple(named)[:2]
        """Names of the arguments that are passed by position: prompts and responses."""
        self.by_name = {name: each for name, each in named.items() if name not in self.by_position}
        """The other arguments."""

    def require_columns(self, spec: str, columns: Sequence[str], source: str) -> None:
        """Check that the prompts of ``source`` have the columns that the reward ``spec`` needs.

        Raises:
            OptionError: naming a column that is missing and those that exist.
        """
        for name, parameter in self.by_name.items():
            if name not in (*TEXTS, *columns) and parameter.default is inspect.Parameter.empty:
                raise OptionError(
                    f"the reward {spec} needs {name!r}, which {source} does not have; the columns are "
                    f"{', '.join(map(repr, columns)) or 'none: plain text has none, JSONL has'}"
                )

    def __call__(self, dialogues: Sequence[Dialogue]) -> Any:
        """Call the function with these dialogues; a coroutine is awaited."""
        responses = [dialogue.response for dialogue in dialogues]
        texts: dict[str, list[Any]] = {
            "prompts": [dialogue.prompt for dialogue in dialogues],
            "responses": responses,
            "completions": [*responses],
        }
        if all(dialogue.token_ids is not None for dialogue in dialogues):
            texts["completion_ids"] = [list(dialogue.token_ids or ()) for dialogue in dialogues]
        columns = dict.fromkeys(name for dialogue in dialogues for name in dialogue.columns)
        names = [*self.by_name]
        if self.takes_all:
            column_names = [name for name in columns if name not in (PROMPT, *TEXTS, *self.by_position)]
            names += column_names if self.by_position else [*TRL_TEXTS, *column_names]
        named = {
            # copies, since a reward may change its arguments
            name: texts[name] if name in texts else [deepcopy(each.columns.get(name)) for each in dialogues]
            for name in dict.fromkeys(names)
            if name in texts or name in columns
        }
        positional = (texts["prompts"], responses) if self.by_position else ()
        returned = self.function(*positional, **named)
        return (
            asyncio.run_coroutine_threadsafe(returned, _event_loop()).result()
            if inspect.iscoroutine(returned)
            else returned
        )


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The one of all calls of async rewards, whose clients and semaphores belong to the loop that used them first.

    It has a thread of its own, since that of the training may have a loop that runs, as in a notebook. No call that
    hangs holds up the end of the process.
    """
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


def reward_values(
    spec: str, function: DialogueReward, dialogues: Sequence[Dialogue], weight: float = 1.0
) -> Float64[np.ndarray, " responses"]:
    """Call a reward; returns a number for each response, without the weight, NaN where it is None (does not apply).

    Args:
        spec: the option that names the reward, for errors.
        function: the reward; returns a sequence, an iterator, an array or a tensor of one dimension.
        dialogues: prompts and responses.
        weight: what it is multiplied by in the sum of the rewards.

    Raises:
        CannotRunError: if the reward raises, or returns anything but numbers.
        ShapeError: if there is not one number for each response.
        NonFiniteError: if a number is NaN or infinite, or its square is in float32, with or without the weight.
    """
    try:
        returned = function(dialogues)
        check_reward_order(spec, returned)
        returned = list(returned.tolist() if hasattr(returned, "tolist") else returned)
        values = np.array(returned, dtype=np.float64)
    except (CannotRunError, NonFiniteError):
        raise
    except (Exception, SystemExit) as error:  # a reward may raise anything
        module, frames = split_path(spec)[0], traceback.walk_tb(error.__traceback__)
        lines = [
            f" in line {line} of {module}"
            for each, line in frames
            if each.f_globals.get("__name__") == module
        ]
        batch = (
            f"{len(dialogues)} responses, the first to {dialogues[0].name}" if dialogues else "no response"
        )
        raise CannotRunError(
            f"the reward {spec} raises {type(error).__name__}: {summarise_error(error)}{''.join(lines[-1:])} "
            f"(given {batch})"
        ) from error
    if values.shape != (len(dialogues),):
        raise ShapeError(
            f"the reward {spec} returned numbers of shape {values.shape} for {len(dialogues)} responses; it must "
            "return one each"
        )
    with np.errstate(over="ignore"):  # advantages are scaled by the mean of squares
        squares = np.square(values * max(1.0, abs(weight))).astype(np.float32)
    is_wrong = ~np.isfinite(squares) & np.array([value is not None for value in returned], dtype=bool)
    if is_wrong.any():
        first = np.flatnonzero(is_wrong)[0]
        raise NonFiniteError(
            f"the reward {spec} is {values[first]}{'' if weight == 1 else f' times {weight:g}'} for "
            f"{dialogues[first].name} and {is_wrong.sum()} of {len(values)} responses in all; it must be a finite "
            "number with a square below 3e38 (float32)"
        )
    return values


@dataclass(frozen=True, eq=False, kw_only=True)
class Reward:
    """A reward function or model with its weight."""

    name: str
    """Name of the function or of the folder, short, for metrics; numbered if another has it."""
    weight: float
    """Its weight in the sum."""
    spec: str
    """The option that names it, without its weight."""
    function: DialogueReward
    """Returns one number for each response."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RewardScores:
    """Rewards of responses."""

    total: Float64[np.ndarray, " responses"]
    """The weighted sum of the rewards."""
    parts: Mapping[str, Float64[np.ndarray, " responses"]]
    """Each reward by name, without its weight; NaN where it returned None, which means that it does not apply."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rewards:
    """The rewards of a job."""

    rewards: tuple[Reward, ...]
    tokenizer: Any = None
    """The policy's tokenizer, which decodes responses without special tokens; None to take texts unchanged."""

    def of(self, sequences: Sequence[TokenSequence]) -> RewardScores:
        """The rewards of sequences.

        Raises:
            CannotRunError: if a reward raises or returns no number, or all rewards of a response are None.
            ShapeError: if there is not one number for each response.
            NonFiniteError: if a number is NaN or infinite.
        """
        return self.of_dialogues(
            [
                Dialogue(
                    prompt=each.prompt_text,
                    response=each.response_text
                    if self.tokenizer is None
                    else text_after(self.tokenizer, (), each.response_ids, skip_special_tokens=True),
                    continuation=None
                    if self.tokenizer is None
                    else text_after(
                        self.tokenizer, each.prompt_ids, each.response_ids, skip_special_tokens=True
                    ),
                    messages=each.messages,
                    name=each.name,
                    columns=each.columns,
                    token_ids=each.response_ids,
                )
                for each in sequences
            ]
        )

    def of_dialogues(self, dialogues: Sequence[Dialogue]) -> RewardScores:
        """The rewards of prompts and responses as texts; raises as ``of`` does."""
        parts = {
            reward.name: reward_values(reward.spec, reward.function, dialogues, reward.weight)
            for reward in self.rewards
        }
        require_scored(parts, [each.name for each in dialogues])
        weighted = (reward.weight * np.nan_to_num(parts[reward.name], nan=0.0) for reward in self.rewards)
        return RewardScores(total=sum(weighted, np.zeros(len(dialogues))), parts=parts)


def load_rewards(
    specs: Sequence[str],
    *,
    tokenizer: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int = 4096,
) -> Rewards:
    """Load the rewards of a job.

    Args:
        specs: each is ``package.module:function`` or the folder of a sequence classifier, optionally with a weight
            ("0.5*…"); the rewards are added. A function is called with prompts and responses (lists of texts) and the
            columns that it has arguments for. It returns a number for each response, or None if it does not apply.
        tokenizer: the policy's tokenizer.
        device: of reward models; "auto" is the first GPU, or else the CPU.
        dtype: of reward models; "auto" is float32 on a CPU and the checkpoint's own on an accelerator.
        batch_tokens: largest number of tokens in a forward pass of a reward model, including padding.

    Raises:
        OptionError: if there is no reward, or one has another form.
        UnknownNameError, MissingExtraError, CannotRunError: if a function cannot be imported.
        ModelError: if a model cannot be loaded, or is not a reward model.
    """
    if not specs:
        raise OptionError("say what is rewarded: package.module:function, or the folder of a reward model")
    weights, paths = zip(*map(weight_of, specs), strict=True)
    names = [what.rpartition(":")[2] if ":" in what else Path(what).name for what in paths]
    rewards = tuple(
        Reward(
            name=f"{name}-{names[:at].count(name) + 1}" if name in names[:at] else name,
            weight=weights[at],
            spec=what,
            function=RewardFunction(resolve_function(what, "a reward"))
            if is_function(what)
            else load_reward_model(what, device=device, dtype=dtype, batch_tokens=batch_tokens),
        )
        for at, (name, what) in enumerate(zip(names, paths, strict=True))
    )
    return Rewards(rewards=rewards, tokenizer=tokenizer)


def check_rewards(
    specs: Sequence[str], source: str, limit: int | None = None, reading: DatasetOptions | None = None
) -> None:
    """Check that all reward functions exist and that the prompts have the columns that they need.

    Reads the file of the prompts and loads no model.

    Raises:
        OptionError, UnknownNameError, MissingExtraError, CannotRunError, SourceError: as ``load_rewards`` and
            ``RewardFunction.require_columns``.
    """
    functions = {
        what: RewardFunction(resolve_function(what, "a reward"))
        for _, what in map(weight_of, specs)
        if is_function(what)
    }
    columns = list(count_columns(source, limit, reading)) if functions else []
    for path, function in functions.items():
        function.require_columns(path, columns, source)


def require_scored(parts: Mapping[str, Float64[np.ndarray, " responses"]], names: Sequence[str]) -> None:
    """Check that each response has a reward that is not None.

    Raises:
        CannotRunError: naming the first response without one.
    """
    unscored = np.flatnonzero(np.isnan(np.stack(list(parts.values()))).all(0))
    if len(unscored):
        subject = "the reward" if len(parts) == 1 else "each of the rewards"
        raise CannotRunError(
            f"{subject} {', '.join(parts)} returned None for {names[unscored[0]]} and {len(unscored)} of {len(names)} "
            "responses in all; at least one reward must return a number for each"
        )


def is_function(what: str) -> bool:
    """Whether a reward is a function; False if it is a model.

    Raises:
        OptionError: if it is neither.
    """
    if ":" in what and not Path(what).is_dir():
        return True
    if not what or (not Path(what).is_dir() and "/" not in what):
        raise OptionError(f"a reward is package.module:function or a model's folder, and {what!r} is neither")
    return False


def weight_of(spec: str) -> tuple[float, str]:
    """The weight before a ``*`` (1 without one), and the reward without it.

    Raises:
        OptionError: if the weight is not a number.
    """
    match = WEIGHTED.fullmatch(spec)
    if match is None:
        return 1.0, spec.strip()
    try:
        weight = float(match["weight"])
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise OptionError(
            f"the weight of the reward {spec!r} is {match['weight']!r}; it must be a number, as in 0.5*…"
        )
    return weight, match["what"].strip()
