"""A step's responses: drawn, rewarded, and scored by policy, critic and reference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.models import Prompt, Sampling, TokenSequence, generate, length_batches
from kleash.training.ppo.policy import Policy, with_whole_weights
from kleash.training.ppo.setup import TrainingSetup
from kleash.training.process_group import ProcessGroup
from kleash.training.scheduling import minibatches_of, number, prompts_of_step, share_of

PER_TOKEN = ("behaviour_logp", "token_logp", "token_logq", "token_kl", "entropy", "values")
"""The fields of a rollout that hold a number for each token."""


class Micro(NamedTuple):
    """Some of a process's responses, as many as go through the network at once."""

    own: list[int]
    """Their places among the process's own."""
    live: bool
    """Whether they are learned from; a process that has fewer to do reads some again and learns nothing."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollout:
    """A process's responses of a step, and what is said of each of their tokens.

    Tensors of tokens are [responses, steps], on the device, 0 where ``mask`` is false; ``hidden`` are lists with
    an entry [tokens, dim] for each response.
    """

    places: list[int]
    """Which of the whole step's responses these are."""
    sequences: list[TokenSequence]
    scores: Float[Tensor, "responses"]
    """What they were rewarded, before any KL is taken from it."""
    parts: dict[str, np.ndarray]
    """The rewards that the scores are the weighted sum of."""
    mask: Bool[Tensor, "responses steps"]
    behaviour_logp: Float[Tensor, "responses steps"]
    """As the tokens were drawn: the same weights, through the key-value cache."""
    token_logp: Float[Tensor, "responses steps"]
    """Under the policy before the step's updates, read as training reads it."""
    token_logq: Float[Tensor, "responses steps"]
    """Under the reference."""
    token_kl: Float[Tensor, "responses steps"]
    """KL(policy || reference), exact."""
    entropy: Float[Tensor, "responses steps"]
    values: Float[Tensor, "responses steps"]
    hidden: list[Tensor]
    """The policy's, before the updates."""
    hidden_reference: list[Tensor]
    micros: list[list[Micro]]
    """Each minibatch's micro-batches, as they were scored: read again alike, the policy says the same to the bit."""

    def of_tokens(self) -> dict[str, Tensor]:
        """The tensors that hold a number for each token."""
        return {name: getattr(self, name) for name in PER_TOKEN}


def roll_out(setting: TrainingSetup, prompts: Sequence[Prompt], step: int) -> Rollout:
    """Draw this process's share of a step's responses, have them rewarded, and score them.

    Raises:
        NonFiniteError: if the policy gives NaN, or a reward is not a finite number.
        CannotRunError: if a reward raises.
    """
    job, ranks = setting.job, setting.group
    responses = job.prompts_per_step * job.samples_per_prompt
    asked = prompts_of_step(prompts, step, job.prompts_per_step, job.seed)
    places = share_of(responses, job.minibatches, ranks.rank, ranks.world_size)
    sequences = _draw(setting, asked, places, step)
    rewarded = setting.rewards.of(sequences)
    scores = np.asarray(rewarded.total, dtype=np.float64)
    dealt = minibatches_of(responses, job.minibatches, job.seed, "minibatches", step)
    micros = micro_batches(dealt, places, [one.read for one in sequences], job.batch_tokens, ranks)
    scored = score(setting, sequences, micros)
    given = scored["token_logp"]
    behaviour = [torch.from_numpy(np.asarray(one.logp_sampled)) for one in sequences]
    steps = given.shape[1]
    drawn = [torch.nn.functional.pad(x.to(given), (0, steps - len(x))) for x in behaviour]
    return Rollout(
        places=places,
        sequences=sequences,
        scores=torch.as_tensor(scores, dtype=given.dtype, device=given.device),
        parts={name: np.asarray(values, dtype=np.float64) for name, values in rewarded.parts.items()},
        behaviour_logp=torch.stack(drawn),
        micros=micros,
        **scored,
    )


