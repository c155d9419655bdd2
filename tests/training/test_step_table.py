"""How a run looks on a terminal while it goes."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from histories import healthy
from rich.console import Console

from kleash.cli.progress import Steps
from kleash.records import HackingAlert, StepRecord
from kleash.training.run_log import LogOptions, RunLog


def shown_on(terminal: bool) -> str:
    file = StringIO()
    console = Console(file=file, width=100, force_terminal=terminal, highlight=False, color_system=None)
    steps = Steps(20, console)
    steps.note("the policy is [bold]")
    for record in healthy(20):
        steps.stepped(record)
    alert = HackingAlert(kind="runaway", sentence="it [red] runs")
    steps.stepped(replace(healthy(20)[-1], alerts=(alert,), events=("beta [x] was bounded",)))
    return file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_notes_are_printed_without_markup(terminal: bool) -> None:
    shown = shown_on(terminal)
    for said in ("the policy is [bold]", "alert, step 20: it [red] runs", "step 20: beta [x] was bounded"):
        assert said in shown


def test_tiny_numbers_are_scientific_and_the_first_step_says_the_time_left(tmp_path: Path) -> None:
    metrics = {"kl/exact_per_sequence": 1.172e-29, "kl/exact_per_sequence_error": 5.69e-30}
    now, file = [0.0], StringIO()
    steps = Steps(3, Console(file=file, width=100, highlight=False), clock=lambda: now[0], target_per="token")
    run_log = RunLog(tmp_path, LogOptions(target_nats=0.5), display=steps)
    run_log.begin(0)
    now[0] += 20.0
    run_log.step(0, {"eval/reward": 1.0})
    run_log.step(1, metrics)
    line = "step 1/3: KL/sequence 1.17e-29 ± 5.7e-30 nats, target 0.5 nats per token, about 40 s left\n"
    assert file.getvalue() == f"step 0/3: target 0.5 nats per token, held-out reward 1\n{line}"


def test_a_log_shows_what_a_step_is_at_and_the_time_left() -> None:
    """Steps of 100 s, of which 80 s are generation in 40 pieces; the last resumes as step 3 of 4."""
    now, file = [1000.0], StringIO()
    steps = Steps(4, Console(file=file, width=120, highlight=False), clock=lambda: now[0])
    for record in healthy(4)[2:]:
        for piece in range(40):
            steps.working(record.step, f"generating, {100 * piece / 40:.0f} % of 8 responses")
            now[0] += 2.0
        now[0] += 20.0
        steps.stepped(StepRecord(step=record.step, metrics={"beta": 0.1}))
    assert file.getvalue().splitlines() == [
        "step 3/4: generating, 38 % of 8 responses",
        "step 3/4: generating, 75 % of 8 responses",
        "step 3/4: beta 0.1, about 2 min left",
        "step 4/4: generating, 38 % of 8 responses",
        "step 4/4: generating, 75 % of 8 responses",
        "step 4/4: beta 0.1",
    ]
