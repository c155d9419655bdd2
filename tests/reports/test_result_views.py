"""A result in Python: its summary, its data frames, its picture, and reading it back."""

import json
import shutil
from dataclasses import replace
from inspect import signature
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest
from synthetic_audit import plain_audit
from synthetic_run import HOSTILE, synthetic_comparison, synthetic_sweep, write_sweep_folder
from synthetic_training import write_hostile_run

import kleash
from kleash.errors import OptionError, RunFolderError
from kleash.store.codec import encode
from kleash.store.measurement_summary import all_warnings

pandas = pytest.importorskip("pandas")


def test_the_summary_has_all_warnings_and_notes_and_the_repr_counts_them_in_six_lines(run):
    measurement = run[1]
    lines = measurement.summary().split("\n")
    other = f"KL(reference ‖ policy): {measurement.per_token['kl_reference_policy'].rounded} nats (95 % "
    assert lines[0].startswith("KL(policy ‖ reference) per token: ") and lines[1].startswith(other)
    assert lines[-2:] == [f"note: {measurement.notes[0]}", f"warning: {all_warnings(measurement)[0]}"]
    assert len(repr(measurement).split("\n")) == 6 and str(measurement) == repr(measurement)
    assert repr(measurement).endswith("1 warning, 1 note; see .summary(), .to_pandas() and .plot()")


def test_names_cannot_break_a_line_or_reach_the_terminal(run):
    hostile = "a\nwarning: \x1b[2J\u202e"
    models = {role: replace(model, path=hostile) for role, model in run[1].models.items()}
    text = replace(run[1], models=models).summary()
    assert "policy: a\\u000awarning: \\u001b[2J\\u202e\n" in text
    assert all(character == "\n" or character.isprintable() for character in text)


def test_the_ranking_of_a_sweep_is_in_its_summary_with_one_note_of_all_candidates():
    sweep = synthetic_sweep(("q8", "q6", "q4"), ())
    noted = [replace(one, notes=(f"the policy {one.name} is packed",)) for one in sweep.candidates]
    lines = replace(sweep, candidates=tuple(noted)).summary().split("\n")
    assert [line.split()[0] for line in lines[2:5]] == ["q8", "q6", "q4"]
    assert lines.count("note: the policy is packed") == 1


def test_the_tables_of_a_run_are_data_frames(run, tmp_path):
    folder, measurement = run
    frames = kleash.open(folder).to_pandas()
    for name, frame in zip(("tokens", "sequences"), frames, strict=True):
        table = pq.read_table(folder / name)
        assert set(frame.columns) == set(table.column_names)
        assert list(frame.index) == list(range(table.num_rows))
    assert len(frames.tokens) == measurement.counts.tokens
    expected = pq.read_table(folder / "tokens")["kl_policy_reference"].to_numpy().astype(float).mean()
    assert frames.tokens["kl_policy_reference"].astype(float).mean() == pytest.approx(expected, rel=1e-9)
    with pytest.raises(RunFolderError, match=r"kleash\.open"):
        replace(measurement, folder=None).to_pandas()
    (shutil.copytree(folder, tmp_path / "cut") / "tokens" / "part-00001.parquet").unlink()
    with pytest.raises(RunFolderError, match=r"tokens/part-00001\.parquet is missing"):
        kleash.open(tmp_path / "cut").to_pandas()


def test_other_results_are_a_frame_of_their_numbers(tmp_path):
    frame = synthetic_comparison().to_pandas()
    assert {"run", "name", "value", "ci95"} <= set(frame.columns) and len(frame) > 10
    training = kleash.open(write_hostile_run(tmp_path / "training"))
    with pytest.raises(OptionError, match=r"kleash\.records\.read_steps\(folder\)$"):
        training.to_pandas()
    with pytest.raises(OptionError, match="no picture of a TrainingResult"):
        training.plot()


def test_a_figure_is_the_picture(run):
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    before = dict(rcParams)
    figure = run[1].plot()
    assert isinstance(figure, Figure) and dict(rcParams) == before
    titles = [axes.get_title("left").split("\n")[0] for axes in figure.axes if axes.axison]
    assert titles[0] == "KL and one-sample estimators" and 2 <= len(titles) <= 4
    assert run[1].per_token["kl_policy_reference"].rounded in figure.get_suptitle()
    assert synthetic_sweep().plot().axes


def test_any_result_is_read_back(run, tmp_path):
    folder, measurement = run
    assert kleash.open(str(folder)) == measurement  # with numbers that are NaN
    sweep = write_sweep_folder(tmp_path / "sweep", synthetic_sweep(HOSTILE[:3]))
    assert kleash.open(tmp_path / "sweep") == sweep != measurement
    trained = kleash.open(write_hostile_run(tmp_path / "training"))
    assert trained.algorithm == "ppo"
    audits = tmp_path / "audits.json"
    audits.write_text(json.dumps({"audits": encode([plain_audit(), plain_audit()])}))
    assert kleash.open(audits) == (plain_audit(), plain_audit())
    audits.write_text(plain_audit().to_json())
    assert kleash.open(audits) == (plain_audit(),)
    kinds = set(get_args(signature(kleash.open).return_annotation)) - {Any}  # a type checker asks all of them
    assert kinds >= {type(measurement), type(sweep)} and all(hasattr(kind, "to_json") for kind in kinds)
    assert "Measurement" in str(signature(kleash.compare).parameters["folders"].annotation)


def test_what_is_no_result_is_refused(run, tmp_path):
    unfinished = write_hostile_run(tmp_path / "training")
    (unfinished / "training.json").unlink()
    checksums = unfinished / "checksums.jsonl"
    lines = checksums.read_text().splitlines(keepends=True)
    checksums.write_text("".join(line for line in lines if '"training.json"' not in line))
    (tmp_path / "old.json").write_text('{"audits": [{"schema": 1}]}')
    (tmp_path / "other.json").write_text("[]")
    for path, word in (
        (tmp_path, "measurement.json"),
        (tmp_path / "nothing", "there is no folder .*nothing$"),
        (unfinished, "not finished"),
        (tmp_path / "old.json", "schema"),
        (tmp_path / "other.json", "cannot be read as audits .* give the folder of any other result"),
    ):
        with pytest.raises(RunFolderError, match=word):
            kleash.open(path)
