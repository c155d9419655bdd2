"""kleash mismatch: its numbers, the field names of other frameworks, its gate, and bad files."""

import json
import math
import os
import re
import resource
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kleash.cli import main
from kleash.diagnosis import measure_mismatch, read_rollouts, write_rollouts
from kleash.diagnosis.rollout_records import FIELD_NAMES, RESPONSE_MASKS
from kleash.errors import OptionError, SourceError
from kleash.leash import mismatch


def records(count: int = 40, shift: float = 0.05, seed: int = 0) -> list[dict[str, Any]]:
    """Rollouts of different lengths, two for each prompt; the last token of each does not count."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(draw.integers(3, 12))
        engine = -draw.exponential(1.0, length)
        trainer = np.minimum(engine + shift * draw.standard_normal(length), 0)
        row = {"prompt_token_ids": [number // 2, 7], "response_mask": [1] * (length - 1) + [0]}
        row |= {"trainer_logprobs": trainer.tolist(), "engine_logprobs": engine.tolist()}
        rows.append(row | {"response_token_ids": draw.integers(0, 99, length).tolist()})
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_the_numbers_are_those_of_the_library_function(tmp_path, capsys):
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


def test_verl_metrics_are_printed_on_request(tmp_path, capsys):
    path = written(tmp_path / "rollouts.jsonl", records())
    assert main(["mismatch", path, "--names", "verl"]) == 0
    output = capsys.readouterr().out
    record = measure_mismatch(path, names="verl")
    assert re.search(rf"rollout_corr/k3_kl +{record.numbers['kl_engine_trainer'].value!r}", output)
    assert "rollout_corr/chi2_seq" in output and "training/rollout_probs_diff_max" in output
    assert "KL(trainer ‖ engine)" not in output, "no table of kleash's names"
    with pytest.raises(OptionError, match="--names must be one of verl; it is 'trl'"):
        measure_mismatch(path, names="trl")


def test_a_narrow_terminal_truncates_no_number(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["mismatch", written(tmp_path / "rollouts.jsonl", records())]) == 0
    output = capsys.readouterr().out
    assert "…" not in output and "nats" in output
    assert "warning: on KL(engine ‖ trainer)" in output, "20 clusters are few"


NAMES = {
    "verl": "prompts responses old_log_probs rollout_log_probs ref_log_prob response_mask",
    "TRL": "prompt_ids completion_ids old_per_token_logps sampling_per_token_logps ref_per_token_logps completion_mask",
    "prime-rl": "prompt_ids completion_ids trainer_logprobs inference_logprobs ref_logprobs loss_mask",
}


@pytest.mark.parametrize("system", NAMES)
def test_the_names_of_other_frameworks_are_understood(system, tmp_path):
    rows = [{**row, "reference_logprobs": [x - 0.1 for x in row["trainer_logprobs"]]} for row in records(4)]
    names = dict(zip((*FIELD_NAMES, "response_mask"), NAMES[system].split(), strict=True))
    renamed = [{theirs: row[ours] for ours, theirs in names.items()} for row in rows]
    first, second = (read_rollouts(written(tmp_path / "r.jsonl", each)) for each in (rows, renamed))
    for mine, theirs in zip(first, second, strict=True):
        assert (mine.prompt_ids, mine.response_ids) == (theirs.prompt_ids, theirs.response_ids)
        for column in ("trainer", "engine", "reference", "is_counted"):
            np.testing.assert_array_equal(getattr(mine, column), getattr(theirs, column))


def test_padding_of_verl_and_masks_of_trl_are_applied(tmp_path):
    row = {"prompts": [0, 0, 5, 6], "responses": [7, 8, 9, 0], "response_mask": [1, 1, 1, 0]}
    row |= {name: [-1.0, -2.0, -3.0, 0.0] for name in ("old_log_probs", "rollout_log_probs")}
    row |= {"attention_mask": [0, 0, 1, 1, 1, 1, 1, 0]}
    (rollout,) = read_rollouts(written(tmp_path / "verl.jsonl", [row]))
    assert (rollout.prompt_ids, rollout.response_ids) == ((5, 6), (7, 8, 9))
    assert rollout.is_counted.tolist() == [True, True, True] and rollout.trainer.tolist() == [-1, -2, -3]
    row = {"prompt_ids": [0, 5], "prompt_mask": [0, 1], "completion_ids": [7, 8, 9]}
    row |= {"completion_mask": [1, 1, 0], "tool_mask": [1, 0, 1]}
    row |= {"old_per_token_logps": [-1.0, -2.0, -3.0], "sampling_per_token_logps": [-1.0, None, -3.0]}
    (rollout,) = read_rollouts(written(tmp_path / "trl.jsonl", [row]))
    assert rollout.prompt_ids == (5,) and rollout.response_ids == (7, 8, 9)
    assert rollout.is_counted.tolist() == [True, False, False]


def test_the_gate_decides_by_the_interval(tmp_path, capsys):
    path = written(tmp_path / "many.jsonl", records(200))
    kl = measure_mismatch(path).numbers["kl_engine_trainer"]
    assert main(["mismatch", path, "--at-most", repr(1.01 * kl.ci95[1])]) == 0
    assert "gate: passed: KL(engine ‖ trainer) per token" in capsys.readouterr().out
    assert main(["mismatch", path, "--at-most", repr(0.99 * kl.ci95[0])]) == 1
    assert main(["mismatch", path, "--at-most", repr(kl.value * 1.01)]) == 3
    few = written(tmp_path / "few.jsonl", records(40))  # 20 prompts
    assert main(["mismatch", few, "--at-most", "10"]) == 3
    assert "20 clusters, and it takes 30 to pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "value", "limit", "code", "sentences"),
    [
        (60, None, "0", 0, ["gate: passed", "both columns are equal bit for bit at all"]),  # 30 prompts
        (40, None, "0", 3, ["20 clusters, and it takes 30 to pass; about 121 more tokens, of"]),
        (80, 0.0, "1", 3, ["no number of tokens is known to decide", "were not filled in"]),
    ],
)
def test_columns_that_are_equal_bit_for_bit_pass_with_a_note_if_they_have_several_values(
    count, value, limit, code, sentences, tmp_path, capsys
):
    rows = records(count)
    for row in rows:
        row["engine_logprobs"] = [x if value is None else value for x in row["engine_logprobs"]]
        row["trainer_logprobs"] = row["engine_logprobs"]
    assert main(["mismatch", written(tmp_path / "equal.jsonl", rows), "--at-most", limit]) == code
    output = " ".join(capsys.readouterr().out.split())
    assert all(sentence in output for sentence in sentences)


def test_the_mean_weight_is_noted_if_it_is_not_1_and_not_for_the_noise_of_few_prompts(tmp_path):
    paths = [written(tmp_path / f"{seed}.jsonl", records(4, 0.1, seed)) for seed in range(20)]
    rows = [{**row, "trainer_logprobs": [x / 2 for x in row["engine_logprobs"]]} for row in records(200)]
    notes = [measure_mismatch(path).notes for path in (*paths, written(tmp_path / "half.jsonl", rows))]
    assert ["mean weight" in "".join(each) for each in notes] == [False] * 20 + [True]


def test_few_decimals_are_a_noise_floor(tmp_path):
    rows = records(80)
    for row in rows:
        row["engine_logprobs"] = row["trainer_logprobs"] = [round(x, 2) for x in row["engine_logprobs"]]
    path = written(tmp_path / "rounded.jsonl", rows)
    gates = [measure_mismatch(path, at_most=limit).gate for limit in (4e-5, 6e-5)]
    assert [gate.verdict for gate in gates if gate] == ["undecided", "passed"]
    assert gates[0] is not None and gates[0].noise_floor == pytest.approx(0.01**2 / 2)


def changed(**changes: Any) -> dict[str, Any]:
    row = {"prompt_token_ids": [1], "response_token_ids": [2, 3]}
    row |= {"trainer_logprobs": [-1.0, -2.0], "engine_logprobs": [-1.0, -2.0]}
    return {name: value for name, value in (row | changes).items() if value is not ...}


def token_export(**changes: Any) -> dict[str, Any]:
    """A record of prime-rl's ``TokenExporter``: columns over the tokens of prompt and response."""
    record = {
        "token_ids": [5, 6, 7, 8, 9],
        "loss_mask": [False, False, True, False, True],
        "inference_logprobs": [0.0, 0.0, -1.0, 0.0, -3.0],
        "trainer_logprobs": [-6.0, None, -1.5, -9.0, -3.5],
        **dict.fromkeys(("rl_weights", "ce_weights", "ref_kl_weights"), [None] * 5),
    }
    return {**record, **changes}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (changed(engine_logprobs=...), "expected a field 'engine_logprobs' or 'rollout_log_probs'"),
        (changed(rollout_log_probs=[-1, -2]), "'engine_logprobs' and 'rollout_log_probs' are the same"),
        (changed(trainer_logprobs=[-1.0]), "'trainer_logprobs' has 1 values for 2 tokens"),
        (changed(trainer_logprobs=[-1.0, "x"]), "to hold numbers, and it holds '\"x\"'"),
        (changed(trainer_logprobs="x"), "to be a list of numbers"),
        (changed(trainer_logprobs=[-1.0, math.nan]), "'trainer_logprobs' is nan at token 1; mask the token"),
        (changed(trainer_logprobs=[math.inf, -1.0]), "is inf at token 0"),
        (changed(engine_logprobs=[-math.inf, -1.0]), "the engine drew this token"),
        (changed(engine_logprobs=[3.5, -1.0]), "log-probabilities are at most 0"),
        (changed(engine_logprobs=[10**400, -1.0]), "to hold numbers"),
        (changed(response_token_ids=[2, -3]), "to hold token ids, and it holds '-3'"),
        (changed(response_token_ids=[]), "'response_token_ids' is empty"),
        (changed(response_mask=[1]), "'response_mask' has 1 values for 2 tokens"),
        (changed(response_mask=[1, 2]), "to hold 0 and 1, and it holds '2'"),
        (changed(response_mask=[0, 0]), "no token that counts"),
        (changed(prompt_mask=[0]), "the masks leave no token of the prompt"),
        (changed(reference_logprobs=[-1.0, math.nan]), "'reference_logprobs' is nan"),
        (token_export(loss_mask=[True] * 5), "counts the first of 5 tokens, which no prompt precedes"),
        (token_export(trainer_logprobs=[-1.0] * 3), "'trainer_logprobs' has 3 values for 5 tokens; give one"),
        (token_export(loss_mask=[False] * 5), "no token that counts"),
        (token_export(inference_logprobs=[None] * 5), "expected a field 'engine_logprobs'"),
    ],
)
def test_a_bad_record_is_one_sentence(row, message, tmp_path, capsys):
    path = written(tmp_path / "bad.jsonl", [row])
    with pytest.raises(SourceError) as error:
        measure_mismatch(path)
    assert message in str(error.value)
    assert main(["mismatch", path]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_token_exports_of_prime_rl_are_split_at_the_first_token_of_the_loss(tmp_path):
    (rollout,) = read_rollouts(written(tmp_path / "rank_0.jsonl", [token_export()]))
    assert (rollout.prompt_ids, rollout.response_ids) == ((5, 6), (7, 8, 9))
    assert rollout.trainer.tolist() == [-1.5, -9, -3.5] and rollout.engine.tolist() == [-1, 0, -3]
    assert rollout.is_counted.tolist() == [True, False, True] and rollout.reference is None
    weights = {"rl_weights": [0.0, 0.0, 0.0, 0.0, 1.0], "loss_mask": [False, True, True, False, True]}
    (rollout,) = read_rollouts(written(tmp_path / "mixed.jsonl", [token_export(**weights)]))
    assert rollout.response_ids == (6, 7, 8, 9)
    counted = rollout.is_counted.tolist()
    assert counted == [False, False, False, True], "tokens of a frozen model are not drawn"


@pytest.mark.parametrize(
    ("module", "column"),
    [
        pytest.param(module, column, marks=pytest.mark.peers(module.split("/")[0]))
        for module, column in (("trl/trainer/grpo_trainer.py", 1), ("verl/trainer/ppo/ray_trainer.py", 0))
    ],
)
def test_names_of_fields_are_those_of_the_installed_frameworks(module, column, root):
    """The table of docs/reference/doctor.md, against what the frameworks call their tensors."""
    rows = [
        [re.findall(r"`(\w+)`", cell) for cell in line.strip("|\n ").split("|")]
        for line in (root / "docs/reference/doctor.md").read_text().splitlines()
        if re.match(r"\| `\w+`( \(optional\))? \| `", line)
    ]
    assert len(rows) == 6
    spec = find_spec(module.split("/")[0])
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    source = "".join(path.read_text() for path in (folder.parent / module).parent.glob("*.py"))
    for row in rows:
        for name in row[1 + column]:
            assert f'"{name}"' in source, name
            masks = RESPONSE_MASKS if row[0] == ["response_mask"] else ()
            assert name in {*FIELD_NAMES.get(row[0][0], ()), *masks}


def test_files_of_several_ranks_are_measured_as_one(tmp_path, capsys):
    """A folder, the same files by name and by pattern, one of them twice, and one file with all of their lines."""
    rows = records(36)
    parts = {f"rank-{rank}.jsonl": rows[place : place + 12] for rank, place in ((2, 0), (3, 12), (4, 24))}
    for name, part in parts.items():
        written(tmp_path / "logs" / name, part)
    (tmp_path / "logs" / "config.json").write_text("{}")
    (tmp_path / "logs" / "rank-5.jsonl").touch()
    whole = measure_mismatch(written(tmp_path / "whole.jsonl", rows))
    logs = tmp_path / "logs"
    one_by_one = ("rank-2.jsonl", "../logs/rank-2.jsonl", "rank-[3-4].jsonl")
    for names in (str(logs), [str(logs / name) for name in one_by_one], str(logs / "rank-*.jsonl")):
        record = measure_mismatch(names)
        assert record.numbers == whole.numbers and record.values == whole.values
        expected = {**dict.fromkeys(parts, 12), **({} if isinstance(names, list) else {"rank-5.jsonl": 0})}
        assert {Path(file).name: count for file, count in record.files.items()} == expected
    for file, number in record.kl_by_file.items():
        assert number == measure_mismatch(file).numbers["kl_engine_trainer"]
    assert whole.kl_by_file == {} and whole.notes == () and len(whole.files) == 1
    assert main(["mismatch", str(tmp_path / "logs")]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "36 responses to 18 prompts, from 4 files" in output and "no rollout in" in output
    os.close(free := os.dup(1))
    largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, largest[1]))  # for two more open files
    try:
        limited = [read_rollouts(str(tmp_path / "logs"), limit=limit) for limit in (7, 20)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, largest)
    ranks = [[int(re.findall(r"\d+", rollout.file)[-1]) for rollout in part] for part in limited]
    assert ranks == [[2, 2, 2, 3, 3, 4, 4], [2] * 7 + [3] * 7 + [4] * 6]


