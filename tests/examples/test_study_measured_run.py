"""Case (e): a run folder with known numbers, against plain numpy."""

from pathlib import Path

import numpy as np
import pytest
from estimator_study.samples import measured_case
from synthetic_run import write_synthetic_run

from kleash.errors import OptionError, RunFolderError
from kleash.records import RunFolder

READ = ["prompt_id", "logp_policy", "logp_reference", "kl_policy_reference"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "plain"
    write_synthetic_run(path, prompts=35, tokens=40, hostile=False, shards=3)
    return path


def columns(folder, names=READ):
    parts = list(RunFolder(folder).token_parts(names))
    return [np.concatenate([part[name] for part in parts]).astype(np.float64) for name in names]


def clustered(values, prompts):
    """Mean, and the error that takes tokens of one prompt together, by the textbook."""
    mean = values.mean()
    names = np.unique(prompts)
    sums = np.array([(values[prompts == name] - mean).sum() for name in names])
    count = len(names)
    return mean, np.sqrt(count / (count - 1) * (sums**2).sum()) / len(values)


FUNCTIONS = {
    "k1": lambda u: u,
    "abs": np.abs,
    "k2": lambda u: u * u / 2,
    "k3": lambda u: np.exp(-u) - 1 + u,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_cell_with_its_error(folder, name):
    case = measured_case(folder)
    prompts, logp, logq, exact = columns(folder)
    values = FUNCTIONS[name](logp - logq)
    row = case.row(name)
    for found, wanted in ((row.value, values), (row.bias, values - exact), (row.negative_share, values < 0)):
        mean, error = clustered(wanted.astype(np.float64), prompts)
        assert found.value == pytest.approx(mean, rel=1e-9)
        assert found.standard_error == pytest.approx(error, rel=1e-7)
    missed = values - exact
    spread = missed.std()
    error = clustered((missed - missed.mean()) ** 2, prompts)[1] / (2 * spread)
    assert (row.standard_deviation.value, row.standard_deviation.standard_error) == pytest.approx(
        (spread, error), rel=1e-7
    )
    assert row.gradient_error is None
    assert "unknown" in case.notes[1]


def test_the_exact_column_and_the_words(folder):
    case = measured_case(folder)
    prompts, _, _, exact = columns(folder)
    mean, error = clustered(exact, prompts)
    assert (case.kl.value, case.kl.standard_error) == pytest.approx((mean, error), rel=1e-7)
    assert case.row("exact").value == case.kl
    assert case.row("exact").bias.value == case.row("exact").standard_deviation.value == 0
    assert case.title == "Measured: shipped:policy against shipped:reference"
    assert f"one of {len(exact)} tokens of 70 responses" in case.sample


def test_the_controlled_estimate_misses_by_least(folder):
    row = measured_case(folder).row("k1 + a(w − 1)")
    _, logp, logq, exact = columns(folder)
    change = np.expm1(logq - logp)
    missed = {a: logp - logq + a * change - exact for a in np.linspace(-2, 3, 1001)}
    a = min(missed, key=lambda a: (missed[a] ** 2).mean())
    best = (missed[a] ** 2).mean() ** 0.5
    assert np.hypot(row.bias.value, row.standard_deviation.value) == pytest.approx(best, rel=1e-3)
    assert float(measured_case(folder).notes[0].split("a = ")[1].split(",")[0]) == pytest.approx(a, abs=6e-3)


def test_off_policy_responses_carry_importance_weights(tmp_path, monkeypatch):
    plain = write_synthetic_run(tmp_path / "one", prompts=31, tokens=24, hostile=False)
    job = {**plain.job, "responses": "rollouts.jsonl"}
    write_synthetic_run(tmp_path / "two", prompts=31, tokens=24, hostile=False, changes={"job": job})
    read = RunFolder.token_parts

    def half_as_likely(self, names):
        for part in read(self, names):
            yield {**part, "logp_sampled": part["logp_policy"] - np.float32(np.log(2))}

    monkeypatch.setattr(RunFolder, "token_parts", half_as_likely)
    one, two = measured_case(tmp_path / "one"), measured_case(tmp_path / "two")
    for name in FUNCTIONS:
        assert two.row(name).value.value == pytest.approx(2 * one.row(name).value.value, rel=1e-6)
    _, logp, logq, exact = columns(tmp_path / "two")
    controlled, change = two.row("k1 + a(w − 1)"), np.expm1(logq - logp)
    best = min(
        (((2 * (logp - logq + a * change) - exact) ** 2).mean()) ** 0.5 for a in np.linspace(-2, 3, 1001)
    )
    assert np.hypot(controlled.bias.value, controlled.standard_deviation.value) == pytest.approx(
        best, rel=1e-3
    )


@pytest.mark.usefixtures("unhooked")
def test_what_cannot_be_studied(tmp_path):
    with pytest.raises(RunFolderError, match=r"has no measurement\.json; is it a run folder\?"):
        measured_case(tmp_path)
    changes = {"estimators": {}, "estimators_note": "left out: these tokens are the text's"}
    write_synthetic_run(tmp_path / "text", prompts=4, tokens=24, hostile=False, changes=changes)
    with pytest.raises(OptionError, match="left out: these tokens are the text's; study a run whose"):
        measured_case(tmp_path / "text")
