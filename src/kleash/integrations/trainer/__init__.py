"""Callbacks for any transformers ``Trainer``: how far the policy has drifted, and what beta makes of it."""

from kleash.integrations.trainer.beta_controller import BetaController
from kleash.integrations.trainer.drift_monitor import DriftMonitor

__all__ = ["BetaController", "DriftMonitor"]