def test_a_file_whose_mismatch_is_above_that_of_the_others_is_named(tmp_path):
    for rank in range(3):
        rows = records(60, shift=0.3 if rank == 2 else 0.02, seed=rank)
        if rank == 1:  # another framework's name, and a mask that is null
            for row in rows:
                row |= {"rollout_log_probs": row.pop("engine_logprobs"), "response_mask": None}
        written(tmp_path / "logs" / f"rank-{rank}.jsonl", rows)
    (one_sided,) = measure_mismatch(tmp_path / "logs").notes
    words = f"KL(engine ‖ trainer) per token of {tmp_path}/logs/rank-2.jsonl is at least 0.0"
    assert one_sided.startswith(words)
    equal = [written(tmp_path / name, records(60)) for name in ("a.jsonl", "b.jsonl")]
    assert measure_mismatch(equal).notes == (), "equal files have no side"


BAD_FILES = {
    "zero.jsonl": "",
    "table.csv": "prompt,response\n1,2\n",
    "blank.jsonl": "\n \n",
    "cut.jsonl": '{"prompt_token_ids": [1',
    "escape.jsonl": '{"\\u001b[31m": 1}',
    "empty/notes.txt": "x",
    "run/steps.jsonl": "{}",
}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["zero.jsonl"], "zero.jsonl is empty; give a file of JSONL, a JSON array or Parquet"),
        (["table.csv"], "table.csv is read as CSV, and rollouts come as JSONL"),
        (["escape.jsonl"], r"the record has '\x1b[31m'"),
        (["a.jsonl", "x" * 300], "cannot be read (File name too long); give the name of a file"),
        (["rank-*.jsonl"], "no file matches"),
        (["empty"], "is a folder without a file of rollouts (.jsonl"),
        (["run"], "kleash.attach(trainer, rollouts_every=…) writes those of a training run"),
        (["zero.jsonl", "blank.jsonl"], "holds no rollout; give a record for each response"),
        (["a.jsonl", "cut.jsonl"], "cut.jsonl, line 1: expected a JSON object"),
    ],
)
def test_files_that_cannot_be_read_are_one_sentence(names, message, tmp_path, capsys):
    written(tmp_path / "a.jsonl", records(2))
    for name, content in BAD_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert main(["mismatch", *(str(tmp_path / name) for name in names)]) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split("\n")) and "\x1b" not in error and error.count("kleash: ") == 1


