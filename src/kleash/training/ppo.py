"""PPO with a KL penalty to a reference, after InstructGPT: responses, rewards, advantages, updates, beta.

Ouyang et al., "Training language models to follow instructions with human feedback" (2022),
https://arxiv.org/abs/2203.02155; Schulman et al., "Proximal Policy Optimization Algorithms" (2017),
https://arxiv.org/abs/1707.06347. ``train_ppo`` has the loop, ``one_step`` a step, in the order of the file;
``ppo_loss`` has the formulas of advantages and losses.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kleash.errors import CannotRunError, NonFiniteError
from kleash.extras import import_extra
from kleash.jobs import PPOJob
from kleash.leash import beta_from_dict, beta_reason
from kleash.linear import Head, linear_kl, linear_objective
from kleash.masking import Mean, sum_over_ranks
from kleash.models import Prompt, Sampling, TokenSequence, generate, read_prompts
from kleash.models.pair_loading import resolve_device
from kleash.sources.sequences import batch_by_length
from kleash.store import TrainingResult
from kleash.store.training_folder import CHECKPOINTS, POLICY
from kleash.training.checkpoints import TrainingState, restore_last, save
from kleash.training.job_schedule import leash_of, prompt_indices, tightened
from kleash.training.networks import ActorCritic, final_states, load_networks
from kleash.training.ppo_loss import (
    LearningSignals,
    PastTokens,
    Scored,
    learning_signals,
    policy_objective,
    update_sums,
    value_losses,
)
from kleash.training.response_metrics import (
    Response,
    explained_variance,
    gather_object,
    of_first_process,
    response_metrics,
    to_samples,
)
from kleash.training.rewards import Rewards, check_rewards, load_rewards
from kleash.training.run_log import Advice, RunLog, stopped_by
from kleash.version import __version__

__all__ = ["train_ppo"]


def train_ppo(job: PPOJob, run_log: RunLog | None) -> TrainingResult:
    """Train a policy by PPO with a KL penalty to its reference.

    With ``resume=True`` an interrupted run continues from its last checkpoint; on a CPU in float32 with the numbers of
    an uninterrupted run. Under ``accelerate launch`` every process calls this and has whole copies of the models.

    Args:
        job: the training job.
        run_log: records the steps; None on ranks other than 0.

    Raises:
        SourceError, ModelError, OptionError, UnknownNameError: if an input or an option of the job is invalid.
        NonFiniteError: if a loss, a gradient, a reward or a model's numbers are NaN or infinite.
        RunFolderError: if a checkpoint cannot be written or read.
        CannotRunError, MissingExtraError: if an option is unsupported here or a dependency is missing.
    """
    check_rewards(job.rewards, job.source, job.limit, job)  # before any model is loaded
    run = set_up(job)
    prompts = read_prompts(job.source, run.networks.pair, limit=job.limit, columns=True, reading=job)
    root = Path(str(job.out))
    restored = restore_last(root / CHECKPOINTS, run.accelerator) if job.resume else None
    progress = restored or TrainingState(leash=leash_of(job).to_dict(), learning_rate=job.learning_rate)
    if run_log is not None:
        run_log.begin(progress.step, run.networks.pair.notes)
    while progress.step < job.steps and progress.stopped is None:
        progress = one_step(run, prompts, progress, run_log)
        ended = progress.step == job.steps or progress.stopped is not None
        if ended or progress.step % job.checkpoint_every == 0:
            save(root / CHECKPOINTS, progress, run.accelerator, run.networks)
    if run.accelerator.is_main_process:
        run.networks.save_policy(root / POLICY)
    run.accelerator.wait_for_everyone()
    return TrainingResult(
        kleash=__version__,
        algorithm=job.algorithm,
        steps=progress.step,
        stopped=progress.stopped,
        metrics=progress.metrics,
        beta=beta_from_dict(progress.leash).beta,
        policy=str(root / POLICY),
        out=str(root),
        dtypes=run.networks.dtypes,
    )


def one_step(
    run: "Run", prompts: list[Prompt], progress: TrainingState, run_log: RunLog | None
) -> TrainingState:
    """Take one step: rollout, advantages, updates, metrics, controller, log; raises as ``update_policy``."""
    job, step, leash, start = run.job, progress.step + 1, beta_from_dict(progress.leash), monotonic()
    if run_log is not None:
        run_log.display.working(step, "generating, rewarding and scoring responses")
    rollout = roll_out(run, prompts, step)
    signals = learning_signals(rollout, job, leash.beta)
    generated, head = monotonic(), deepcopy(run.networks.head())
    if run_log is not None:
        run_log.display.working(step, "updating the policy")
    for parameters in run.optimizer.param_groups:
        parameters["lr"] = progress.learning_rate
    update_metrics, stopped = update_policy(run, rollout, signals, step)
    update_kl = Mean(total=kl_of_update(run, rollout, head), count=rollout.mask.sum()).across_ranks()
    updated = monotonic()

    responses = gather_responses(rollout, signals.returns)
    measured = response_metrics(responses, leash.beta)
    kl, kl_error = (measured[f"kl/exact_per_{leash.per}{suffix}"] for suffix in ("", "_error"))
    next_leash = leash.after(kl, sequences=len(responses), standard_error=kl_error)
    metrics = {
        **measured,
        "response/cut_share": float(np.mean([response.is_truncated for response in responses])),
        "value/explained_variance": explained_variance(responses),
        **update_metrics,
        "policy/learning_rate": progress.learning_rate,
        "kl/update": update_kl.value.item(),
        "beta": leash.beta,
        "time/rollout": generated - start,
        "time/update": updated - generated,
        "time/step": monotonic() - start,
    }
    advice, events = Advice(), [event for event in (next_leash.event, stopped) if event is not None]
    if run_log is not None:
        advice = run_log.step(
            step, metrics, to_samples(responses), events, beta_reason=beta_reason(leash, next_leash, kl)
        )
    after = replace(progress, step=step, leash=next_leash.to_dict(), metrics=metrics)
    return apply_advice(after, of_first_process(advice), job)


def apply_advice(progress: TrainingState, advice: Advice, job: PPOJob) -> TrainingState:
    """The progress after the response to alerts."""
    match advice.act:
        case "stop":
            return replace(progress, stopped=stopped_by(advice.alerts, progress.step))
        case "halve-lr":
            return replace(progress, learning_rate=progress.learning_rate / 2)
        case "tighten":
            return replace(progress, leash=tightened(beta_from_dict(progress.leash), job).to_dict())
        case _:
            return progress


class Batch(NamedTuple):
    """Responses that are one forward pass, in scoring and in the updates: log-probabilities are then bit-identical."""

    rows: list[int]
    """Their rows in the rollout."""
    ids: Tensor
    """Prompts and responses without their last token, which is only predicted; padded on the right."""
    places: Bool[Tensor, "rows time"]
    """True where the hidden state predicts a response token: one before the token's own."""
    tokens: Tensor
    """The response tokens of all responses, concatenated."""
    hidden: Float[Tensor, "tokens dim"]
    """The policy's hidden states before the updates."""
    hidden_reference: Float[Tensor, "tokens dim_q"]
    columns: dict[str, Float[Tensor, " tokens"]]
    """Columns of ``Rollout`` at these tokens, by name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollout(Scored):
    """A process's responses of a step, what was measured on them, and their division for the updates."""

    sequences: list[TokenSequence]
    parts: Mapping[str, np.ndarray]
    """The individual rewards by name."""
    entropy: Float[Tensor, "responses steps"]
    minibatches: list[list[Batch]]


