"""What a response is worth: functions by dotted path, reward models in folders, and weighted sums of them."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from kleash.dotted import function_at
from kleash.errors import CannotRunError, NonFiniteError, OptionError, ShapeError
from kleash.models import Sequence as Scored
from kleash.training.reward_models import Dialogue, load_reward_model

WEIGHTED = re.compile(r"\s*(?P<weight>[^*\s]+)\s*\*\s*(?P<what>.+)")

OfDialogues = Callable[[Sequence[Dialogue]], Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Reward:
    """One of the things that are rewarded."""

    name: str
    """Of the function, or of the folder."""
    weight: float
    """Times which it is added."""
    spec: str
    """As it was asked for, without its weight."""
    of: OfDialogues
    """One number for each response."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RewardScores:
    """What responses are worth."""

    total: Float64[np.ndarray, " responses"]
    """The weighted sum."""
    parts: Mapping[str, Float64[np.ndarray, " responses"]]
    """Each reward by its name, without its weight."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rewards:
    """All that is rewarded."""

    rewards: tuple[Reward, ...]
    tokenizer: Any = None
    """The policy's, which leaves out special tokens where it turns tokens into text; None: a text is as it stands."""

    def of(self, sequences: Sequence[Scored]) -> RewardScores:
        """What these responses are worth.

        Raises:
            CannotRunError: if a reward raises, or what it returns is no number.
            ShapeError: if there is not one number for each response.
            NonFiniteError: if a number is NaN or infinite.
        """
        return self.of_dialogues(
            [
                Dialogue(
                    prompt=each.prompt_text, response=self._text(each), messages=each.messages, name=each.name
                )
                for each in sequences
            ]
        )

    def of_texts(self, prompts: Sequence[str], responses: Sequence[str]) -> RewardScores:
        """What these responses are worth, given as texts; raises as ``of`` does."""
        pairs = enumerate(zip(prompts, responses, strict=True))
        return self.of_dialogues(
            [
                Dialogue(prompt=prompt, response=response, name=f"response {at}")
                for at, (prompt, response) in pairs
            ]
        )

    def of_dialogues(self, dialogues: Sequence[Dialogue]) -> RewardScores:
        """What these responses are worth; raises as ``of`` does."""
        parts = {reward.name: _numbers(reward, dialogues) for reward in self.rewards}
        total = np.zeros(len(dialogues))
        for reward in self.rewards:
            total += reward.weight * parts[reward.name]
        return RewardScores(total=total, parts=parts)

    def _text(self, sequence: Scored) -> str:
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
    """What a job rewards.

    Args:
        specs: ``package.module:function``, called with the prompts and the responses, two lists of texts, and
            returning a number for each; or the folder of a sequence-classification model; each perhaps with a
            weight before it, "0.5*…". They are added.
        tokenizer: the policy's.
        device: of reward models; "auto" is the first GPU, or else the CPU.
        dtype: of reward models; "auto" is float32 on a CPU and the checkpoint's own on an accelerator.
        batch_tokens: tokens that go through a reward model at once, padding counted.

    Raises:
        OptionError: if there is none, or one is not written so.
        UnknownNameError, MissingExtraError, CannotRunError: if a function cannot be imported.
        ModelError: if a model cannot be loaded, or is no reward model.
    """
    if not specs:
        raise OptionError("say what is rewarded: package.module:function, or the folder of a reward model")
    weighted = [weight_of(spec) for spec in specs]
    names = _names([what for _, what in weighted])
    rewards: list[Reward] = []
    for name, (weight, what) in zip(names, weighted, strict=True):
        if ":" in what and not Path(what).is_dir():
            of = _function(what)
        elif not what or (not Path(what).is_dir() and "/" not in what):
            raise OptionError(
                f"a reward is package.module:function or a model's folder, and {what!r} is neither"
            )
        else:
            of = load_reward_model(what, device=device, dtype=dtype, batch_tokens=batch_tokens)
        rewards.append(Reward(name=name, weight=weight, spec=what, of=of))
    return Rewards(rewards=tuple(rewards), tokenizer=tokenizer)


def weight_of(spec: str) -> tuple[float, str]:
    """The weight before a ``*``, 1 without one, and what is rewarded.

    Raises:
        OptionError: if the weight is not a number.
    """
    found = WEIGHTED.fullmatch(spec)
    if found is None:
        return 1.0, spec.strip()
    try:
        weight = float(found["weight"])
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise OptionError(
            f"the weight of the reward {spec!r} is {found['weight']!r}; it must be a number, as in 0.5*…"
        )
    return weight, found["what"].strip()


def _names(specs: Sequence[str]) -> list[str]:
    """What the rewards are called in metrics: short, and each once."""
    short = [what.rpartition(":")[2] if ":" in what else Path(what).name for what in specs]
    seen: Counter[str] = Counter()
    names: list[str] = []
    for name in short:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def _function(path: str) -> OfDialogues:
    function = function_at(path, "a reward")

    def of(dialogues: Sequence[Dialogue]) -> Any:
        return function([each.prompt for each in dialogues], [each.response for each in dialogues])

    return of


def _numbers(reward: Reward, dialogues: Sequence[Dialogue]) -> Float64[np.ndarray, " responses"]:
    """What a reward says, seen to be one finite number for each response."""
    try:
        found = reward.of(dialogues)
        said = list(found.tolist() if hasattr(found, "tolist") else found)  # a tensor may carry a gradient
    except (Exception, SystemExit) as error:  # a reward is other people's code, and may raise anything
        if isinstance(error, (CannotRunError, NonFiniteError)):
            raise
        line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise CannotRunError(f"the reward {reward.spec} raises {line}") from error
    if len(said) != len(dialogues):
        raise ShapeError(
            f"the reward {reward.spec} returned {len(said)} numbers for {len(dialogues)} responses; "
            "it must return one each"
        )
    values = np.array(
        [_number(reward, each, value) for each, value in zip(dialogues, said, strict=True)], np.float64
    )
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise NonFiniteError(
            f"the reward {reward.spec} is {values[wrong[0]]} for {dialogues[wrong[0]].name} and {len(wrong)} of "
            f"{len(values)} responses in all; it must be a finite number"
        )
    return values


def _number(reward: Reward, dialogue: Dialogue, value: Any) -> float:
    if not isinstance(value, (str, bytes)):
        try:
            return float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise CannotRunError(
        f"the reward {reward.spec} returned a {type(value).__name__} for {dialogue.name}; it must return numbers"
    )
