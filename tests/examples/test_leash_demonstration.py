"""The example of one reward and three leashes: equal starts, and best-of-n against its definition."""

import sys
from itertools import combinations, pairwise

import leash_demonstration as example
import numpy as np
import pytest

from kleash.store import read_steps


def test_three_runs_start_alike(tmp_path, monkeypatch, capsys):
    words = ["--steps", "2", "--prompts", "3", "--draws", "4", "--tokens", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["leash_demonstration.py", *words])
    example.main()
    first = [read_steps(tmp_path / name)[0].metrics for name in example.BETAS]
    assert [metrics["beta"] for metrics in first] == [0.0, 0.3, 5.0]
    assert len({metrics[example.REWARD] for metrics in first}) == 1, "the same prompts, the same draws"
    assert all(metrics[example.KL] == 0 for metrics in first)
    printed = capsys.readouterr().out
    assert printed.count("best of") == 3 and printed.count("nats a response") == 6
    assert (tmp_path / "leashes.png").stat().st_size > 10_000


def test_reward_and_bound_of_the_kl_of_best_of_n_grow_with_n(tmp_path):
    points = example.sample_reference(tmp_path / "prompts.jsonl", 3, 4, 4)
    assert [point.n for point in points] == [1, 2, 4]
    rewards = [point.reward.value for point in points]
    assert rewards == sorted(rewards)
    assert points[0].bound == 0 and all(a.bound < b.bound for a, b in pairwise(points))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_best_of_n_reward_is_mean_over_all_subsets(n):
    rewards = np.array([[3.0, 1.0, 1.0, 0.0, 7.0], [2.0, 2.0, 2.0, -1.0, 0.5]])
    every = [np.mean([max(chosen) for chosen in combinations(row, n)]) for row in rewards]
    assert example.best_of_n_reward(rewards, n).value == pytest.approx(np.mean(every))
