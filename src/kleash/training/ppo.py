"""PPO with a KL penalty to a reference, after InstructGPT: responses, rewards, advantages, updates, beta.

Ouyang et al., "Training language models to follow instructions with human feedback" (2022),
https://arxiv.org/abs/2203.02155; Schulman et al., "Proximal Policy Optimization Algorithms" (2017),
https://arxiv.org/abs/1707.06347. ``train_ppo`` has the loop, ``one_step`` a step, in the order of the file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from kleash.errors import NonFiniteError
from kleash.jobs import PPOJob
from kleash.launch_environment import launched_rank
from kleash.leash import EarlyStop, beta_reason
from kleash.linear import Head, linear_kl, linear_objective
from kleash.models import Prompt, Sampling, TokenSequence, generate, read_prompts
from kleash.sources.sequences import batch_by_length
from kleash.store import TrainingResult
from kleash.store.training_folder import CHECKPOINTS
from kleash.training.actor_critic import TokenBatch
from kleash.training.checkpoints import (
    POLICY,
    TrainingState,
    last_checkpoint,
    load_progress,
    publish,
    remove_before,
    restore,
    save,
)
from kleash.training.job_controllers import leash_of, tightened
from kleash.training.ppo_loss import (
    LearningSignals,
    PastTokens,
    Scored,
    learning_signals,
    policy_objective,
    update_sums,
    value_losses,
)
from kleash.training.ppo_setup import Run, set_up
from kleash.training.process_group import ProcessGroup, all_reduce_sum
from kleash.training.response_metrics import (
    Response,
    column_of,
    mean_sampled_kl,
    response_metrics,
    to_samples,
)
from kleash.training.rewards import check_rewards
from kleash.training.run_log import Advice, Display, NullDisplay, RunLog, stopped_by
from kleash.training.runner import run_job
from kleash.training.scheduling import minibatches_of, number, prompts_of_step, share_of, shuffled
from kleash.version import __version__

__all__ = ["train_ppo"]


def train_ppo(job: PPOJob, run_log: RunLog | None = None) -> TrainingResult:
    """Train a policy by PPO with a KL penalty to its reference.

    An interrupted run continues with ``resume=True`` from its last checkpoint; on a CPU in float32 with the numbers of
    an uninterrupted run. Under ``accelerate launch`` every process calls this with the same job and has whole copies of
    the models; rank 0 writes.

    Args:
        job: the training job; ``out`` is set.
        run_log: records the steps, on rank 0. Without it there, ``kleash.training.train(job)`` is called, which
            writes the whole run folder.

    Raises:
        SourceError, ModelError, OptionError, UnknownNameError: if an input or an option of the job is invalid.
        NonFiniteError: if a loss, a gradient, a reward or a model's numbers are NaN or infinite.
        RunFolderError: if a checkpoint cannot be written or read.
        CannotRunError, MissingExtraError: if an option is unsupported here or a dependency is missing.
    """
    if run_log is None and launched_rank() == 0:
        return run_job(job, train_ppo)
    check_rewards(job.rewards, job.source, job.limit, job)  # before any model is loaded
    run = set_up(job)
    prompts = read_prompts(job.source, run.networks.pair, limit=job.limit, columns=True, reading=job)
    root, networks, group = Path(str(job.out)), run.networks, run.group
    progress = TrainingState(leash=leash_of(job).to_dict(), learning_rate=job.learning_rate, metrics={})
    notes = [*networks.pair.notes]
    checkpoint = last_checkpoint(root) if job.resume else None
    if checkpoint is not None:
        saved = load_progress(checkpoint)
        progress = saved.progress
        notes += [f"going on after step {progress.step}, from {checkpoint}"]
        notes += restore(checkpoint, saved, run)
        if group.is_first:
            remove_before(root / CHECKPOINTS, progress.step)
    if run_log is not None:
        run_log.begin(progress.step)
        for note in notes:
            run_log.note(note)
    while progress.step < job.steps and progress.stopped is None:
        progress = one_step(run, prompts, progress, run_log)
        ended = progress.step == job.steps or progress.stopped is not None
        if ended or progress.step % job.checkpoint_every == 0:
            save(root, progress, run)
    if group.is_first:
        publish(networks, root / POLICY)
    group.barrier()
    return TrainingResult(
        kleash=__version__,
        algorithm=job.algorithm,
        steps=progress.step,
        stopped=progress.stopped,
        metrics=progress.metrics,
        beta=progress.controller.beta,
        policy=str(root / POLICY),
        out=str(root),
        dtypes=networks.dtypes,
        alerts=progress.alerts,
    )


def one_step(
    run: Run, prompts: list[Prompt], progress: TrainingState, run_log: RunLog | None
) -> TrainingState:
    """Take one step: rollout, advantages, updates, metrics, controller, log.

    Raises:
        NonFiniteError: if a loss or gradient is NaN or infinite; the weights are then those before it.
    """
    job, group, networks, step = run.job, run.group, run.networks, progress.step + 1
    leash, start = progress.controller, monotonic()
    display = NullDisplay() if run_log is None else run_log.display
    rollout = roll_out(run, prompts, step, display)
    signals = learning_signals(rollout, job, leash.beta)
    generated = monotonic()
    display.working(step, "updating the policy")
    before = networks.head_copy()
    for parameters in run.optimizer.param_groups:
        parameters["lr"] = progress.learning_rate
    result = update_policy(run, rollout, signals, step)
    update_kl = group.sum_over_ranks(
        {"nats": kl_of_update(run, rollout, before), "tokens": float(rollout.mask.sum())}
    )
    updated = monotonic()

    responses = gather_responses(rollout, signals.returns, group)
    measured = response_metrics(responses, leash.beta)
    kl, kl_error = (measured[f"kl/exact_per_{leash.per}{suffix}"] for suffix in ("", "_error"))
    next_leash = leash.after(kl, sequences=len(responses), standard_error=kl_error)
    metrics = {
        **measured,
        **critic_metrics(responses),
        **result.metrics(),
        "policy/learning_rate": progress.learning_rate,
        "kl/update": update_kl["nats"] / update_kl["tokens"],
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
    return apply_advice(after, group.broadcast_from_first(advice) or Advice(), job)


def apply_advice(progress: TrainingState, advice: Advice, job: PPOJob) -> TrainingState:
    """The progress after the response to alerts."""
    progress = replace(progress, alerts=(*progress.alerts, *(alert.sentence for alert in advice.alerts)))
    match advice.act:
        case "stop":
            return replace(progress, stopped=stopped_by(advice.alerts, progress.step))
        case "halve-lr":
            return replace(progress, learning_rate=progress.learning_rate / 2)
        case "tighten":
            return replace(progress, leash=tightened(progress.controller, job).to_dict())
        case _:
            return progress


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollout(Scored):
    """A process's responses of a step, what was measured on them, and how they are divided for the updates."""

    indices: list[int]
    """The indices of the responses among those of the whole step."""
    sequences: list[TokenSequence]
    parts: dict[str, np.ndarray]
    """The individual rewards by name."""
    behaviour_logp: Float[Tensor, "responses steps"]
    """Log-probabilities during generation: the same weights, with the key-value cache."""
    entropy: Float[Tensor, "responses steps"]
    hidden: list[Float[Tensor, "tokens dim"]]
    """Of each response, the policy's hidden states before the updates."""
    hidden_reference: list[Float[Tensor, "tokens dim_q"]]
    minibatches: list[list[list[int]]]
    """The responses of each forward pass of each minibatch. The updates use them too, so that log-probabilities are
    bit-identical."""

    def columns(self) -> dict[str, Tensor]:
        """The tensors with a number for each token by name."""
        names = ("behaviour_logp", "token_logp", "token_logq", "token_kl", "entropy", "values")
        return {name: getattr(self, name) for name in names}