def padded_row(number: int, length: int, values: tuple[float, float] = (0.0, 0.0)) -> dict[str, Any]:
    """A response of so many tokens, padded to 12 tokens as in a batch of verl."""
    draw = np.random.default_rng(number)
    trainer = -draw.exponential(size=length)
    engine = trainer * (1 - 0.01 * draw.standard_normal(length))
    return {
        "prompts": [5, number + 6],
        "responses": [*draw.integers(10, 99, length).tolist(), *[0] * (12 - length)],
        "old_log_probs": [*trainer.tolist(), *[values[0]] * (12 - length)],
        "rollout_log_probs": [*engine.tolist(), *[values[1]] * (12 - length)],
    }


@pytest.mark.parametrize("values", [(0.0, 0.0), (0.0, -1.0)])
def test_padding_without_a_mask_is_named_before_any_number(tmp_path, capsys, values):
    """The tokens of padding have no KL, so a mean over them is too small."""
    rows = [padded_row(number, 4 + number % 7, values) for number in range(40)]
    path = written(tmp_path / "padded.jsonl", rows)
    assert main(["mismatch", path]) == 2
    captured = capsys.readouterr()
    assert "padding" in captured.err and "'response_mask'" in captured.err and not captured.out
    assert main(["doctor", path]) == 0
    assert "padding without a mask" in " ".join(capsys.readouterr().out.split())
    for number, row in enumerate(rows):
        row["response_mask"] = [index < 4 + number % 7 for index in range(12)]
    kept = measure_mismatch(written(tmp_path / "masked.jsonl", rows))
    assert kept.tokens == sum(4 + number % 7 for number in range(40))


