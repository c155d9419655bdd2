"""Names that a package had are refused with what to use instead, and others as Python refuses them."""

from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("leash.BetaSchedule", "dataclasses.replace"),
        ("leash.best_of_n_kl", "best_of_n_bound"),
        ("estimators.check_agreement", "mismatch"),
        ("uncertainty.CoarseCounts", "quantiles"),
    ],
)
def test_a_former_name_says_what_to_use(name, instead):
    package, attribute = name.split(".")
    module = import_module(f"kleash.{package}")
    with pytest.raises(ImportError, match=rf"kleash.{name} is gone: .*{instead}"):
        getattr(module, attribute)
    assert not hasattr(module, "never_there")
