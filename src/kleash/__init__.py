"""KL divergence in LLM post-training: measured exactly and with error bars."""

from kleash.version import __version__

__all__ = ["__version__"]
