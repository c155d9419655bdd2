"""What a job prescribes for each step: its prompts, and the beta controller."""

from dataclasses import fields, replace
from functools import lru_cache
from random import Random
from typing import Any

from kleash.jobs.train import RewardJob
from kleash.leash import CONTROLLERS, Leash


def prompt_indices(num_prompts: int, positions: range, seed: int) -> list[int]:
    """The prompts at these positions of an endless sequence of shuffled epochs, which depends on the seed alone."""
    places = (divmod(position, num_prompts) for position in positions)
    return [_epoch_order(num_prompts, epoch, seed)[place] for epoch, place in places]


@lru_cache(maxsize=2)
def _epoch_order(num_prompts: int, epoch: int, seed: int) -> list[int]:
    random = Random(f"{seed}/{epoch}")
    numbers = [random.random() for _ in range(num_prompts)]
    return sorted(range(num_prompts), key=numbers.__getitem__)


def leash_of(job: RewardJob) -> Leash:
    """The controller of a job in its initial state: its fields are the job's options of the same names."""
    kind: Any = CONTROLLERS[job.controller]
    options = {each.name: getattr(job, each.name) for each in fields(kind) if hasattr(job, each.name)}
    return kind(**options, per=job.target_per)


def tightened(leash: Leash, job: Any) -> Leash:
    """The controller with twice its beta, at most the ``beta_max`` of the job or of another run's options."""
    return replace(leash, beta=max(leash.beta, min(2 * leash.beta, job.beta_max)))
