"""The state of a network without adapters: a checksum of every tensor and the logits for a probe."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

CHUNK_BYTES = 1 << 25
"""Bytes of a tensor that are summed at once: what checking takes of memory, at most twice."""

COLUMNS = 1 << 12

PROBE_TOKENS = 64
"""Of the vocabulary at large; a row of the probe holds twice as many."""

MOST_NAMED = 512
"""Tokens with trained embeddings that are put into the probe."""

UNMEASURED = "its weights are not all in memory"


@dataclass(frozen=True, eq=False, kw_only=True)
class NetworkState:
    """A network as it was: a checksum of every tensor, and its logits for a probe."""

    tensors: tuple[tuple[str, Tensor], ...]
    """Parameters and buffers by name: the objects themselves, which keep no copy of their values."""
    sums: tuple[int, ...] | None
    """A checksum of each; None where some cannot be read."""
    probe: Int[Tensor, "rows time"]
    logits: Tensor

    def change(self, network: Any, logits: Tensor) -> str | None:
        """What is no longer as it was, in words; None if nothing is.

        Args:
            network: the same network with adapters in it.
            logits: its logits for the probe, all adapters switched off.
        """
        if self.sums is None:
            return UNMEASURED
        present = {id(tensor) for tensor in (*network.parameters(), *network.buffers())}
        for (name, tensor), total in zip(self.tensors, self.sums, strict=True):
            if id(tensor) not in present or checksum(tensor) != total:
                return f"changes {name} of its base"
        return (
            None
            if same_bits(logits, self.logits)
            else "changes the logits of its base even when switched off"
        )


def state_of(network: Any, tokens: tuple[int, ...] = ()) -> NetworkState:
    """The state of a network without adapters, in evaluation mode.

    Args:
        network: a transformers causal language model.
        tokens: token ids that the probe must hold.
    """
    tensors = (*network.named_parameters(), *network.named_buffers())
    readable = not any(tensor.is_meta for _, tensor in tensors)
    probe = probe_of(network, tokens)
    return NetworkState(
        tensors=tensors,
        sums=tuple(checksum(tensor) for _, tensor in tensors) if readable else None,
        probe=probe,
        logits=logits_of(network, probe),
    )


def probe_of(network: Any, tokens: tuple[int, ...] = ()) -> Int[Tensor, "rows time"]:
    """Token ids spread over the whole vocabulary, and those that are asked for, in rows that the network can read."""
    embedding = network.get_input_embeddings().weight
    vocab_size = len(embedding)
    step = max(1, round(vocab_size * 0.382))  # by the golden ratio neighbours are far apart
    named = [token for token in dict.fromkeys(tokens) if 0 <= token < vocab_size][:MOST_NAMED]
    ids = [*named, *((17 + place * step) % vocab_size for place in range(PROBE_TOKENS))]
    context = getattr(network.config, "max_position_embeddings", None)
    length = min(
        len(ids), 2 * PROBE_TOKENS, context if isinstance(context, int) and context > 0 else len(ids)
    )
    rows = -(-len(ids) // length)
    return torch.tensor([(ids * 2)[: rows * length]], device=embedding.device).view(rows, length)


def logits_of(network: Any, probe: Int[Tensor, "rows time"]) -> Tensor:
    """The logits for the probe, with adapters as they are switched."""
    with torch.inference_mode():
        return network(input_ids=probe, use_cache=False).logits


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included."""
    return ours.shape == theirs.shape and bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def checksum(tensor: Tensor) -> int:
    """A number that changes with the bytes of a tensor, at the speed of memory and on its own device.

        sum over rows i of v_i (sum over columns j of x_ij w_j)   mod 2^64

    x are the bytes as 64-bit integers in rows of ``COLUMNS``; v and w are fixed random odd numbers, so that one change,
    or an exchange of two places, always shows, and two or more go unnoticed once in 2^63 times.
    """
    total = 0
    flat = (
        tensor.detach().reshape(-1).contiguous().view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    )
    columns, rows = (_weights(kind, tensor.device) for kind in (0, 1))
    for number, start in enumerate(range(0, flat.numel(), CHUNK_BYTES)):
        part = flat[start : start + CHUNK_BYTES]
        missing = -part.numel() % (8 * COLUMNS)
        if missing or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, missing))
        table = part.view(torch.int64).view(-1, COLUMNS)
        sums = table @ columns if table.device.type == "cpu" else (table * columns).sum(-1)
        value = int((sums * rows[: len(sums)]).sum())
        total = (total * 0x9E3779B97F4A7C15 + value + number) % 2**64
    return total


def _weights(kind: int, device: torch.device) -> Int[Tensor, "columns"]:
    generator = torch.Generator().manual_seed(20_240_607 + kind)
    return (torch.randint(-(2**62), 2**62, (COLUMNS,), generator=generator) | 1).to(device)
