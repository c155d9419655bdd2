"""Two models side by side, each ready to be asked for its hidden states."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear import Head
from kleash.models.sequences import TokenSequence
from kleash.records import ModelRecord


@runtime_checkable
class StoredHiddenStates(Protocol):
    """What was kept of a model that is not loaded."""

    def read(self, batch: Sequence[TokenSequence]) -> Float[Tensor, "tokens dim"]:
        """Final hidden states at the scored positions of a batch, one sequence after the other."""
        ...

    def rounding_columns(self, what: str, temperature: float) -> dict[str, np.ndarray] | None:
        """Token columns of "noise" or "gap" at a temperature; None if nothing is known about it."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """One side of a comparison, ready to be asked."""

    role: str
    """"policy" or "reference": how errors call it."""
    path: str
    """As it was asked for."""
    revision: str | None
    """The commit a hub id led to; None for a folder."""
    dtype: torch.dtype
    device: torch.device
    """Where token ids go and hidden states come from."""
    parameters: int
    """Of the base and the adapter together."""
    vocab_size: int
    """Tokens with a logit."""
    context_length: int | None
    """The most tokens it can read at once; None if nothing limits it."""
    eos_token_ids: tuple[int, ...]
    """Tokens at which a response of it ends."""
    head: Head
    """Of the hidden states that ``hidden_states`` gives."""
    fingerprint: str
    """Changes with the weights: see ``Checkpoint.fingerprint``."""
    device_map: str | None = None
    """How it was spread over devices, if it was."""
    trust_remote_code: bool = False
    """Whether code that came with it may run."""
    tokenizer: Any
    network: Any
    """The transformers model."""
    backbone: Any
    """What of it gives hidden states."""
    adapters: Any = None
    """The PEFT model around the network, if one or both sides are adapters on it."""
    adapter: str | None = None
    """The name of this side's adapter in ``adapters``; None for the base."""
    stored: StoredHiddenStates | None = None
    """Where hidden states are read from, instead of asking the network, which then is None."""

    @contextmanager
    def activate_adapter(self) -> Iterator[None]:
        """Inside, the network acts as this side: its adapter on, or all of them off."""
        if self.adapters is None:
            yield
        elif self.adapter is None:
            with self.adapters.disable_adapter():
                yield
        else:
            if self.adapters.active_adapter != self.adapter:
                self.adapters.set_adapter(self.adapter)
            yield

    def hidden_states(
        self, input_ids: Int[Tensor, "batch time"], attention_mask: Int[Tensor, "batch time"] | None = None
    ) -> Float[Tensor, "batch time dim"]:
        """Final hidden states, which ``head`` turns into logits (or the logits, where the head has no
        weight).

        Args:
            input_ids: on any device.
            attention_mask: 0 where there is padding; None if nothing is padded, or only on the right, which a
                causal model does not see.
        """
        ids = input_ids.to(self.device)
        mask = None if attention_mask is None else attention_mask.to(self.device)
        with torch.inference_mode(), self.activate_adapter():
            if self.head.weight is None:
                out = self.network(input_ids=ids, attention_mask=mask, use_cache=False)
                return out.logits[..., : self.vocab_size]
            return self.backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state

    def is_same_as(self, other: "Model") -> bool:
        """Whether both are one network with one adapter, so that one pass tells both."""
        return self.network is other.network and self.adapter == other.adapter

    def record(self) -> ModelRecord:
        """Which model it is, for the record."""
        return ModelRecord(
            path=self.path,
            revision=self.revision,
            dtype=str(self.dtype).removeprefix("torch."),
            parameters=self.parameters,
            vocabulary=self.vocab_size,
            fingerprint=self.fingerprint,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Pair:
    """A policy and its reference, which put probability on the same tokens."""

    policy: Model
    reference: Model
    tokenizer: Any
    """The policy's; the reference's cuts text alike."""
    notes: tuple[str, ...] = ()
    """What was taken for what, to be said aloud: no fault in it."""
    warnings: tuple[str, ...] = ()
    """What could make the numbers mean less than they seem to."""

    @property
    def is_one_model(self) -> bool:
        """Whether both sides are known to be the same: one network, or one fingerprint in one dtype."""
        policy, reference = self.policy, self.reference
        marks = (policy.fingerprint, policy.dtype), (reference.fingerprint, reference.dtype)
        return policy.is_same_as(reference) or (policy.fingerprint != "" and marks[0] == marks[1])

    @property
    def vocab_size(self) -> int:
        """Tokens both give a probability to."""
        return self.policy.vocab_size

    @property
    def context_length(self) -> int | None:
        """The most tokens both can read at once; None if nothing limits them."""
        limits = [
            model.context_length
            for model in (self.policy, self.reference)
            if model.context_length is not None
        ]
        return min(limits, default=None)
