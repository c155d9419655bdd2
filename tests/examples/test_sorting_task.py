"""The example of a task with a right answer: its data, its reward, and a run of two steps of each leash."""

import json
import random
import re
import sys

import pytest

from kleash.store import StepRecord
from kleash.store.steps import append_step

example = pytest.importorskip("sorting_task")  # which needs pandas
pytestmark = [
    pytest.mark.peers("trl"),
    pytest.mark.filterwarnings("ignore"),  # TRL's own trainer warns about what it does not use
]


def test_answers_are_sorted_prompts_and_kl_of_training_is_that_of_the_second_half(tmp_path):
    rows = [example.task(random.Random(seed), 8) for seed in range(20)]
    assert all(sorted(row["prompt"].removesuffix(" :").split()) == row["answer"].split() for row in rows)
    responses = [" " + rows[0]["answer"], rows[0]["prompt"], ""]
    assert example.sorted_right([], responses, [rows[0]["answer"]] * 3) == [1, 0, 0]
    for step, kl in enumerate([9.0, 8.0, 2.0, 5.0], 1):
        append_step(tmp_path, StepRecord(step=step, metrics={"kl/exact_per_sequence": kl}), [], None)
    assert example.second_half(tmp_path) == 3.5


def test_every_leash_is_trained_and_measured(tmp_path, monkeypatch, capsys):
    sizes = "--steps 2 --warm-up 1 --prompts 4 --held-out 3 --letters 2 --target-nats 1 --beta 0.1 --seeds 0"
    monkeypatch.setattr(sys, "argv", ["sorting_task.py", *sizes.split(), "--out", str(tmp_path)])
    monkeypatch.setattr(example, "LONGEST", 6)
    example.main()
    table = capsys.readouterr().out.split("KL of training over its target\n")[1].splitlines()
    rows = {line[:16].strip(): [float(x) for x in re.findall(r"\d+\.\d+", line[16:])] for line in table}
    assert list(rows) == ["reference", "exact, 1 nats", "k3, 1 nats", example.NO_LEASH, example.TRL]
    assert rows["reference"][2:] == [0, 0] and all(0 <= row[0] <= 1 for row in rows.values())
    assert [len(row) for row in rows.values()] == [4, 5, 5, 4, 4]
    root = tmp_path / "seed-0"
    train, held_out = (
        [json.loads(line)["prompt"] for line in (root / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    )
    assert len({*train}) == 4 and len({*held_out}) == 3 and not {*train} & {*held_out}
    answers = example.pd.read_parquet(root / "measured-reference" / "sequences").groupby("prompt_id")[
        "response"
    ]
    answers = answers.first().str.removesuffix("</s>").str.strip()
    lines = map(json.dumps, ({"prompt": x, "answer": y} for x, y in zip(held_out, answers, strict=True)))
    (root / "held_out.jsonl").write_text("\n".join(lines))
    right, _ = example.answered(root / "reference", root, "again")
    assert right.reshape(3, example.SAMPLES)[:, 0].all()
