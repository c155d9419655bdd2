"""The trained module: a causal language model with a value head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.errors import ModelError
from kleash.linear import Head, TokenTerms, linear_kl, linear_objective
from kleash.models import Model, Pair, TokenSequence, in_lockstep
from kleash.models.compat import find_backbone
from kleash.models.heads import first_rows
from kleash.models.scoring import pad_batch
from kleash.models.sharded_networks import shard_storage, view_of_shards, with_mean_gradient

T = TypeVar("T")
Objective = Callable[[TokenTerms, slice], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch:
    """Token sequences as model inputs, padded on the right."""

    ids: Int[Tensor, "rows time"]
    """Prompts and responses without their last token, which is only predicted."""
    rows: Int[Tensor, " tokens"]
    cols: Int[Tensor, " tokens"]
    """The position whose hidden state predicts each response token: one before the token's own."""
    tokens: Int[Tensor, " tokens"]
    """The response tokens of all sequences, concatenated."""
    temperature: float

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], temperature: float, device: torch.device) -> "TokenBatch":
        """The batch of these sequences."""
        ids, rows, cols = pad_batch(sequences)
        tokens = torch.tensor([token for sequence in sequences for token in sequence.response_ids])
        ids, rows, cols, tokens = (x.to(device) for x in (ids, rows, cols, tokens))
        return cls(ids=ids, rows=rows, cols=cols, tokens=tokens, temperature=temperature)


class PolicyScores(NamedTuple):
    """Per-token quantities of a batch under the policy, without gradients."""

    terms: TokenTerms
    """Log-probability under policy and reference, exact KL(policy || reference) and entropy."""
    values: Float[Tensor, " tokens"]
    """The critic's value before each token."""
    hidden: Float[Tensor, "tokens dim"]


class PolicyLoss(NamedTuple):
    """The result of a training pass over a batch."""

    loss: Float[Tensor, ""]
    """The sum of the objective over the tokens, with gradient."""
    values: Float[Tensor, " tokens"]
    """The critic's values; their gradient reaches only the critic's own weights."""
    terms: TokenTerms
    """Detached."""


class OutputEmbedding(torch.nn.Linear):
    """An output embedding that FSDP2 shards as a unit of its own, by its class.

    Its forward is never called, so that FSDP never gathers it; ``kleash.linear`` computes with the stored rows.
    """


