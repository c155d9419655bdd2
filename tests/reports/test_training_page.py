"""The pages of training: every number where it belongs, and other people's text inert."""

import re
from dataclasses import replace

import pytest
from drawn_charts import bands, curves, drawn, legend
from histories import bent, healthy
from page_text import Page
from synthetic_training import EVIL, header_of, write_hostile_run, write_pairs_run, write_run

from kleash.errors import RunFolderError
from kleash.records import GRPOJob, HackingAlert, PPOJob, StepRecord, TrainingFolder
from kleash.reports import write_training_report
from kleash.reports.folder_report import write_report_of
from kleash.reports.training import format_metric, metrics_table, run_warnings, summary_cards
from kleash.reports.training_charts import run_charts, thin_steps


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = write_hostile_run(tmp_path_factory.mktemp("training") / "run")
    return Page(write_training_report(folder))


def test_untrusted_text_is_escaped(hostile):
    assert hostile.words.count(EVIL) >= 20, "or the page would not show it at all"
    assert "script" not in hostile.names


def test_every_metric_with_values_has_a_chart(hostile):
    names = ("reward", "held-out", "kl-sequence", "kl-token", "beta", "entropy", "length", "updates", "texts")
    assert tuple(figure["id"] for figure in hostile.all("figure")) == names


def test_the_headlines_are_those_of_the_last_step_and_what_happened_is_told(hostile):
    last = healthy(60)[-1].metrics
    kl, error = last["kl/exact_per_sequence"], last["kl/exact_per_sequence_error"]
    assert f"KL per sequence {kl:.2f} ± {error:.2f} nats 0 in step 1; target 6.00" in hostile.words
    assert "Steps 60 finished" in hostile.words and "Step 60: KL(p ‖ q) is gone" in hostile.words
    assert "Step 60: beta was bounded" in hostile.words
    assert "held-out numbers those after it." in hostile.words
    assert "saw nothing" not in hostile.words and "NaN" not in hostile.words
    steps = [int(step) for step in re.findall(r"Step (\d+) Samples of step", hostile.words)]
    assert steps == [1, 13, 25, 36, 48, 60]


def test_a_number_has_its_unit_and_a_tiny_one_is_formatted_in_scientific_notation():
    metrics = {"kl/k3": 1.172e-29, "kl/k3_error": 5.69e-30}
    assert format_metric(metrics, "kl/k3") == "1.17 × 10⁻²⁹ ± 5.7 × 10⁻³⁰ nats"
    assert format_metric({"reward/score": -0.5, "reward/score_error": 0.25}, "reward/score") == "−0.50 ± 0.25"
    assert format_metric({"teacher/divergence": 0.25}, "teacher/divergence") == "0.250", "maybe a hellinger"


def test_a_number_of_every_other_step_is_a_line_through_them():
    measured = ("kl/exact_per_sequence", "eval/reward")
    kls = [{} if step % 2 else dict.fromkeys(measured, float(step)) for step in range(1, 10)]
    history = [StepRecord(step=at, metrics={"pairs/margin": 1.0, **kl}) for at, kl in enumerate(kls, 1)]
    cards = summary_cards(header_of(GRPOJob()), history, None)
    assert ("KL per sequence", "8.00 nats", "after step 8") in cards
    assert ("eval/reward", "2.00", "8.00") in [row[:3] for row in metrics_table(history)]
    begun = [StepRecord(step=0, metrics={"eval/reward": 0.5}), *history[1:8]]
    cards = summary_cards(header_of(GRPOJob()), begun, None)
    assert ("Held-out reward", "8.00", "0.500 in step 0") in cards
    assert ("KL per sequence", "8.00 nats", "2.00 in step 2") in cards, "begun with an evaluation"
    for chart in map(run_charts(history).__getitem__, ("held-out", "kl-sequence")):
        assert list(curves(drawn(chart)[0]).values()) == [([2, 4, 6, 8], [2.0, 4.0, 6.0, 8.0])]
        assert chart.rows[:2] == (("1", "–"), ("2", "2.00")), "which is no NaN"


def test_the_command_repeats_the_run(hostile):
    command = f"kleash train ppo --policy '{EVIL}' --prompts x --reward 'a:b{EVIL}' '0.5*c:d' --steps 60"
    assert f"{command} --controller pid --target-nats 6.0" in hostile.words