def test_padding_before_prompts_without_a_mask_is_left_out(tmp_path):
    """Paddings of a prompt are one cluster; with a mask, or in a few responses, these tokens are the prompt's."""
    ids = "prompt_token_ids"
    plain = [{**row, ids: [7, *row[ids]]} for row in records()]
    rows = [{**row, ids: [0] * (at % 4) + row[ids]} for at, row in enumerate(plain)]
    masked = [{**row, "prompt_mask": [1] * len(row[ids])} for row in rows]
    files = [plain, rows, masked, [*plain[:39], rows[39]]]
    expected, found, *others = (measure_mismatch(written(tmp_path / "r.jsonl", each)) for each in files)
    read = read_rollouts(written(tmp_path / "r.jsonl", rows))
    assert [list(each.prompt_ids) for each in read] == [row[ids] for row in plain]
    assert found.prompts == 20 and found.numbers == expected.numbers
    assert "10 of 40 prompts begin with the token 0" in found.notes[0]
    assert [each.prompts for each in others] == [40, 21]


def test_certain_tokens_at_the_end_are_no_padding(tmp_path):
    """Different tokens of probability 1, one token often repeated in one response, and a mask that counts all."""
    rows = [padded_row(number, 6) for number in range(30)]
    certain = [{**row, "responses": [*row["responses"][:6], *range(100, 106)]} for row in rows]
    assert len(read_rollouts(written(tmp_path / "certain.jsonl", certain))) == 30
    whole = [padded_row(number, 12) for number in range(29)]
    assert len(read_rollouts(written(tmp_path / "one.jsonl", [*whole, rows[0]]))) == 30
    counted = [{**row, "response_mask": [1] * 12} for row in rows]
    assert len(read_rollouts(written(tmp_path / "counted.jsonl", counted))) == 30


