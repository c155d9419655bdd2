"""How a run is shown while it goes: lines now and then where nothing can be drawn over, and a bar where it can."""

import math
import re
from io import StringIO

import pytest
from rich.console import Console

from kleash.cli.progress import Progress
from kleash.cli.terminal import Terminal
from kleash.records import Number
from kleash.reports.formatting import format_duration
from kleash.store.summary import cells, with_error


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def number(error=0.01, ends=(0.1, 0.3), unit="nats"):
    return Number(value=0.2, unit=unit, standard_error=error, ci95=ends)


def lines_of(sequences, seconds_each, *, total=True, terminal=False):
    clock, file = Clock(), StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    with Progress(console=console, clock=clock) as progress:
        progress.set_total(sequences if total else None)
        for _ in range(sequences):
            clock.now += seconds_each / 2
            progress.add_generated(50, 1.0)
            clock.now += seconds_each / 2
            progress.add_scored(1, 50)
            progress.update_kl(number())
    return file.getvalue()


def test_a_log_has_a_line_for_every_twentieth_of_the_work():
    lines = lines_of(100, 2.0).splitlines()
    assert lines[0] == "measuring: 100 sequences to do"
    assert 18 <= len(lines) <= 21
    (line,) = [line for line in lines if re.match(r"measuring: (59|6[0-3]) of 100 ", line)]
    assert re.fullmatch(
        r".* \(6. %\), 50 tokens/s, KL so far 0\.200 ± 0\.010 nats, about (7[0-9]|8[0-4]) s left", line
    )


@pytest.mark.parametrize(
    ("sequences", "seconds", "low", "high"), [(10000, 0.001, 1, 4), (3, 600, 4, 8), (5000, 1, 150, 180)]
)
def test_a_short_run_has_few_lines_and_a_slow_one_is_never_silent_for_long(sequences, seconds, low, high):
    assert low <= len(lines_of(sequences, seconds).splitlines()) <= high


def test_a_second_part_of_the_work_is_counted_from_0():
    clock, file = Clock(), StringIO()
    with Progress(console=Console(file=file, width=100), clock=clock) as progress:
        for sequences in (40, 10):
            progress.set_total(sequences)
            for _ in range(sequences):
                clock.now += 5.0
                progress.add_scored(1, 50)
            progress.update_kl(number())  # of the first part alone
    assert "measuring: 10 of 10 sequences (100 %), 10 tokens/s\n" in file.getvalue()


def test_the_first_shard_shows_what_is_generated_and_the_time_left():
    """96 responses of 100 tokens in one batch of 200 s, which 40 s of scoring in four batches follow."""
    clock, file = Clock(), StringIO()
    with Progress(console=Console(file=file, width=120), clock=clock) as progress:
        progress.set_total(96)
        for _ in range(100):
            clock.now += 2.0
            progress.add_generated(96, 0.96)
        for _ in range(4):
            clock.now += 10.0
            progress.add_scored(24, 2400)
    first, *lines = file.getvalue().splitlines()
    assert first == "measuring: 96 sequences to do"
    told = r"measuring: 0 of 96 sequences, (\d+) generated \((\d+) %\), 48 tokens/s"
    shares = [tuple(map(int, pair)) for pair in re.findall(told, "\n".join(lines))]
    assert len(shares) > 15
    assert all(share == pytest.approx(100 * generated / 96, abs=2) for generated, share in shares)
    assert any(line.endswith("about 2 min left") for line in lines[:8])
    left = {line.split()[1]: line.rpartition(", ")[2] for line in lines}
    expected = {"24": "about 30 s left", "48": "about 20 s left", "72": "about 10 s left"}
    assert (seen := left.keys() & expected) and all(left[scored] == expected[scored] for scored in seen)


def test_responses_of_other_processes_count_as_generated():
    """Of two processes, this one generates 48 of 96 responses in 60 s, and hears of the others when they are scored."""
    clock, file = Clock(), StringIO()
    with Progress(console=Console(file=file, width=120), clock=clock) as progress:
        progress.set_total(96)
        for _ in range(60):
            clock.now += 1.0
            progress.add_generated(80, 0.8)
        clock.now += 30.0
        progress.add_scored(48, 4800)
        progress.add_scored(48, 4800)
        clock.now += 30.0
        progress.add_scored(0, 0)
    assert file.getvalue().splitlines()[-1].startswith("measuring: 96 of 96 sequences (100 %)")


def test_text_of_unknown_length_says_how_much_is_done():
    lines = lines_of(100, 2.0, total=False).splitlines()
    assert 5 <= len(lines) <= 8 and lines[-1].startswith("measuring: 90 sequences, ")


def test_a_log_holds_no_control_codes(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in lines_of(20, 7.0) and "\r" not in lines_of(20, 7.0)
    file = StringIO()
    Terminal(file=file).print("[red]a[/red] :smile:", style="bold")
    assert file.getvalue() == "[red]a[/red] :smile:\n"
    assert "\x1b" in lines_of(20, 7.0, terminal=True)


def test_a_number_without_an_error_is_not_followed_by_nan():
    unknown = number(math.nan, (math.nan, math.nan))
    assert with_error(unknown) == "0.20000 nats" and cells(unknown)[1:] == ("", "", "nats")
    assert cells(number(math.nan, (0.0, math.inf)))[1] == ""
    assert with_error(number()) == "0.200 ± 0.010 nats"
    assert cells(number(unit="probability")) == ("20.0", "10.0 to 30.0", "1.0", "%")


def test_lengths_of_time():
    expected = {4.2: "4 s", 89: "89 s", 91: "2 min", 3600: "60 min", 7200: "2.0 h"}
    assert {seconds: format_duration(seconds) for seconds in expected} == expected
