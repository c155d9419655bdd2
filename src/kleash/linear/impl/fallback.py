"""KL(p || q) of the rows that the fast core leaves over: too near, too far, or with logits that are not finite."""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import DIVERGENCES
from kleash.linear.impl.divergence_rows import plain_rows
from kleash.linear.impl.kl_fast import faint_kl
from kleash.linear.impl.reference import divergence_of_logits
from kleash.linear.impl.row_statistics import gradient_rows, kl_rows
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB, LocalVocab

KL = DIVERGENCES["kl"]


def fallback_kl(
    zp: Tensor, zq: Tensor, *, apart: bool = False, across: LocalVocab = LOCAL_VOCAB
) -> tuple[Tensor]:
    """By phi where the two nearly agree, else by the steady core, and where that fails by the specification."""
    kl = faint_kl(zp, zq, apart, across)
    for far in across.row_parts(~(kl < 1), zp.shape[1]):
        ours, theirs = zp[far], zp[far] + zq[far] if apart else zq[far]
        (steady,) = kl_rows(ours, theirs, across=across)
        for rare in across.row_parts(~steady.isfinite(), zp.shape[1]):
            steady[rare] = divergence_of_logits(KL, ours[rare], theirs[rare], across)
        kl[far] = steady
    return (kl,)


def fallback_gradient_(
    found: tuple[Tensor | None, ...],
    zp: Tensor,
    zq: Tensor,
    weight: Float[Tensor, " rows"],
    apart: bool,
    across: LocalVocab = LOCAL_VOCAB,
) -> None:
    """Mend what the fast core found: values of rows too near, values and gradients of the others."""
    value = found[0]
    assert value is not None
    for near in across.row_parts(value == -torch.inf, zp.shape[1]):
        value[near] = faint_kl(zp[near], zq[near], apart, across)
    for rare in across.row_parts(~value.isfinite(), zp.shape[1]):
        theirs = zp[rare] + zq[rare] if apart else zq[rare]
        replace_rows_(found, rare, steady(zp[rare], theirs, weight[rare], across))


def steady(zp: Tensor, zq: Tensor, weight: Tensor, across: LocalVocab) -> tuple[Tensor, ...]:
    """KL(p || q) and its gradients of rows however near or far, then of rows of any kind."""
    found = gradient_rows(zp, zq, weight, across=across)
    for rare in across.row_parts(~found[0].isfinite(), zp.shape[1]):
        replace_rows_(found, rare, plain_rows(KL, zp[rare], zq[rare], weight[rare], across))
    return found


def replace_rows_(found: tuple[Tensor | None, ...], rare: Tensor, right: tuple[Tensor, ...]) -> None:
    """Put what is right about the rare rows where something was said about them."""
    for numbers, new in zip(found, right, strict=True):
        if numbers is not None:
            numbers[rare] = new
