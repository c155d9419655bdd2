"""The kernels' way to what kleash.linear promises; loads triton."""

from kleash.linear.impl.triton.engine import divergence, gradients, judged, keeping, token_statistics

__all__ = ["divergence", "gradients", "judged", "keeping", "token_statistics"]
