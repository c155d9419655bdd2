"""One step of PPO, readable from top to bottom."""

from dataclasses import replace
from pathlib import Path
from time import monotonic

from kleash.errors import NonFiniteError
from kleash.leash import beta_reason
from kleash.linear import Head
from kleash.models import Prompt
from kleash.models.sharded_networks import reshard
from kleash.training.job_controllers import tightened
from kleash.training.ppo.checkpointing import POLICY, TrainingState, last_checkpoint
from kleash.training.ppo.failure_report import describe_non_finite, save_batch
from kleash.training.ppo.ppo_metrics import critic_metrics, gather_responses, update_metrics
from kleash.training.ppo.rollout import Rollout, roll_out
from kleash.training.ppo.setup import TrainingSetup
from kleash.training.ppo.shaping import LearningSignals, RewardSignals, learning_signals
from kleash.training.ppo.update import DivergedError, UpdateResult, kl_of_update, update_policy
from kleash.training.response_metrics import response_metrics, to_samples
from kleash.training.run_log import Advice, RunLog, stopped_by


def one_step(
    setting: TrainingSetup, prompts: list[Prompt], root: Path, progress: TrainingState, run_log: RunLog | None
) -> TrainingState:
    """Take one step: rollout, advantages, updates, metrics, controller, log.

    Raises:
        NonFiniteError: if a loss or gradient is NaN or infinite; the step's responses are then in ``root``.
    """
    job, group, step = setting.job, setting.group, progress.step + 1
    leash, start = progress.controller, monotonic()

    rollout = roll_out(setting, prompts, step, None if run_log is None else run_log.display)
    signals = learning_signals(_reward_signals(rollout), job, leash.beta)
    generated = monotonic()
    if run_log is not None:
        run_log.display.working(step, "updating the policy")

    reshard(setting.actor_critic.policy)  # so that each process copies its own rows
    before = frozen_head(setting.actor_critic.policy.head(detached=True), trained=not job.lora_rank)
    set_learning_rate(setting, progress.learning_rate)
    result = _update(setting, rollout, signals, root, progress.step)
    update_kl = group.sum_over_ranks(
        {"nats": kl_of_update(setting, rollout, before), "tokens": float(rollout.mask.sum())}
    )
    updated = monotonic()

    responses = gather_responses(rollout, signals.returns, group)
    measured = {**response_metrics(responses, leash.beta), **critic_metrics(responses)}
    kl, kl_error = (measured[f"kl/exact_per_{leash.per}{suffix}"] for suffix in ("", "_error"))
    next_leash = leash.after(kl, sequences=len(responses), standard_error=kl_error)

    metrics = {
        **measured,
        **update_metrics(result, update_kl["nats"] / update_kl["tokens"], progress.learning_rate),
        "beta": leash.beta,
        **({} if job.target_nats is None else {"kl/target": job.target_nats}),
        "time/rollout": generated - start,
        "time/update": updated - generated,
        "time/step": monotonic() - start,
    }
    events = [event for event in (next_leash.event, result.stopped) if event is not None]
    reason = beta_reason(leash, next_leash, kl)
    advice = None if run_log is None else run_log.step(step, metrics, to_samples(responses), events, reason)
    after = replace(progress, step=step, leash=next_leash.to_dict(), metrics=metrics)
    return apply_response(after, group.broadcast_from_first(advice) or Advice(), setting)


def apply_response(progress: TrainingState, advice: Advice, setting: TrainingSetup) -> TrainingState:
    """The training state after the response to alerts."""
    progress = replace(progress, alerts=(*progress.alerts, *(alert.sentence for alert in advice.alerts)))
    match advice.act:
        case "stop":
            return replace(progress, stopped=stopped_by(advice.alerts, progress.step))
        case "halve-lr":
            return replace(progress, learning_rate=progress.learning_rate / 2)
        case "tighten":
            return replace(progress, leash=tightened(progress.controller, setting.job).to_dict())
        case _:
            return progress


def frozen_head(head: Head, *, trained: bool) -> Head:
    """A copy of the head's current weights, if they are trained."""
    if not trained or head.weight is None:
        return head
    bias = None if head.bias is None else head.bias.clone()
    return replace(head, weight=head.weight.clone(), bias=bias)


def set_learning_rate(setting: TrainingSetup, learning_rate: float) -> None:
    """Set the optimiser's learning rate."""
    for group in setting.optimizer.param_groups:
        group["lr"] = learning_rate


def _reward_signals(rollout: Rollout) -> RewardSignals:
    return RewardSignals(
        scores=rollout.scores,
        token_logp=rollout.token_logp,
        token_logq=rollout.token_logq,
        token_kl=rollout.token_kl,
        values=rollout.values,
        mask=rollout.mask,
    )


def _update(
    setting: TrainingSetup, rollout: Rollout, signals: LearningSignals, root: Path, finished: int
) -> UpdateResult:
    """The updates of a step; if they diverge, the data of the step is saved and named in the error."""
    try:
        return update_policy(setting, rollout, signals, finished + 1)
    except DivergedError as error:
        folder = save_batch(root, rollout, signals, finished + 1, setting.group)
        non_finite = next(
            filter(None, setting.group.all_gather_object(describe_non_finite(rollout, signals))), None
        )
        cause = (
            f"{non_finite}, which came in with the responses"
            if non_finite
            else (
                f"nothing that came in with the responses was, so the updates ran away at a learning rate of "
                f"{setting.optimizer.param_groups[0]['lr']:g}: lower it, or --max-gradient-norm"
            )
        )
        checkpoint = last_checkpoint(root)
        advice = "" if checkpoint is None else f"; another run can begin from --policy {checkpoint / POLICY}"
        raise NonFiniteError(
            f"{error}; {cause}; the responses with all their numbers are in {folder}{advice}"
        ) from error
