"""Rewards: functions, sums, and what is said about each way to get them wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scoring_cases import sequence_of
from tiny_models import tiny_tokenizer

from kleash.errors import (
    CannotRunError,
    KleashError,
    NonFiniteError,
    OptionError,
    ShapeError,
    UnknownNameError,
)
from kleash.models import TokenSequence
from kleash.training import load_rewards
from kleash.training.reward_models import Dialogue
from kleash.training.rewards import RewardScores

EXAMPLES = "kleash.training.example_rewards"
MINE = """
import numpy, torch
calls = []
def length(prompts, responses):
    calls.append((prompts, responses))
    assert isinstance(prompts, list) and isinstance(responses, list)
    return [float(len(response)) for response in responses]
def as_tensor(prompts, responses):
    return torch.arange(len(responses), dtype=torch.bfloat16, requires_grad=True)
def as_array(prompts, responses):
    return numpy.arange(len(responses), dtype=numpy.float32)
def as_bools(prompts, responses):
    return [True for _ in responses]
def generated(prompts, responses):
    return (0.5 for _ in responses)
def one_short(prompts, responses):
    return [1.0] * (len(responses) - 1)
def exits(prompts, responses):
    raise SystemExit(0)
def nothing(prompts, responses):
    pass
def raises(prompts, responses):
    raise ValueError("no such judge\\nsecond line")
def nan(prompts, responses):
    return [1.0, float("nan"), float("inf")][: len(responses)]
def huge(prompts, responses): return [1.0, 1e25, -1e300][: len(responses)]
def words(prompts, responses):
    return ["high" for _ in responses]
class Judge:
    @staticmethod
    def says(prompts, responses):
        return [-1.0 for _ in responses]
def one_number(prompts, responses):
    return torch.tensor(1.0)
def as_dict(prompts, responses):
    return {0.5: 1.0, 0.25: 2.0, 0.75: 3.0}
def as_values(prompts, responses):
    return as_dict(prompts, responses).values()
def as_text(prompts, responses):
    return "123"
def as_fractions(prompts, responses):
    from decimal import Decimal
    from fractions import Fraction
    return (Fraction(1, 2), Decimal("0.25"), numpy.float16(0.75))
def of_tensors(prompts, responses):
    return [torch.tensor(0.5, dtype=torch.float16), numpy.float64(0.25), numpy.int8(1)]
def nested(prompts, responses):
    return [[1.0] for _ in responses]
def interrupts(prompts, responses):
    raise KeyboardInterrupt
def sometimes(prompts, responses):
    return [None, 2.0, None]
def otherwise(prompts, responses):
    return [1.0, None, None]
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of one's own in the current folder."""
    (tmp_path / "my_rewards.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_rewards", raising=False)


def scores_of(*specs: str, responses: tuple[str, ...] = ("abc", "", "é!")) -> RewardScores:
    texts = {f"response {at}": text for at, text in enumerate(responses)}
    dialogues = [Dialogue(prompt="p", response=text, name=name) for name, text in texts.items()]
    return load_rewards(specs).of_dialogues(dialogues)


def test_reward_is_called_once_with_all_prompts_and_responses() -> None:
    found = scores_of("my_rewards:length", responses=("abc", ""))
    assert found.total.tolist() == [3.0, 0.0] and found.total.dtype == np.float64
    import my_rewards

    assert my_rewards.calls == [(["p", "p"], ["abc", ""])]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("as_tensor", [0, 1, 2]),
        ("generated", [0.5, 0.5, 0.5]),
        ("Judge.says", [-1, -1, -1]),
        ("as_values", [1, 2, 3]),
        ("as_fractions", [0.5, 0.25, 0.75]),
        ("of_tensors", [0.5, 0.25, 1]),
    ],
)
def test_rewards_may_return_any_sequence_of_numbers(name: str, values: list[float]) -> None:
    assert scores_of(f"my_rewards:{name}").total.tolist() == values


