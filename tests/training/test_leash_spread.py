"""The study of the leash: its runs can be broken off, its page says what the runs say."""

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import leash_study_words
import make_leash_study_page as tool
import numpy as np
import pytest
from scipy import stats

X, Y = np.random.default_rng(1).multivariate_normal([3.0, 2.5], [[0.5, 0.3], [0.3, 0.9]], size=12).T


@pytest.fixture(scope="module")
def study(root: Path) -> Iterator[SimpleNamespace]:
    """The modules of the benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")
        yield SimpleNamespace(
            command=import_module("leash_spread"),
            runs=import_module("spread_runs"),
            figures=import_module("spread_figures"),
        )


def assert_alike(found: Any, stored: Any) -> None:
    """That both hold the same, but for the roundings of another scipy."""
    if isinstance(stored, dict):
        assert found.keys() == stored.keys()
        for name in stored:
            assert_alike(found[name], stored[name])
    elif isinstance(stored, list):
        for one, other in zip(found, stored, strict=True):
            assert_alike(one, other)
    else:
        assert found == (pytest.approx(stored, rel=1e-9) if isinstance(stored, float) else stored)


def line(setting: dict[str, Any], seed: int, reward: float, nats: float, **kind: Any) -> dict[str, Any]:
    """A made-up run, whose path rises evenly to twice its last reward and KL."""
    up = [2 * (step + 1) / setting["steps"] for step in range(setting["steps"])]
    common = {"kl": "exact", "place": "loss", "scope": "sequence", "beta": setting["beta"], "seed": seed}
    return {
        **common,
        **kind,
        "setting": setting,
        "rewards": [reward * x for x in up],
        "kls": [nats * x for x in up],
        "held_out": {"reward": reward, "reward_error": 0.01, "kl": nats, "kl_error": 0.3},
        "cpu_seconds": 8.0,
        "date": f"2026-11-21T16:{seed:02d}:00+00:00",
        "commit": "abc1234",
        "machine": {"processor": "a processor", "threads": 1},
        "versions": {"torch": "2.13.0"},
        **({"sampler": "Gumbel-max"} if seed else {}),
    }


@pytest.fixture
def lines(study) -> list[dict[str, Any]]:
    """Twelve seeds of the estimators, of which k1 strays twice as far; three seeds of each beta and scope."""
    setting = json.loads(json.dumps(vars(study.runs.Setting())))
    found = [line(setting, seed, 1.0, X[seed]) for seed in range(12)]
    found += [
        line(setting, seed, 1.1, 3.5 + 2 * (X[seed] - 3.0), kl="k1", place="reward") for seed in range(12)
    ]
    found += [line(setting, seed, 1.0, Y[seed], kl="k3") for seed in range(11)]
    for beta in setting["betas"]:
        for seed in range(3):
            rest = {"beta": beta}
            kl = (1 + 0.1 * seed) / beta
            found.append(line(setting, seed, kl**0.5, kl, scope="token", **rest))
            if beta != setting["beta"]:
                found.append(line(setting, seed, 1.2 * kl**0.5, kl, **rest))
    return found


def test_only_seeds_of_all_estimators_are_compared(study, lines):
    found = study.figures.figures_of(lines)["estimators"]
    assert found["seeds"] == 11
    spread = found["of"]["exact"]["end"]["spread"]
    assert spread["value"] == pytest.approx(stats.tstd(X[:11]))
    assert found["of"]["exact"]["end"]["from_sampling"] == pytest.approx(0.09 / stats.tvar(X[:11]))
    beside = found["against_exact"]["k1"]["end"]
    assert beside["spread"]["value"] == pytest.approx(2.0)
    assert beside["reward"]["value"] == pytest.approx(0.1)
    assert beside["kl"]["value"] == pytest.approx(np.mean(3.5 + 2 * (X[:11] - 3) - X[:11]))
    assert found["against_exact"]["k3"]["end"]["spread"]["value"] == pytest.approx(
        stats.tstd(Y[:11]) / stats.tstd(X[:11])
    )


def test_linear_path_gives_its_slope_at_equal_reward(study, lines):
    at = study.figures.figures_of(lines)["estimators"]["of"]["k1"]["equal_reward"]
    assert at["reached"] == 11
    level = lines[0]["setting"]["equal_reward"]
    assert at["kl"]["value"] == pytest.approx(np.mean(3.5 + 2 * (X[:11] - 3)) * level / 1.1)


def test_frontiers_are_compared_by_beta_and_at_equal_kl(study, lines):
    found = study.figures.figures_of(lines)["frontier"]
    of = {(one["scope"], one["beta"]): one for one in found["points"]}
    assert of["token", 0.6]["kl"]["value"] == pytest.approx(1.1 / 0.6)
    assert of["sequence", 0.6]["reward"]["n"] == 3
    differences = {one["beta"]: one for one in found["sequence_less_token"]}
    assert differences[0.6]["kl"]["value"] == pytest.approx(0.0)
    assert differences[0.6]["reward"]["value"] == pytest.approx(
        0.2 * np.mean(np.sqrt(np.array([1, 1.1, 1.2]) / 0.6))
    )
    at = found["at_equal_kl"]
    assert (at["seeds"], at["reached"]) == (3, 3)
    assert at["token"]["value"] == pytest.approx(math.sqrt(lines[0]["setting"]["equal_kl"]))


def test_page_says_which_parts_are_not_measured(study, lines):
    few = study.figures.figures_of(lines[:1])
    assert few["estimators"] is None
    assert few["frontier"] is None
    page = tool.make_files({"figures": few})[tool.PAGE]
    assert page.count("Not measured yet") == 2
    assert "1 runs" in page
    assert list(tool.make_files(None)) == [tool.PAGE]


def test_page_states_ratios_intervals_and_sides(study, lines):
    figures = study.figures.figures_of(lines)
    made = tool.make_files({"figures": figures})
    page, image = made[tool.PAGE], made[tool.IMAGE]
    assert "11 seeds, beta 0.3" in " ".join(page.split())
    assert "Sampler of the responses: Gumbel-max and one of before 2026-11-22, so that" in " ".join(
        page.split()
    )
    end = figures["estimators"]["against_exact"]["k1"]["end"]["spread"]
    low, high = end["ci95"]
    assert f"with k1 is 2.00 ({low:.2f} to {high:.2f}) times that with exact: higher." in " ".join(
        page.split()
    )
    assert "{" not in page
    assert len(ElementTree.fromstring(image).findall("{*}circle")) == 3 + 2 * len(
        lines[0]["setting"]["betas"]
    )


def test_picture_is_drawn_to_scale(study, lines):
    figures = study.figures.figures_of(lines)
    image = ElementTree.fromstring(tool.make_files({"figures": figures})[tool.IMAGE])
    circles = [(float(one.get("cx")), float(one.get("cy"))) for one in image.findall("{*}circle")]
    spreads = [one["end"]["spread"] for one in figures["estimators"]["of"].values()]
    heights = [260 - y for _, y in circles[:3]]
    np.testing.assert_allclose(
        np.array(heights) / heights[0], [s["value"] / spreads[0]["value"] for s in spreads], atol=0.01
    )
    thick = [one for one in image.findall("{*}line") if one.get("stroke-width") == "2"]
    ends = [sorted(260 - float(one.get(end)) for end in ("y1", "y2")) for one in thick]
    np.testing.assert_allclose(
        np.array(ends) / heights[0], [np.divide(s["ci95"], spreads[0]["value"]) for s in spreads], atol=0.01
    )
    points = [
        one
        for scope in ("sequence", "token")
        for one in figures["frontier"]["points"]
        if one["scope"] == scope
    ]
    points.sort(key=lambda one: (one["scope"], one["kl"]["value"]))
    for side, found in (
        ("kl", [x - 390 for x, _ in circles[3:]]),
        ("reward", [260 - y for _, y in circles[3:]]),
    ):
        values = [one[side]["value"] for one in points]
        np.testing.assert_allclose(np.array(found) / max(found), np.array(values) / max(values), atol=0.01)


@pytest.mark.parametrize(
    ("interval", "null", "word"),
    [
        ([0.1, 0.3], 0, "higher"),
        ([-0.3, -0.1], 0, "lower"),
        ([0.9, 1.2], 1, "not significant"),
        ([0.0, 1.0], 0, "not significant"),
    ],
)
def test_side_of_an_interval_in_words(interval, null, word):
    assert leash_study_words.side({"value": 0.2, "ci95": interval}, null) == word


def test_committed_page_matches_committed_results(root):
    path = root / "benchmarks" / "results" / "leash_spread.json"
    for name, text in tool.make_files(json.loads(path.read_text(encoding="utf-8"))).items():
        assert (root / "docs" / name).read_text(encoding="utf-8") == text, (
            "python tools/make_leash_study_page.py"
        )


def test_committed_figures_match_committed_runs(study, root):
    folder = root / "benchmarks" / "results"
    runs = [
        json.loads(text) for text in (folder / "leash_spread.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    mine = study.command.runs_of_setting(runs, study.runs.Setting())
    figures = json.loads((folder / "leash_spread.json").read_text(encoding="utf-8"))["figures"]
    then = mine[: figures["runs"]]  # a study that is under way has more
    assert_alike(study.figures.figures_of(then), figures)


def test_run_order_balances_seeds_at_every_prefix(study):
    setting = study.runs.Setting()
    runs = study.runs.plan_runs(setting, 20, 5)
    assert len(runs) == len({run.key for run in runs}) == 20 * 3 + 5 * 7
    half = [run.seed for run in runs[:48] if run.scope == "sequence" and run.beta == setting.beta]
    assert sorted(half)[:27] == sorted(list(range(9)) * 3)
    assert {run.beta for run in runs[:48] if run.scope == "token"} == set(setting.betas)
    assert len(study.runs.plan_runs(setting, 20, 5, "estimators")) == 60
    assert len(study.runs.plan_runs(setting, 20, 5, "frontier")) == 40


def test_interrupted_study_resumes_after_last_whole_run(study, tmp_path, capsys):
    setting = replace(
        study.runs.Setting(), prompts=2, max_new_tokens=12, steps=2, held_out=2, held_out_samples=2, window=2
    )
    runs = [run for run in study.runs.plan_runs(setting, 2, 0) if run.kl != "k3"]
    path = tmp_path / "leash_spread.jsonl"
    assert len(study.command.study(setting, tmp_path, runs[:3])) == 3
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + whole[:100], encoding="utf-8")
    done = study.command.study(setting, tmp_path, runs)
    assert path.read_text(encoding="utf-8").startswith(whole)
    assert [(one["kl"], one["seed"]) for one in done] == [(run.kl, run.seed) for run in runs]
    first = [one["rewards"][0] for one in done if one["seed"] == 0]
    assert first[0] == first[1]
    assert all(one["kls"][0] == 0 and len(one["kls"]) == 2 for one in done)
    assert all(one["held_out"]["kl"] > 0 for one in done)
    study.command.study(setting, tmp_path, [*runs, replace(runs[0], seed=5)], minutes=0)
    assert "1 runs are left" in capsys.readouterr().out
    assert study.command.runs_of_setting(done, study.runs.Setting()) == []
