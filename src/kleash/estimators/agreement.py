"""Whether two columns of log-probabilities look as if they were of the same kind, from the numbers alone."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import ShapeError
from kleash.masking import as_mask
from kleash.uncertainty import Estimate, clustered_mean, ratio_of_sums

WEIGHT_TOLERANCE = 0.01
"""Means of weights within this of 1 are what engines' rounding makes."""
SLOPE_TOLERANCE = 0.05
"""Slopes within this of 1 are what a few steps of training make."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the numbers say about two sides' log-probabilities of the same tokens."""

    weight: Estimate
    """The mean of policy / behaviour. Over tokens drawn from the behaviour it is 1, however far the policy was
    trained; below 1, what the policy keeps on the tokens that could be drawn."""
    slope: Estimate
    """How many nats the policy's log-probability moves for each nat of the behaviour's (least squares); about 1
    at equal temperatures as long as the policy stays near."""
    above: Estimate
    """The share of tokens on which the behaviour's is the larger one."""
    ruled_out: int
    """Tokens drawn that the policy gives no probability; the slope is of the others."""
    findings: tuple[str, ...]
    """What is wrong beyond the 95 % intervals, in sentences; empty where nothing is."""


@validated
def check_agreement(
    token_logp: Float[Tensor, "batch time"],
    behaviour_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    *,
    prompts: Integer[Tensor, "batch"] | None = None,
) -> Agreement:
    """Whether importance weights from these two columns can be right: mixed truncation, unequal temperatures.

    A mean weight off 1 is proof (up to the interval) that the behaviour's column is not that of the
    distribution the tokens were drawn from, or that this one leaves out tokens which the policy can draw. A
    slope off 1 is only an indication: temperatures differ, or the policy has moved far. Tokens drawn from a
    truncated distribution and given the *full* log-probability on both sides cannot be told from sound ones:
    their weights are right up to the ratio of the two kept masses.

    Args:
        token_logp: the policy's, of the drawn tokens.
        behaviour_logp: what the engine returned with them.
        mask: true (or 1) for the tokens that count.
        prompts: a label per sequence; tokens of one prompt are not independent. By default each is its own.

    Raises:
        ShapeError: if the shapes do not fit together.
    """
    shapes = [tuple(x.shape) for x in (token_logp, behaviour_logp, mask)]
    labels = torch.arange(len(token_logp)) if prompts is None else prompts
    if len(set(shapes)) > 1 or len(shapes[0]) != 2 or labels.shape != token_logp.shape[:1]:
        raise ShapeError(
            f"token_logp is {shapes[0]}, behaviour_logp {shapes[1]}, mask {shapes[2]} and prompts "
            f"{tuple(labels.shape)}; give [batch, time] three times, and a prompt for each sequence"
        )
    chosen = as_mask(mask).cpu()
    policy, behaviour = (x.detach().cpu().double()[chosen].numpy() for x in (token_logp, behaviour_logp))
    cluster = labels.cpu().unsqueeze(-1).expand(chosen.shape)[chosen].numpy()
    weight = clustered_mean(np.exp(policy - behaviour), cluster, unit="none", lower=0.0)
    possible = policy != -np.inf
    slope = _slope(behaviour[possible], policy[possible], cluster[possible])
    above = clustered_mean(
        (behaviour > policy).astype(float), cluster, unit="probability", lower=0.0, upper=1.0
    )
    ruled_out = int((~possible).sum())
    return Agreement(
        weight=weight,
        slope=slope,
        above=above,
        ruled_out=ruled_out,
        findings=tuple(
            filter(None, (_about_weight(weight), _about_slope(slope), _about_ruled_out(ruled_out)))
        ),
    )


def _slope(x: np.ndarray, y: np.ndarray, cluster: np.ndarray) -> Estimate:
    """Least squares as a ratio of sums over clusters, which makes its error robust within them."""
    names, index = np.unique(cluster, return_inverse=True)
    dx, dy = x - x.mean() if len(x) else x, y - y.mean() if len(y) else y
    products, squares = (np.bincount(index, weights=w, minlength=len(names)) for w in (dx * dy, dx * dx))
    return ratio_of_sums(products, squares, unit="none")


def _range(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} (95 %: {estimate.ci95[0]:.3f} to {estimate.ci95[1]:.3f})"


def _about_weight(weight: Estimate) -> str:
    found = f"the weights policy / behaviour average {_range(weight)} instead of 1: "
    if weight.ci95[1] < 1 - WEIGHT_TOLERANCE:
        return found + (
            "the behaviour was cut to tokens that hold only so much of the policy, as by top-p, and the policy "
            "was not; cut both to the same tokens"
        )
    if weight.ci95[0] > 1 + WEIGHT_TOLERANCE:
        return found + (
            "the behaviour's numbers are not of the distribution that the tokens were drawn from, as where an engine "
            "returns them from before the temperature or the cut; ask it for processed log-probabilities"
        )
    return ""


def _about_slope(slope: Estimate) -> str:
    low, high = slope.ci95
    if not (low > 1 + SLOPE_TOLERANCE or high < 1 - SLOPE_TOLERANCE):
        return ""
    return (
        f"the policy's log-probability moves {_range(slope)} nats for each of the behaviour's: it is the "
        f"{'flatter' if slope.value < 1 else 'sharper'} one, as where the two were taken at different temperatures; "
        "divide both sides' logits by the one that was sampled with, unless the policy was trained far away"
    )


def _about_ruled_out(count: int) -> str:
    if count == 0:
        return ""
    noun = "token has" if count == 1 else "tokens have"
    return f"{count} drawn {noun} no probability under the policy; cut it to the behaviour's tokens, not to its own"
