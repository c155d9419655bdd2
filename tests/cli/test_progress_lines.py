"""How a run is shown while it goes: lines now and then where nothing can be drawn over, and a bar where it can."""

import math
from io import StringIO

import pytest
from rich.console import Console

from kleash.cli.progress import Progress
from kleash.cli.terminal import Terminal
from kleash.records import Number
from kleash.reports.formatting import format_duration
from kleash.store.number import cells, with_error


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def number(error: float = 0.01, ends: tuple[float, float] = (0.1, 0.3), unit: str = "nats") -> Number:
    return Number(value=0.2, unit=unit, standard_error=error, ci95=ends)


def lines_of(sequences: int, seconds_each: float, *, total: bool = True, terminal: bool = False) -> str:
    clock, file = Clock(), StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    with Progress(console=console, clock=clock) as progress:
        progress.set_total(sequences if total else None)
        for _ in range(sequences):
            clock.now += seconds_each / 2
            progress.add_generated(50)
            clock.now += seconds_each / 2
            progress.add_scored(1, 50)
            progress.update_kl(number())
    return file.getvalue()


def test_a_log_has_a_line_for_every_twentieth_of_the_work() -> None:
    lines = lines_of(100, 2.0).splitlines()
    assert lines[0] == "measuring: 100 sequences to do"
    assert 18 <= len(lines) <= 21
    assert (
        "measuring: 60 of 100 sequences (60%), 50 tokens/s, KL so far 0.200 ± 0.010 nats, about 80 s left"
        in lines
    )


@pytest.mark.parametrize(
    ("sequences", "seconds", "low", "high"), [(10000, 0.001, 1, 4), (3, 600, 4, 8), (5000, 1, 150, 180)]
)
def test_a_short_run_has_few_lines_and_a_slow_one_is_never_silent_for_long(
    sequences: int, seconds: float, low: int, high: int
) -> None:
    assert low <= len(lines_of(sequences, seconds).splitlines()) <= high


def test_a_second_part_of_the_work_is_counted_from_0() -> None:
    clock, file = Clock(), StringIO()
    with Progress(console=Console(file=file, width=100), clock=clock) as progress:
        for sequences in (40, 10):
            progress.set_total(sequences)
            for _ in range(sequences):
                clock.now += 5.0
                progress.add_scored(1, 50)
    assert "measuring: 10 of 10 sequences (100%), 10 tokens/s\n" in file.getvalue()


def test_text_of_unknown_length_says_how_much_is_done() -> None:
    lines = lines_of(100, 2.0, total=False).splitlines()
    assert 5 <= len(lines) <= 8 and lines[-1].startswith("measuring: 90 sequences, ")


@pytest.mark.parametrize("colours", ["", "1"])
def test_a_log_holds_no_control_codes(colours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if colours:
        monkeypatch.setenv("FORCE_COLOR", colours)
    assert "\x1b" not in lines_of(20, 7.0) and "\r" not in lines_of(20, 7.0)
    file = StringIO()
    Terminal(file=file).print("[red]a[/red] :smile:", style="bold")
    assert file.getvalue() == "[red]a[/red] :smile:\n"
    assert "\x1b" in lines_of(20, 7.0, terminal=True)


def test_a_number_without_an_error_is_not_followed_by_nan() -> None:
    unknown = number(math.nan, (math.nan, math.nan))
    assert with_error(unknown) == "0.20000 nats" and cells(unknown)[1:] == ("", "", "nats")
    assert cells(number(math.nan, (0.0, math.inf)))[1] == ""
    assert with_error(number()) == "0.200 ± 0.010 nats"
    assert cells(number(unit="probability")) == ("20.0", "10.0 to 30.0", "1.0", "%")


def test_lengths_of_time() -> None:
    assert [format_duration(seconds) for seconds in (4.2, 89, 91, 3600, 7200)] == [
        "4 s",
        "89 s",
        "2 min",
        "60 min",
        "2.0 h",
    ]
