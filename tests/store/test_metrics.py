"""The names of metrics: each explained, and spelt as others really spell them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from kleash.errors import UnknownNameError
from kleash.store.metrics import METRICS, metric_of, spelt


def source_of(package):
    """All Python text of an installed package; importing it is not needed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    root = Path(spec.submodule_search_locations[0])
    folders = [root / "trainer", root / "workers"]
    return "".join(path.read_text(errors="replace") for folder in folders for path in folder.rglob("*.py"))


@pytest.mark.parametrize("name", [name for name in METRICS if name.startswith("kl/")])
def test_every_kl_says_its_direction_and_what_it_is_per(name):
    meaning = METRICS[name].meaning
    if name.endswith("_error"):
        assert name.removesuffix("_error") in meaning
    elif name in ("kl/k2", "kl/target"):
        assert "per" in meaning
    else:
        assert "‖" in meaning
        assert any(word in meaning for word in ("token", "response"))


def test_no_two_metrics_are_spelt_alike_and_other_names_stay():
    for spelling in ("kleash", "verl", "trl"):
        names = [spelt(name, spelling) for name in METRICS]
        assert len(set(names)) == len(names)
    assert spelt("kl/k3", "verl") == "kl/k3"
    assert spelt("beta", "kleash") == "beta"
    assert spelt("beta", "verl") == "actor/reward_kl_penalty_coeff"
    assert spelt("kl/exact_per_token", "trl") == "kl"


def test_the_parts_of_a_reward_have_names_of_their_own():
    assert metric_of("reward/part/helpful").unit == "reward"
    assert spelt("reward/part/helpful", "trl") == "rewards/helpful/mean"
    assert spelt("trainer/kl", "trl") == "trainer/kl", "which is not the exact one"
    for name in ("reward/part/", "reward/parts/x", "kl", "trainer/"):
        with pytest.raises(UnknownNameError):
            metric_of(name)


@pytest.mark.parametrize("package", ["verl", "trl"])
def test_others_really_spell_them_so(package):
    text = source_of(package)
    for metric in METRICS.values():
        name = getattr(metric, package)
        own = {"actor/lr", "rollout_corr/k3_kl", "beta", "learning_rate", "grad_norm", "eval_loss"}
        if name is None or name in own:
            continue  # put together from parts there, or the Trainer's own
        assert f'"{name.removeprefix("eval_")}"' in text, f"{package} has no {name}"
