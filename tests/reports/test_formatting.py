"""Formatting of numbers and untrusted text."""

import math
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kleash.records import MeasureJob, Number
from kleash.reports.formatting import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_value,
    keep_beginning,
    keep_end,
    make_visible,
    measure_command,
    short_names,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("word", "word"),
        (" word", "␣word"),
        ("two words ", "two words␣"),
        ("   ", "␣␣␣"),
        ("", "∅"),
        ("\n", "⏎"),
        ("a\n\n\tb", "a⏎⏎⇥b"),
        ("\r", "⟨U+000D⟩"),
        ("\x00\x1b[31m", "⟨U+0000⟩⟨U+001B⟩[31m"),
        ("\u202eabc", "⟨U+202E⟩abc"),
        ("\u00a0", "⟨U+00A0⟩"),
        ("\u200d", "⟨U+200D⟩"),
        ("👩\u200d👧", "👩\u200d👧"),
        ("\u0301", "◌\u0301"),
        ("\ufffd", "\ufffd"),
        ("\ud800", "⟨U+D800⟩"),
        ("שלום", "שלום"),
        ("<b>", "<b>"),
    ],
)
def test_invisible_characters_are_made_visible(text, expected):
    assert make_visible(text) == expected


@given(st.text(alphabet=st.characters(max_codepoint=0x3000), max_size=8))
def test_no_text_looks_empty(text):
    assert make_visible(text).strip()


def test_shortened_text_has_an_ellipsis():
    assert keep_beginning("abc", 3) == "abc"
    assert keep_beginning("abcd efgh", 5) == "abcd …"
    assert keep_end("runs/a-long-name/step-100", 10) == "…-step-100"[:1] + "/step-100"
    assert keep_end("step", 10) == "step"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (1.0, "1.00"),
        (-22.04, "−22.0"),
        (1234.0, "1234"),
        (0.00012345, "0.000123"),
        (3.21e-8, "3.21 × 10⁻⁸"),
        (6.6e9, "6.60 × 10⁹"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "NaN"),
    ],
)
def test_values_have_three_significant_digits(value, expected):
    assert format_value(value) == expected


def measured(value, error, unit="nats"):
    return Number(value=value, unit=unit, standard_error=error, ci95=(value - 2 * error, value + 2 * error))


def test_counts_percentages_and_bytes_in_the_largest_decimal_unit_that_fits():
    assert format_count(1234567) == "1\u202f234\u202f567"
    assert [*map(format_percent, (0.123456, 1.0))] == ["12.3\u202f%", "100\u202f%"]
    sizes = (0, 999, 1_000, 8_270_000, 4_900_000_000, 3_210_000_000_000)
    expected = ["0 bytes", "999 bytes", "1.00 kB", "8.27 MB", "4.90 GB", "3.21 TB"]
    assert [format_bytes(size) for size in sizes] == expected
    assert format_bytes(None) == UNKNOWN


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (measured(0.218312, 0.0095), ("0.2183", "0.0095", "0.1993 to 0.2373", "nats")),
        (measured(0.9123, 0.0031, "probability"), ("91.23", "0.31", "90.61 to 91.85", "%")),
        (replace(measured(math.inf, math.nan), ci95=(0.1, math.inf)), ("∞", "–", "–", "nats")),
        (replace(measured(math.nan, math.inf), ci95=(0.1, math.inf)), ("NaN", "∞", "0.1 to ∞", "nats")),
    ],
)
def test_a_number_is_rounded_to_its_error(number, expected):
    text = format_number(number)
    assert (text.value, text.error, text.interval, text.unit) == expected


def test_the_command_has_the_options_that_differ_from_their_defaults():
    job = MeasureJob(policy="my models/p", reference="r", text="it's.txt", top_p=0.9, quiet=True)
    words = shlex.split(measure_command({**job.settings(), "resume": True, "quiet": True, "unknown": 3}))
    options = ["--policy", "my models/p", "--reference", "r", "--text", "it's.txt"]
    assert words == ["kleash", "measure", *options, "--top-p", "0.9", "--quiet"]
    assert measure_command({}) == "kleash measure"


def test_names_with_one_end_are_shown_without_it():
    steps = [f"/runs/a-long-name-{run}/checkpoints/step-1000/model" for run in (17, 18)]
    assert short_names(steps, 24) == [f"/runs/a-long-name-{run}…" for run in (17, 18)]
    assert short_names(["a" * 30, "b" * 30], 24) == [keep_end("a" * 30), keep_end("b" * 30)]
    assert short_names([*steps, "x" + steps[0]], 16) == [*steps, "x" + steps[0]], "two would look alike"
