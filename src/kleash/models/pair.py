"""Policy and reference: the two loaded models that are compared, each with its head and hidden states."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kleash.checkpoints.resolution import Checkpoint
from kleash.linear import Head
from kleash.models.padding_rows import PaddingRows
from kleash.models.sharded_networks import ShardStorage
from kleash.sources.sequences import group_for_padding
from kleash.store.measurement import ModelRecord, StoredWeights


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A loaded model with the role that it has in a comparison."""

    role: str
    """"policy" or "reference"."""
    path: str
    """The name that it was loaded by."""
    revision: str | None = None
    """Commit of a hub id; None for a folder or a network in memory."""
    dtype: torch.dtype
    device: torch.device
    """Device of the inputs."""
    parameters: int | None
    """Number of parameters of the base and the adapter together; None where a server does not say it."""
    vocab_size: int
    """Tokens that have a logit."""
    context_length: int | None
    """Largest number of input tokens; None if there is no limit."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    generation_settings: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Settings of the checkpoint's generation configuration that change which tokens are drawn, and that ``generate``
    does not use: see ``read_generation_settings``."""
    head: Head
    """Maps what ``hidden_states`` returns to logits."""
    padding: PaddingRows | None = None
    """The rows of the whole head that are no tokens; None if neither model of the pair has any, or several ranks store
    the head."""
    fingerprint: str
    """Hash of the checkpoint's files: see ``Checkpoint.fingerprint``; "" for a network in memory."""
    checkpoint: Checkpoint | None = None
    """The files that it was loaded from; None for a network in memory and a model that is not loaded."""
    weights: StoredWeights | None = None
    """How the checkpoint stores the weights; None for a network in memory."""
    base: str | None = None
    """The name of the model that the checkpoint is an adapter over; None for no adapter."""
    device_map: str | None = None
    """The device map that it was loaded with."""
    trust_remote_code: bool = False
    """Whether the checkpoint's own code may run."""
    notes: tuple[str, ...] = ()
    """What a user should know of how it was loaded and is run."""
    tokenizer: Any
    network: Any
    """The transformers model."""
    backbone: Any
    """The submodule of the network that returns hidden states."""
    adapters: Any = None
    """The PEFT model around the network; None if it has no adapters."""
    adapter: str | None = None
    """Name of this model's adapter in ``adapters``; None for the base."""
    max_padded_length: int | None = None
    """Longest batch in which padding on the right leaves the numbers of a sequence unchanged: longer ones hold
    sequences of one length. None for no limit, 0 if padding always changes numbers."""
    stored: Any = None
    """The ``StoredReference`` of a model that is not loaded; then ``network`` is None."""
    storage: ShardStorage | None = None
    """The ranks that store the weights between them; None if they are whole on this process."""
    turns: Any = None
    """The turns of these ranks (``Lockstep``), with which each can have tokens of its own; None if all make the same
    calls."""

    @contextmanager
    def activate_adapter(self) -> Iterator[None]:
        """Context in which the network has this model's adapter active, or all adapters disabled for a base."""
        if self.adapters is None:
            yield
        elif self.adapter is None:
            with self.adapters.disable_adapter():
                yield
        else:
            if self.adapters.active_adapter != self.adapter:
                self.adapters.set_adapter(self.adapter)
            yield

    def hidden_states(self, input_ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time dim"]:
        """Final hidden states, which ``head`` maps to logits (the logits themselves if the head has no weight).

        They are on the head's device, which a ``device_map`` may put elsewhere than the last layer.

        Args:
            input_ids: on any device; padded on the right only, which a causal model does not see.
        """
        ids = input_ids.to(self.device)
        self.wait_for("pass")
        with torch.inference_mode(), self.activate_adapter():
            if self.head.weight is None:
                return self.network(input_ids=ids, use_cache=False).logits[..., : self.vocab_size]
            output = self.backbone(input_ids=ids, use_cache=False)
            return output.last_hidden_state.to(self.head.weight.device)

    def states_from(
        self, texts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[Float[Tensor, "positions dim"]]:
        """The hidden states of each text from a position on, in the order of the texts.

        Texts of unlike lengths are padded to one batch only where padding changes no number.

        Args:
            texts: the token ids of each text.
            starts: for each text the first position whose hidden state is returned.
        """
        states: dict[int, Tensor] = {}
        for group in group_for_padding([len(text) for text in texts], self.max_padded_length):
            ids = pad_sequence([torch.tensor(texts[index]) for index in group], batch_first=True)
            for index, hidden in zip(group, self.hidden_states(ids), strict=True):
                states[index] = hidden[starts[index] : len(texts[index])]
        return [states[index] for index in range(len(texts))]

    def wait_for(self, call: Literal["pass", "logp"]) -> None:
        """Wait until all ranks that store the weights make a forward pass, or compute log-probabilities by the head.

        Returns at once if the weights are whole.
        """
        if self.turns is not None and self.storage is not None:
            self.turns.wait_for(self.role, call)

    def padding_mask(self) -> Bool[Tensor, " vocab"] | None:
        """Whether each logit is of no token; None if all are of tokens, or several ranks store the head."""
        if self.padding is None:
            return None
        return torch.isin(torch.arange(self.vocab_size), torch.tensor(self.padding.ids))

    @property
    def is_in_memory(self) -> bool:
        """Whether it was given as a network in memory (``live_model``), whose files are unknown."""
        return self.fingerprint == ""

    def is_same_as(self, other: "Model") -> bool:
        """Whether both are the same network with the same adapter, so that one forward pass serves both."""
        return self.network is other.network and self.adapter == other.adapter

    def record(self) -> ModelRecord:
        """The model's entry in a run's records."""
        return ModelRecord(
            path=self.path,
            revision=self.revision,
            dtype=str(self.dtype).removeprefix("torch."),
            parameters=self.parameters,
            vocabulary=self.vocab_size,
            fingerprint=self.fingerprint,
            weights=self.weights,
            base=self.base,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Pair:
    """A policy and its reference over the same vocabulary."""

    policy: Model
    reference: Model
    tokenizer: Any
    """The policy's tokenizer; the reference's gives the same tokens."""
    notes: tuple[str, ...] = ()
    """Information for the user about how the models were loaded."""
    warnings: tuple[str, ...] = ()
    """Reasons to doubt the numbers."""
    vocabulary: str = "the whole vocabulary"
    """What the distributions are over, in words."""
    has_equal_weights: bool = False
    """Whether both were loaded with the same weights and settings, from whatever files."""

    @property
    def is_one_model(self) -> bool:
        """Whether both are known to be the same model: the same network, weights, or fingerprint and dtype."""
        policy, reference = self.policy, self.reference
        has_same_files = not policy.is_in_memory and policy.fingerprint == reference.fingerprint
        is_same_load = has_same_files and policy.dtype == reference.dtype
        return policy.is_same_as(reference) or is_same_load or self.has_equal_weights

    @property
    def vocab_size(self) -> int:
        """Number of tokens that both give a probability to."""
        return self.policy.vocab_size

    @property
    def context_length(self) -> int | None:
        """Largest number of input tokens for both; None if there is no limit."""
        limits = [
            model.context_length
            for model in (self.policy, self.reference)
            if model.context_length is not None
        ]
        return min(limits, default=None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response of the policy."""
        return self.policy.eos_token_ids
