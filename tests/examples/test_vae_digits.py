"""The example shows what it says: posterior collapse, and its cures."""

import runpy

import pytest
from documentation import ROOT

EXAMPLE = ROOT / "examples" / "vae_digits.py"


def test_collapse_and_cure(capsys):
    found = {outcome.name: outcome for outcome in runpy.run_path(str(EXAMPLE))["main"]()}
    printed = capsys.readouterr().out
    assert [line[:28].strip() for line in printed.splitlines()[1:]] == list(found)
    for name in ("strong decoder", "weak decoder, KL weighs 8"):
        assert found[name].active == 0 and 0 <= found[name].kl_nats < 0.05
    assert found["weak decoder"].active >= 5 and found["weak decoder"].kl_nats > 1
    for cure in ("free bits", "annealed", "cyclical"):
        cured, collapsed = found[f"strong decoder, {cure}"], found["strong decoder"]
        assert cured.active >= 2 and cured.kl_nats > 5 * collapsed.kl_nats
        assert cured.image_nats < collapsed.image_nats
    assert found["strong decoder, free bits"].kl_nats == pytest.approx(8 * 0.25, rel=0.15)
