"""TRL and the trainers of kleash."""

from types import SimpleNamespace

import pytest

from kleash.auditing.targets.packages import quiet


@pytest.fixture(scope="session")
def trl() -> SimpleNamespace:
    """TRL as ``package``, kleash's trainers, and the modules of ``kleash train`` over TRL."""
    with quiet():
        import trl as package

        from kleash.integrations.trl import LeashedGRPOTrainer, LeashedRLOOTrainer
        from kleash.training.with_trl import distillation, online, preferences, response_recorder
    return SimpleNamespace(
        package=package,
        LeashedGRPO=LeashedGRPOTrainer,
        LeashedRLOO=LeashedRLOOTrainer,
        Recorder=response_recorder.ResponseRecorder,
        distillation=distillation,
        online=online,
        train_online=online.train_online,
        train_dpo=preferences.train_dpo,
        train_distill=distillation.train_distill,
    )
