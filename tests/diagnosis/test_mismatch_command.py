"""kleash mismatch: its numbers, the field names of other frameworks, its gate, and bad files."""

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kleash.cli import main
from kleash.diagnosis import measure_mismatch, read_rollouts
from kleash.diagnosis.rollout_records import FIELD_NAMES, RESPONSE_MASKS
from kleash.errors import OptionError, SourceError
from kleash.jobs.rollout_jobs import MismatchJob
from kleash.leash import mismatch


def records(count: int = 40, shift: float = 0.05, seed: int = 0) -> list[dict[str, Any]]:
    """Rollouts of different lengths, two for each prompt; the last token of each does not count."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(draw.integers(3, 12))
        engine = -draw.exponential(1.0, length)
        trainer = np.minimum(engine + shift * draw.standard_normal(length), 0)
        rows.append(
            {
                "prompt_token_ids": [number // 2, 7],
                "response_token_ids": draw.integers(0, 99, length).tolist(),
                "trainer_logprobs": trainer.tolist(),
                "engine_logprobs": engine.tolist(),
                "response_mask": [1] * (length - 1) + [0],
            }
        )
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_the_numbers_are_those_of_the_library_function(tmp_path: Path, capsys: Any) -> None:
    rows = records()
    rows[0]["trainer_logprobs"][-1] = float("nan")  # does not count
    rows[1]["engine_logprobs"][-1] = None
    path = written(tmp_path / "rollouts.jsonl", rows)
    assert main(["mismatch", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    longest = max(len(row["response_token_ids"]) for row in rows)
    trainer, engine = torch.zeros(2, len(rows), longest, dtype=torch.float64)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for at, row in enumerate(rows):
        n = sum(row["response_mask"])
        trainer[at, :n] = torch.tensor(row["trainer_logprobs"][:n], dtype=torch.float64)
        engine[at, :n] = torch.tensor(row["engine_logprobs"][:n], dtype=torch.float64)
        mask[at, :n] = True
    expected = mismatch(trainer, engine, mask, prompts=torch.arange(len(rows)) // 2)
    for name in ("kl_engine_trainer", "mean_weight", "sequence_chi_squared", "perplexity_ratio"):
        estimate = getattr(expected, name)
        number = found["numbers"][name]
        assert number["value"] == pytest.approx(estimate.value, rel=1e-12)
        assert number["ci95"] == pytest.approx(estimate.ci95, rel=1e-9)
    assert found["values"]["effective_sample_size"] == pytest.approx(expected.effective_sample_size)
    assert found["values"]["over_sequences.perplexity_engine"] == expected.over_sequences.perplexity_engine
    assert (found["tokens"], found["sequences"], found["prompts"]) == (expected.tokens, 40, 20)
    assert found["gate"] is None and found["renamed"] == {}


def test_verl_metrics_are_printed_on_request(tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path / "rollouts.jsonl", records())
    assert main(["mismatch", path, "--names", "verl"]) == 0
    output = capsys.readouterr().out
    record = measure_mismatch(path, names="verl")
    assert f"rollout_corr/k3_kl {record.numbers['kl_engine_trainer'].value!r}" in output
    assert "rollout_corr/chi2_seq" in output and "training/rollout_probs_diff_max" in output
    assert "KL(engine || trainer)" not in output


def test_a_narrow_terminal_truncates_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    path = written(tmp_path / "rollouts.jsonl", records())
    assert main(["mismatch", path]) == 0
    output = capsys.readouterr().out
    assert "…" not in output and "nats" in output
    assert "warning: on KL(engine || trainer)" in output, "20 clusters are few"


NAMES = {
    "verl": ("prompts", "responses", "old_log_probs", "rollout_log_probs", "ref_log_prob", "response_mask"),
    "TRL": (
        *("prompt_ids", "completion_ids", "old_per_token_logps", "sampling_per_token_logps"),
        *("ref_per_token_logps", "completion_mask"),
    ),
    "prime-rl": (
        *("prompt_ids", "completion_ids", "trainer_logprobs", "inference_logprobs"),
        *("ref_logprobs", "loss_mask"),
    ),
}


@pytest.mark.parametrize("system", NAMES)
def test_the_names_of_other_frameworks_are_understood(system: str, tmp_path: Path) -> None:
    rows = records(4)
    for row in rows:
        row["reference_logprobs"] = [value - 0.1 for value in row["trainer_logprobs"]]
    ours = (
        *("prompt_token_ids", "response_token_ids", "trainer_logprobs", "engine_logprobs"),
        *("reference_logprobs", "response_mask"),
    )
    renamed = [{theirs: row[name] for name, theirs in zip(ours, NAMES[system], strict=True)} for row in rows]
    first, second = (
        read_rollouts(written(tmp_path / name, content))
        for name, content in (("ours.jsonl", rows), ("theirs.jsonl", renamed))
    )
    for mine, theirs in zip(first, second, strict=True):
        assert (mine.prompt_ids, mine.response_ids) == (theirs.prompt_ids, theirs.response_ids)
        for column in ("trainer", "engine", "reference", "is_counted"):
            np.testing.assert_array_equal(getattr(mine, column), getattr(theirs, column))


def test_padding_of_verl_and_masks_of_trl_are_applied(tmp_path: Path) -> None:
    row = {
        "prompts": [0, 0, 5, 6],
        "responses": [7, 8, 9, 0],
        "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0],
        "old_log_probs": [-1.0, -2.0, -3.0, 0.0],
        "rollout_log_probs": [-1.0, -2.0, -3.0, 0.0],
        "response_mask": [1, 1, 1, 0],
    }
    (rollout,) = read_rollouts(written(tmp_path / "verl.jsonl", [row]))
    assert (rollout.prompt_ids, rollout.response_ids) == ((5, 6), (7, 8, 9))
    assert rollout.is_counted.tolist() == [True, True, True] and rollout.trainer.tolist() == [-1, -2, -3]
    row = {
        "prompt_ids": [0, 5],
        "prompt_mask": [0, 1],
        "completion_ids": [7, 8, 9],
        "completion_mask": [1, 1, 0],
        "tool_mask": [1, 0, 1],
        "old_per_token_logps": [-1.0, -2.0, -3.0],
        "sampling_per_token_logps": [-1.0, None, -3.0],
    }
    (rollout,) = read_rollouts(written(tmp_path / "trl.jsonl", [row]))
    assert rollout.prompt_ids == (5,) and rollout.response_ids == (7, 8, 9)
    assert rollout.is_counted.tolist() == [True, False, False]


def test_the_gate_decides_by_the_interval(tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path / "many.jsonl", records(200))
    kl = measure_mismatch(path).numbers["kl_engine_trainer"]
    assert main(["mismatch", path, "--at-most", repr(1.01 * kl.ci95[1])]) == 0
    assert "gate: passed: KL(engine || trainer) per token" in capsys.readouterr().out
    assert main(["mismatch", path, "--at-most", repr(0.99 * kl.ci95[0])]) == 1
    assert main(["mismatch", path, "--at-most", repr(kl.value * 1.01)]) == 3
    few = written(tmp_path / "few.jsonl", records(40))  # 20 prompts
    assert main(["mismatch", few, "--at-most", "10"]) == 3
    assert "20 clusters, and it takes 30 to pass" in capsys.readouterr().out


def changed(**changes: Any) -> dict[str, Any]:
    row = {
        "prompt_token_ids": [1],
        "response_token_ids": [2, 3],
        "trainer_logprobs": [-1.0, -2.0],
        "engine_logprobs": [-1.0, -2.0],
    }
    return {name: value for name, value in (row | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (changed(engine_logprobs=...), "expected a field 'engine_logprobs' or 'rollout_log_probs'"),
        (
            changed(rollout_log_probs=[-1, -2]),
            "'engine_logprobs' and 'rollout_log_probs' are the same column",
        ),
        (changed(trainer_logprobs=[-1.0]), "'trainer_logprobs' has 1 values for 2 response tokens"),
        (changed(trainer_logprobs=[-1.0, "x"]), "to hold numbers, and it holds '\"x\"'"),
        (changed(trainer_logprobs="x"), "to be a list of numbers"),
        (changed(trainer_logprobs=[-1.0, math.nan]), "'trainer_logprobs' is nan at token 1; mask the token"),
        (changed(trainer_logprobs=[None, -1.0]), "is nan at token 0"),
        (changed(trainer_logprobs=[math.inf, -1.0]), "is inf at token 0"),
        (changed(engine_logprobs=[-math.inf, -1.0]), "the engine drew this token"),
        (changed(engine_logprobs=[3.5, -1.0]), "log-probabilities are at most 0"),
        (changed(engine_logprobs=[10**400, -1.0]), "more than 308 digits"),
        (changed(response_token_ids=[2, -3]), "to hold token ids, and it holds '-3'"),
        (changed(response_token_ids=[2, 2.5]), "to hold token ids"),
        (changed(response_token_ids=[]), "'response_token_ids' is empty"),
        (changed(prompt_token_ids=[]), "'prompt_token_ids' is empty"),
        (changed(response_mask=[1]), "'response_mask' has 1 values for 2 tokens"),
        (changed(response_mask=[1, 2]), "to hold 0 and 1, and it holds '2'"),
        (changed(response_mask=[0, 0]), "no token that counts"),
        (changed(reference_logprobs=[-1.0, math.nan]), "'reference_logprobs' is nan"),
        (changed(engine_logprobs=[-1.0, -1e300]), "'engine_logprobs' is -1e+300 at token 1; the engine drew"),
    ],
)
def test_a_bad_record_is_one_sentence(row: dict[str, Any], message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(SourceError) as error:
        measure_mismatch(str(path))
    assert message in str(error.value)
    assert main(["mismatch", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "column"),
    [
        ("trl/trainer/grpo_trainer.py", 1),
        ("verl/trainer/ppo/ray_trainer.py", 0),
    ],
)
def test_names_of_fields_are_those_of_the_installed_frameworks(module: str, column: int, root: Path) -> None:
    """The table of docs/mismatch.md, which the reader follows, against what the frameworks call their tensors."""
    rows = [
        [re.findall(r"`(\w+)`", cell) for cell in line.strip("|\n ").split("|")]
        for line in (root / "docs/mismatch.md").read_text().splitlines()
        if re.match(r"\| `\w+`( \(optional\))? \| `", line)
    ]
    assert len(rows) == 6
    folder = Path(find_spec(module.split("/")[0]).submodule_search_locations[0])
    source = "".join(path.read_text() for path in (folder.parent / module).parent.glob("*.py"))
    for row in rows:
        for name in row[1 + column]:
            assert f'"{name}"' in source, name
            assert name in {
                *FIELD_NAMES.get(row[0][0], ()),
                *(RESPONSE_MASKS if row[0] == ["response_mask"] else ()),
            }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "empty.jsonl is empty; give a file of JSONL, a JSON array or Parquet"),
        ("table.csv", "prompt,response\n1,2\n", "table.csv is read as CSV, and rollouts come as JSONL"),
        ("blank.jsonl", "\n \n", "blank.jsonl holds no rollout"),
        ("none.json", "[]", "none.json holds no rollout"),
        ("list.jsonl", "[1]", "expected a JSON object"),
        (
            "plain.txt",
            "hello",
            "plain.txt is read as plain text, and rollouts come as JSONL, a JSON array or Parquet; convert it",
        ),
        ("cut.jsonl", '{"prompt_token_ids": [1', "expected a JSON object"),
        ("escape.jsonl", '{"\\u001b[31m": 1}', r"the record has '\x1b[31m'"),
    ],
)
def test_a_bad_file_is_one_sentence(
    name: str, content: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["mismatch", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert message in error and "\x1b" not in error and error.count("\n") == 1


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--names must be one of verl; it is 'trl'"):
        MismatchJob(rollouts="x", names="trl")
    with pytest.raises(OptionError, match="it is 'trl'"):
        measure_mismatch(written(tmp_path / "x.jsonl", records(2)), names="trl")