def test_the_curves_hold_the_numbers_with_their_errors_and_the_target():
    history = healthy(60)
    charts = run_charts(history, target=6.0)
    (axes,), (of_tokens,) = (drawn(charts[name]) for name in ("kl-sequence", "kl-token"))
    values = [record.metrics["kl/exact_per_sequence"] for record in history]
    errors = [record.metrics["kl/exact_per_sequence_error"] for record in history]
    assert curves(axes)["exact"] == (list(range(1, 61)), values)
    ((low, high),) = bands(axes)
    assert low == pytest.approx([v - 2 * e for v, e in zip(values, errors, strict=True)])
    assert high == pytest.approx([v + 2 * e for v, e in zip(values, errors, strict=True)])
    assert legend(axes) == ["exact", "target"] and axes.lines[-1].get_ydata()[0] == 6.0
    assert "target" not in legend(of_tokens) and len(bands(of_tokens)) == 1, "of the first curve"
    lost = run_charts(bent(history, 40, lambda *_: {"kl/exact_per_sequence": float("inf")}))["kl-sequence"]
    assert lost.description.endswith(" in step 60; infinite in 20 steps, which are not drawn.")


def test_a_target_per_token_is_drawn_where_kl_is_per_token():
    charts = run_charts(healthy(20), target=0.1, per="token")
    assert legend(drawn(charts["kl-sequence"])[0]) == []
    (axes,) = drawn(charts["kl-token"])
    assert legend(axes) == ["exact", "k1", "k3", "target"] and axes.lines[-1].get_ydata()[0] == 0.1
    units = {name: unit for name, *_, unit, _ in metrics_table(healthy(20), per="token")}
    assert units["kl/target"] == "nats per token" and units["kl/exact_per_sequence"] == "nats"


def test_a_dpo_run_shows_its_own_metrics(tmp_path):
    page = Page(write_report_of(write_pairs_run(tmp_path / "run")))
    assert [figure["id"] for figure in page.all("figure")] == ["pairs"]
    assert "Preference accuracy 0.530 0.510 in step 1 Steps 3 running or interrupted" in page.words
    assert "From 0.510 in step 1 to 0.530 in step 3." in page.words
    assert "kleash train dpo --pairs p.jsonl --steps 3" in page.words and "No reward hacking" in page.words
    assert "is the last that was measured by then, before training or after an update, on" in page.words
    assert "Machine-readable: steps.jsonl , training.json" in page.words


def test_errors_over_few_prompts_carry_a_warning():
    steps = [StepRecord(step=at, metrics=each) for at, each in ((1, {"response/prompts": 30.0}), (2, {}))]
    assert run_warnings(steps) == run_warnings(steps[1:]) == ()
    (warning,) = run_warnings([*steps, StepRecord(step=3, metrics={"response/prompts": 8.0})])
    assert warning.startswith("the errors of a step are over its prompts: only 8 clusters; below 30 ")


def test_a_long_run_is_thinned_with_its_first_and_last_step():
    thinned = thin_steps(healthy(5000), 400)
    assert len(thinned) == 400 and (thinned[0].step, thinned[-1].step) == (1, 5000)
    assert thin_steps(healthy(3), 400) == healthy(3)
    chart = run_charts(healthy(5000))["reward"]
    assert len(chart.rows) == 40 and len(curves(drawn(chart)[0])["reward"][0]) == 400


def test_beta_over_decades_is_drawn_on_a_logarithmic_axis():
    (narrow,) = drawn(run_charts(healthy(20))["beta"])
    assert narrow.get_yscale() == "linear" and narrow.get_ylim()[0] >= 0, "also where it is constant"
    wide = [type(r)(step=r.step, metrics={"beta": 10.0 ** (r.step / 10 - 3)}) for r in healthy(20)]
    assert drawn(run_charts(wide)["beta"])[0].get_yscale() == "log"


@pytest.mark.usefixtures("undrawn")
def test_a_stopped_run_shows_the_reason_and_its_command_with_disabled_switches(tmp_path):
    job = PPOJob(whiten=False, trust_remote_code=True, clip_range_value=None)
    alerts = tuple(HackingAlert(kind="runaway", sentence=f"alert {at}") for at in range(25))
    history = [replace(record, alerts=alerts * (record.step == 2)) for record in healthy(3)]
    files = TrainingFolder(write_run(tmp_path / "run", history, job))
    ended = {"stopped": "the hacking monitor stopped it", "alerts": tuple(each.sentence for each in alerts)}
    result = replace(files.result(), **ended)
    files.write_result(result)
    text = Page(write_training_report(files.root)).words
    command = "kleash train ppo --steps 3 --no-whiten --clip-range-value None --trust-remote-code"
    assert command in text and "Steps 3 the hacking monitor stopped it" in text
    assert "The last 20; 5 earlier ones are in steps.jsonl . Step 2: alert 5. Step 2: alert 6." in text
    assert "in steps.jsonl: 5\nwarning: alert 5\n" in result.summary()


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_a_step_raises(tmp_path):
    folder = TrainingFolder(tmp_path / "run")
    with folder.writing(header_of(PPOJob()), resume=False):
        (folder.root / "checkpoints" / "checkpoint-1").mkdir(parents=True)  # left without checksums
    with pytest.raises(RunFolderError, match="without a step"):
        write_training_report(folder.root)
