"""Callbacks for any transformers ``Trainer``: a monitor of KL(policy ‖ reference), and a controller of beta."""

from kleash.integrations.trainer.beta_controller import BetaController
from kleash.integrations.trainer.drift_monitor import DriftMonitor

__all__ = ["BetaController", "DriftMonitor"]