def roll_out(run: Run, prompts: Sequence[Prompt], step: int, display: Display) -> Rollout:
    """Generate this process's responses of a step, reward them, and score them.

    Raises:
        NonFiniteError: if the policy gives NaN, or a reward is not a finite number.
        CannotRunError: if a reward raises.
    """
    job = run.job
    count = job.prompts_per_step * job.samples_per_prompt
    indices = share_of(count, job.minibatches, run.group.rank, run.group.world_size)
    sequences = draw(
        run, prompts_of_step(prompts, step, job.prompts_per_step, job.seed), indices, step, display
    )
    display.working(step, f"rewarding and scoring {len(sequences):,} responses")
    rewards = run.rewards.of(sequences)
    row_of = {index: row for row, index in enumerate(indices)}
    minibatches = []
    for minibatch in minibatches_of(count, job.minibatches, job.seed, "minibatches", step):
        rows = [row_of[index] for index in sorted(minibatch) if index in row_of]
        batches = batch_by_length([sequences[row].num_input_tokens for row in rows], job.batch_tokens)
        minibatches.append([[rows[at] for at in batch] for batch in batches])
    scored = score(run, sequences, list(chain.from_iterable(minibatches)))
    behaviour = [torch.from_numpy(np.asarray(sequence.logp_sampled)) for sequence in sequences]
    like = scored["token_logp"]
    return Rollout(
        indices=indices,
        sequences=sequences,
        scores=torch.as_tensor(np.asarray(rewards.total), dtype=like.dtype, device=like.device),
        parts={name: np.asarray(values, dtype=np.float64) for name, values in rewards.parts.items()},
        behaviour_logp=torch.stack([pad(x.to(like), (0, like.shape[1] - len(x))) for x in behaviour]),
        minibatches=minibatches,
        **scored,
    )


