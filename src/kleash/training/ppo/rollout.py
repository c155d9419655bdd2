"""The rollout of a PPO step: responses are generated, rewarded, and scored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.models import Pair, Prompt, Sampling, TokenSequence, generate, turns_of
from kleash.sources.sequences import batch_by_length
from kleash.training.ppo.policy import Policy, sharded_sampler, with_gathered_weights
from kleash.training.ppo.setup import TrainingSetup
from kleash.training.process_group import ProcessGroup
from kleash.training.run_log import Display, NullDisplay
from kleash.training.scheduling import minibatches_of, number, prompts_of_step, share_of

PER_TOKEN = ("behaviour_logp", "token_logp", "token_logq", "token_kl", "entropy", "values")
"""The fields of a rollout with a number for each token."""


class MicroBatch(NamedTuple):
    """The responses of one forward pass."""

    rows: list[int]
    """Their indices among the process's responses."""
    in_loss: bool
    """False for padding passes: all processes make equally many passes, and this one adds no loss."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollout:
    """A process's responses of a step with their per-token quantities.

    Tensors of tokens are [responses, steps], on the device, 0 where ``mask`` is false; ``hidden`` are lists with
    an entry [tokens, dim] for each response.
    """

    indices: list[int]
    """The indices of the responses among those of the whole step."""
    sequences: list[TokenSequence]
    scores: Float[Tensor, "responses"]
    """Rewards, without KL penalty."""
    parts: dict[str, np.ndarray]
    """The individual rewards by name."""
    mask: Bool[Tensor, "responses steps"]
    behaviour_logp: Float[Tensor, "responses steps"]
    """Log-probabilities during generation: the same weights, with the key-value cache."""
    token_logp: Float[Tensor, "responses steps"]
    """Log-probabilities under the policy before the updates, in the training forward pass."""
    token_logq: Float[Tensor, "responses steps"]
    """Log-probabilities under the reference."""
    token_kl: Float[Tensor, "responses steps"]
    """KL(policy || reference), exact."""
    entropy: Float[Tensor, "responses steps"]
    values: Float[Tensor, "responses steps"]
    hidden: list[Tensor]
    """The policy's hidden states before the updates."""
    hidden_reference: list[Tensor]
    micro_batches: list[list[MicroBatch]]
    """The micro-batches of each minibatch. The updates use them too, so that log-probabilities are bit-identical."""

    def token_columns(self) -> dict[str, Tensor]:
        """The per-token tensors by name."""
        return {name: getattr(self, name) for name in PER_TOKEN}


def roll_out(
    setting: TrainingSetup, prompts: Sequence[Prompt], step: int, display: Display | None = None
) -> Rollout:
    """Generate this process's responses of a step, reward them, and score them; ``display`` shows how far it is.

    Raises:
        NonFiniteError: if the policy gives NaN, or a reward is not a finite number.
        CannotRunError: if a reward raises.
    """
    job, group, display = setting.job, setting.group, display or NullDisplay()
    responses = job.prompts_per_step * job.samples_per_prompt
    step_prompts = prompts_of_step(prompts, step, job.prompts_per_step, job.seed)
    indices = share_of(responses, job.minibatches, group.rank, group.world_size)
    sequences = _draw(setting, step_prompts, indices, step, display)
    display.working(step, f"rewarding and scoring {len(sequences):,} responses")
    rewards = setting.rewards.of(sequences)
    scores = np.asarray(rewards.total, dtype=np.float64)
    minibatches = minibatches_of(responses, job.minibatches, job.seed, "minibatches", step)
    batches = micro_batches(
        minibatches, indices, [sequence.num_input_tokens for sequence in sequences], job.batch_tokens, group
    )
    scores_of_tokens = score(setting, sequences, batches)
    token_logp = scores_of_tokens["token_logp"]
    behaviour = [torch.from_numpy(np.asarray(sequence.logp_sampled)) for sequence in sequences]
    steps = token_logp.shape[1]
    padded = [torch.nn.functional.pad(x.to(token_logp), (0, steps - len(x))) for x in behaviour]
    return Rollout(
        indices=indices,
        sequences=sequences,
        scores=torch.as_tensor(scores, dtype=token_logp.dtype, device=token_logp.device),
        parts={name: np.asarray(values, dtype=np.float64) for name, values in rewards.parts.items()},
        behaviour_logp=torch.stack(padded),
        micro_batches=batches,
        **scores_of_tokens,
    )


