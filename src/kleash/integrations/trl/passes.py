"""The hidden states of TRL's own passes through a model, and the head behind them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import CannotRunError
from kleash.linear import Head
from kleash.models import at_rest, live_model


@dataclass(frozen=True, eq=False, kw_only=True)
class Pass:
    """One pass of a model over prompts and responses."""

    logp: Float[Tensor, "batch time"]
    """Log-probabilities of the responses' tokens, at the temperature of training."""
    hidden: Float[Tensor, "batch time dim"] | None
    """Final hidden states at the positions that predict them, part of the graph; None if not asked for."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """Positional and keyword arguments after the model, so that the pass can be repeated."""


@contextmanager
def caught(backbone: Any) -> Iterator[list[Tensor]]:
    """Inside, the final hidden states of each call of ``backbone`` are put into the list."""
    seen: list[Tensor] = []
    handle = backbone.register_forward_hook(lambda _, __, out: seen.append(out.last_hidden_state))
    try:
        yield seen
    finally:
        handle.remove()


def inner(network: Any) -> Any:
    """The transformers model inside a PEFT model, or itself."""
    return network.get_base_model() if hasattr(network, "get_base_model") else network


def of_responses(seen: list[Tensor], length: int) -> Float[Tensor, "batch time dim"]:
    """Of hidden states of whole texts, those that predict the last ``length`` tokens."""
    return torch.cat(seen)[:, :-1][:, -length:]


def reading_of(network: Any, tokenizer: Any, role: str) -> Head:
    """How the head of a model in memory is read: scale, softcap, and how many rows count.

    Raises:
        CannotRunError: if it does not come apart into hidden states and a plain matrix.
        ModelError: if it is no causal language model of text, or its weights are sharded.
    """
    layer = inner(network).get_output_embeddings()
    if any(hasattr(layer, name) for name in ("base_layer", "modules_to_save", "token_adapter")):
        raise CannotRunError(
            f"the head of the {role} is adapted itself, and the exact KL is computed from a plain one; leave the "
            "output embedding out of the adapter, or take kl='k3'"
        )
    with at_rest(network):
        head = live_model(network, tokenizer, role=role).head
    if head.weight is None:
        raise CannotRunError(
            f"the {role} ({type(inner(network)).__name__}) does not come apart into hidden states and a head, which "
            "the exact KL is computed from; take kl='k3'"
        )
    return head


def head_of(network: Any, reading: Head, *, trained: bool) -> Head:
    """The head as it is now, with its gradient if it is trained."""
    layer = inner(network).get_output_embeddings()
    rows = 0 if reading.weight is None else len(reading.weight)
    weight, bias = layer.weight[:rows], None if layer.bias is None else layer.bias[:rows]
    if not trained:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    return replace(reading, weight=weight, bias=bias)
