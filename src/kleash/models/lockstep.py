"""Ranks that share the weights of a model make the same collective calls, each with tokens of its own.

Ranks generate and score different prompts, so they need a model at different times. Before each call that takes all of
them, a rank says which one it needs; all ranks then make the call that comes first in ``CALLS``, those that
need another, or none, without tokens.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from kleash.errors import CannotRunError, ModelError
from kleash.linear import log_probabilities, token_statistics, token_statistics_and_top
from kleash.linear.vocab_shards import all_gather_numbers
from kleash.models.pair import Model, Pair

FAILED = -1
FINISHED = 0
CALLS = (
    ("", "finished"),
    *(("policy", "pass"), ("policy", "logp"), ("reference", "pass"), ("reference", "logp")),
    *(("policy", "statistics"), ("policy", "statistics_and_top"), ("reference", "statistics")),
)
"""Roles and calls in which all ranks take part; a rank sends the place of the one it needs and waits for its turn. The
reference's statistics are those against itself."""


class Lockstep:
    """The turns of the ranks that share the weights of a pair of models."""

    def __init__(self, pair: Pair) -> None:
        """``pair``: at least one model has weights on several ranks."""
        self.temperature = 1.0
        storages = [model.storage for model in (pair.policy, pair.reference) if model.storage is not None]
        self.pair, self.storage = pair, storages[0]

    def wait_for(self, role: str, name: str) -> None:
        """Take part in the calls of other ranks until all make this one.

        Args:
            role: of the model that is called, "policy" or "reference"; as ``name``, one of ``CALLS``.
            name: of the call, such as "pass".

        Raises:
            CannotRunError: if another rank has failed.
        """
        call = CALLS.index((role, name))
        while (chosen := self._announce(call)) != call:
            self._make_without_tokens(*CALLS[chosen])

    @contextmanager
    def until_all_finish(self, temperature: float) -> Iterator[None]:
        """Context of this rank's calls; it ends when all ranks have left it, or one has failed."""
        self.temperature = temperature
        try:
            yield
        except BaseException as error:
            if not isinstance(error, _OtherRankError):
                self._gather(FAILED)
            raise
        self.wait_for(*CALLS[FINISHED])

    def _announce(self, needed: int) -> int:
        """The call that all ranks make next; ``FINISHED`` if none needs any."""
        numbers = self._gather(needed)
        if FAILED in numbers:
            rank = torch.distributed.get_process_group_ranks(self.storage.group)[numbers.index(FAILED)]
            raise _OtherRankError(
                f"rank {rank} of those that share the weights has stopped; its own error message says why"
            )
        return min((number for number in numbers if number != FINISHED), default=FINISHED)

    def _gather(self, number: int) -> list[int]:
        return all_gather_numbers(self.storage.group, self.storage.device, [number])[0]

    @torch.inference_mode()
    def _make_without_tokens(self, role: str, name: str) -> None:
        """Take part in a call of other ranks."""
        policy, reference = self.pair.policy, self.pair.reference
        model = policy if role == "policy" else reference
        if name == "pass":
            with model.activate_adapter():
                one_token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
                model.backbone(input_ids=one_token, use_cache=False)
        elif name == "logp":
            log_probabilities(_no_tokens(model), model.head, temperature=self.temperature)
        else:
            inputs = (_no_tokens(model), model.head, _no_tokens(reference), reference.head)
            token_ids = torch.zeros(0, dtype=torch.long, device=policy.device)
            if name == "statistics_and_top":
                token_statistics_and_top(*inputs, token_ids, top=1, temperature=self.temperature)
            else:
                token_statistics(*inputs, token_ids, temperature=self.temperature)


def _no_tokens(model: Model) -> Tensor:
    """The hidden states of no token."""
    assert model.head.weight is not None, "a sharded model has a head"
    return torch.zeros((0, model.head.weight.shape[1]), dtype=model.dtype, device=model.device)


class _OtherRankError(CannotRunError):
    """Another rank has failed, and knows that all have heard of it."""


def in_lockstep(pair: Pair) -> Pair:
    """The pair with turns, if the weights of one of its models are stored on several ranks.

    Raises:
        ModelError: if the two are stored on different ranks.
    """
    groups = [
        torch.distributed.get_process_group_ranks(model.storage.group)
        for model in (pair.policy, pair.reference)
        if model.storage is not None
    ]
    if not groups:
        return pair
    if groups[0] != groups[-1]:
        raise ModelError(
            f"the policy is sharded over ranks {groups[0]} and the reference over ranks {groups[1]}; shard both over "
            "the same ranks"
        )
    turns = Lockstep(pair)
    policy = replace(pair.policy, turns=turns)
    reference = policy if pair.reference is pair.policy else replace(pair.reference, turns=turns)
    return replace(pair, policy=policy, reference=reference)


def turns_of(pair: Pair, temperature: float) -> AbstractContextManager[None]:
    """Context of one rank's calls of a pair from ``in_lockstep``, which ends when all ranks have left it.

    ``temperature`` is that of all calls in it.
    """
    turns = pair.policy.turns
    return turns.until_all_finish(temperature) if isinstance(turns, Lockstep) else nullcontext()
