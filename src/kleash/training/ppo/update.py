"""The updates of a PPO step: epochs of minibatches of micro-batches."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kleash.leash import EarlyStop
from kleash.linear import Head
from kleash.training.ppo.policy import Policy
from kleash.training.ppo.ppo_losses import RolloutTokens, policy_objective, update_sums, value_losses
from kleash.training.ppo.rollout import MicroBatch, Rollout
from kleash.training.ppo.setup import TrainingSetup
from kleash.training.ppo.shaping import LearningSignals
from kleash.training.scheduling import shuffled


class DivergedError(ArithmeticError):
    """A loss or gradient is NaN or infinite; the weights were not updated with it."""


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """Sums and gradient norms of a step's updates, over all processes."""

    sums: dict[str, float]
    """``ppo_losses.update_sums``, added over updates."""
    gradient_norms: tuple[float, ...]
    """Gradient norm of each update, before clipping."""
    stopped: str | None
    """Why the updates ended early; None if they did not."""


def update_policy(
    setting: TrainingSetup, rollout: Rollout, shaped: LearningSignals, step: int
) -> UpdateResult:
    """Update the policy on a step's responses: ``epochs`` passes of ``minibatches`` updates each.

    The micro-batches are those of scoring, in another order in each epoch, so that a token has bit for bit the same
    log-probability. The first ratio is then exactly 1, and while policy and reference are equal, KL and its gradient
    are exactly 0 (Adam would turn rounding errors into full steps).

    All tokens have the same weight: the sum of a minibatch is divided by (tokens of the step / minibatches), counted
    over all processes.

    Raises:
        DivergedError: if a loss or a gradient is NaN or infinite, before the weights are touched.
    """
    job, group = setting.job, setting.group
    tokens = group.sum_over_ranks({"tokens": float(rollout.mask.sum())})["tokens"]
    # Averaging gradients over processes divides by their number.
    token_weight = group.world_size * job.minibatches / tokens
    stop = None if job.early_stop_nats is None else EarlyStop(target_nats=job.early_stop_nats, factor=1.0)
    sums: dict[str, float] = {}
    norms: list[float] = []
    for epoch in range(job.epochs):
        for number in shuffled(job.minibatches, job.seed, "order", step, epoch):
            where = f"step {step}, epoch {epoch + 1}, minibatch {number + 1}"
            pass_sums = _learn(setting, rollout, shaped, rollout.micro_batches[number], token_weight)
            if not math.isfinite(pass_sums["loss"]):
                raise DivergedError(f"the loss is {pass_sums['loss']} in {where}")
            sums = _add_sums(sums, pass_sums)
            update_kl = pass_sums["update_kl"] / pass_sums["tokens"] if pass_sums["tokens"] else 0.0
            if stop is not None and stop.stops(update_kl):
                setting.optimizer.zero_grad()
                return UpdateResult(
                    sums=sums,
                    gradient_norms=tuple(norms),
                    stopped=f"the updates ended early, after {len(norms)}: KL(before ‖ now) is {update_kl:.3g} nats "
                    f"per token, above {job.early_stop_nats:g}",
                )
            norm = _as_float(
                setting.accelerator.clip_grad_norm_(
                    setting.wrapped_policy.parameters(), job.max_gradient_norm
                )
            )
            if not math.isfinite(norm):
                setting.optimizer.zero_grad()
                raise DivergedError(f"the gradient is {norm} in {where}")
            setting.optimizer.step()
            setting.optimizer.zero_grad()
            norms.append(norm)
    return UpdateResult(sums=sums, gradient_norms=tuple(norms), stopped=None)


def kl_of_update(setting: TrainingSetup, rollout: Rollout, head_before: Head) -> float:
    """KL(policy before || policy now), exact, summed over the tokens of this process's responses, in nats."""
    total = 0.0
    for micro in (micro for minibatch in rollout.micro_batches for micro in minibatch):
        batch = setting.batch([rollout.sequences[row] for row in micro.rows])
        hidden = torch.cat([rollout.hidden[row] for row in micro.rows])
        with setting.autocast():
            token_kl = setting.wrapped_policy(Policy.kl_of_update, batch, hidden, head_before)
        total += token_kl.cpu().double().sum().item() if micro.in_loss else 0.0
    return total


def _learn(
    setting: TrainingSetup,
    rollout: Rollout,
    shaped: LearningSignals,
    minibatch: list[MicroBatch],
    token_weight: float,
) -> dict[str, float]:
    """Accumulate the gradient of a minibatch; returns sums over all processes, with the loss as "loss"."""
    sums: dict[str, float] = {}
    for number, micro in enumerate(minibatch):
        is_last = number == len(minibatch) - 1
        batch = setting.batch([rollout.sequences[row] for row in micro.rows])
        past, hidden_q = (
            _past(rollout, shaped, micro),
            torch.cat([rollout.hidden_reference[row] for row in micro.rows]),
        )
        objective = policy_objective(past, setting.job, shaped.scaled_beta)
        with nullcontext() if is_last else setting.accelerator.no_sync(setting.wrapped_policy):
            with setting.autocast():
                result = setting.wrapped_policy(
                    Policy.learn, batch, hidden_q, setting.actor_critic.reference.head, objective
                )
            errors = value_losses(result.values, past, setting.job.clip_range_value).sum()
            loss = (result.loss + setting.job.vf_coef * errors) * token_weight
            setting.accelerator.backward(loss)
        sums = _add_sums(
            sums, {"loss": loss.item(), **update_sums(result.terms, result.values, past, setting.job)}
        )
    gathered = setting.group.all_gather_object(sums)
    total: dict[str, float] = {}
    for rank_sums in gathered:
        total = _add_sums(total, rank_sums)
    return total


def _past(rollout: Rollout, shaped: LearningSignals, micro: MicroBatch) -> RolloutTokens:
    """The rollout's data for the tokens of a micro-batch, in the order of the batch."""
    mask = rollout.mask[micro.rows]
    columns = (rollout.token_logp, rollout.values, shaped.advantages, shaped.returns)
    flat = [x[micro.rows][mask] for x in columns]
    return RolloutTokens(*flat, is_counted=torch.full_like(flat[0], micro.in_loss, dtype=torch.bool))


def _add_sums(sums: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """The sums of two passes, and the larger of their maxima (names that end in "_max")."""
    if not sums:
        return more
    return {name: max(sums[name], x) if name.endswith("_max") else sums[name] + x for name, x in more.items()}


def _as_float(norm: "Tensor | float") -> float:
    """A gradient norm as a float, gathered if it is sharded."""
    gather = getattr(norm, "full_tensor", None)
    return float(norm if gather is None else gather())
