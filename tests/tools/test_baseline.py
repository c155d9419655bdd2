"""The comparison of stored numbers notices every change, and takes a rename for none."""

import baseline
import numpy as np
import pytest
import torch


def records(value: object) -> dict[str, object]:
    collected: dict[str, object] = {}
    baseline.collect("group", value, collected)
    return collected


VALUE = {
    "small": torch.tensor([0.1, 0.2]),
    "large": np.linspace(0.0, 1.0, 1000),
    "half": torch.tensor([1.0, 2.0]).bfloat16(),
    "number": 0.3,
    "count": 4,
    "word": "nats",
    "sentence": "This may be reworded.",
    "names": np.array(["a", "b"], dtype=object),
    "nothing": None,
    "list": [1.0, float("nan")],
    "seconds": 12.5,
}


def test_equal_values_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert baseline.compare(records(VALUE), records(VALUE)) == 0
    assert "12 records, 0 different, 0 sentences reworded, 0 new" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("small", torch.tensor([0.1, 0.2 + 1.5e-8]), "1 of 2 entries differ, by up to 1.49e-08"),
        (
            "large",
            np.linspace(0.0, 1.0, 1000) + 1e-16 * (np.arange(1000) == 0),
            "1 of 24 sampled entries differ",
        ),
        (
            "large",
            np.where(np.arange(1000) == 1, 0.0, np.linspace(0.0, 1.0, 1000)),
            "0 of 24 sampled entries",
        ),
        ("half", torch.tensor([1.0, 2.015625]).bfloat16(), "by up to 0.0156"),
        ("half", torch.tensor([1.0, 2.0]), "bfloat16 [2] -> float32 [2]"),
        ("number", 0.3 + 6e-17, "0.3 -> 0.30000000000000004"),
        ("count", 5, "4 -> 5"),
        ("count", True, "4 -> True"),
        ("word", "bits", "'nats' -> 'bits'"),
        ("names", np.array(["a", "c"], dtype=object), "another content"),
        ("nothing", 0.0, "None -> "),
        ("list", [1.0, 2.0], "nan -> 2.0"),
        ("list", [1.0], "is missing now"),
    ],
)
def test_every_change_is_a_difference(
    name: str, changed: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baseline.compare(records(VALUE), records({**VALUE, name: changed})) == 1
    assert message in capsys.readouterr().out


def test_sentences_and_ignored_fields_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    changed = {**VALUE, "sentence": "This was reworded.", "seconds": 1.0, "additional": 2.0}
    assert baseline.compare(records(VALUE), records(changed)) == 0
    assert "1 sentences reworded, 1 new" in capsys.readouterr().out
    assert baseline.compare(records(VALUE), records(changed), texts=True) == 1


def test_a_renamed_field_is_the_same_field() -> None:
    assert baseline.compare(records({"doubts": ["word"]}), records({"warnings": ["word"]})) == 0
    assert baseline.compare(records({"doubts": ["word"]}), records({"warnings": ["other"]})) == 1


def test_the_stored_file_is_read_back_and_compared(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"group": lambda: iter([("value", VALUE)])}
    monkeypatch.setattr(baseline, "GROUPS", groups)
    for _ in range(2):
        assert baseline.main(["write", str(tmp_path), "--only", "group"]) == 0
    assert baseline.main(["compare", str(tmp_path), "--only", "group"]) == 0
    groups["group"] = lambda: iter([("value", {**VALUE, "number": 0.4})])
    assert baseline.main(["compare", str(tmp_path), "--only", "group"]) == 1
