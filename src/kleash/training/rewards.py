"""Rewards of responses: functions by dotted path, reward models in folders, and weighted sums of them."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float64

from kleash.dotted import resolve_function
from kleash.errors import CannotRunError, OptionError, ShapeError
from kleash.jobs.reading import DatasetOptions
from kleash.models import TokenSequence
from kleash.sources.prompts import count_columns
from kleash.training.reward_calls import RewardFunction, RewardSignature, reward_values
from kleash.training.reward_models import Dialogue, load_reward_model

NO_COLUMNS: Mapping[str, Sequence[Any]] = MappingProxyType({})
WEIGHTED = re.compile(r"\s*(?P<weight>[^*\s]+)\s*\*\s*(?P<what>.+)")

DialogueReward = Callable[[Sequence[Dialogue]], Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Reward:
    """A reward function or model with its weight."""

    name: str
    """Name of the function or of the folder."""
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
                    response=self._text(each),
                    messages=each.messages,
                    name=each.name,
                    columns=each.columns,
                    token_ids=each.response_ids,
                )
                for each in sequences
            ]
        )

    def of_texts(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        columns: Mapping[str, Sequence[Any]] = NO_COLUMNS,
    ) -> RewardScores:
        """The rewards of responses as texts; raises as ``of`` does.

        Args:
            prompts: a prompt for each response.
            responses: the texts of the responses.
            columns: name -> a value for each response.
        """
        pairs = enumerate(zip(prompts, responses, strict=True))
        rows = _rows(columns, len(responses))
        return self.of_dialogues(
            [
                Dialogue(prompt=prompt, response=response, name=f"response {at}", columns=rows[at])
                for at, (prompt, response) in pairs
            ]
        )

    def require_columns(self, columns: Sequence[str], source: str) -> None:
        """Check that prompts with these columns have all columns that rewards need.

        Raises:
            OptionError: naming the columns that are missing and those that exist.
        """
        for reward in self.rewards:
            if isinstance(reward.function, RewardFunction):
                reward.function.signature.require_columns(reward.spec, columns, source)

    def of_dialogues(self, dialogues: Sequence[Dialogue]) -> RewardScores:
        """The rewards of dialogues; raises as ``of`` does."""
        parts = {
            reward.name: reward_values(reward.spec, reward.function, dialogues) for reward in self.rewards
        }
        require_scored(parts, [each.name for each in dialogues])
        total = np.zeros(len(dialogues))
        for reward in self.rewards:
            total += reward.weight * np.nan_to_num(parts[reward.name], nan=0.0)
        return RewardScores(total=total, parts=parts)

    def _text(self, sequence: TokenSequence) -> str:
        if self.tokenizer is None:
            return sequence.response_text
        return self.tokenizer.decode(list(sequence.response_ids), skip_special_tokens=True)


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
    rewards: list[Reward] = []
    for name, weight, what in _named(specs):
        function = (
            _function(what)
            if _is_function(what)
            else load_reward_model(what, device=device, dtype=dtype, batch_tokens=batch_tokens)
        )
        rewards.append(Reward(name=name, weight=weight, spec=what, function=function))
    return Rewards(rewards=tuple(rewards), tokenizer=tokenizer)


def check_rewards(
    specs: Sequence[str], source: str, limit: int | None = None, reading: DatasetOptions | None = None
) -> None:
    """Check that all reward functions exist and that the prompts have the columns that they need.

    Reads the file of the prompts and loads no model.

    Raises:
        OptionError, UnknownNameError, MissingExtraError, CannotRunError, SourceError: as ``load_rewards`` and
            ``Rewards.require_columns``.
    """
    functions = [
        Reward(name=name, weight=weight, spec=what, function=_function(what))
        for name, weight, what in _named(specs)
        if _is_function(what)
    ]
    if functions:
        Rewards(rewards=tuple(functions)).require_columns(list(count_columns(source, limit, reading)), source)


def require_scored(parts: Mapping[str, Float64[np.ndarray, " responses"]], names: Sequence[str]) -> None:
    """Check that each response has a reward that is not None.

    Raises:
        CannotRunError: naming the first response without one.
    """
    if not parts:
        return
    unscored = np.flatnonzero(np.isnan(np.stack(list(parts.values()))).all(0))
    if len(unscored):
        subject = "the reward" if len(parts) == 1 else "each of the rewards"
        raise CannotRunError(
            f"{subject} {', '.join(parts)} returned None for {names[unscored[0]]} and {len(unscored)} of {len(names)} "
            "responses in all; at least one reward must return a number for each"
        )


def _rows(columns: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """The columns as a row for each response."""
    for name, values in columns.items():
        if len(values) != count:
            raise ShapeError(f"the column {name!r} has {len(values)} values for {count} responses")
    return [{name: values[at] for name, values in columns.items()} for at in range(count)]


def _named(specs: Sequence[str]) -> list[tuple[str, float, str]]:
    """Name, weight and path of each reward."""
    weighted = [weight_of(spec) for spec in specs]
    names = _names([what for _, what in weighted])
    return [(name, weight, what) for name, (weight, what) in zip(names, weighted, strict=True)]


def _is_function(what: str) -> bool:
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


def _names(specs: Sequence[str]) -> list[str]:
    """Short, unique names of the rewards for metrics."""
    short = [what.rpartition(":")[2] if ":" in what else Path(what).name for what in specs]
    seen: Counter[str] = Counter()
    names: list[str] = []
    for name in short:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def _function(path: str) -> RewardFunction:
    function = resolve_function(path, "a reward")
    return RewardFunction(function=function, signature=RewardSignature.of(function))
