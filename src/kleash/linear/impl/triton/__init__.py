"""The kernels' way to what kleash.linear promises; loads triton."""

from kleash.linear.impl.triton.engine import (
    divergence,
    gradients,
    judged,
    keeping,
    statistics_and_top,
    token_statistics,
)

__all__ = ["divergence", "gradients", "judged", "keeping", "statistics_and_top", "token_statistics"]