class Policy(torch.nn.Module):
    """A causal language model and its critic: a linear layer on the final hidden states, initialised to 0.

    All access to the weights goes through ``forward``, so that wrappers which gather sharded weights or reduce
    gradients (DistributedDataParallel, FSDP) see every use. Its first argument is the method to run:
    ``wrapped(Policy.score, batch, ...)``.

    The network stays in evaluation mode during training passes: with dropout, the ratio of a token's
    probabilities in two passes would be meaningless.
    """

    def __init__(self, network: Any, head: Head, *, adapters: Any = None) -> None:
        """Add the critic to the network.

        Args:
            network: the transformers causal language model.
            head: how its hidden states become logits; of its weight, only the number of rows is kept.
            adapters: the PEFT model around the network, if it is an adapter that is trained.
        """
        super().__init__()
        assert head.weight is not None
        self.network = network
        self.value = torch.nn.Linear(
            head.weight.shape[1], 1, dtype=torch.promote_types(head.weight.dtype, torch.float32)
        )
        torch.nn.init.zeros_(self.value.weight)
        torch.nn.init.zeros_(self.value.bias)
        self.vocab_size = head.weight.shape[0]
        self.head_without_weights = replace(head, weight=None, bias=None)
        self.adapters = (adapters,)  # a tuple, so that torch does not register its parameters a second time
        # transformers' list of layers that Accelerate wraps with FSDP; without it, FSDP wraps the whole module.
        layers = getattr(network, "_no_split_modules", None)
        self._no_split_modules = None if layers is None else [*layers, *_own_unit(network)]

    def forward(self, what: Callable[..., T], *arguments: Any) -> T:
        """Run one of the methods below inside the wrapper."""
        return what(self, *arguments)

    def score(
        self, batch: TokenBatch, hidden_q: Float[Tensor, "tokens dim_q"], head_q: Head | None
    ) -> PolicyScores:
        """Per-token quantities of a batch under policy and reference, without gradients.

        Args:
            batch: the sequences.
            hidden_q: the reference's hidden states at the same positions.
            head_q: the reference's head; None if it is the policy's head, which is then not trained.
        """
        with torch.no_grad():
            hidden, head = self.hidden_states(batch), self.head(detached=True)
            _, terms = linear_objective(
                hidden,
                head,
                batch.tokens,
                hidden_q,
                head_q or head,
                lambda terms, rows: torch.zeros_like(terms.kl),
                temperature=batch.temperature,
            )
            return PolicyScores(terms, self.predict_values(hidden), hidden)

    def learn(
        self,
        batch: TokenBatch,
        hidden_q: Float[Tensor, "tokens dim_q"],
        head_q: Head | None,
        objective: Objective,
    ) -> PolicyLoss:
        """The sum of the objective over a batch, with its gradient; arguments as ``score``.

        The gradient of the values ends at the critic. Its errors grow with the rewards, and would change the policy's
        hidden states more than the policy loss does.
        """
        hidden, head = self.hidden_states(batch), self.head()
        loss, terms = linear_objective(
            hidden,
            head,
            batch.tokens,
            hidden_q,
            head_q or self.head(detached=True),
            objective,
            temperature=batch.temperature,
        )
        return PolicyLoss(loss, self.predict_values(hidden.detach()), terms)

    def kl_of_update(
        self, batch: TokenBatch, hidden_before: Float[Tensor, "tokens dim"], head_before: Head
    ) -> Float[Tensor, " tokens"]:
        """The exact KL(policy before || policy now) of each token of a batch, in nats, without gradient."""
        with torch.no_grad():
            hidden, head = self.hidden_states(batch), self.head(detached=True)
            return linear_kl(hidden_before, head_before, hidden, head, temperature=batch.temperature)

    def reference(self, batch: TokenBatch) -> Float[Tensor, "tokens dim"]:
        """Hidden states of the network with its adapter disabled, without gradient."""
        with torch.no_grad(), self.adapters[0].disable_adapter():
            return self.hidden_states(batch)

    def hidden_states(self, batch: TokenBatch) -> Float[Tensor, "tokens dim"]:
        """Final hidden states at the positions that predict the batch's tokens."""
        hidden = find_backbone(self.network)(input_ids=batch.ids, use_cache=False).last_hidden_state
        return hidden[batch.rows, batch.cols]

    def predict_values(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, " tokens"]:
        """The critic's values, in at least float32 also under autocast."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.value(hidden.to(self.value.weight.dtype))[:, 0]

    def head(self, *, detached: bool = False) -> Head:
        """The network's head as it is now."""
        layer = self.network.get_output_embeddings()
        parts = [layer.weight, getattr(layer, "bias", None)]
        weight, bias = (
            None
            if x is None
            else first_rows(x.detach() if detached else with_mean_gradient(x), self.vocab_size)
            for x in parts
        )
        return replace(self.head_without_weights, weight=weight, bias=bias)

    def tie_weights(self) -> None:
        """Tie the weights that the network ties; Accelerate calls this after moving them."""
        self.network.tie_weights()


def with_gathered_weights(wrapped: Any, function: Callable[["Policy"], T]) -> T:
    """Return ``function(policy)`` for the unwrapped policy, with sharded weights (FSDP2) gathered meanwhile.

    For generation where the weights are sharded in a way that ``sharded_sampler`` does not take: it makes a different
    number of forward passes on each process, so no pass may need other processes.
    """
    with torch.no_grad():
        return wrapped(_call_with_gathered, function)


def sharded_sampler(policy: Policy, sampler: Model) -> Model | None:
    """The policy as a model for generation with the weights where FSDP2 stores them; None if it cannot be had.

    Processes with it take turns (``turns_of``).
    """
    try:
        storage = shard_storage(policy.network, "the policy", root=policy)
    except ModelError:  # two dimensions, or offloaded: the reason is the same on all processes
        return None
    if storage is None:
        return None
    view = view_of_shards(policy.network, storage)
    layer = view.get_output_embeddings()
    weight, bias = (
        None if x is None else first_rows(x, policy.vocab_size) for x in (layer.weight, layer.bias)
    )
    head = replace(policy.head_without_weights, weight=weight, bias=bias)
    model = replace(sampler, network=view, backbone=find_backbone(view), head=head, storage=storage)
    return in_lockstep(Pair(policy=model, reference=model, tokenizer=model.tokenizer)).policy


def _own_unit(network: Any) -> list[str]:
    """Give the output embedding its own class, if it is a plain layer of its own; returns the class's name."""
    layer, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if type(layer) is not torch.nn.Linear or layer.weight is embedding.weight:
        return []
    layer.__class__ = OutputEmbedding
    return [OutputEmbedding.__name__]


def _call_with_gathered(policy: Policy, function: Callable[[Policy], T]) -> T:
    sharded = _sharded(policy)
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        return function(policy)
    finally:
        for module in sharded:
            module.set_reshard_after_forward(module is not policy, recurse=False)
            if module is not policy:  # its forward is still running
                module.reshard()


def _sharded(policy: Policy) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in policy.modules() if isinstance(module, FSDPModule)]
