"""A chunk of tokens at a time, the elementwise work a few rows at a time: no ``[tokens, vocab]`` ever."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.linear.impl.gradient import differentiable_kl
from kleash.linear.impl.loop import Core, per_token
from kleash.linear.impl.pair import Pair
from kleash.linear.impl.reference import kl_of_logits, statistics_of_logits
from kleash.linear.impl.rows import kl_rows, statistics_rows
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import TokenStatistics


def careful_kl(zp: Tensor, zq: Tensor) -> tuple[Tensor, ...]:
    """KL(p || q), by the specification."""
    return (kl_of_logits(zp, zq),)


KL = Core(kl_rows, careful_kl, slice(0, 1))
STATISTICS = Core(statistics_rows, statistics_of_logits, slice(2, 4))


def linear_kl(pair: Pair, options: LinearOptions) -> Float[Tensor, " tokens"]:
    """KL(p || q) per token; whatever requires a gradient gets it."""
    needed = (x is not None and x.requires_grad for m in (pair.p, pair.q) for x in m.tensors)
    if torch.is_grad_enabled() and any(needed):
        return differentiable_kl(pair, options, lambda: per_token(KL, pair, options)[0])
    return per_token(KL, pair, options)[0]


def token_statistics(pair: Pair, tokens: Int[Tensor, " tokens"], options: LinearOptions) -> TokenStatistics:
    """The statistics of each token."""
    return TokenStatistics(*per_token(STATISTICS, pair, options, tokens))
