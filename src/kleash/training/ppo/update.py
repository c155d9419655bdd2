"""A step's updates: epochs of minibatches of micro-batches."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kleash.leash import EarlyStop
from kleash.linear import Head
from kleash.training.ppo.losses import Past, objective, sums_of, value_losses
from kleash.training.ppo.policy import Policy
from kleash.training.ppo.rollout import Micro, Rollout
from kleash.training.ppo.setting import Setting
from kleash.training.ppo.shaping import Shaped
from kleash.training.sharing import shuffled


class DivergedError(ArithmeticError):
    """A loss or a gradient that is no number; the policy was not touched by it."""


@dataclass(frozen=True, kw_only=True)
class Updated:
    """What a step's updates told, over all processes."""

    sums: dict[str, float]
    """Over tokens and updates: ``losses.sums_of``."""
    gradient_norms: tuple[float, ...]
    """One for each update that was made, before it was scaled down."""
    stopped: str | None
    """Why the updates ended early."""


def improve(setting: Setting, rollout: Rollout, shaped: Shaped, step: int) -> Updated:
    """Learn from a step's responses, ``epochs`` times over, in ``minibatches`` updates each.

    The minibatches are those in which the responses were scored, in another order each time: read in the same
    company, a token has the same numbers to the last bit. So the first ratio is exactly 1, and where policy and
    reference are still one, KL and its gradient are exactly 0 (Adam makes full steps of what is left of rounding).

    A token weighs the same in whichever minibatch it lands: each minibatch's sum is divided by the tokens of the
    whole step over the number of minibatches, over all processes.

    Raises:
        DivergedError: if a loss or a gradient is NaN or infinite, before the weights are touched.
    """
    job, ranks = setting.job, setting.ranks
    tokens = ranks.totals({"tokens": float(rollout.mask.sum())})["tokens"]
    share = ranks.count * job.minibatches / tokens  # processes: what averages their gradients divides by them
    stop = None if job.early_stop_nats is None else EarlyStop(target_nats=job.early_stop_nats, factor=1.0)
    sums: dict[str, float] = {}
    norms: list[float] = []
    for epoch in range(job.epochs):
        for number in shuffled(job.minibatches, job.seed, "order", step, epoch):
            where = f"step {step}, epoch {epoch + 1}, minibatch {number + 1}"
            found = _learn(setting, rollout, shaped, rollout.micros[number], share)
            if not math.isfinite(found["loss"]):
                raise DivergedError(f"the loss is {found['loss']} in {where}")
            sums = _added(sums, found)
            moved = found["moved"] / found["tokens"] if found["tokens"] else 0.0
            if stop is not None and stop.stops(moved):
                setting.optimizer.zero_grad()
                return Updated(
                    sums=sums,
                    gradient_norms=tuple(norms),
                    stopped=f"the updates ended early, after {len(norms)}: KL(before || now) is {moved:.3g} nats per "
                    f"token, above {job.early_stop_nats:g}",
                )
            norm = _length(
                setting.accelerator.clip_grad_norm_(setting.wrapped.parameters(), job.max_gradient_norm)
            )
            if not math.isfinite(norm):
                setting.optimizer.zero_grad()
                raise DivergedError(f"the gradient is {norm} in {where}")
            setting.optimizer.step()
            setting.optimizer.zero_grad()
            norms.append(norm)
    return Updated(sums=sums, gradient_norms=tuple(norms), stopped=None)


def moved_by(setting: Setting, rollout: Rollout, head_before: Head) -> float:
    """KL(policy before || policy now), exact, summed over the tokens of this process's responses, in nats."""
    total = 0.0
    for micro in (micro for minibatch in rollout.micros for micro in minibatch):
        batch = setting.batch([rollout.sequences[own] for own in micro.own])
        hidden = torch.cat([rollout.hidden[own] for own in micro.own])
        with setting.autocast():
            moved = setting.wrapped(Policy.moved, batch, hidden, head_before)
        total += moved.cpu().double().sum().item() if micro.live else 0.0
    return total


def _learn(
    setting: Setting, rollout: Rollout, shaped: Shaped, minibatch: list[Micro], share: float
) -> dict[str, float]:
    """Add a minibatch's gradient to the weights'; returns the sums of all processes, "loss" being the whole."""
    sums: dict[str, float] = {}
    for number, micro in enumerate(minibatch):
        last = number == len(minibatch) - 1
        batch = setting.batch([rollout.sequences[own] for own in micro.own])
        past, theirs = (
            _past(rollout, shaped, micro),
            torch.cat([rollout.hidden_reference[own] for own in micro.own]),
        )
        told = objective(past, setting.job, shaped.price)
        with nullcontext() if last else setting.accelerator.no_sync(setting.wrapped):
            with setting.autocast():
                learnt = setting.wrapped(Policy.learn, batch, theirs, setting.trainee.reference.head, told)
            errors = value_losses(learnt.values, past, setting.job.clip_range_value).sum()
            loss = (learnt.loss + setting.job.vf_coef * errors) * share
            setting.accelerator.backward(loss)
        sums = _added(sums, {"loss": loss.item(), **sums_of(learnt.terms, learnt.values, past, setting.job)})
    told = setting.ranks.told(sums)
    together: dict[str, float] = {}
    for one in told:
        together = _added(together, one)
    return together


def _past(rollout: Rollout, shaped: Shaped, micro: Micro) -> Past:
    """What was known of a micro-batch's tokens, in the order in which they are read."""
    mask = rollout.mask[micro.own]
    known = (rollout.token_logp, rollout.values, shaped.advantages, shaped.returns)
    flat = [x[micro.own][mask] for x in known]
    return Past(*flat, counts=torch.full_like(flat[0], micro.live, dtype=torch.bool))


def _added(sums: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """Sums added, maxima compared."""
    if not sums:
        return more
    return {
        name: max(sums[name], x) if name.endswith("_most") else sums[name] + x for name, x in more.items()
    }


def _length(norm: "Tensor | float") -> float:
    """The norm of a gradient that may lie in parts on all processes."""
    whole = getattr(norm, "full_tensor", None)
    return float(norm if whole is None else whole())
