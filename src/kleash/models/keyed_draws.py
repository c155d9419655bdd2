"""Sampling with noise keyed by seed, prompt, sample and position, on the logits' device."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

GROUP = 512
"""Group size in consecutive token ids. It is part of the algorithm: another value gives other draws."""
SAMPLER = f"Gumbel-max over groups of {GROUP}, BLAKE2b, SplitMix64"
"""Name of the sampling algorithm. A run that was started with another algorithm cannot be resumed."""
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's increment and multipliers, as signed 64-bit numbers."""

DrawKey = tuple[str, int, int]
"""Prompt hash, sample, position."""


def draw(
    logp: Float[Tensor, "rows vocab"], seed: int, keys: Sequence[DrawKey]
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Draw one token for each row exactly from ``logp``; return the tokens and their log-probabilities.

    The Gumbel-max trick in two stages, over groups of ``GROUP`` consecutive ids and then within the drawn group:

        group = argmax_g  log P(g) - log E(-1 - g),    P(g) = sum of the probabilities of its tokens
        token = argmax_i  log p(i) - log E(i),         i in that group

    with standard exponential ``E`` keyed by (seed, key, counter). The probability of a token is
    P(g) · p(i) / P(g) = p(i), as with noise for every token, but with vocab/512 + 512 random numbers instead of vocab.
    If a change of the logits changes a fraction of the draws of plain Gumbel-max, it changes at most twice that
    fraction here, for any distribution (for draws by the inverse cumulative sum, up to a hundred times).

    A token of probability 0 is never drawn. A row with NaN, or without any token of probability above 0, gives a
    log-probability that is not finite. No tensor of the vocabulary's size leaves the device.

    Args:
        logp: normalised log-probabilities; -inf for excluded tokens.
        seed: from 0 to 2^64 - 1.
        keys: of each row, its prompt hash, sample number and position.

    References:
        Maddison et al. (2014), "A* Sampling", https://arxiv.org/abs/1411.0030
    """
    key_hashes = hash_keys(seed, keys).to(logp.device)
    group_probs = _group_probabilities(logp)
    groups = torch.arange(group_probs.shape[-1], device=logp.device)
    group = (group_probs.log() - exponentials(key_hashes, -1 - groups).log()).argmax(-1, keepdim=True)
    ids = group * GROUP + torch.arange(GROUP, device=logp.device)
    last_id = logp.shape[-1] - 1
    scores = logp.gather(-1, ids.clamp(max=last_id)).double() - exponentials(key_hashes, ids).log()
    best = scores.masked_fill(ids > last_id, -torch.inf).argmax(-1, keepdim=True)
    tokens = ids.gather(-1, best).clamp(max=last_id)
    return tokens[:, 0], logp.gather(-1, tokens)[:, 0]


def hash_keys(seed: int, keys: Sequence[DrawKey]) -> Int[Tensor, "rows 2"]:
    """A 128-bit hash of the seed and each key, as two 64-bit numbers."""
    texts = (f"{seed % 2**64} {prompt_hash} {sample} {position}" for prompt_hash, sample, position in keys)
    digests = b"".join(blake2b(text.encode(), digest_size=16).digest() for text in texts)
    return torch.from_numpy(np.frombuffer(digests, dtype="<i8").astype(np.int64).reshape(-1, 2))


def exponentials(
    key_hashes: Int[Tensor, "rows 2"], counters: Int[Tensor, "*rows numbers"]
) -> Float[Tensor, "rows numbers"]:
    """The standard exponential noise of each key (``hash_keys``) at the given counters, in float64.

    Number ``c`` for a key is -log(1 - v), v = (upper 53 bits of x + 1/2) · 2⁻⁵³, where

        x = mix(b ^ mix(a + c · golden))    mod 2^64,

    ``mix`` and ``golden`` are SplitMix64's, and (a, b) is the BLAKE2b hash (16 bytes, little-endian) of the text
    "seed prompt_hash sample position". So a number depends neither on the batch, nor on the device, nor on the version
    of PyTorch. This algorithm will not change, since interrupted runs are resumed with it.

    References:
        Steele, Lea & Flood (2014), "Fast splittable pseudorandom number generators".
    """
    bits = _mix(key_hashes[:, 1:] ^ _mix(key_hashes[:, :1] + counters * GOLDEN))
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-53))


def _mix(x: Int[Tensor, "*numbers"]) -> Int[Tensor, "*numbers"]:
    """SplitMix64's bijection of the 64-bit numbers, modulo 2^64."""
    x = (x ^ _shift_right(x, 30)) * FIRST
    x = (x ^ _shift_right(x, 27)) * SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Int[Tensor, "*numbers"], bits: int) -> Int[Tensor, "*numbers"]:
    """``x >> bits`` of unsigned numbers; torch's shift is signed and repeats the highest bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _group_probabilities(logp: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows groups"]:
    """The probability of each group of consecutive tokens, in float64; the last group may be smaller."""
    probs = pad(logp, (0, -logp.shape[-1] % GROUP), value=-torch.inf).exp()
    return probs.unflatten(-1, (-1, GROUP)).sum(-1).double()
