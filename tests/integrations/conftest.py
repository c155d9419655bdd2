"""Trainers of TRL, and a tiny model for them."""

from pathlib import Path
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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    from tiny_models import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))