def test_rewards_are_added_with_weights() -> None:
    specs = ["0.5*my_rewards:length", " -2 * my_rewards:as_bools", "my_rewards:as_array"]
    found = scores_of(*specs)
    assert found.total.tolist() == [1.5 - 2 + 0, 0 - 2 + 1, 1 - 2 + 2]
    assert {name: part.tolist() for name, part in found.parts.items()} == {
        "length": [3, 0, 2],
        "as_bools": [1, 1, 1],
        "as_array": [0, 1, 2],
    }


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("none", OptionError, "say what is rewarded"),
        ("my_rewards:lenght", UnknownNameError, "my_rewards has no 'lenght'; did you mean length"),
        ("no_such_file:f", UnknownNameError, "there is no module no_such_file, neither"),
        ("my_rewards:calls", OptionError, "my_rewards:calls is of type list, which cannot be called"),
        ("builtins:max", OptionError, "the reward <built-in function max> does not say which"),
        ("", OptionError, "a reward is package.module:function or a model's folder, and '' is neither"),
        ("my rewards:length", OptionError, "a reward is written package.module:function"),
        ("my_rewards.length", OptionError,
            "a reward is package.module:function or a model's folder, and 'my_rew"),
        ("x*my_rewards:length", OptionError, "the weight of the reward 'x*my_rewards:length' is 'x'"),
        ("nan*my_rewards:length", OptionError, "it must be a number, as in 0.5*"),
    ],
)  # fmt: skip
def test_unloadable_reward_is_refused(spec: str, error: type[KleashError], said: str) -> None:
    with pytest.raises(error) as caught:
        load_rewards([spec] if spec != "none" else [])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("one_short", ShapeError,
            "my_rewards:one_short returned numbers of shape (2,) for 3 responses; it must return one each"),
        ("nothing", CannotRunError, "my_rewards:nothing returned a NoneType; it must return a sequence"),
        ("raises", CannotRunError, "raises raises ValueError: no such judge in line 23 of my_rewards (given 3 "),
        ("exits", CannotRunError, "the reward my_rewards:exits raises SystemExit: 0 in line 19 of my_rewards"),
        ("nan", NonFiniteError, "is nan for response 1 and 2 of 3 responses in all; it must be a finite number"),
        ("huge", NonFiniteError, "huge is 1e+25 for response 1 and 2 of 3 responses"),
        ("-1e25*my_rewards:length", NonFiniteError, "length is 3.0 times -1e+25 for response 0 and 2 of 3"),
        ("interrupts", KeyboardInterrupt, ""),
        ("words", CannotRunError, "my_rewards:words raises ValueError: could not convert string to float"),
        ("as_dict", CannotRunError,
            "my_rewards:as_dict returned a dict; it must return a sequence of numbers"),
        ("as_text", CannotRunError, "my_rewards:as_text returned a str; it must return a sequence"),
        ("nested", ShapeError, "my_rewards:nested returned numbers of shape (3, 1) for 3 responses"),
        ("one_number", CannotRunError,
            "my_rewards:one_number returned a Tensor; it must return a sequence of numbers"),
        ("sometimes", CannotRunError,
            "the reward sometimes returned None for response 0 and 2 of 3 responses"),
    ],
)  # fmt: skip
def test_invalid_reward_results_name_the_reward(name: str, error: type[BaseException], said: str) -> None:
    with pytest.raises(error) as caught:
        scores_of(name if "*" in name else f"my_rewards:{name}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_none_means_reward_does_not_apply() -> None:
    specs = ["my_rewards:sometimes", "0.5*my_rewards:otherwise", "my_rewards:as_array"]
    found = scores_of(*specs)
    assert found.total.tolist() == [0.5 + 0, 2 + 1, 0 + 2]
    assert np.isnan(found.parts["sometimes"]).tolist() == [True, False, True]
    with pytest.raises(CannotRunError, match="each of the rewards sometimes, otherwise returned None for"):
        scores_of(*specs[:2])


def sequence(text: str, prompt: str = "The sea", **more: Any) -> TokenSequence:
    ids = [*tiny_tokenizer()(text, add_special_tokens=False)["input_ids"], tiny_tokenizer().eos_token_id]
    return sequence_of((0,), ids, prompt_text=prompt, response_text=text + "</s>", **more)


def test_special_tokens_are_not_rewarded() -> None:
    answers = [sequence(" was calm"), sequence("")]
    for tokenizer, lengths in ((tiny_tokenizer(), [9, 0]), (None, [13, 4])):
        assert load_rewards(["my_rewards:length"], tokenizer=tokenizer).of(answers).total.tolist() == lengths


def test_the_example_reward_counts_words_and_not_letters() -> None:
    texts = "She was happy; her heart was HERS", "sheer herbal unkindness", "", "she happy she"
    assert scores_of(f"{EXAMPLES}:heroine", responses=texts).total.tolist() == [3, 0, 0, 2]
