"""How far apart two distributions over the same tokens are, exactly."""

from kleash.divergences.generator import phi, psi

__all__ = ["phi", "psi"]
