"""verl's own functions, which several files compare with."""

from types import SimpleNamespace

import pytest

from kleash.auditing.targets.packages import quiet


@pytest.fixture(scope="session")
def verl():
    with quiet():  # what verl's own dependencies warn of when they are imported
        core = pytest.importorskip("verl.trainer.ppo.core_algos")
        corr = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
        debug = pytest.importorskip("verl.utils.debug.metrics")
    return SimpleNamespace(core=core, corr=corr, debug=debug)
