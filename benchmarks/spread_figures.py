"""From the runs of leash_spread.py to the figures of its page."""

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
Line = Mapping[str, Any]
Lines = Sequence[Line]
Figures = dict[str, Any]


def figures_of(lines: Lines) -> Figures:
    """All figures; ``lines`` are runs of one setting, in any order, any of them missing."""
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
        "cpu_seconds": mean_of([line["cpu_seconds"] for line in lines])["value"],
        "estimators": estimators(lines, setting),
        "frontier": frontier(lines, setting),
    }


def words_of(where: Any) -> str:
    """A commit, a machine or versions in words."""
    if isinstance(where, str):
        return where
    if "processor" in where:
        return f"{where['processor']} ({where['threads']} thread{'s'[: where['threads'] != 1]})"
    return ", ".join(f"{name} {version}" for name, version in where.items())


def estimators(lines: Lines, setting: Line) -> Figures | None:
    """Exact, k1 and k3 on the seeds that all three have; None where there are not two of them."""
    of: dict[str, dict[int, Line]] = {name: {} for name in ESTIMATORS}
    for line in lines:
        for name, kind in ESTIMATORS.items():
            wanted = (*kind, "sequence", setting["beta"])
            if tuple(line[key] for key in ("kl", "place", "scope", "beta")) == wanted:
                of[name][line["seed"]] = line
    seeds = sorted(set.intersection(*(set(found) for found in of.values())))
    if len(seeds) < 2:
        return None
    runs = {name: [found[seed] for seed in seeds] for name, found in of.items()}
    return {
        "seeds": len(seeds),
        "of": {name: _alone(found, setting) for name, found in runs.items()},
        "against_exact": {name: _beside(runs[name], runs["exact"], setting) for name in ("k1", "k3")},
        "paths": {name: _mean_path(found, setting["window"]) for name, found in runs.items()},
    }


def _alone(runs: Lines, setting: Line) -> Figures:
    there = [kl for kl in _reached(runs, setting) if kl is not None]
    rewards, kls, errors = (_last(runs, name) for name in ("reward", "kl", "kl_error"))
    found: Figures = {
        "end": {"reward": mean_of(rewards), "kl": mean_of(kls), "spread": spread_of(kls)},
        "equal_reward": {"reached": len(there)},
    }
    spread = found["end"]["spread"]["value"]
    if spread:
        found["end"]["from_sampling"] = sum(error**2 for error in errors) / len(errors) / spread**2
    if len(there) > 1:
        found["equal_reward"] |= {"kl": mean_of(there), "spread": spread_of(there)}
    return found


def _beside(ours: Lines, theirs: Lines, setting: Line) -> Figures:
    """What an estimate makes other than the exact KL does, seed by seed."""
    pairs = zip(_reached(ours, setting), _reached(theirs, setting), strict=True)
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    found: Figures = {
        "end": {
            "reward": difference_of(_last(ours, "reward"), _last(theirs, "reward")),
            "kl": difference_of(_last(ours, "kl"), _last(theirs, "kl")),
            "spread": ratio_of_spreads(_last(ours, "kl"), _last(theirs, "kl")),
        },
        "equal_reward": {"both": len(both)},
    }
    if len(both) > 1:
        a, b = ([pair[side] for pair in both] for side in (0, 1))
        found["equal_reward"] |= {"kl": difference_of(a, b), "spread": ratio_of_spreads(a, b)}
    return found


def frontier(lines: Lines, setting: Line) -> Figures | None:
    """Reward and KL at the end of training for each scope and beta; None where there is no run."""
    of: dict[tuple[str, float], dict[int, Line]] = {}
    for line in lines:
        if (line["kl"], line["place"]) == ("exact", "loss") and line["beta"] in setting["betas"]:
            of.setdefault((line["scope"], line["beta"]), {})[line["seed"]] = line
    points, differences = [], []
    for beta in setting["betas"]:
        ours, theirs = (of.get((scope, beta), {}) for scope in SCOPES)
        seeds = sorted(set(ours) & set(theirs))
        if not seeds:
            continue
        both = dict(zip(SCOPES, ([one[seed] for seed in seeds] for one in (ours, theirs)), strict=True))
        for scope, runs in both.items():
            rest = {name: mean_of(_last(runs, name)) for name in ("reward", "kl")}
            points.append({"scope": scope, "beta": beta, **rest})
        rest = {
            name: difference_of(*(_last(both[scope], name) for scope in SCOPES)) for name in ("reward", "kl")
        }
        differences.append({"beta": beta, **rest})
    if not points:
        return None
    return {
        "points": points,
        "sequence_less_token": differences,
        "at_equal_kl": _at_equal_kl(of, setting),
    }


def _at_equal_kl(of: Mapping[tuple[str, float], Mapping[int, Line]], setting: Line) -> Figures:
    """Of the seeds that have all points: the reward of each seed's own frontier where its KL is the same."""
    curves = [of.get((scope, beta), {}) for scope in SCOPES for beta in setting["betas"]]
    seeds = sorted(set.intersection(*(set(found) for found in curves)))
    rewards: dict[str, list[float]] = {scope: [] for scope in SCOPES}
    for seed in seeds:
        at = []
        for scope in SCOPES:
            runs = [of[scope, beta][seed] for beta in setting["betas"]]
            at.append(reward_at(_last(runs, "kl"), _last(runs, "reward"), setting["equal_kl"]))
        if None not in at:
            for scope, reward in zip(SCOPES, at, strict=True):
                rewards[scope].append(reward)
    found: Figures = {"seeds": len(seeds), "reached": len(rewards["token"])}
    if found["reached"] > 1:
        found |= {scope: mean_of(rewards[scope]) for scope in SCOPES}
        found["sequence_less_token"] = difference_of(*(rewards[scope] for scope in SCOPES))
    return found


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