def micro_batches(
    dealt: Sequence[Sequence[int]],
    places: Sequence[int],
    lengths: Sequence[int],
    batch_tokens: int,
    ranks: ProcessGroup,
) -> list[list[Micro]]:
    """Each minibatch's micro-batches of this process: as many as those of any other process.

    Sharded weights are gathered by all processes together, so all have to make as many passes. A collective.

    Args:
        dealt: the places of each minibatch's responses, in the whole step.
        places: those of the responses that this process has.
        lengths: how many tokens of each of these are read.
        batch_tokens: the most tokens read at once, padding counted.
        ranks: the processes.
    """
    mine = {place: own for own, place in enumerate(places)}
    shortest = min(range(len(lengths)), key=lambda own: lengths[own])
    found = []
    for minibatch in dealt:
        own = [mine[place] for place in sorted(minibatch) if place in mine]
        batches = length_batches([lengths[one] for one in own], batch_tokens)
        found.append([Micro([own[index] for index in batch], True) for batch in batches])
    most = ranks.max_over_ranks([len(minibatch) for minibatch in found])
    idle = Micro([shortest], False)
    return [minibatch + [idle] * (n - len(minibatch)) for minibatch, n in zip(found, most, strict=True)]


def score(
    setting: TrainingSetup, sequences: Sequence[TokenSequence], micros: Sequence[Sequence[Micro]]
) -> dict[str, Any]:
    """What policy, critic and reference say of these sequences: the fields of ``Rollout`` of the same names."""
    lengths = torch.tensor([len(one.response_ids) for one in sequences])
    mask = (torch.arange(setting.job.max_new_tokens) < lengths[:, None]).to(setting.device)
    tensors: dict[str, Tensor] = {}
    hidden: dict[str, list[Any]] = {
        "hidden": [None] * len(sequences),
        "hidden_reference": [None] * len(sequences),
    }
    for micro in (micro for minibatch in micros for micro in minibatch):
        batch = setting.batch([sequences[own] for own in micro.own])
        with setting.autocast():
            theirs = setting.actor_critic.reference.hidden(setting.wrapped_policy, batch)
            ours = setting.wrapped_policy(Policy.score, batch, theirs, setting.actor_critic.reference.head)
        if not micro.live:
            continue
        terms = ours.terms
        found = {"token_logp": terms.token_logp, "token_logq": terms.token_logq, "token_kl": terms.kl}
        found |= {"entropy": terms.entropy, "values": ours.values}
        for name, flat in found.items():
            whole_step = tensors.setdefault(name, flat.new_zeros(mask.shape))
            whole_step[micro.own] = spread(flat, mask[micro.own])
        counts = lengths[micro.own].tolist()
        for name, states in (("hidden", ours.hidden), ("hidden_reference", theirs)):
            for own, part in zip(micro.own, states.split(counts), strict=True):
                hidden[name][own] = part
    return {"mask": mask, **tensors, **hidden}


def spread(
    flat: Float[Tensor, " tokens"], mask: Bool[Tensor, "responses steps"]
) -> Float[Tensor, "responses steps"]:
    """A number for each token, one response after the other, as a row for each response; 0 beyond its end."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def _draw(setting: TrainingSetup, asked: list[Prompt], places: list[int], step: int) -> list[TokenSequence]:
    """The responses at these places: place by place the same, whoever draws them."""
    job = setting.job
    samples = job.samples_per_prompt
    each = [asked[place // samples] for place in places]
    copies = [one.copy * samples + place % samples for one, place in zip(each, places, strict=True)]
    sampling = Sampling(
        samples_per_prompt=1,
        max_new_tokens=job.max_new_tokens,
        temperature=job.temperature,
        seed=number(job.seed, "responses", step),
    )
    prompts = [replace(one, copy=copy) for one, copy in zip(each, copies, strict=True)]

    def answer(policy: Policy) -> list[TokenSequence]:
        speaker = setting.actor_critic.current_sampler(policy)
        return generate(speaker, prompts, sampling, batch_tokens=job.batch_tokens)

    with setting.autocast():
        answers = with_whole_weights(setting.wrapped_policy, answer)
    return [replace(answer, sample_id=place % samples) for answer, place in zip(answers, places, strict=True)]
