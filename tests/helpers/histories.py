"""Histories of training runs, made up: a healthy one, and what can be done to it."""

from collections.abc import Callable, Mapping

import numpy as np

from kleash.records import StepRecord


def healthy(steps: int = 60, *, seed: int = 0, target: float | None = 6.0) -> list[StepRecord]:
    """Reward rises and levels off, KL settles at the target, entropy loses a quarter; all of it noisy."""
    noise = np.random.default_rng(seed).normal(size=(steps, 8))
    records = []
    for at in range(steps):
        done = 1 - np.exp(-at / 12)
        z = noise[at]
        kl = (target if target is not None else 6.0) * done * (1 + 0.1 * z[0])
        metrics = {
            "reward/score": 0.5 + 2.5 * done + 0.3 * z[1],
            "reward/score_error": 0.3,
            "reward/score_std": 0.8,
            "reward/adjusted": 0.5 + 2.5 * done + 0.3 * z[1] - 0.2 * kl,
            "kl/exact_per_sequence": kl,
            "kl/exact_per_sequence_error": 0.05 * kl,
            "kl/exact_per_token": kl / 64,
            "kl/exact_per_token_error": 0.05 * kl / 64,
            "kl/k1": kl / 64 * (1 + 0.3 * z[2]),
            "kl/k3": kl / 64 * (1 + 0.1 * z[3]),
            "kl/k3_error": 0.05 * kl / 64,
            "kl/top_percent_share": 0.12 + 0.02 * abs(z[4]),
            "kl/max_token": 1.5 + 0.3 * abs(z[5]),
            "beta": 0.3 - 0.2 * done,
            "policy/entropy": 3.2 - 0.8 * done + 0.05 * z[6],
            "policy/clip_share": 0.05,
            "response/length": 60.0 + z[7],
            "response/prompts": 16.0,
            "response/repetition": 0.01 + 0.003 * abs(z[0]),
            "response/distinct": 0.97 - 0.01 * abs(z[1]),
            **({} if target is None else {"kl/target": target}),
        }
        records.append(
            StepRecord(step=at + 1, metrics={name: float(value) for name, value in metrics.items()})
        )
    return records


def bent(
    history: list[StepRecord], after: int, change: Callable[[int, Mapping[str, float]], Mapping[str, float]]
) -> list[StepRecord]:
    """The same history with other metrics from step ``after + 1`` on; ``change`` gets the steps since then, from 1."""
    return [
        record
        if record.step <= after
        else StepRecord(
            step=record.step, metrics={**record.metrics, **change(record.step - after, record.metrics)}
        )
        for record in history
    ]
