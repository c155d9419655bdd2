"""How a run looks on a terminal while it goes."""

from dataclasses import replace
from io import StringIO

import pytest
from histories import healthy
from rich.console import Console

from kleash.cli.steps import Steps
from kleash.records import HackingAlert, StepRecord


def shown_on(width: int, terminal: bool) -> str:
    console = Console(
        file=StringIO(), width=width, force_terminal=terminal, highlight=False, color_system=None
    )
    with Steps(20, console) as steps:
        steps.note("the policy is [bold]")
        for record in healthy(20):
            steps.stepped(record)
        alert = HackingAlert(kind="runaway", sentence="it [red] runs")
        steps.stepped(replace(healthy(20)[-1], alerts=(alert,), events=("beta [x] was bounded",)))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_notes_are_printed_without_markup(terminal: bool) -> None:
    shown = shown_on(100, terminal)
    for said in ("the policy is [bold]", "alert, step 20: it [red] runs", "step 20: beta [x] was bounded"):
        assert said in shown


def test_terminal_table_ends_with_the_last_steps() -> None:
    left = shown_on(140, True).rpartition("step of 20")[2].splitlines()
    assert [line.split()[0] for line in left[1:] if line.strip()] == [*map(str, range(10, 21)), "20"]
    assert "reward" in left[0] and "KL/sequence" in left[0] and "repeated" in left[0]
    record = healthy(20)[9].metrics
    assert f"{record['kl/exact_per_sequence']:.2f} ± {record['kl/exact_per_sequence_error']:.2f}" in left[1]


def test_narrow_terminal_shows_first_columns_unbroken() -> None:
    left = shown_on(60, True).rpartition("step of 20")[2].splitlines()
    assert "KL/sequence" in left[0] and "repeated" not in left[0]
    assert not any("…" in line for line in left)


def test_tiny_numbers_are_printed_in_scientific_notation() -> None:
    metrics = {"kl/exact_per_sequence": 1.172e-29, "kl/exact_per_sequence_error": 5.69e-30}
    console = Console(file=StringIO(), width=100, highlight=False)
    with Steps(1, console) as steps:
        steps.stepped(StepRecord(step=1, metrics=metrics))
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == "step 1/1: KL/sequence 1.17e-29 ± 5.7e-30\n"


def test_a_log_shows_what_a_step_is_at_and_the_time_left() -> None:
    """Steps of 100 s, of which 80 s are generation in 40 pieces; the last resumes as step 3 of 4."""
    now, console = [1000.0], Console(file=StringIO(), width=120, highlight=False)
    with Steps(4, console, clock=lambda: now[0]) as steps:
        for record in healthy(4)[2:]:
            for piece in range(40):
                steps.working(record.step, f"generating, {piece / 40:.0%} of 8 responses")
                now[0] += 2.0
            now[0] += 20.0
            steps.stepped(StepRecord(step=record.step, metrics={"beta": 0.1}))
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().splitlines() == [
        "step 3/4: generating, 38% of 8 responses",
        "step 3/4: generating, 75% of 8 responses",
        "step 3/4: beta 0.1, about 2 min left",
        "step 4/4: generating, 38% of 8 responses",
        "step 4/4: generating, 75% of 8 responses",
        "step 4/4: beta 0.1",
    ]


def test_a_terminal_shows_what_a_step_is_at_below_the_table() -> None:
    console = Console(file=StringIO(), width=100, force_terminal=True, color_system=None)
    with Steps(20, console) as steps:
        steps.working(1, "generating, 40% of 8 responses")
    assert isinstance(console.file, StringIO)
    assert "step 1: generating, 40% of 8 responses" in console.file.getvalue()
