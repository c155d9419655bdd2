"""The cores of ``lean.py``, ``objective.py`` and ``rows.py`` for float32 rows, by what is made of ``rows.c``."""

import ctypes
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kleash.linear.impl.native.building import library

Outs: TypeAlias = tuple[Tensor | None, Tensor | None]
"""Where the gradients in p's logits and in q's go, if they are wanted; logits may be replaced by their own."""
FACTS = 4
"""KL(p || q); log-sum-exp of p's logits; by how much q's is larger; p's entropy."""
NUMBERS, PLACES = 10, 3
"""The fields of TokenStatistics: those that are numbers, those that are indices or counts."""
SCRATCH_ROWS = 2
"""Rows of the vocabulary's size that each thread works in."""


def threads_within(words: int, nbytes: int) -> int:
    """How many threads may work at once if what they work in may take so many bytes; one at least."""
    return max(1, min(torch.get_num_threads(), nbytes // (SCRATCH_ROWS * words * 4)))


def scratch(words: int, threads: int) -> Float[Tensor, "rows vocab"]:
    """Memory for the threads to work in."""
    return torch.empty(SCRATCH_ROWS * threads, words)


def kl_rows(
    zp: Float[Tensor, "rows vocab"], zq: Float[Tensor, "rows vocab"], *, room: Tensor, apart: bool = False
) -> tuple[Tensor]:
    """``lean.kl_rows``."""
    return (facts(zp, zq, room, apart=apart)[:, 0].float(),)


def terms_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, " rows"],
    *,
    room: Tensor,
    apart: bool = False,
) -> tuple[Tensor, ...]:
    """``objective.terms_rows``."""
    kl, sums, more, entropies = facts(zp, zq, room, apart=apart).unbind(1)
    token_zp, token_zq = (z.gather(-1, tokens[:, None])[:, 0].double() for z in (zp, zq))
    token_logp = token_zp - sums
    token_logq = token_logp + ((token_zq if apart else token_zq - token_zp) - more)
    return tuple(x.float() for x in (token_logp, token_logq, kl, entropies, sums, more))


def statistics_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, " rows"],
    *,
    room: Tensor,
) -> tuple[Tensor, ...]:
    """``rows.statistics_rows``."""
    numbers = torch.empty((len(zp), NUMBERS), dtype=torch.float64)
    places = torch.empty((len(zp), PLACES), dtype=torch.int64)
    given = tokens.to(torch.int64).contiguous()
    call("kleash_statistics", zp, zq, *zp.shape, room, threads_in(room), given, numbers, places)
    *first, top_p, top_q = numbers.float().unbind(1)
    likeliest_p, likeliest_q, rank = places.unbind(1)
    return (*first, likeliest_p, likeliest_q, top_p, top_q, rank)


def facts(
    zp: Float[Tensor, "rows vocab"], zq: Float[Tensor, "rows vocab"], room: Tensor, *, apart: bool
) -> Float[Tensor, "rows facts"]:
    """FACTS of each row, in float64; a KL of NaN says that they are not to be had here."""
    found = torch.empty((len(zp), FACTS), dtype=torch.float64)
    call("kleash_facts", zp, zq, int(apart), *zp.shape, room, threads_in(room), found)
    return found


def kl_gradient_(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    outs: Outs,
    room: Tensor,
    *,
    apart: bool,
) -> Float[Tensor, " rows"]:
    """KL(p || q) of each row; the gradients of ``weight KL`` in both logits go into ``outs``.

    Of a row that cannot be done here the KL is NaN, and nothing is written.
    """
    found = torch.empty_like(weight)
    shape = (*zp.shape, room, threads_in(room))
    call("kleash_kl_gradient", zp, zq, int(apart), *shape, weight.contiguous(), found, *outs)
    return found


def pull_(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, " rows"],
    asked: Float[Tensor, "rows 4"],
    known: Float[Tensor, "rows 4"],
    outs: Outs,
    *,
    apart: bool,
    with_entropy: bool,
) -> Bool[Tensor, " rows"]:
    """The gradients of what a loss asks of each row go into ``outs``; returns which rows could be done.

    Args:
        zp: p's logits.
        zq: q's logits, or, if ``apart``, by how much they are larger.
        tokens: the sampled ones.
        asked: the loss's coefficients in log p and log q of the token, in the KL, and in p's entropy.
        known: the KL, p's entropy, the log-sum-exp of p's logits, by how much q's is larger.
        outs: not where the logits are.
        apart: see ``zq``.
        with_entropy: whether any coefficient in the entropy is not 0.
    """
    done = torch.empty(len(zp), dtype=torch.bool)
    kinds = int(apart), int(with_entropy)
    given = tokens.contiguous(), asked.contiguous(), known.contiguous()
    call("kleash_pull", zp, zq, *kinds, *zp.shape, torch.get_num_threads(), *given, *outs, done)
    return done


def threads_in(room: Float[Tensor, "rows vocab"]) -> int:
    """How many threads there is memory for."""
    return len(room) // SCRATCH_ROWS


def call(name: str, *given: Tensor | int | None) -> None:
    """A function of the library; tensors are contiguous."""
    assert all(x.is_contiguous() for x in given if isinstance(x, Tensor))
    words = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x if x is None else ctypes.c_int64(x)
        for x in given
    ]
    getattr(library(), name)(*words)
