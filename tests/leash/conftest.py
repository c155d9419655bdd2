"""verl's own functions, which several files compare with."""

import warnings

import pytest


@pytest.fixture(scope="module")
def verl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what verl's own dependencies warn of when they are imported
        return pytest.importorskip("verl.trainer.ppo.core_algos")
