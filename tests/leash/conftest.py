"""verl's own functions, which several files compare with."""

import pytest

from kleash.auditing.targets.packages import quiet


@pytest.fixture(scope="module")
def verl():
    with quiet():  # what verl's own dependencies warn of when they are imported
        return pytest.importorskip("verl.trainer.ppo.core_algos")