def micro_batches(
    minibatches: Sequence[Sequence[int]],
    indices: Sequence[int],
    lengths: Sequence[int],
    batch_tokens: int,
    group: ProcessGroup,
) -> list[list[MicroBatch]]:
    """The micro-batches of each minibatch on this process, equally many on all processes.

    All processes gather sharded weights in each pass, so they make equally many passes. A collective.

    Args:
        minibatches: indices of the responses of each minibatch, in the whole step.
        indices: indices of the responses of this process, in the whole step.
        lengths: number of input tokens of each of these.
        batch_tokens: largest number of tokens in a forward pass, including padding.
        group: the processes.
    """
    row_of = {index: row for row, index in enumerate(indices)}
    shortest = min(range(len(lengths)), key=lambda row: lengths[row])
    per_minibatch = []
    for minibatch in minibatches:
        rows = [row_of[index] for index in sorted(minibatch) if index in row_of]
        batches = batch_by_length([lengths[row] for row in rows], batch_tokens)
        per_minibatch.append([MicroBatch([rows[at] for at in batch], True) for batch in batches])
    counts = group.max_over_ranks([len(minibatch) for minibatch in per_minibatch])
    idle = MicroBatch([shortest], False)
    return [
        minibatch + [idle] * (n - len(minibatch)) for minibatch, n in zip(per_minibatch, counts, strict=True)
    ]


def score(
    setting: TrainingSetup,
    sequences: Sequence[TokenSequence],
    batches: Sequence[Sequence[MicroBatch]],
) -> dict[str, Any]:
    """Score sequences under policy, critic and reference, without gradient.

    Args:
        setting: models, job and device.
        sequences: the responses of this process.
        batches: the micro-batches of each minibatch; those that are not in the loss only take part in collectives.

    Returns:
        Fields of ``Rollout`` by name: tensors [responses, steps], 0 beyond the end of a response, and for each
        response its hidden states [tokens, dim] under both models.
    """
    lengths = torch.tensor([len(sequence.response_ids) for sequence in sequences])
    mask = (torch.arange(setting.job.max_new_tokens) < lengths[:, None]).to(setting.device)
    tensors: dict[str, Tensor] = {}
    hidden: dict[str, list[Any]] = {
        "hidden": [None] * len(sequences),
        "hidden_reference": [None] * len(sequences),
    }
    for micro in (micro for minibatch in batches for micro in minibatch):
        batch = setting.batch([sequences[row] for row in micro.rows])
        with setting.autocast():
            hidden_q = setting.actor_critic.reference.hidden(setting.wrapped_policy, batch)
            scores = setting.wrapped_policy(
                Policy.score, batch, hidden_q, setting.actor_critic.reference.head
            )
        if not micro.in_loss:
            continue
        terms = scores.terms
        columns = {"token_logp": terms.token_logp, "token_logq": terms.token_logq, "token_kl": terms.kl}
        columns |= {"entropy": terms.entropy, "values": scores.values}
        for name, flat in columns.items():
            whole_step = tensors.setdefault(name, flat.new_zeros(mask.shape))
            whole_step[micro.rows] = spread(flat, mask[micro.rows])
        counts = lengths[micro.rows].tolist()
        for name, states in (("hidden", scores.hidden), ("hidden_reference", hidden_q)):
            for row, part in zip(micro.rows, states.split(counts), strict=True):
                hidden[name][row] = part
    return {"mask": mask, **tensors, **hidden}


def spread(
    flat: Float[Tensor, " tokens"], mask: Bool[Tensor, "responses steps"]
) -> Float[Tensor, "responses steps"]:
    """Unpack concatenated per-token values to a row for each response, 0 beyond its end."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def _draw(
    setting: TrainingSetup, step_prompts: list[Prompt], indices: list[int], step: int, display: Display
) -> list[TokenSequence]:
    """Generate the responses with these indices; they do not depend on the process."""
    job = setting.job
    samples = job.samples_per_prompt
    sources = [step_prompts[index // samples] for index in indices]
    copies = [prompt.copy * samples + index % samples for prompt, index in zip(sources, indices, strict=True)]
    sampling = Sampling(
        samples_per_prompt=1,
        max_new_tokens=job.max_new_tokens,
        temperature=job.temperature,
        seed=number(job.seed, "responses", step),
    )
    prompts = [replace(prompt, copy=copy) for prompt, copy in zip(sources, copies, strict=True)]

    finished = 0.0

    def show(_: int, responses: float) -> None:
        nonlocal finished
        finished += responses
        display.working(step, f"generating, {finished / len(indices):.0%} of {len(indices):,} responses")

    show(0, 0.0)

    def respond(policy: Policy) -> list[TokenSequence]:
        sampler = setting.actor_critic.current_sampler(policy)
        return generate(sampler, prompts, sampling, batch_tokens=job.batch_tokens, on_tokens=show)

    with setting.autocast():
        sharded = sharded_sampler(setting.actor_critic.policy, setting.actor_critic.sampler)
        if sharded is None:
            responses = with_gathered_weights(setting.wrapped_policy, respond)
        else:
            pair = Pair(policy=sharded, reference=sharded, tokenizer=sharded.tokenizer)
            with turns_of(pair, job.temperature):
                responses = generate(
                    sharded, prompts, sampling, batch_tokens=job.batch_tokens, on_tokens=show
                )
    return [
        replace(response, sample_id=index % samples)
        for response, index in zip(responses, indices, strict=True)
    ]
