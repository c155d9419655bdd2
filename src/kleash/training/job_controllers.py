"""The beta controller of a job."""

from dataclasses import replace
from typing import Any

from kleash.jobs.train import RewardJob
from kleash.leash import DualBeta, FixedBeta, Leash, PIDBeta, ZieglerBeta

HORIZON_STEPS = 3
"""Horizon of Ziegler's rule in steps: with ``LOOKAHEAD`` fast enough for a run of fifty steps."""
LOOKAHEAD = 4.0
"""Lookahead in steps of all controllers with a target, against overshooting at these rates."""
DUAL_RATE = 0.2
CAUTION = 1 / 3
"""Factor on decreases of beta while the KL is far from its target."""
PID_CAUTION = 0.6
"""The same for PID, which decreases beta already while the KL falls."""
PROPORTIONAL, INTEGRAL = 0.5, 0.05
"""Gains of PID: faster than its defaults, which overshoot by at most 6 % but need 200 updates."""


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
            if job.horizon is not None:
                return ZieglerBeta(**target, horizon=job.horizon)  # the published rule
            horizon = HORIZON_STEPS * job.prompts_per_step * job.samples_per_prompt
            return ZieglerBeta(**target, horizon=horizon, lookahead=LOOKAHEAD, caution=CAUTION)
        case "pid":
            return PIDBeta(
                **target,
                proportional=PROPORTIONAL,
                integral=INTEGRAL,
                lookahead=LOOKAHEAD,
                caution=PID_CAUTION,
            )
        case _:
            return DualBeta(**target, rate=DUAL_RATE, lookahead=LOOKAHEAD, caution=CAUTION)


def tightened(leash: Leash, job: RewardJob) -> Leash:
    """The controller with twice its beta, at most the job's ``beta_max``."""
    controller: Any = leash
    return replace(controller, beta=max(leash.beta, min(2 * leash.beta, job.beta_max)))