@pytest.mark.peers("verl")
def test_a_batch_of_verl_is_written_and_read(tmp_path):
    """Padded, as in DataProto, and with a length of each row, as the queue of verl's default trainer has it."""
    from verl import DataProto
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    ids = torch.arange(20).reshape(2, 10)
    masks = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 0, 0], [1] * 10])
    columns = -torch.rand(3, 2, 6, generator=torch.Generator().manual_seed(0))
    batch = {"responses": ids[:, 4:], "response_mask": masks[:, 4:], "token_level_scores": columns[0]}
    batch |= dict(zip(("old_log_probs", "rollout_log_probs", "ref_log_prob"), columns, strict=True))
    padded = DataProto.from_dict({"prompts": ids[:, :4], "attention_mask": masks, **batch}).batch
    rows = [{"prompts": ids[0, 1:4], **{name: column[0, :4] for name, column in batch.items()}}]
    rows += [{"prompts": ids[1, :4], **{name: column[1] for name, column in batch.items()}}]
    path = tmp_path / "rollouts" / "3.jsonl"
    for data in (padded, list_of_dict_to_tensordict(rows)):
        write_rollouts(path, data, version=3)
        first, second = read_rollouts(str(path))
        assert first.prompt_ids == (1, 2, 3) and first.response_ids == (4, 5, 6, 7)
        assert second.trainer.tolist() == columns[0, 1].tolist()
        assert first.engine.tolist() == columns[1, 0, :4].tolist()
        assert first.reference is not None and first.reference.tolist() == columns[2, 0, :4].tolist()
        assert json.loads(path.read_text().splitlines()[0])["version"] == 3


