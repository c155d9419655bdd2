import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kleash.records import Number
from kleash.store.codec import decode, encode, parse_json, to_json
from kleash.store.summary import with_error

floats = st.floats(allow_nan=True, allow_infinity=True)


@dataclass(frozen=True, kw_only=True)
class Outer:
    number: Number
    many: tuple[Number, ...]
    named: dict[str, float]
    perhaps: Number | None
    word: str = "left out"


def numbers(value, error):
    return Number(value=value, unit="nats", standard_error=error, ci95=(value, error), warnings=("a", "b"))


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


@given(floats, floats)
def test_a_number_survives_json_whatever_it_is(value, error):
    text = to_json(numbers(value, error))
    back = decode(Number, json.loads(text))
    assert same(back.value, value) and same(back.standard_error, error)
    assert same(back.ci95[0], value) and same(back.ci95[1], error)
    assert back.warnings == ("a", "b") and isinstance(back.warnings, tuple)


@pytest.mark.parametrize("perhaps", [None, numbers(1.0, 0.1)])
def test_nested_records_come_back_as_they_were(perhaps):
    outer = Outer(number=numbers(2.0, 0.5), many=(numbers(3.0, 1.0),), named={"x": math.inf}, perhaps=perhaps)
    assert decode(Outer, json.loads(to_json(outer))) == outer


def test_keys_of_a_later_kleash_are_ignored_and_absent_ones_take_their_default():
    data = {"number": encode(numbers(1.0, 1.0)), "many": [], "named": {}, "perhaps": None, "new": 1}
    assert decode(Outer, data).word == "left out"


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.123456, 0.00234, "0.1235 ± 0.0023 nats"),
        (0.00198629, 8.4e-7, "0.00198629 ± 8.4e-07 nats"),
        (3.2e-9, 1.04e-10, "3.20e-09 ± 1.0e-10 nats"),
        (1.0, 1.24e-8, "1.000000000 ± 1.2e-08 nats"),
        (math.inf, math.nan, "inf nats"),
        (1234.5, 321.0, "1234 ± 321 nats"),
    ],
)
def test_digits_follow_the_error(value, error, text):
    number = numbers(value, error)
    assert with_error(number) == text and str(number).startswith(text)


@pytest.mark.parametrize(
    ("error", "ends"), [(math.nan, (0.0, math.inf)), (0.0, (0.0, math.inf)), (0.0, (0.1, 0.5))]
)
def test_an_error_that_is_not_known_is_words(error, ends):
    number = Number(value=0.3, unit="nats", standard_error=error, ci95=ends)
    assert not number.has_error and str(number).startswith("0.30000 nats, error unknown")
    exact = Number(value=0.3, unit="nats", standard_error=0.0, ci95=(0.3, 0.3))
    assert exact.has_error and str(exact) == "0.30000 nats exactly"


def test_what_is_not_finite_is_a_word_and_what_is_nested_too_deeply_an_error():
    assert encode({"a": math.inf, "b": [-math.inf, math.nan]}) == {"a": "Infinity", "b": ["-Infinity", "NaN"]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 200_000)
