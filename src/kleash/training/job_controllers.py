"""The beta controller of a job."""

from dataclasses import replace
from typing import Any

from kleash.jobs import RewardJob
from kleash.leash import DualBeta, FixedBeta, Leash, PIDBeta, ZieglerBeta

HORIZON_STEPS = 3
"""Steps that make up the horizon of Ziegler's rule: fast enough for a run of fifty steps, with ``LOOKAHEAD``."""
LOOKAHEAD = 4.0
"""Steps ahead that Ziegler's and the dual rule look, as PID does, so that at such rates they do not overshoot."""
DUAL_RATE = 0.2
CAUTION = 1 / 3
"""Share of a loosening that is carried out while the KL swings far from its target."""
PID_CAUTION = 0.6
"""The same of PID, which loosens as the KL falls and not only once it is low."""
PROPORTIONAL, INTEGRAL = 0.5, 0.05
"""Of PID: faster than its own, which never overshoot by more than 6 % but need 200 updates."""


def leash_of(job: RewardJob) -> Leash:
    """The controller of a job in its initial state."""
    per: Any = job.target_per
    if job.controller == "fixed":
        return FixedBeta(beta=job.beta, per=per)
    steered: dict[str, Any] = {
        "beta": job.beta,
        "target_nats": job.target_nats,
        "per": per,
        "beta_min": job.beta_min,
        "beta_max": job.beta_max,
    }
    match job.controller:
        case "ziegler":
            if job.horizon is not None:
                return ZieglerBeta(**steered, horizon=job.horizon)  # the published rule
            horizon = HORIZON_STEPS * job.prompts_per_step * job.samples_per_prompt
            return ZieglerBeta(**steered, horizon=horizon, lookahead=LOOKAHEAD, caution=CAUTION)
        case "pid":
            return PIDBeta(
                **steered,
                proportional=PROPORTIONAL,
                integral=INTEGRAL,
                lookahead=LOOKAHEAD,
                caution=PID_CAUTION,
            )
        case _:
            return DualBeta(**steered, rate=DUAL_RATE, lookahead=LOOKAHEAD, caution=CAUTION)


def tightened(leash: Leash, job: RewardJob) -> Leash:
    """The controller with twice its beta, at most the job's ``beta_max``."""
    controller: Any = leash
    return replace(controller, beta=max(leash.beta, min(2 * leash.beta, job.beta_max)))