def roll_out(run: "Run", prompts: Sequence[Prompt], step: int) -> Rollout:
    """Generate this process's responses of a step, reward them, and score them.

    Response i of a step is in minibatch i modulo their number, on any number of processes. The generators of Python,
    numpy and torch are seeded by step and first response, for rewards that use random numbers.

    Raises:
        NonFiniteError: if the policy gives NaN, or a reward is not a finite number.
        CannotRunError: if a reward raises.
    """
    job = run.job
    rank, world_size = run.accelerator.process_index, run.accelerator.num_processes
    count = job.responses_per_step
    indices = range(count * rank // world_size, count * (rank + 1) // world_size)
    sequences = draw(run, prompts, indices, step)
    # seeded anew in each step, so that resuming needs no state of a generator
    seed = Random(f"{job.seed}/{step}/{indices.start}").getrandbits(32)
    import_extra("accelerate.utils", "train").set_seed(seed)
    rewards = run.rewards.of(sequences)
    lengths = torch.tensor([len(sequence.response_ids) for sequence in sequences])
    mask = (torch.arange(job.max_new_tokens) < lengths[:, None]).to(run.accelerator.device)
    minibatches: list[list[Batch]] = []
    for minibatch in range(job.minibatches):
        rows = [row for row, index in enumerate(indices) if index % job.minibatches == minibatch]
        batches = batch_by_length([sequences[row].num_input_tokens for row in rows], job.batch_tokens)
        minibatches.append([score(run, sequences, [rows[at] for at in batch]) for batch in batches])
    columns: dict[str, Tensor] = {}  # each [responses, max_new_tokens], 0 after the end
    for batch in chain.from_iterable(minibatches):
        for name, flat in batch.columns.items():
            column = columns.setdefault(name, flat.new_zeros(mask.shape))
            column[batch.rows] = column[batch.rows].masked_scatter(mask[batch.rows], flat)
    return Rollout(
        sequences=sequences,
        scores=torch.from_numpy(rewards.total).to(columns["token_logp"]),
        parts=rewards.parts,
        mask=mask,
        minibatches=minibatches,
        **columns,
    )


def draw(run: "Run", prompts: Sequence[Prompt], indices: range, step: int) -> list[TokenSequence]:
    """Generate the responses with these indices; the draws are keyed by the seed and a response's number in the run."""
    job = run.job
    numbers = [(step - 1) * job.responses_per_step + index for index in indices]
    chosen = prompt_indices(len(prompts), [number // job.samples_per_prompt for number in numbers], job.seed)
    numbered = [replace(prompts[which], copy=number) for which, number in zip(chosen, numbers, strict=True)]
    sampling = Sampling(max_new_tokens=job.max_new_tokens, temperature=job.temperature, seed=job.seed)
    with torch.no_grad(), run.autocast():
        return generate(run.networks.sampler, numbered, sampling, batch_tokens=job.batch_tokens)


def score(run: "Run", sequences: Sequence[TokenSequence], rows: list[int]) -> Batch:
    """Score responses under policy, critic and reference, without gradient."""
    networks, chosen = run.networks, [sequences[row] for row in rows]
    # the last token of a sequence is no input; each token is predicted at the position before it
    inputs = [torch.tensor((*sequence.prompt_ids, *sequence.response_ids)[:-1]) for sequence in chosen]
    marks = [torch.arange(sequence.num_input_tokens) >= len(sequence.prompt_ids) - 1 for sequence in chosen]
    ids, places = (pad_sequence(x, batch_first=True).to(run.accelerator.device) for x in (inputs, marks))
    tokens = torch.tensor(
        [token for sequence in chosen for token in sequence.response_ids], device=ids.device
    )
    with torch.no_grad(), run.autocast():
        hidden, hidden_q = (
            final_states(model, ids)[places] for model in (networks.sampler, networks.reference)
        )
        terms = linear_objective(
            hidden,
            networks.head(),
            tokens,
            hidden_q,
            networks.reference.head,
            lambda terms, _: torch.zeros_like(terms.kl),
            temperature=run.job.temperature,
        )[1]
        values = networks.values(hidden)
    return Batch(
        rows=rows,
        ids=ids,
        places=places,
        tokens=tokens,
        hidden=hidden,
        hidden_reference=hidden_q,
        columns={
            "token_logp": terms.token_logp,
            "token_logq": terms.token_logq,
            "token_kl": terms.kl,
            "entropy": terms.entropy,
            "values": values,
        },
    )


def update_policy(
    run: "Run", rollout: Rollout, signals: LearningSignals, step: int
) -> tuple[dict[str, float], str | None]:
    """Update the policy on a step's responses: ``epochs`` passes of ``minibatches`` updates each.

    The forward passes are those of scoring, so the first ratio is exactly 1, and while policy and reference are equal,
    KL and its gradient are exactly 0 (Adam would turn rounding errors into full steps). All tokens have the same
    weight: the sum of a minibatch is divided by (tokens of the step / minibatches), counted over all processes.

    Returns the metrics of the updates, and why they ended early; None if they did not. Raises NonFiniteError if a loss
    or a gradient is NaN or infinite, before the weights are touched.
    """
    job, optimizer, stopped = run.job, run.optimizer, None
    token_weight = job.minibatches / sum_over_ranks(rollout.mask.sum()).item()
    updates: list[dict[str, float]] = []
    norms: list[float] = []
    for epoch, minibatch in product(range(job.epochs), range(job.minibatches)):
        where = f"step {step}, epoch {epoch + 1}, minibatch {minibatch + 1}"
        optimizer.zero_grad()
        sums = learn(run, rollout, signals, rollout.minibatches[minibatch], token_weight)
        require_finite("loss", sums["loss"], where, run, rollout)
        updates.append(sums)
        update_kl = sums["update_kl"] / sums["tokens"]
        if job.early_stop_nats is not None and update_kl > job.early_stop_nats:
            stopped = (
                f"the updates ended early, after {len(norms)}: KL(before ‖ now) is {update_kl:.3g} nats per token, "
                f"above {job.early_stop_nats:g}"
            )
            break
        # apart: the critic's errors grow with the rewards, and would scale the policy's gradient down with its own
        norm, critic_norm = (
            torch.nn.utils.clip_grad_norm_(part.parameters(), job.max_gradient_norm).item()
            for part in (run.networks.network, run.networks.value)
        )
        require_finite("gradient", norm + critic_norm, where, run, rollout)
        optimizer.step()
        norms.append(norm)
    optimizer.zero_grad()
    total = added(updates)
    return {
        "policy/loss": total["policy_loss"] / total["tokens"],
        "policy/ratio_mean": total["ratio"] / total["tokens"],
        "policy/ratio_max": total["ratio_max"],
        "policy/clip_share": total["clipped"] / total["tokens"],
        "policy/gradient_norm": float(np.mean(norms)) if norms else float("nan"),
        "policy/updates": float(len(norms)),
        "value/loss": total["value_loss"] / total["tokens"],
        "value/clip_share": total["value_clipped"] / total["tokens"],
    }, stopped


def learn(
    run: "Run", rollout: Rollout, signals: LearningSignals, minibatch: list[Batch], token_weight: float
) -> dict[str, float]:
    """Accumulate the gradient of a minibatch over all processes; returns sums over them, the loss as "loss".

    The gradient of the values ends at the critic. Its errors grow with the rewards, and would change the policy's
    hidden states more than the policy loss does.
    """
    job, networks, sums = run.job, run.networks, []
    for batch in minibatch:
        columns = (rollout.token_logp, rollout.values, signals.advantages, signals.returns)
        past = PastTokens(*(x[batch.rows][rollout.mask[batch.rows]] for x in columns))
        with run.autocast():
            hidden = final_states(networks.sampler, batch.ids)[batch.places]
            loss, terms = linear_objective(
                hidden,
                networks.head(requires_grad=True),
                batch.tokens,
                batch.hidden_reference,
                networks.reference.head,
                policy_objective(past, job, signals.scaled_beta),
                temperature=job.temperature,
            )
        values = networks.values(hidden.detach())
        loss = (loss + job.vf_coef * value_losses(values, past, job.clip_range_value).sum()) * token_weight
        loss.backward()
        sums.append({"loss": loss.item(), **update_sums(terms, values, past, job)})
    if run.accelerator.num_processes > 1:
        for parameter in run.trained:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = sum_over_ranks(gradient)
    return added(gather_object(sums))


def added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums of some passes or updates, and the largest "ratio_max"."""
    return {
        name: max(part[name] for part in parts) if name == "ratio_max" else sum(part[name] for part in parts)
        for name in parts[0]
    }


def require_finite(what: str, number: float, where: str, run: "Run", rollout: Rollout) -> None:
    """Check the loss or gradient of an update.

    Raises:
        NonFiniteError: if it is NaN or infinite.
    """
    if not math.isfinite(number):
        token_kl = torch.where(rollout.mask, rollout.token_kl, 0.0).max().item()
        raise NonFiniteError(
            f"the {what} is {number} in {where}: the largest KL of a token before it is {token_kl:.3g} nats, the "
            f"largest absolute reward {rollout.scores.abs().max().item():.3g}; if both are of an ordinary size, lower "
            f"the learning rate, {run.optimizer.param_groups[0]['lr']:g}, or --max-gradient-norm"
        )


def kl_of_update(run: "Run", rollout: Rollout, head_before: Head) -> Float[Tensor, ""]:
    """KL(policy before || policy now), exact, summed over the tokens of this process's responses, in nats."""
    networks = run.networks
    total = torch.zeros((), dtype=torch.float64, device=run.accelerator.device)
    for batch in chain.from_iterable(rollout.minibatches):
        with torch.no_grad(), run.autocast():
            now = final_states(networks.sampler, batch.ids)[batch.places]
            token_kl = linear_kl(
                batch.hidden, head_before, now, networks.head(), temperature=run.job.temperature
            )
        total += token_kl.double().sum()
    return total


def gather_responses(rollout: Rollout, returns: Tensor) -> list[Response]:
    """The responses of all processes, in the order of the step. A collective."""
    columns = {
        "token_logp": rollout.token_logp,
        "token_logq": rollout.token_logq,
        "token_kl": rollout.token_kl,
        "entropy": rollout.entropy,
        "values": rollout.values,
        "returns": returns,
    }
    arrays = {name: x.cpu().double().numpy() for name, x in columns.items()}
    return gather_object(
        [
            Response(
                prompt_hash=sequence.prompt_hash,
                score=rollout.scores[row].item(),
                parts={name: float(values[row]) for name, values in rollout.parts.items()},
                is_truncated=sequence.finish_reason == "length",
                tokens={name: x[row, : len(sequence.response_ids)] for name, x in arrays.items()},
                prompt=sequence.prompt_text,
                response=sequence.response_text,
            )
            for row, sequence in enumerate(rollout.sequences)
        ]
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """The objects of a run; only the state of networks and optimiser changes."""

    job: PPOJob
    accelerator: Any
    networks: ActorCritic
    trained: Any
    """The trained parameters, which Accelerate saves with the optimiser."""
    optimizer: torch.optim.Optimizer
    rewards: Rewards

    def autocast(self) -> torch.autocast:
        """The context of forward passes, with bfloat16 products if checkpoint, job or Accelerate ask for them."""
        enabled = (
            self.networks.pair.policy.dtype == torch.bfloat16 or self.accelerator.mixed_precision == "bf16"
        )
        return torch.autocast(self.accelerator.device.type, dtype=torch.bfloat16, enabled=enabled)


def set_up(job: PPOJob) -> Run:
    """Load the models and the rewards, on the device that Accelerate gives to this process.

    The generators of Python, numpy and torch are seeded before adapters are initialised.

    Raises:
        ModelError, OptionError, UnknownNameError: if a model or a reward cannot be loaded.
        CannotRunError: if the device is missing, or Accelerate is set to shard the weights.
    """
    accelerate = import_extra("accelerate", "train")
    # else device and precision of a trainer that ran before in this process would be this run's, too
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=resolve_device(job.device, None).type == "cpu")
    require_replicas(accelerator, job.responses_per_step)
    accelerate.utils.set_seed(job.seed % 2**32)
    networks = ActorCritic(load_networks(job, job.reference_name, device=str(accelerator.device)))
    trained = torch.nn.ParameterList(x for x in networks.parameters() if x.requires_grad)
    accelerator.prepare_model(trained, evaluation_mode=True)  # gradients are added here, by ``learn``
    return Run(
        job=job,
        accelerator=accelerator,
        networks=networks,
        trained=trained,
        optimizer=accelerator.prepare_optimizer(
            torch.optim.AdamW(trained, lr=job.learning_rate, weight_decay=0.0)
        ),
        rewards=load_rewards(
            job.rewards,
            tokenizer=networks.pair.tokenizer,
            device=str(accelerator.device),
            dtype=job.dtype,
            batch_tokens=job.batch_tokens,
        ),
    )


def require_replicas(accelerator: Any, num_responses: int) -> None:
    """Refuse configurations of Accelerate under which a process has not all weights, no response, or scaled losses."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA") or accelerator.mixed_precision not in (
        "no",
        "bf16",
    ):
        raise CannotRunError(
            f"Accelerate is set to {kind} with mixed precision {accelerator.mixed_precision}; every process of PPO has "
            "whole copies of the models, in float32 or bf16: take plain processes, with --lora-rank if memory is "
            "short, or train grpo, which TRL shards"
        )
    if accelerator.num_processes > num_responses:
        raise CannotRunError(
            f"{num_responses} responses of a step keep at most so many processes busy, and there are "
            f"{accelerator.num_processes}; give more --prompts-per-step, or fewer processes"
        )
