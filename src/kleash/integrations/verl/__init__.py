"""verl's KL penalty without clamps, an exact KL in its loss, and beta controllers with bounds."""

from kleash.integrations.verl.exact import REFERENCE_HIDDEN
from kleash.integrations.verl.installing import install
from kleash.integrations.verl.kl_controller import KLController, get_kl_controller
from kleash.integrations.verl.penalty import NAMES, kl_penalty

__all__ = [
    "NAMES",
    "REFERENCE_HIDDEN",
    "KLController",
    "get_kl_controller",
    "install",
    "kl_penalty",
]
