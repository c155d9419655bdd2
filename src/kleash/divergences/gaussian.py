"""KL between diagonal Gaussians."""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences.generator import phi
from kleash.errors import ShapeError
from kleash.precision import at_least_float32


@validated
def kl_gaussian(
    mean_p: Float[Tensor, "*batch dim"],
    log_variance_p: Float[Tensor, "*batch dim"],
    mean_q: Float[Tensor, "..."] | float = 0.0,
    log_variance_q: Float[Tensor, "..."] | float = 0.0,
) -> Float[Tensor, "*batch"]:
    """KL between Gaussians with diagonal covariance, in nats, summed over the last axis.

        sum_i (phi(log_variance_q - log_variance_p) + (mean_p - mean_q)^2 exp(-log_variance_q)) / 2

    ``q`` is the standard normal unless said otherwise, which makes it the VAE's regulariser. The four
    broadcast against each other. Log-variances must be finite.

    Raises:
        ShapeError: if they do not broadcast, or leave no axis to sum over.

    References:
        Kingma & Welling, "Auto-Encoding Variational Bayes" (2013), https://arxiv.org/abs/1312.6114
    """
    given = [
        torch.as_tensor(x, device=mean_p.device) for x in (mean_p, log_variance_p, mean_q, log_variance_q)
    ]
    try:
        torch.broadcast_shapes(*(x.shape for x in given))  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in given)
        raise ShapeError(f"means and log-variances of shapes {shapes} do not broadcast") from error
    if all(x.ndim == 0 for x in given):
        raise ShapeError("means and log-variances have no axis to sum over; give at least one dimension")
    mp, vp, mq, vq = (at_least_float32(x) for x in given)
    return ((phi(vq - vp) + (mp - mq).square() * torch.exp(-vq)) / 2).sum(-1)
