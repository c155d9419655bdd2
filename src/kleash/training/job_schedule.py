"""What a job prescribes for each step: its prompts, and the beta controller."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

from kleash.jobs.train import RewardJob
from kleash.leash import Leash
from kleash.leash.controller_state import controller_of


def prompt_indices(num_prompts: int, positions: Iterable[int], seed: int) -> list[int]:
    """The prompts at these positions of an endless sequence of shuffled epochs, which depends on the seed alone."""
    return [
        _epoch_order(num_prompts, position // num_prompts, seed)[position % num_prompts]
        for position in positions
    ]


@lru_cache(maxsize=2)
def _epoch_order(num_prompts: int, epoch: int, seed: int) -> list[int]:
    """The indices of all prompts in the order of an epoch."""
    random = Random(f"{seed}/{epoch}")
    numbers = [random.random() for _ in range(num_prompts)]
    return sorted(range(num_prompts), key=numbers.__getitem__)


def leash_of(job: RewardJob) -> Leash:
    """The controller of a job in its initial state."""
    return controller_of({**vars(job), "kind": job.controller, "per": job.target_per})


def tightened(leash: Leash, job: Any) -> Leash:
    """The controller with twice its beta, at most the ``beta_max`` of the job or of another run's options."""
    return replace(leash, beta=max(leash.beta, min(2 * leash.beta, job.beta_max)))
