"""The beta controller of a job."""

from dataclasses import replace
from typing import Any

from kleash.jobs.train import RewardJob
from kleash.leash import DualBeta, FixedBeta, Leash, PIDBeta, ZieglerBeta


def leash_of(job: RewardJob) -> Leash:
    """The controller of a job in its initial state."""
    per: Any = job.target_per
    if job.controller == "fixed":
        return FixedBeta(beta=job.beta, per=per)
    target: dict[str, Any] = {
        "beta": job.beta,
        "target_nats": job.target_nats,
        "per": per,
        "beta_min": job.beta_min,
        "beta_max": job.beta_max,
    }
    match job.controller:
        case "ziegler":
            return ZieglerBeta(**target, horizon=job.horizon)
        case "pid":
            return PIDBeta(**target)
        case _:
            return DualBeta(**target)


def tightened(leash: Leash, job: RewardJob) -> Leash:
    """The controller with twice its beta, at most the job's ``beta_max``."""
    controller: Any = leash
    return replace(controller, beta=max(leash.beta, min(2 * leash.beta, job.beta_max)))
