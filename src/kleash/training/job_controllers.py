"""The beta controller of a job."""

from dataclasses import replace
from typing import Any

from kleash.jobs.train import RewardJob
from kleash.leash import Leash, beta_from_dict


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