def draw(
    run: Run, prompts: list[Prompt], indices: list[int], step: int, display: Display
) -> list[TokenSequence]:
    """Generate the responses with these indices; they do not depend on the process."""
    job, samples, finished = run.job, run.job.samples_per_prompt, 0.0

    def show(_: int, responses: float) -> None:
        nonlocal finished
        finished += responses
        display.working(step, f"generating, {finished / len(indices):.0%} of {len(indices):,} responses")

    show(0, 0.0)
    sources = [prompts[index // samples] for index in indices]
    copies = [prompt.copy * samples + index % samples for prompt, index in zip(sources, indices, strict=True)]
    sampling = Sampling(
        samples_per_prompt=1,
        max_new_tokens=job.max_new_tokens,
        temperature=job.temperature,
        seed=number(job.seed, "responses", step),
    )
    numbered = [replace(prompt, copy=copy) for prompt, copy in zip(sources, copies, strict=True)]
    with torch.no_grad(), run.autocast():
        responses = generate(
            run.networks.sampler, numbered, sampling, batch_tokens=job.batch_tokens, on_tokens=show
        )
    return [
        replace(response, sample_id=index % samples)
        for response, index in zip(responses, indices, strict=True)
    ]


def score(run: Run, sequences: Sequence[TokenSequence], batches: Sequence[list[int]]) -> dict[str, Any]:
    """Score sequences under policy, critic and reference, without gradient.

    Returns:
        Fields of ``Rollout`` by name: tensors [responses, steps], 0 beyond the end of a response, and for each
        response its hidden states [tokens, dim] under both models.
    """
    networks, lengths = run.networks, torch.tensor([len(sequence.response_ids) for sequence in sequences])
    mask = (torch.arange(run.job.max_new_tokens) < lengths[:, None]).to(run.device)
    tensors: dict[str, Tensor] = {}
    states: dict[str, list[Any]] = {name: [None] * len(sequences) for name in ("hidden", "hidden_reference")}
    for rows in batches:
        batch = TokenBatch.of([sequences[row] for row in rows], run.device)
        with torch.no_grad(), run.autocast():
            hidden, hidden_q = networks.hidden(batch), networks.hidden_of_reference(batch)
            terms = linear_objective(
                hidden,
                networks.head(detached=True),
                batch.tokens,
                hidden_q,
                networks.reference_head,
                lambda terms, _: torch.zeros_like(terms.kl),
                temperature=run.job.temperature,
            )[1]
        columns = {"token_logp": terms.token_logp, "token_logq": terms.token_logq, "token_kl": terms.kl}
        columns |= {"entropy": terms.entropy, "values": networks.values(hidden).detach()}
        for name, flat in columns.items():
            whole_step = tensors.setdefault(name, flat.new_zeros(mask.shape))
            whole_step[rows] = whole_step[rows].masked_scatter(mask[rows], flat)
        for name, of_batch in (("hidden", hidden), ("hidden_reference", hidden_q)):
            for row, part in zip(rows, of_batch.split(lengths[rows].tolist()), strict=True):
                states[name][row] = part
    return {"mask": mask, **tensors, **states}


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """Sums and gradient norms of a step's updates, over all processes."""

    sums: dict[str, float]
    """``update_sums``, added over updates."""
    gradient_norms: tuple[float, ...]
    """Gradient norm of each update, before clipping."""
    stopped: str | None = None
    """Why the updates ended early; None if they did not."""

    def metrics(self) -> dict[str, float]:
        """The metrics of the updates."""
        tokens, norms = self.sums["tokens"], self.gradient_norms
        return {
            "policy/loss": self.sums["policy_loss"] / tokens,
            "policy/ratio_mean": self.sums["ratio"] / tokens,
            "policy/ratio_max": self.sums["ratio_max"],
            "policy/clip_share": self.sums["clipped"] / tokens,
            "policy/gradient_norm": float(np.mean(norms)) if norms else float("nan"),
            "policy/updates": float(len(norms)),
            "value/loss": self.sums["value_loss"] / tokens,
            "value/clip_share": self.sums["value_clipped"] / tokens,
        }


def update_policy(run: Run, rollout: Rollout, signals: LearningSignals, step: int) -> UpdateResult:
    """Update the policy on a step's responses: ``epochs`` passes of ``minibatches`` updates each.

    The forward passes are those of scoring, in another order in each epoch, so that a token has bit for bit the same
    log-probability. The first ratio is then exactly 1, and while policy and reference are equal, KL and its gradient
    are exactly 0 (Adam would turn rounding errors into full steps).

    All tokens have the same weight: the sum of a minibatch is divided by (tokens of the step / minibatches), counted
    over all processes, whose gradients are added.

    Raises:
        NonFiniteError: if a loss or a gradient is NaN or infinite, before the weights are touched.
    """
    job, optimizer = run.job, run.optimizer
    token_weight = job.minibatches / run.group.sum_over_ranks({"tokens": float(rollout.mask.sum())})["tokens"]
    stop = None if job.early_stop_nats is None else EarlyStop(target_nats=job.early_stop_nats, factor=1.0)
    sums: dict[str, float] = {}
    norms: list[float] = []
    for epoch in range(job.epochs):
        for at in shuffled(job.minibatches, job.seed, "order", step, epoch):
            where = f"step {step}, epoch {epoch + 1}, minibatch {at + 1}"
            optimizer.zero_grad()
            pass_sums = learn(run, rollout, signals, rollout.minibatches[at], token_weight)
            if not math.isfinite(pass_sums["loss"]):
                raise NonFiniteError(
                    f"the loss is {pass_sums['loss']} in {where}; {describe_cause(run, rollout, signals)}"
                )
            sums = add_sums(sums, pass_sums)
            update_kl = pass_sums["update_kl"] / pass_sums["tokens"] if pass_sums["tokens"] else 0.0
            if stop is not None and stop.stops(update_kl):
                optimizer.zero_grad()
                sentence = (
                    f"the updates ended early, after {len(norms)}: KL(before ‖ now) is {update_kl:.3g} nats "
                    f"per token, above {job.early_stop_nats:g}"
                )
                return UpdateResult(sums=sums, gradient_norms=tuple(norms), stopped=sentence)
            norm = torch.nn.utils.clip_grad_norm_(run.networks.parameters(), job.max_gradient_norm).item()
            if not math.isfinite(norm):
                raise NonFiniteError(
                    f"the gradient is {norm} in {where}; {describe_cause(run, rollout, signals)}"
                )
            optimizer.step()
            optimizer.zero_grad()
            norms.append(norm)
    return UpdateResult(sums=sums, gradient_norms=tuple(norms))


def learn(
    run: Run, rollout: Rollout, signals: LearningSignals, minibatch: list[list[int]], token_weight: float
) -> dict[str, float]:
    """Accumulate the gradient of a minibatch over all processes; returns sums over them, the loss as "loss".

    The gradient of the values ends at the critic. Its errors grow with the rewards, and would change the policy's
    hidden states more than the policy loss does.
    """
    job, networks, sums = run.job, run.networks, {}
    for rows in minibatch:
        batch = TokenBatch.of([rollout.sequences[row] for row in rows], run.device)
        mask = rollout.mask[rows]
        columns = (rollout.token_logp, rollout.values, signals.advantages, signals.returns)
        past = PastTokens(*(x[rows][mask] for x in columns))
        with run.autocast():
            hidden = networks.hidden(batch)
            loss, terms = linear_objective(
                hidden,
                networks.head(),
                batch.tokens,
                torch.cat([rollout.hidden_reference[row] for row in rows]),
                networks.reference_head,
                policy_objective(past, job, signals.scaled_beta),
                temperature=job.temperature,
            )
        values = networks.values(hidden.detach())
        errors = value_losses(values, past, job.clip_range_value).sum()
        loss = (loss + job.vf_coef * errors) * token_weight
        loss.backward()
        sums = add_sums(sums, {"loss": loss.item(), **update_sums(terms, values, past, job)})
    if run.group.world_size > 1:
        for parameter in networks.parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = all_reduce_sum(gradient)
    total: dict[str, float] = {}
    for of_rank in run.group.all_gather_object(sums):
        total = add_sums(total, of_rank)
    return total


def add_sums(sums: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """The sums of two passes, and the larger of their maxima (names that end in "_max")."""
    if not sums or not more:
        return sums or more
    return {name: max(sums[name], x) if name.endswith("_max") else sums[name] + x for name, x in more.items()}


def kl_of_update(run: Run, rollout: Rollout, head_before: Head) -> float:
    """KL(policy before || policy now), exact, summed over the tokens of this process's responses, in nats."""
    total, networks = 0.0, run.networks
    for rows in chain.from_iterable(rollout.minibatches):
        batch = TokenBatch.of([rollout.sequences[row] for row in rows], run.device)
        before = torch.cat([rollout.hidden[row] for row in rows])
        with torch.no_grad(), run.autocast():
            now, head = networks.hidden(batch), networks.head(detached=True)
            token_kl = linear_kl(before, head_before, now, head, temperature=run.job.temperature)
        total += token_kl.double().sum().item()
    return total


def describe_cause(run: Run, rollout: Rollout, signals: LearningSignals) -> str:
    """Where a NaN or an infinity comes from: the first one among the numbers of the responses, or the updates."""
    columns = {**rollout.columns(), "advantages": signals.advantages, "returns": signals.returns}
    sentence = ""
    for name, values in columns.items():
        places = (~values.isfinite() & rollout.mask).nonzero()
        if len(places):
            row, position = places[0].tolist()
            sentence = (
                f"{name} of {rollout.sequences[row].name}, response token {position}, is "
                f"{values[row, position].item()}, which came in with the responses"
            )
            break
    sentence = next(filter(None, run.group.all_gather_object(sentence)), "")
    return sentence or (
        "nothing that came in with the responses was, so the updates ran away at a learning rate of "
        f"{run.optimizer.param_groups[0]['lr']:g}: lower it, or --max-gradient-norm"
    )


def gather_responses(rollout: Rollout, returns: Tensor, group: ProcessGroup) -> list[Response]:
    """The responses of all processes, in the order of the step. A collective."""
    columns = {**rollout.columns(), "returns": returns}
    arrays = {name: x.cpu().double().numpy() for name, x in columns.items()}
    scores = rollout.scores.tolist()
    responses = [
        Response(
            index=index,
            prompt_hash=sequence.prompt_hash,
            score=scores[row],
            parts={name: float(values[row]) for name, values in rollout.parts.items()},
            is_truncated=sequence.finish_reason == "length",
            tokens={name: x[row, : len(sequence.response_ids)] for name, x in arrays.items()},
            prompt=sequence.prompt_text,
            response=sequence.response_text,
        )
        for row, (index, sequence) in enumerate(zip(rollout.indices, rollout.sequences, strict=True))
    ]
    return sorted(
        chain.from_iterable(group.all_gather_object(responses)), key=lambda response: response.index
    )


def critic_metrics(responses: Sequence[Response]) -> dict[str, float]:
    """Metrics of the critic, and of the difference between log-probabilities in sampling and in scoring."""
    returns = column_of(responses, "returns")
    errors, variance = returns - column_of(responses, "values"), returns.var()
    return {
        "value/explained_variance": float(1 - errors.var() / variance) if variance > 0 else float("nan"),
        "sampling/k3": mean_sampled_kl(responses, "behaviour_logp", "token_logp", "k3"),
    }
