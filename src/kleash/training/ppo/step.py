"""One step of PPO, readable from top to bottom."""

from dataclasses import replace
from pathlib import Path
from time import monotonic

from kleash.errors import NonFiniteError
from kleash.leash import beta_reason
from kleash.linear import Head
from kleash.models import Prompt
from kleash.training.job_controllers import tightened
from kleash.training.ppo.checkpoints import POLICY, TrainingState, last_checkpoint
from kleash.training.ppo.failure_report import save_batch, where_it_broke
from kleash.training.ppo.metrics import of_critic, of_updates, responses_of
from kleash.training.ppo.rollout import Rollout, roll_out
from kleash.training.ppo.setup import TrainingSetup
from kleash.training.ppo.shaping import LearningSignals, RewardSignals, learning_signals
from kleash.training.ppo.update import DivergedError, UpdateResult, kl_of_update, update_policy
from kleash.training.responses import of_responses, to_samples
from kleash.training.run_log import Advice, RunLog, stopped_by


def one_step(
    setting: TrainingSetup, prompts: list[Prompt], root: Path, progress: TrainingState, run_log: RunLog | None
) -> TrainingState:
    """Draw, reward, score, shape, learn, measure, steer, write down.

    Raises:
        NonFiniteError: if a loss or gradient is NaN or infinite; the step's responses are then in ``root``.
    """
    job, ranks, step = setting.job, setting.group, progress.step + 1
    leash, began = progress.controller, monotonic()

    rollout = roll_out(setting, prompts, step)
    signals = learning_signals(_reward_signals(rollout), job, leash.beta)
    drawn = monotonic()

    before = frozen_head(setting.actor_critic.policy.head(detached=True), trained=not job.lora_rank)
    set_learning_rate(setting, progress.learning_rate)
    updated = _improve(setting, rollout, signals, root, progress.step)
    moved = ranks.sum_over_ranks(
        {"nats": kl_of_update(setting, rollout, before), "tokens": float(rollout.mask.sum())}
    )
    learnt = monotonic()

    responses = responses_of(rollout, signals.returns, ranks)
    measured = {**of_responses(responses, leash.beta), **of_critic(responses)}
    following = leash.after(measured[f"kl/exact_per_{leash.per}"], sequences=len(responses))

    metrics = {
        **measured,
        **of_updates(updated, moved["nats"] / moved["tokens"], progress.learning_rate),
        "beta": leash.beta,
        **({} if job.target_nats is None else {"kl/target": job.target_nats}),
        "time/rollout": drawn - began,
        "time/update": learnt - drawn,
        "time/step": monotonic() - began,
    }
    events = [event for event in (following.event, updated.stopped) if event is not None]
    reason = beta_reason(leash, following, measured[f"kl/exact_per_{leash.per}"])
    advice = None if run_log is None else run_log.step(step, metrics, to_samples(responses), events, reason)
    after = replace(progress, step=step, leash=following.to_dict(), metrics=metrics)
    return apply_response(after, ranks.broadcast_from_first(advice) or Advice(), setting)


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


def _improve(
    setting: TrainingSetup, rollout: Rollout, shaped: LearningSignals, root: Path, finished: int
) -> UpdateResult:
    """The step's updates; if they diverge, the step's data is saved and named in the error."""
    try:
        return update_policy(setting, rollout, shaped, finished + 1)
    except DivergedError as broken:
        folder = save_batch(root, rollout, shaped, finished + 1, setting.group)
        first_bad_number = next(
            filter(None, setting.group.all_gather_object(where_it_broke(rollout, shaped))), None
        )
        what = (
            f"{first_bad_number}, which came in with the responses"
            if first_bad_number
            else (
                f"nothing that came in with the responses was, so the updates ran away at a learning rate of "
                f"{setting.optimizer.param_groups[0]['lr']:g}: lower it, or --max-gradient-norm"
            )
        )
        kept_one = last_checkpoint(root)
        again = "" if kept_one is None else f"; another run can begin from --policy {kept_one / POLICY}"
        raise NonFiniteError(
            f"{broken}; {what}; the responses with all their numbers are in {folder}{again}"
        ) from broken
