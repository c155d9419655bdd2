"""Folders of an older schema: fields that were renamed since are read under their names of today."""

import dataclasses
import json
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from shutil import copytree

import pytest

import kleash.store
from kleash.records import Audit, Measurement, Number, PPOJob, TrainingFolder, read_steps
from kleash.reports.training import write_training_report
from kleash.store.codec import decode
from kleash.store.renamed_fields import RENAMED_FIELDS
from kleash.training.ppo.checkpointing import load_progress

OLD = Path(__file__).with_name("schema_1")
HOMES = (
    *(f"kleash.store.{module.name}" for module in iter_modules(kleash.store.__path__)),
    "kleash.training.ppo.checkpointing",
)


def test_the_warnings_of_a_measurement_of_schema_1_are_read() -> None:
    written = json.loads((OLD / "measured" / "measurement.json").read_text())
    measurement = Measurement.read(OLD / "measured")
    assert written["schema"] == 1
    for name, number in written["per_token"].items():
        assert measurement.per_token[name].warnings == tuple(number["doubts"]), name
    assert any(number.warnings for number in measurement.per_token.values())
    for name, record in written["estimators"].items():
        assert measurement.estimators[name].warnings == tuple(record["doubts"])
        assert measurement.estimators[name].bias.warnings == tuple(record["bias"]["doubts"])


def test_the_warnings_of_the_run_itself_are_read() -> None:
    written = json.loads((OLD / "measured" / "measurement.json").read_text())
    assert decode(Measurement, {**written, "doubts": ["read me"]}).warnings == ("read me",)


def test_the_alerts_of_a_training_run_of_that_time_are_read() -> None:
    steps = read_steps(OLD / "trained")
    (alert,) = [alert for record in steps for alert in record.alerts]
    assert alert.kind == "far_from_target"
    result = TrainingFolder(OLD / "trained").result()
    assert result is not None and result.alerts == (alert.sentence,)
    assert load_progress(OLD / "trained" / "checkpoints" / "step-000014").alerts == (alert.sentence,)


def test_the_options_of_a_training_run_of_that_time_are_read_and_reported(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    copytree(OLD / "trained", folder)
    settings = TrainingFolder(folder).header().settings
    assert (settings["gamma"], settings["gae_lambda"], settings["on_hacking"]) == (1.0, 0.95, "warn")
    assert settings.keys() <= {field.name for field in dataclasses.fields(PPOJob)} | {"algorithm"}
    page = write_training_report(folder).read_text(encoding="utf-8")
    assert "--lora-rank 2" in page and "--watch" not in page and "--decay" not in page


def test_the_rows_of_an_audit_of_schema_2_are_read() -> None:
    written = json.loads((OLD / "audited" / "audit.json").read_text())
    audit = Audit.from_json((OLD / "audited" / "audit.json").read_text())
    assert written["schema"] == audit.schema == 2
    assert [row.pair for row in audit.values] == [row["world"] for row in written["values"]]
    assert [row.pair for row in audit.gradients] == [row["world"] for row in written["gradients"]]
    assert [row.kind for row in audit.zones] == [row["of"] for row in written["zones"]] != []
    errors = [row.unavoidable_error for row in audit.accuracy]
    assert errors == [row["forced"] for row in written["accuracy"]] != []


def test_the_name_of_today_wins() -> None:
    both = {"value": 1.0, "unit": "nats", "doubts": ["old"], "warnings": ["new"]}
    assert decode(Number, {**both, "standard_error": 0.0, "ci95": [1.0, 1.0]}).warnings == ("new",)


@pytest.mark.parametrize("name", sorted(RENAMED_FIELDS.keys() - {"settings"}))
def test_every_entry_is_of_a_record_that_has_the_new_name_and_not_the_old(name: str) -> None:
    (record,) = {getattr(import_module(home), name) for home in HOMES if hasattr(import_module(home), name)}
    fields = {field.name for field in dataclasses.fields(record)}
    assert set(RENAMED_FIELDS[name].values()) <= fields and not set(RENAMED_FIELDS[name]) & fields
