"""Trainers of TRL."""

from types import SimpleNamespace

import pytest

from kleash.auditing.targets.packages import quiet

CLASSES = ("GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer")


@pytest.fixture(scope="session")
def trl() -> SimpleNamespace:
    """TRL's trainers and configurations, and all names of kleash's integration."""
    with quiet():
        import trl as package

        import kleash.integrations.trl as ours
    return SimpleNamespace(**{name: getattr(package, name) for name in CLASSES}, **vars(ours))
