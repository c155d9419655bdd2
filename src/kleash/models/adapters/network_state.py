"""The state of a network without adapters: a checksum of every tensor and the logits for a probe."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

CHUNK_BYTES = 1 << 25
"""Bytes of a tensor per checksum step; a step takes four times this in memory."""

PROBE_TOKENS = 64
"""Number of the probe's tokens that are spread over the vocabulary; a row of the probe holds twice as many."""

MAX_REQUIRED_TOKENS = 512
"""Largest number of tokens with trained embeddings in the probe."""

UNREADABLE = "its weights are not all in memory"


@dataclass(frozen=True, eq=False, kw_only=True)
class NetworkState:
    """A snapshot of a network: a checksum of every tensor, and its logits for a probe."""

    tensors: tuple[tuple[str, Tensor], ...]
    """Parameters and buffers with their names; references, not copies."""
    checksums: tuple[int, ...] | None
    """Checksum of each tensor; None if some are on the meta device."""
    probe: Int[Tensor, "rows time"]
    logits: Tensor

    def describe_change(self, network: Any, logits: Tensor) -> str | None:
        """The first difference from the snapshot, completing "the adapter …"; None without a difference.

        Args:
            network: the same network with adapters attached.
            logits: its logits for the probe with all adapters disabled.
        """
        if self.checksums is None:
            return UNREADABLE
        present = {id(tensor) for tensor in (*network.parameters(), *network.buffers())}
        for (name, tensor), checksum_before in zip(self.tensors, self.checksums, strict=True):
            if id(tensor) not in present or checksum(tensor) != checksum_before:
                return f"changes {name} of its base"
        return (
            None
            if bitwise_equal(logits, self.logits)
            else "changes the logits of its base even when switched off"
        )


def record_state(network: Any, tokens: tuple[int, ...] = ()) -> NetworkState:
    """Take a snapshot of a network without adapters, in evaluation mode.

    Args:
        network: a transformers causal language model.
        tokens: token ids that the probe must contain.
    """
    tensors = (*network.named_parameters(), *network.named_buffers())
    is_readable = not any(tensor.is_meta for _, tensor in tensors)
    probe = make_probe(network, tokens)
    return NetworkState(
        tensors=tensors,
        checksums=tuple(checksum(tensor) for _, tensor in tensors) if is_readable else None,
        probe=probe,
        logits=probe_logits(network, probe),
    )


def make_probe(network: Any, tokens: tuple[int, ...] = ()) -> Int[Tensor, "rows time"]:
    """Token ids for a forward pass: ``tokens`` and others spread over the vocabulary, within the context length."""
    embedding = network.get_input_embeddings().weight
    vocab_size = len(embedding)
    step = max(1, round(vocab_size * 0.382))  # the golden ratio spreads consecutive ids
    required_ids = [token for token in dict.fromkeys(tokens) if 0 <= token < vocab_size]
    spread_ids = [(17 + index * step) % vocab_size for index in range(PROBE_TOKENS)]
    ids = [*required_ids[:MAX_REQUIRED_TOKENS], *spread_ids]
    context = getattr(network.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = min(
        len(ids), 2 * PROBE_TOKENS, context if isinstance(context, int) and context > 0 else len(ids)
    )
    rows = -(-len(ids) // length)
    return torch.tensor([(ids * 2)[: rows * length]], device=embedding.device).view(rows, length)


def probe_logits(network: Any, probe: Int[Tensor, "rows time"]) -> Tensor:
    """The network's logits for the probe, with its adapters enabled or disabled as they are."""
    with torch.inference_mode():
        return network(input_ids=probe, use_cache=False).logits


def bitwise_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have equal shape, type and bits: 0.0 is not -0.0, and a NaN equals one of the same bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    first, second = (x.detach().reshape(-1).contiguous().view(torch.uint8) for x in (first, second))
    return torch.equal(first, second.to(first.device))


def checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of a tensor's bytes, computed on its device.

        sum over i of x_i (2 i + 1)   mod 2^64

    x are the bytes as 64-bit integers. One changed integer always changes the checksum, and so do two that are swapped.
    """
    flat, total = tensor.detach().reshape(-1).contiguous().view(torch.uint8), 0
    for start in range(0, flat.numel(), CHUNK_BYTES):
        part = flat[start : start + CHUNK_BYTES]
        numbers = torch.nn.functional.pad(part, (0, -len(part) % 8)).clone().view(torch.int64)
        places = torch.arange(start // 8, start // 8 + len(numbers), device=tensor.device)
        total += int((numbers * (2 * places + 1)).sum())
    return total % 2**64
