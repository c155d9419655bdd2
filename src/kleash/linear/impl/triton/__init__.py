"""The kernels' way to what kleash.linear promises; loads triton."""

from kleash.linear.impl.triton.engine import (
    divergence,
    evaluate_objective,
    gradients,
    statistics_and_top,
    token_statistics,
    values_saving_forward,
)

__all__ = [
    "divergence",
    "evaluate_objective",
    "gradients",
    "statistics_and_top",
    "token_statistics",
    "values_saving_forward",
]
