"""One step of PPO, readable from top to bottom."""

from dataclasses import replace
from pathlib import Path
from time import monotonic

from kleash.errors import NonFiniteError
from kleash.leash import beta_reason
from kleash.linear import Head
from kleash.models import Prompt
from kleash.training.leashes import tightened
from kleash.training.ppo.checkpoints import POLICY, Progress, last_checkpoint
from kleash.training.ppo.failing import save_batch, where_it_broke
from kleash.training.ppo.measures import of_critic, of_updates, responses_of
from kleash.training.ppo.rollout import Rollout, roll_out
from kleash.training.ppo.setting import Setting
from kleash.training.ppo.shaping import Said, Shaped, shape
from kleash.training.ppo.update import DivergedError, Updated, improve, moved_by
from kleash.training.responses import of_responses, samples_of
from kleash.training.run_log import Advice, RunLog, stopped_by


def one_step(
    setting: Setting, prompts: list[Prompt], root: Path, progress: Progress, run_log: RunLog | None
) -> Progress:
    """Draw, reward, score, shape, learn, measure, steer, write down.

    Raises:
        NonFiniteError: if a loss or gradient is NaN or infinite; the step's responses are then in ``root``.
    """
    job, ranks, step = setting.job, setting.ranks, progress.step + 1
    leash, began = progress.controller, monotonic()

    rollout = roll_out(setting, prompts, step)
    shaped = shape(_said(rollout), job, leash.beta)
    drawn = monotonic()

    before = kept(setting.trainee.policy.head(detached=True), trained=not job.lora_rank)
    set_learning_rate(setting, progress.learning_rate)
    updated = _improve(setting, rollout, shaped, root, progress.step)
    moved = ranks.totals({"nats": moved_by(setting, rollout, before), "tokens": float(rollout.mask.sum())})
    learnt = monotonic()

    responses = responses_of(rollout, shaped.returns, ranks)
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
    advice = None if run_log is None else run_log.step(step, metrics, samples_of(responses), events, reason)
    after = replace(progress, step=step, leash=following.to_dict(), metrics=metrics)
    return advised(after, ranks.agreed(advice) or Advice(), setting)


def advised(progress: Progress, advice: Advice, setting: Setting) -> Progress:
    """The run's progress after the response to alerts."""
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


def kept(head: Head, *, trained: bool) -> Head:
    """A head as it is now, whatever becomes of the network."""
    if not trained or head.weight is None:
        return head
    bias = None if head.bias is None else head.bias.clone()
    return replace(head, weight=head.weight.clone(), bias=bias)


def set_learning_rate(setting: Setting, learning_rate: float) -> None:
    """Let the optimiser take steps of this size from now on."""
    for group in setting.optimizer.param_groups:
        group["lr"] = learning_rate


def _said(rollout: Rollout) -> Said:
    return Said(
        scores=rollout.scores,
        token_logp=rollout.token_logp,
        token_logq=rollout.token_logq,
        token_kl=rollout.token_kl,
        values=rollout.values,
        mask=rollout.mask,
    )


def _improve(setting: Setting, rollout: Rollout, shaped: Shaped, root: Path, finished: int) -> Updated:
    """The step's updates; where they break down, what they were made of is saved and said."""
    try:
        return improve(setting, rollout, shaped, finished + 1)
    except DivergedError as broken:
        folder = save_batch(root, rollout, shaped, finished + 1, setting.ranks)
        said = next(filter(None, setting.ranks.told(where_it_broke(rollout, shaped))), None)
        what = (
            f"{said}, which came in with the responses"
            if said
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
