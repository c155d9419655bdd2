"""The figures of docs/leash_study.md from the runs of leash_spread.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from spread_statistics import (
    difference_of,
    mean_of,
    ratio_of_spreads,
    reached,
    reward_at,
    smoothed,
    spread_of,
)

ESTIMATORS = {"exact": ("exact", "loss"), "k1": ("k1", "reward"), "k3": ("k3", "loss")}
SCOPES = ("sequence", "token")
UNNAMED_SAMPLER = "one of before 2026-11-22, so that kleash now draws other responses from the same seeds"
"""In place of ``kleash.models.keyed_draws.SAMPLER`` for stored runs without it."""
Line = Mapping[str, Any]
Lines = Sequence[Line]
Figures = dict[str, Any]


def figures_of(lines: Lines) -> Figures:
    """All figures; ``lines`` are runs of one setting, in any order; runs may be missing."""
    setting = lines[0]["setting"]
    dates = sorted(line["date"] for line in lines)
    return {
        "setting": setting,
        "runs": len(lines),
        "first": dates[0],
        "last": dates[-1],
        **{
            name: sorted({words_of(line[name]) for line in lines})
            for name in ("commit", "machine", "versions")
        },
        "sampler": sorted({line.get("sampler", UNNAMED_SAMPLER) for line in lines}),
        "cpu_seconds": mean_of([line["cpu_seconds"] for line in lines])["value"],
        "estimators": estimators(lines, setting),
        "frontier": frontier(lines, setting),
    }


def words_of(where: Any) -> str:
    """A commit, a machine or package versions as text."""
    if isinstance(where, str):
        return where
    if "processor" in where:
        return f"{where['processor']} ({where['threads']} thread{'s'[: where['threads'] != 1]})"
    return ", ".join(f"{name} {version}" for name, version in where.items())


def estimators(lines: Lines, setting: Line) -> Figures | None:
    """Exact, k1 and k3 on the seeds that all three have; None if there are fewer than two such seeds."""
    runs_by_name: dict[str, dict[int, Line]] = {name: {} for name in ESTIMATORS}
    for line in lines:
        for name, kind in ESTIMATORS.items():
            kind_of_run = (*kind, "sequence", setting["beta"])
            if tuple(line[key] for key in ("kl", "place", "scope", "beta")) == kind_of_run:
                runs_by_name[name][line["seed"]] = line
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in runs_by_name.values())))
    if len(seeds) < 2:
        return None
    runs = {name: [by_seed[seed] for seed in seeds] for name, by_seed in runs_by_name.items()}
    return {
        "seeds": len(seeds),
        "of": {name: _figures_of_estimator(seed_runs, setting) for name, seed_runs in runs.items()},
        "against_exact": {name: _differences(runs[name], runs["exact"], setting) for name in ("k1", "k3")},
        "paths": {name: _mean_path(seed_runs, setting["window"]) for name, seed_runs in runs.items()},
    }


def _figures_of_estimator(runs: Lines, setting: Line) -> Figures:
    kls_at_reward = [kl for kl in _reached(runs, setting) if kl is not None]
    rewards, kls, errors = (_last(runs, name) for name in ("reward", "kl", "kl_error"))
    figures: Figures = {
        "end": {"reward": mean_of(rewards), "kl": mean_of(kls), "spread": spread_of(kls)},
        "equal_reward": {"reached": len(kls_at_reward)},
    }
    spread = figures["end"]["spread"]["value"]
    if spread:
        figures["end"]["from_sampling"] = sum(error**2 for error in errors) / len(errors) / spread**2
    if len(kls_at_reward) > 1:
        figures["equal_reward"] |= {"kl": mean_of(kls_at_reward), "spread": spread_of(kls_at_reward)}
    return figures


def _differences(runs: Lines, baseline: Lines, setting: Line) -> Figures:
    """Differences between an estimator's runs and those of the exact KL, paired by seed."""
    pairs = zip(_reached(runs, setting), _reached(baseline, setting), strict=True)
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    figures: Figures = {
        "end": {
            "reward": difference_of(_last(runs, "reward"), _last(baseline, "reward")),
            "kl": difference_of(_last(runs, "kl"), _last(baseline, "kl")),
            "spread": ratio_of_spreads(_last(runs, "kl"), _last(baseline, "kl")),
        },
        "equal_reward": {"both": len(both)},
    }
    if len(both) > 1:
        a, b = ([pair[side] for pair in both] for side in (0, 1))
        figures["equal_reward"] |= {"kl": difference_of(a, b), "spread": ratio_of_spreads(a, b)}
    return figures


