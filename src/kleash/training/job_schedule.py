"""What a job prescribes for each step: its prompts, and the beta controller."""

from dataclasses import replace
from random import Random
from typing import Any

from kleash.jobs.train import RewardJob
from kleash.leash import Leash, beta_from_dict


def prompt_indices(num_prompts: int, positions: range, seed: int) -> list[int]:
    """The prompts at these positions of an endless sequence of shuffled epochs, which depends on the seed alone."""
    order: dict[int, list[int]] = {}
    for epoch in range(positions.start // num_prompts, -(-positions.stop // num_prompts)):
        random = Random(f"{seed}/{epoch}")
        numbers = [random.random() for _ in range(num_prompts)]
        order[epoch] = sorted(range(num_prompts), key=numbers.__getitem__)
    return [order[position // num_prompts][position % num_prompts] for position in positions]


def leash_of(job: RewardJob) -> Leash:
    """The controller of a job in its initial state."""
    names = ["beta"]
    if job.controller != "fixed":
        names += ["target_nats", "beta_min", "beta_max"]
    if job.controller == "ziegler":
        names.append("horizon")
    settings = {name: getattr(job, name) for name in names}
    return beta_from_dict({"kind": job.controller, "per": job.target_per, **settings})


def tightened(leash: Leash, job: RewardJob) -> Leash:
    """The controller with twice its beta, at most the job's ``beta_max``."""
    controller: Any = leash
    return replace(controller, beta=max(leash.beta, min(2 * leash.beta, job.beta_max)))