@pytest.mark.peers("openrlhf")
def test_an_experience_of_openrlhf_is_written_and_read(tmp_path):
    """Its columns begin at the second token: the value at t is that of token t + 1."""
    spec = find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0], "trainer", "ppo_utils", "experience.py").read_text()
    columns = -torch.rand(3, 2, 6, generator=torch.Generator().manual_seed(1))
    action_mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1]])
    experience: dict[str, Any] = dict(  # noqa: C408 - as the call of Experience
        sequences=torch.arange(10, 24).reshape(2, 7),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1] * 7]),
        action_mask=action_mask.bool(),
        action_log_probs=columns[0],
        rollout_log_probs=columns[1],
        base_action_log_probs=columns[2],
    )
    assert all(f"    {name}: torch" in source for name in experience)
    write_rollouts(tmp_path / "e.jsonl", {**experience, "index": [0, 1], "values": None})
    first, second = read_rollouts(str(tmp_path / "e.jsonl"))
    assert (first.prompt_ids, first.response_ids) == ((10, 11, 12), (13, 14, 15))
    assert first.is_counted.all() and first.trainer.tolist() == columns[0, 0, 2:5].tolist()
    assert (second.prompt_ids, second.response_ids) == ((17, 18), (19, 20, 21, 22, 23))
    assert second.is_counted.tolist() == [True, True, False, True, True]
    assert second.engine.tolist() == columns[1, 1, 1:].tolist()


def test_what_lacks_a_column_is_refused_with_its_name_or_what_writes_it(tmp_path, monkeypatch):
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(OptionError, match="rollout_log_probs"):
        write_rollouts(tmp_path / "x", {"prompts": ids, "responses": ids, "old_log_probs": -ids.float()})
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("HOME", str(tmp_path))
    columns = {"rollout_log_probs": -ids.float(), "old_log_probs": -ids.float(), "responses": ids}
    columns["prompts"] = ids
    write_rollouts("~/x.jsonl", {"index": [0, 1], **columns})
    first = json.loads((tmp_path / "x.jsonl").read_text().splitlines()[0])
    assert list(first) == [*columns][::-1], "in an order that no hash of a process decides"
    texts = {"input": "What?", "output": "That.", "gts": None, "score": 1.0, "step": 3}
    with pytest.raises(SourceError, match=r"rollout_data_dir.*write_rollouts"):
        read_rollouts(written(tmp_path / "3.jsonl", [texts]))
