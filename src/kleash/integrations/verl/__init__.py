"""verl with the KL that it names: true values, an exact one, and controllers with bounds."""

from kleash.integrations.verl.controllers import CONTROLLER_TYPES, KLController, get_kl_controller
from kleash.integrations.verl.exact import REFERENCE_HIDDEN
from kleash.integrations.verl.installing import install
from kleash.integrations.verl.penalty import NAMES, kl_penalty

__all__ = [
    "CONTROLLER_TYPES",
    "NAMES",
    "REFERENCE_HIDDEN",
    "KLController",
    "get_kl_controller",
    "install",
    "kl_penalty",
]
