"""Which columns of the prompts a reward gets: by its signature, as in TRL, in each trainer."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kleash.cli import main
from kleash.errors import OptionError
from kleash.training.reward_models import Dialogue
from kleash.training.rewards import RewardFunction, reward_values

ROWS = [
    {"prompt": "2 + 2 =", "answer": "4", "tests": [{"in": 1, "out": [2, None]}], "easy": True},
    {"prompt": "3 + 3 =", "answer": None, "ground truth": 6, "level": 1.5},
    {"prompt": "The sea was", "answer": {"any": ["calm", 2]}},
]
DIALOGUES = [
    Dialogue(prompt=row["prompt"], response=f" r{at}", name=f"r{at}", columns=row, token_ids=(at, 9))
    for at, row in enumerate(ROWS)
]
PROMPTS, RESPONSES = [row["prompt"] for row in ROWS], [" r0", " r1", " r2"]
COLUMNS = {
    "answer": ["4", None, {"any": ["calm", 2]}],
    "tests": [[{"in": 1, "out": [2, None]}], None, None],
    "easy": [True, None, None],
    "ground truth": [None, 6, None],
    "level": [None, 1.5, None],
}
IDS = [[0, 9], [1, 9], [2, 9]]
seen: dict[str, Any] = {}


def note(**named: Any) -> list[float]:
    seen.clear()
    seen.update(named)
    return [0.0] * len(DIALOGUES)


def two(prompts, responses):
    return note(a=prompts, b=responses)


def named(prompts, responses, answer):
    return note(a=prompts, b=responses, answer=answer)


def keyword(prompts, responses, *, answer, level=None, missing="default"):
    return note(a=prompts, b=responses, answer=answer, level=level, missing=missing)


def everything(questions, replies, **columns):
    return note(a=questions, b=replies, **columns)


def trl(prompts, completions, completion_ids, answer, **more):
    return note(a=prompts, b=completions, ids=completion_ids, answer=answer, **more)


def trl_short(completions, answer, **more):
    return note(b=completions, answer=answer, **more)


def trl_all(**everything):
    return note(**everything)


def swapped(responses, prompts):
    return note(a=prompts, b=responses)


def the_prompt_itself(prompts, responses, prompt):
    return note(a=prompts, b=responses, prompt=prompt)


LIMIT = asyncio.Semaphore(1)


async def later(*, prompts, completions, answer):
    async def request(_):
        async with LIMIT:
            await asyncio.sleep(0.0)

    await asyncio.gather(*map(request, answer))
    return note(a=prompts, b=completions, answer=answer)


class Judge:
    def __call__(self, prompts, responses, answer):
        return note(a=prompts, b=responses, answer=answer)

    def method(self, prompts, responses, *, level):
        return note(a=prompts, b=responses, level=level)


ANSWER, LEVEL = {"answer": COLUMNS["answer"]}, {"level": COLUMNS["level"]}
BOTH = {"a": PROMPTS, "b": RESPONSES}
TRL_EXTRA = {"completion_ids": IDS}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (two, BOTH),
        (swapped, BOTH),
        (named, BOTH | ANSWER),
        (keyword, BOTH | ANSWER | LEVEL | {"missing": "default"}),
        (everything, BOTH | COLUMNS),
        (the_prompt_itself, BOTH | {"prompt": PROMPTS}),
        (trl, BOTH | {"ids": IDS} | COLUMNS),
        (trl_short, {"b": RESPONSES, "prompts": PROMPTS} | TRL_EXTRA | COLUMNS),
        (trl_all, {"prompts": PROMPTS, "completions": RESPONSES} | TRL_EXTRA | COLUMNS),
        (later, BOTH | ANSWER),
        (Judge(), BOTH | ANSWER),
        (Judge().method, BOTH | LEVEL),
    ],
)
def test_reward_receives_columns_named_by_its_arguments(
    function: Callable[..., Any], expected: dict[str, Any]
) -> None:
    async def values():  # called where a loop runs, as in a notebook
        return reward_values("my:reward", RewardFunction(function), DIALOGUES).tolist()

    for _ in range(2):  # an async one has a loop in which its semaphore stays
        assert asyncio.run(values()) == [0.0, 0.0, 0.0]
        assert seen == expected


def test_columns_modified_by_a_reward_are_restored_for_the_next_call() -> None:
    def spoils(prompts, responses, tests):
        note(tests=json.dumps(tests))
        prompts.clear()
        tests[0][0].clear()
        return [0.0] * 3

    reward = RewardFunction(spoils)
    for _ in range(2):
        reward_values("my:spoils", reward, DIALOGUES)
        assert seen["tests"] == json.dumps(COLUMNS["tests"])


def test_missing_column_error_says_where_there_are_none() -> None:
    with pytest.raises(OptionError, match="the columns are none: plain text has none, JSONL has"):
        RewardFunction(named).require_columns("my:reward", [], "p.txt")


MINE = """
import json
def exact(prompts, responses, answer, **columns):
    with open("seen.jsonl", "a") as file:
        for row in zip(prompts, responses, answer, columns["tests"]):
            file.write(json.dumps(row) + "\\n")
    assert set(columns) == {"tests", "only"}, columns
    return [float(a is not None) for a in answer]
