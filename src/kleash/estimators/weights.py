"""Importance weights: samples of the behaviour distribution, counted as if they were drawn from p."""

from math import inf, log
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn.functional import pad

from kleash.arguments import validated
from kleash.errors import OptionError, ShapeError
from kleash.masking import as_mask
from kleash.precision import at_least_float32

Level = Literal["token", "before", "prefix", "sequence"]
LEVELS: tuple[Level, ...] = ("token", "before", "prefix", "sequence")


class ImportanceWeights(NamedTuple):
    """What each token counts for, and how much is left of the sample; no gradient flows through any of it."""

    values: Float[Tensor, "batch time"]
    """One weight per token, after the cap; 0 where masked."""
    effective_sample_size: Float[Tensor, ""]
    """How many equally weighted units (tokens, or at level "sequence" sequences) would tell as much:
    (sum w)^2 / sum w^2, after the cap. NaN over nothing, where all weights are 0, or where the behaviour
    rules out a token that was drawn."""
    truncated_share: Float[Tensor, ""]
    """The share of those units whose weight the cap lowered. NaN over nothing."""


@validated
def importance_weights(
    token_logp: Float[Tensor, "batch_p time_p"],
    behaviour_logp: Float[Tensor, "batch_b time_b"],
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
    *,
    level: Level = "token",
    cap: float | None = None,
) -> ImportanceWeights:
    """Weights that turn averages over the behaviour distribution's samples into averages over ``p``.

        token      p(x_t | prefix) / behaviour(x_t | prefix)
        before     the product of these over the tokens before t
        prefix     the product of these up to and including t
        sequence   the product over the whole response, the same for each of its tokens

    With an estimator whose mean is the KL, token weights sum to the exact next-token KLs along *the
    behaviour's* prefixes; prefix and sequence weights to the KL between the responses themselves, with
    a variance that grows with the product. An *exact* next-token KL does not depend on the token drawn,
    so its weight is that of the prefix alone: "before", less noisy by one factor.

    A masked token contributes a factor of 1 and weighs 0; what stands there (NaN, inf) is not read.
    Products are sums of logarithms, and capped as such, so a capped weight never overflows, and the
    effective sample size is right even where an uncapped one does (it is then ``inf``).

    ``cap`` is a bias that you ask for: an average of estimates f becomes that under ``min(rho, cap)``, off by

        E_behaviour[(min(rho, cap) - rho) f] = -E_p[(1 - cap / rho)+ f]

    so a KL and its gradient come out too small in what tokens above the cap contribute, most where
    ``p`` has gained most on the behaviour; ``truncated_share`` says for how many.

    Args:
        token_logp: log-probabilities of the drawn tokens under ``p``.
        behaviour_logp: the same under the distribution they were really drawn from.
        mask: true (or 1) for the tokens that count.
        level: "token", "before", "prefix" or "sequence".
        cap: the largest weight to hand out, above 0.

    Raises:
        ShapeError: if the three differ in shape, or are not [batch, time].
        OptionError: if there is no such level, or ``cap`` is not above 0.
    """
    shapes = [tuple(x.shape) for x in (token_logp, behaviour_logp, mask)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ShapeError(
            f"token_logp is {shapes[0]}, behaviour_logp {shapes[1]} and mask {shapes[2]}; "
            "give all three as [batch, time]"
        )
    if level not in LEVELS:
        raise OptionError(f"level is {level!r}; there are {', '.join(LEVELS)}")
    if cap is not None and not cap > 0:
        raise OptionError(f"cap is {cap}; give a weight above 0, or leave it out")
    counts = as_mask(mask)
    log_ratio = _chosen(token_logp, counts) - _chosen(behaviour_logp, counts)
    if level == "sequence":
        units = counts.any(-1)
        log_units = log_ratio.sum(-1)
    else:
        units = counts
        log_units = _product(log_ratio, level)
    above = log_units > (inf if cap is None else log(cap))
    log_units = torch.where(above, inf if cap is None else log(cap), log_units)
    weights = log_units.exp().unsqueeze(-1) if level == "sequence" else log_units.exp()
    return ImportanceWeights(
        values=torch.where(counts, weights, 0.0),
        effective_sample_size=_effective(torch.where(units, log_units, -inf)),
        truncated_share=(above & units).sum() / units.sum(),
    )


def _product(log_ratio: Tensor, level: Level) -> Tensor:
    """The logarithm of each token's weight."""
    if level == "token":
        return log_ratio
    so_far = log_ratio.cumsum(-1)
    return so_far if level == "prefix" else pad(so_far, (1, 0))[..., :-1]


def _chosen(token_logp: Tensor, counts: Tensor) -> Tensor:
    return torch.where(counts, at_least_float32(token_logp.detach()), 0.0)


def _effective(log_weights: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2, from weights divided by the largest."""
    flat = log_weights.flatten()
    if flat.numel() == 0:
        return flat.new_tensor(torch.nan)
    weights = (flat - flat.max()).exp()
    return weights.sum().square() / weights.square().sum()
