"""``kleash compare`` of training runs: paired means against numpy and scipy, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawn_charts import drawn as axes_of
from scipy import stats
from synthetic_run import write_synthetic_run
from synthetic_training import EVIL, header_of

import kleash
from kleash.cli import main
from kleash.errors import OptionError, RunFolderError
from kleash.records import GRPOJob, Sample, StepRecord, TrainingFolder, TrainingResult, read_steps
from kleash.reports.comparison import frontier_chart, metric_chart
from kleash.store.comparison import PAIRED
from kleash.store.steps import append_step, keep_steps, means_by_prompt, read_prompt_means


def samples(values: np.ndarray, prompt: str) -> list[Sample]:
    """Responses to each prompt: ``values`` are [prompt, response, (reward, KL)]."""
    return [
        Sample(prompt=f"{prompt} {number}", response="r", reward=reward, kl=kl)
        for number, row in enumerate(values.tolist())
        for reward, kl in row
    ]


def write(folder, values, job, *, reference="q", prompt="prompt", without="") -> Path:
    """A run whose step t drew ``values[t]``, and which answered held-out prompts in its last step.

    Its settings do not say ``without``, as those of a trainer that kleash was attached to.
    """
    files = TrainingFolder(folder)
    settings = {option: value for option, value in job.settings().items() if option != without}
    fingerprints = {"policy": "p", "reference": reference}
    with files.writing(replace(header_of(job), fingerprints=fingerprints, settings=settings), resume=False):
        for step, drawn in enumerate(values, 1):
            held_out = samples(drawn + 1, prompt) if step == len(values) else []
            metrics = {"reward/score": drawn[..., 0].mean(), "beta": 0.1 * step, "kl/target": 4.0}
            record = StepRecord(step=step, metrics={**metrics, "response/length": 8.0, "policy/entropy": 3.0})
            append_step(folder, record, [], means_by_prompt(samples(drawn, prompt), held_out))
    return folder


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray]:
    """[step, prompt, response, (reward, KL)] of two runs, with much that makes a prompt easy in both."""
    random = np.random.default_rng(0)
    easy = random.normal(size=(1, 40, 1, 2))
    return easy + random.normal(size=(7, 40, 3, 2)), easy + 0.5 + random.normal(size=(9, 40, 3, 2))


@pytest.fixture(scope="module")
def folders(drawn, tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("runs")
    first = write(root / "first", drawn[0], GRPOJob(beta=0.1))
    ended = {"kleash": "1", "algorithm": "grpo", "steps": 7, "metrics": {}, "policy": "", "out": str(first)}
    TrainingFolder(first).write_result(TrainingResult(**ended))
    job = GRPOJob(beta=0.2, kl="k3", target_per="token", seed=1)
    return first, write(root / "second", drawn[1], job, reference="other", without="lora_rank")


def test_differences_are_paired_by_prompt_over_the_shared_second_half(drawn, folders):
    comparison = kleash.compare(folders)
    assert (comparison.first_step, comparison.last_step) == (4, 7)
    (difference,) = comparison.differences
    assert difference.shared_prompts == 40 and difference.only_here == difference.only_there == 0
    assert not difference.warnings
    for at, metric in enumerate(("reward/score", "kl/exact_per_sequence")):
        means = [values[3:7, ..., at].mean(axis=(0, 2)) for values in drawn]
        expected = stats.ttest_rel(means[1], means[0])
        number = difference.differences[metric]
        assert number.value == pytest.approx(np.mean(means[1] - means[0]), rel=1e-12)
        assert number.standard_error == pytest.approx(number.value / expected.statistic, rel=1e-9)
        own = comparison.runs[0].numbers[metric]
        assert number.unit == own.unit == ("nats" if at else "none")
        assert own.value == pytest.approx(means[0].mean(), rel=1e-12)
        assert own.standard_error == pytest.approx(stats.sem(means[0]), rel=1e-9)
        assert (own.ci95[0] >= 0) is bool(at)  # a KL is never below 0
        unpaired = np.hypot(*(stats.sem(each) for each in means))
        assert number.standard_error < 0.5 * unpaired
    assert [run.numbers["beta"].value for run in comparison.runs] == pytest.approx([0.55, 0.55])
    numbers = comparison.runs[0].numbers
    held_out = [numbers[f"eval/{name}"].value for name in ("reward", "kl_per_sequence")]
    assert held_out == pytest.approx((drawn[0][-1] + 1).mean(axis=(0, 1)), rel=1e-12)
    assert numbers["response/length"].unit == "tokens" and "eval/reward" not in difference.differences
    assert [run.ended for run in comparison.runs] == ["finished", "running or interrupted"]
    differing = {"beta": "0.2 for 0.1", "kl": "k3 for exact", "target_per": "token for sequence"}
    assert comparison.runs[1].settings == differing
    assert comparison.warnings == (f"{folders[1].name} has another reference than {folders[0].name}",)


def test_command_prints_writes_a_page_and_its_json_has_every_number(folders, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["compare", *map(str, folders), "--out", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "2 training runs compared over steps 4 to 7" in printed and "k3 for exact" in printed
    assert "by another seed alone runs may differ by more" in " ".join(printed.split())
    assert "shared prompts" in printed and "not measured" in printed and " Entropy per token, " in printed
    assert re.search(r"first .* 4 per sequence .*\n *second .* 4 per token ", printed)
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 3 and "KL per sequence" in text, "reward, beta and entropy are drawn"
    assert main(["compare", *map(str, folders), "--out", str(page), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["differences"][0]["differences"].keys() == {"reward/score", "kl/exact_per_sequence"}
    assert main(["compare", *map(str, folders), "--out", str(page), "--format", "csv"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert sum(row.startswith("second,first,") for row in rows) == 2
    targets = [(row.split(",")[0], row.split(",")[7]) for row in rows if ",kl/target," in row]
    assert targets == [("first", "nats per sequence"), ("second", "nats per token")]


def test_runs_of_one_trainer_of_others_say_its_defaults_and_which_has_no_kl(tmp_path, capsys):
    kinds = {"priced": ({"beta": 0.3}, {"kl/k3_per_sequence": 2.5})}
    kinds |= {"free": ({"epochs": 2}, {"reward/score": 1.0})}
    # which has no prompts of its own
    kinds |= {"dpo": ({"algorithm": "dpo"}, {"kl/exact_per_sequence": 7.125})}
    for name, (settings, metrics) in kinds.items():
        settings = {"algorithm": "grpo", "trainer": f"{name}Trainer", **settings}
        known = {"reference": "q"} if name == "priced" else {}
        header = replace(header_of(GRPOJob()), fingerprints=known, settings=settings)
        with TrainingFolder(tmp_path / name).writing(header, resume=False):
            append_step(tmp_path / name, StepRecord(step=1, metrics=metrics), [])
    pages = ["--out", str(tmp_path / "page.html")]
    assert main(["compare", *(str(tmp_path / name) for name in kinds), *pages]) == 0
    printed = capsys.readouterr().out
    settings = ("beta the default for 0.3", "epochs 2 for the default")
    for said in (*settings, "by k3", "  2.5  ", "free has no KL to a reference"):
        assert said in printed
    assert re.search(r"dpo +7\.125\d* nats ", printed) and "dpo has no KL" not in printed
    assert printed.count("beta the default") == 1, "another algorithm has other defaults"
    assert "share no prompt" not in printed and "paired by" not in printed
    assert "prompt's mean" not in (tmp_path / "page.html").read_text("utf-8")
    assert "another reference" not in printed, "which the second run does not record"


def test_runs_of_other_prompts_are_shown_and_not_paired(drawn, tmp_path):
    first = write(tmp_path / "first", drawn[0], GRPOJob())
    second = write(tmp_path / f"second {EVIL[:8]}", drawn[1], GRPOJob(), prompt="another")
    (difference,) = kleash.compare([first, second]).differences
    assert not difference.differences and difference.only_here == 40
    assert "share no prompt's number" in difference.warnings[0]
    page = tmp_path / "page.html"
    assert main(["compare", str(first), str(second), "--out", str(page)]) == 0
    assert "<script>" not in page.read_text(encoding="utf-8").partition("</style>")[2]


def test_the_last_reward_and_kl_stand_in_their_columns_where_a_run_has_one_alone():
    reward, kl = ([StepRecord(step=1, metrics={name: 2.0})] for name in PAIRED[:2])
    chart = frontier_chart([("a", kl), ("b", reward)])
    assert chart.rows == (("a", "2.00", "–"), ("b", "–", "2.00"))
    assert axes_of(chart)[0].get_xlabel() == chart.header[1] == "KL per sequence, nats"
    wide = [StepRecord(step=1, metrics={PAIRED[1]: 2.0, f"{PAIRED[1]}_error": 9.0})]
    assert axes_of(metric_chart(PAIRED[1], [("a", wide)]))[0].get_ylim()[0] == 0, "no KL is below"


def test_what_cannot_be_compared_is_refused(folders, drawn, tmp_path):
    with pytest.raises(RunFolderError, match="nowhere"):
        kleash.compare([folders[0], tmp_path / "nowhere"])
    write_synthetic_run(tmp_path / "measured", prompts=2, samples=1, tokens=4, hostile=False)
    with pytest.raises(OptionError, match=r"measured is a measurement and .*first a training run"):
        kleash.compare([folders[0], tmp_path / "measured"])
    with pytest.raises(OptionError, match="--at-most is for measurements"):
        kleash.compare(folders, at_most=0.1)
    empty = write(tmp_path / "empty", drawn[0][:0], GRPOJob())
    with pytest.raises(RunFolderError, match="no step yet"):
        kleash.compare([folders[0], empty])
    damaged = write(tmp_path / "damaged", drawn[0], GRPOJob())
    lines = damaged / "prompts.jsonl"
    lines.write_bytes(lines.read_bytes().replace(b"0.", b"1.", 1))
    with pytest.raises(RunFolderError, match=r"prompts\.jsonl"):
        kleash.compare([folders[0], damaged])


def test_means_leave_out_what_has_no_number_and_go_with_their_steps(tmp_path):
    rewards, kls = [1.0, float("nan"), 4.0], [float("nan")] * 3
    drawn = [Sample(prompt="p", response="", reward=r, kl=k) for r, k in zip(rewards, kls, strict=True)]
    ((metric, means),) = means_by_prompt(drawn, []).items()
    assert metric == "reward/score" and list(means.values()) == [2.5]
    with TrainingFolder(tmp_path).writing(header_of(GRPOJob()), resume=False):
        for step in (1, 2, 3):
            append_step(tmp_path, StepRecord(step=step, metrics={}), [], means_by_prompt(drawn, drawn))
        keep_steps(tmp_path, 2)
    kept = ([*read_prompt_means(tmp_path)], read_steps(tmp_path))
    assert [[record.step for record in each] for each in kept] == [[1, 2], [1, 2]]
    assert next(read_prompt_means(tmp_path)).means.keys() == {"reward/score", "eval/reward"}