def frontier(lines: Lines, setting: Line) -> Figures | None:
    """Reward and KL at the end of training for each scope and beta; None if there are no runs."""
    runs_by_point: dict[tuple[str, float], dict[int, Line]] = {}
    for line in lines:
        if (line["kl"], line["place"]) == ("exact", "loss") and line["beta"] in setting["betas"]:
            runs_by_point.setdefault((line["scope"], line["beta"]), {})[line["seed"]] = line
    points, differences = [], []
    for beta in setting["betas"]:
        sequence_runs, token_runs = (runs_by_point.get((scope, beta), {}) for scope in SCOPES)
        seeds = sorted(set(sequence_runs) & set(token_runs))
        if not seeds:
            continue
        both = dict(
            zip(
                SCOPES,
                ([by_seed[seed] for seed in seeds] for by_seed in (sequence_runs, token_runs)),
                strict=True,
            )
        )
        for scope, runs in both.items():
            figures = {name: mean_of(_last(runs, name)) for name in ("reward", "kl")}
            points.append({"scope": scope, "beta": beta, **figures})
        figures = {
            name: difference_of(*(_last(both[scope], name) for scope in SCOPES)) for name in ("reward", "kl")
        }
        differences.append({"beta": beta, **figures})
    if not points:
        return None
    return {
        "points": points,
        "sequence_less_token": differences,
        "at_equal_kl": _at_equal_kl(runs_by_point, setting),
    }


def _at_equal_kl(runs_by_point: Mapping[tuple[str, float], Mapping[int, Line]], setting: Line) -> Figures:
    """The reward at one KL on each seed's frontier, for the seeds that have all points."""
    curves = [runs_by_point.get((scope, beta), {}) for scope in SCOPES for beta in setting["betas"]]
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in curves)))
    rewards: dict[str, list[float]] = {scope: [] for scope in SCOPES}
    for seed in seeds:
        seed_rewards = []
        for scope in SCOPES:
            runs = [runs_by_point[scope, beta][seed] for beta in setting["betas"]]
            seed_rewards.append(reward_at(_last(runs, "kl"), _last(runs, "reward"), setting["equal_kl"]))
        if None not in seed_rewards:
            for scope, reward in zip(SCOPES, seed_rewards, strict=True):
                rewards[scope].append(reward)
    figures: Figures = {"seeds": len(seeds), "reached": len(rewards["token"])}
    if figures["reached"] > 1:
        figures |= {scope: mean_of(rewards[scope]) for scope in SCOPES}
        figures["sequence_less_token"] = difference_of(*(rewards[scope] for scope in SCOPES))
    return figures


def _reached(runs: Lines, setting: Line) -> list[float | None]:
    level, window = setting["equal_reward"], setting["window"]
    return [reached(run["rewards"], run["kls"], level, window) for run in runs]


def _mean_path(runs: Lines, window: int) -> list[list[float]]:
    """[KL, reward] of each smoothed step, mean over seeds."""
    paths = [
        list(zip(smoothed(run["kls"], window), smoothed(run["rewards"], window), strict=True)) for run in runs
    ]
    return [
        [round(sum(x) / len(x), 4) for x in zip(*points, strict=True)] for points in zip(*paths, strict=True)
    ]


def _last(runs: Lines, name: str) -> list[float]:
    return [run["held_out"][name] for run in runs]
