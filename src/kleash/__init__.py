"""KL divergence in LLM post-training: measured exactly and with error bars.

Names are imported on first access (PEP 562), so that ``import kleash`` is fast and commands that only read files do not
import torch. The examples in docstrings assume ``import kleash, numpy as np, torch``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kleash.errors import KleashError
from kleash.version import __version__

if TYPE_CHECKING:
    from kleash.auditing import audit as audit
    from kleash.diagnosis import diagnose as diagnose
    from kleash.divergences import DIVERGENCES as DIVERGENCES
    from kleash.divergences import alpha_divergence as alpha_divergence
    from kleash.divergences import chi_squared as chi_squared
    from kleash.divergences import cross_entropy as cross_entropy
    from kleash.divergences import entropy as entropy
    from kleash.divergences import hellinger as hellinger
    from kleash.divergences import jeffreys as jeffreys
    from kleash.divergences import jensen_shannon as jensen_shannon
    from kleash.divergences import kl as kl
    from kleash.divergences import kl_from_probs as kl_from_probs
    from kleash.divergences import kl_gaussian as kl_gaussian
    from kleash.divergences import renyi as renyi
    from kleash.divergences import skew_kl as skew_kl
    from kleash.divergences import total_variation as total_variation
    from kleash.estimators import ESTIMATORS as ESTIMATORS
    from kleash.estimators import importance_weights as importance_weights
    from kleash.estimators import kl_bounds as kl_bounds
    from kleash.estimators import sampled_kl as sampled_kl
    from kleash.jobs import MeasureJob as MeasureJob
    from kleash.leash import DualBeta as DualBeta
    from kleash.leash import FixedBeta as FixedBeta
    from kleash.leash import PIDBeta as PIDBeta
    from kleash.leash import ZieglerBeta as ZieglerBeta
    from kleash.leash import shape_rewards as shape_rewards
    from kleash.linear import Head as Head
    from kleash.linear import LinearOptions as LinearOptions
    from kleash.linear import linear_divergence as linear_divergence
    from kleash.linear import linear_divergence_loss as linear_divergence_loss
    from kleash.linear import linear_kl as linear_kl
    from kleash.linear import linear_kl_loss as linear_kl_loss
    from kleash.linear import linear_objective as linear_objective
    from kleash.linear import token_statistics as token_statistics
    from kleash.losses import future_kl_loss as future_kl_loss
    from kleash.losses import kl_loss as kl_loss
    from kleash.masking import Mean as Mean
    from kleash.measuring import compare as compare
    from kleash.measuring import measure as measure
    from kleash.measuring import sweep as sweep
    from kleash.reports.folder_report import open as open
    from kleash.store import Audit as Audit
    from kleash.store import Measurement as Measurement
    from kleash.training import attach as attach
    from kleash.uncertainty import Estimate as Estimate
    from kleash.uncertainty import clustered_mean as clustered_mean

HOMES = {
    "auditing": ("audit",),
    "diagnosis": ("diagnose",),
    "divergences": (
        *(
            "DIVERGENCES",
            "alpha_divergence",
            "chi_squared",
            "cross_entropy",
            "entropy",
            "hellinger",
            "jeffreys",
        ),
        *("jensen_shannon", "kl", "kl_from_probs", "kl_gaussian", "renyi", "skew_kl", "total_variation"),
    ),
    "estimators": ("ESTIMATORS", "importance_weights", "kl_bounds", "sampled_kl"),
    "leash": ("DualBeta", "FixedBeta", "PIDBeta", "ZieglerBeta", "shape_rewards"),
    "linear": (
        *("Head", "LinearOptions", "linear_divergence", "linear_divergence_loss", "linear_kl"),
        *("linear_kl_loss", "linear_objective", "token_statistics"),
    ),
    "losses": ("future_kl_loss", "kl_loss"),
    "masking": ("Mean",),
    "measuring": ("compare", "measure", "sweep"),
    "jobs": ("MeasureJob",),
    "reports.folder_report": ("open",),
    "store": ("Audit", "Measurement"),
    "training": ("attach",),
    "uncertainty": ("Estimate", "clustered_mean"),
}
HOME_OF = {name: home for home, names in HOMES.items() for name in names}

__all__ = ["KleashError", "__version__", *HOME_OF]


if not TYPE_CHECKING:  # a type checker would take any name for one of kleash

    def __getattr__(name: str) -> Any:
        """Import the public name ``name`` from its package."""
        if name not in HOME_OF:
            raise AttributeError(f"module 'kleash' has no attribute {name!r}")
        return getattr(import_module(f"kleash.{HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    """The public names, whether imported or not."""
    return sorted(__all__)