def for_trl(prompts, completions, completion_ids, answer, **columns):
    assert all(len(ids) > 0 for ids in completion_ids) and set(columns) == {"tests", "only"}, columns
    return [None if a is None else 1.0 for a in answer]
def needs_more(prompts, responses, solution):
    return [0.0 for _ in prompts]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rewards and prompts, some of which lack columns."""
    (tmp_path / "graded.py").write_text(MINE)
    rows = [
        {"prompt": "She was", "answer": "good", "tests": [1, {"a": None}]},
        {"prompt": "Emma was", "answer": None, "tests": {"b": [2.5]}},
        {"prompt": "The sea was", "answer": 7, "only": "here"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "graded", raising=False)
    return tmp_path


SHORT = (
    *("--prompts", "p.jsonl", "--max-new-tokens", "3", "--lora-rank", "2", "--steps", "1", "--quiet"),
    *("--reward", "graded:exact", "0.5*graded:for_trl", "--prompts-per-step", "3"),
)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
def test_every_trainer_passes_columns_of_each_response(here: Path, algorithm: str) -> None:
    if algorithm != "ppo":
        pytest.importorskip("trl")
    more = ["--minibatches", "1"] if algorithm == "ppo" else []
    assert main(["train", algorithm, *SHORT, *more, "--samples-per-prompt", "2", "--out", "run"]) == 0
    rows = [json.loads(line) for line in (here / "seen.jsonl").read_text().splitlines()]
    by_prompt = {
        "She was": ["good", [1, {"a": None}]],
        "Emma was": [None, {"b": [2.5]}],
        "The sea was": [7, None],
    }
    assert sorted(row[0] for row in rows) == sorted([*by_prompt] * 2), "two samples of each"
    assert all(row[2:] == by_prompt[row[0]] for row in rows)
    metrics = json.loads((here / "run" / "training.json").read_text())["metrics"]
    assert metrics["reward/score"] == pytest.approx(2 / 3 * 1.5), "None is no reward, and not a 0"
    assert metrics["reward/part/for_trl"] == 1 and metrics["reward/part/exact"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("grpo", marks=pytest.mark.peers("trl"))])
def test_missing_column_is_refused_before_models_are_loaded(
    here: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"ppo": "ppo.set_up", "grpo": "with_trl.online.load_networks"}[algorithm]
    monkeypatch.setattr(f"kleash.training.{place}", lambda *_: pytest.fail("a model was loaded"))
    words = ["train", algorithm, *SHORT, "--reward", "graded:needs_more", "--out", "run"]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "kleash: the reward graded:needs_more needs 'solution', which p.jsonl does not have; the columns are "
        "'prompt', 'answer', 'tests', 'only'\n"
    )


@pytest.mark.peers("trl")
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("float('nan') if 'Emma' in p else 1.0", "graded:bad is nan for prompt 1 (p.jsonl, line 2) and 8 of 24"),
        ("1 / ('Emma' not in p)", "by zero in line 2 of graded (given 24 responses, the first to prompt "),
        ("None if 'sea' in p else 1.0", "bad returned None for prompt 2 (p.jsonl, line 3) and 8 of 24 responses"),
        ("None if 'road' in p else 1.0", "bad returned None for prompt 3 (held.txt, line 1) and 8 of 8 responses"),
    ],
)  # fmt: skip
def test_an_error_in_a_trainer_of_trl_names_the_row_and_the_line(
    here: Path, returned: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"def bad(prompts, responses):\n    return [{returned} for p in prompts]\n"
    (here / "graded.py").write_text(code)
    (here / "held.txt").write_text("The road was\n")
    held_out = ["--eval-prompts", "held.txt", "--checkpoint-every", "1"]
    words = ["train", "grpo", *SHORT[:9], *SHORT[-2:], "--reward", "graded:bad", *held_out, "--out", "run"]
    assert main(words) == 2
    assert said in capsys.readouterr().err
