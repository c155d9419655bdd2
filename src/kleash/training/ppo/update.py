"""The updates of a PPO step: epochs of minibatches of micro-batches."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kleash.leash import EarlyStop
from kleash.linear import Head
from kleash.training.ppo.losses import RolloutTokens, policy_objective, sums_of, value_losses
from kleash.training.ppo.policy import Policy
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
    """``losses.sums_of``, added over updates."""
    gradient_norms: tuple[float, ...]
    """The gradient norm of each update, before clipping."""
    stopped: str | None
    """Why the updates ended early."""


def update_policy(
    setting: TrainingSetup, rollout: Rollout, shaped: LearningSignals, step: int
) -> UpdateResult:
    """Update the policy on a step's responses: ``epochs`` passes of ``minibatches`` updates each.

    The minibatches are those of scoring, in another order in each epoch: in the same batch, a token's numbers are
    bit for bit the same. So the first ratio is exactly 1, and while policy and reference are equal, KL and its
    gradient are exactly 0 (Adam would make full steps of rounding errors).

    All tokens have the same weight: each minibatch's sum is divided by the step's tokens over the number of
    minibatches, counted over all processes.

    Raises:
        DivergedError: if a loss or a gradient is NaN or infinite, before the weights are touched.
    """
    job, ranks = setting.job, setting.group
    tokens = ranks.sum_over_ranks({"tokens": float(rollout.mask.sum())})["tokens"]
    share = (
        ranks.world_size * job.minibatches / tokens
    )  # processes: what averages their gradients divides by them
    stop = None if job.early_stop_nats is None else EarlyStop(target_nats=job.early_stop_nats, factor=1.0)
    sums: dict[str, float] = {}
    norms: list[float] = []
    for epoch in range(job.epochs):
        for number in shuffled(job.minibatches, job.seed, "order", step, epoch):
            where = f"step {step}, epoch {epoch + 1}, minibatch {number + 1}"
            pass_sums = _learn(setting, rollout, shaped, rollout.micros[number], share)
            if not math.isfinite(pass_sums["loss"]):
                raise DivergedError(f"the loss is {pass_sums['loss']} in {where}")
            sums = _added(sums, pass_sums)
            moved = pass_sums["moved"] / pass_sums["tokens"] if pass_sums["tokens"] else 0.0
            if stop is not None and stop.stops(moved):
                setting.optimizer.zero_grad()
                return UpdateResult(
                    sums=sums,
                    gradient_norms=tuple(norms),
                    stopped=f"the updates ended early, after {len(norms)}: KL(before || now) is {moved:.3g} nats per "
                    f"token, above {job.early_stop_nats:g}",
                )
            norm = _length(
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
    for micro in (micro for minibatch in rollout.micros for micro in minibatch):
        batch = setting.batch([rollout.sequences[row] for row in micro.rows])
        hidden = torch.cat([rollout.hidden[row] for row in micro.rows])
        with setting.autocast():
            moved = setting.wrapped_policy(Policy.moved, batch, hidden, head_before)
        total += moved.cpu().double().sum().item() if micro.in_loss else 0.0
    return total


def _learn(
    setting: TrainingSetup,
    rollout: Rollout,
    shaped: LearningSignals,
    minibatch: list[MicroBatch],
    share: float,
) -> dict[str, float]:
    """Accumulate a minibatch's gradient; returns the sums over all processes, "loss" being the total loss."""
    sums: dict[str, float] = {}
    for number, micro in enumerate(minibatch):
        last = number == len(minibatch) - 1
        batch = setting.batch([rollout.sequences[row] for row in micro.rows])
        past, hidden_q = (
            _past(rollout, shaped, micro),
            torch.cat([rollout.hidden_reference[row] for row in micro.rows]),
        )
        loss_of_tokens = policy_objective(past, setting.job, shaped.scaled_beta)
        with nullcontext() if last else setting.accelerator.no_sync(setting.wrapped_policy):
            with setting.autocast():
                learnt = setting.wrapped_policy(
                    Policy.learn, batch, hidden_q, setting.actor_critic.reference.head, loss_of_tokens
                )
            errors = value_losses(learnt.values, past, setting.job.clip_range_value).sum()
            loss = (learnt.loss + setting.job.vf_coef * errors) * share
            setting.accelerator.backward(loss)
        sums = _added(sums, {"loss": loss.item(), **sums_of(learnt.terms, learnt.values, past, setting.job)})
    gathered = setting.group.all_gather_object(sums)
    total: dict[str, float] = {}
    for rank_sums in gathered:
        total = _added(total, rank_sums)
    return total


def _past(rollout: Rollout, shaped: LearningSignals, micro: MicroBatch) -> RolloutTokens:
    """The rollout's data of a micro-batch's tokens, in their order in the batch."""
    mask = rollout.mask[micro.rows]
    known = (rollout.token_logp, rollout.values, shaped.advantages, shaped.returns)
    flat = [x[micro.rows][mask] for x in known]
    return RolloutTokens(*flat, counts=torch.full_like(flat[0], micro.in_loss, dtype=torch.bool))


def _added(sums: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """The sums of two passes; maxima (names ending in "_most") are compared."""
    if not sums:
        return more
    return {
        name: max(sums[name], x) if name.endswith("_most") else sums[name] + x for name, x in more.items()
    }


def _length(norm: "Tensor | float") -> float:
    """The norm of a gradient, gathered if it is sharded."""
    whole = getattr(norm, "full_tensor", None)
    return float(norm if whole is None else whole())
