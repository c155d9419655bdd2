"""KL(p || q) of the rows that the fast versions cannot compute: nearly equal, far apart, or with infinite logits."""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.base import KL
from kleash.linear.impl.divergence_rows import reference_gradient_rows
from kleash.linear.impl.kl_fast import kl_of_near_rows
from kleash.linear.impl.reference import divergence_of_logits
from kleash.linear.impl.row_statistics import gradient_rows, kl_rows
from kleash.linear.vocab_shards import LOCAL_VOCAB, LocalVocab


def fallback_kl(
    zp: Tensor, zq: Tensor, *, q_is_delta: bool = False, vocab_shards: LocalVocab = LOCAL_VOCAB
) -> tuple[Tensor]:
    """KL of each row: the sum of phi where it is below 1, else the tanh form, and the reference where that fails."""
    kl = kl_of_near_rows(zp, zq, q_is_delta, vocab_shards)
    for far in vocab_shards.row_parts(~(kl < 1), zp.shape[1]):
        far_zp, far_zq = zp[far], zp[far] + zq[far] if q_is_delta else zq[far]
        (far_kl,) = kl_rows(far_zp, far_zq, vocab_shards=vocab_shards)
        for failed in vocab_shards.row_parts(~far_kl.isfinite(), zp.shape[1]):
            far_kl[failed] = divergence_of_logits(KL, far_zp[failed], far_zq[failed], vocab_shards)
        kl[far] = far_kl
    return (kl,)


def replace_failed_gradients_(
    results: tuple[Tensor | None, ...],
    zp: Tensor,
    zq: Tensor,
    weight: Float[Tensor, " rows"],
    q_is_delta: bool,
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> None:
    """Replace the KL of nearly equal rows, and KL and gradients of all others that the fast version left non-finite.

    ``results`` are KL and the gradients in both logits; a KL of minus infinity marks a nearly equal row.
    """
    value = results[0]
    assert value is not None
    for near in vocab_shards.row_parts(value == -torch.inf, zp.shape[1]):
        value[near] = kl_of_near_rows(zp[near], zq[near], q_is_delta, vocab_shards)
    for failed in vocab_shards.row_parts(~value.isfinite(), zp.shape[1]):
        failed_zq = zp[failed] + zq[failed] if q_is_delta else zq[failed]
        replacement = fallback_gradient_rows(zp[failed], failed_zq, weight[failed], vocab_shards)
        replace_rows_(results, failed, replacement)


def fallback_gradient_rows(
    zp: Tensor, zq: Tensor, weight: Tensor, vocab_shards: LocalVocab
) -> tuple[Tensor, ...]:
    """KL of each row and its gradients, by the tanh form, and by the reference where that is not finite."""
    results = gradient_rows(zp, zq, weight, vocab_shards=vocab_shards)
    for failed in vocab_shards.row_parts(~results[0].isfinite(), zp.shape[1]):
        replacement = reference_gradient_rows(KL, zp[failed], zq[failed], weight[failed], vocab_shards)
        replace_rows_(results, failed, replacement)
    return results


def replace_rows_(results: tuple[Tensor | None, ...], rows: Tensor, replacement: tuple[Tensor, ...]) -> None:
    """Write the replacement into these rows of every result that is not None."""
    for result, new in zip(results, replacement, strict=True):
        if result is not None:
            result[rows] = new
