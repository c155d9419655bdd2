"""Controllers on a plant: KL <- KL + gain (drive / beta - KL), seen late and with noise.

The KL starts where the first beta, ten times off, would hold it. Overshoot is how far a noiseless KL goes past
the target, as a share of it; what starts on the wrong side by a factor of ten is no overshoot.
"""

import itertools
import random

import pytest

from kleash.leash import DualBeta, FixedBeta, PIDBeta, ZieglerBeta

PLANTS = [
    pytest.param(gain, lag, off, id=f"gain {gain}, lag {lag}, beta times {off}")
    for gain, lag, off in itertools.product((0.05, 0.3), (0, 1, 3), (0.1, 10.0))
]
on_every_plant = pytest.mark.parametrize(("gain", "lag", "off"), PLANTS)
TARGET, RIGHT = 4.0, 0.2  # nats, and the beta that holds the KL there
SEQUENCES = 1000
OVERSHOOT = {PIDBeta: 0.3, DualBeta: 0.3, ZieglerBeta: 0.2}


def follow(controller, gain, lag, *, noise=0.0, seed=0, updates=260, sequences=SEQUENCES):
    """The KL of every update, over the target."""
    draw, betas, kls = random.Random(seed), [controller.beta] * (lag + 1), []
    kl = TARGET * RIGHT / controller.beta
    for _ in range(updates):
        kl += gain * (TARGET * RIGHT / betas[-1 - lag] - kl)
        kls.append(kl / TARGET)
        error = None if noise else 0.0
        measured = kl * (1 + noise * draw.gauss(0, 1))
        controller = controller.after(measured, sequences=sequences, standard_error=error)
        betas.append(controller.beta)
    return kls


def overshoot(kls, off):
    """Past the target: above it where beta began too strong, below it where it began too weak."""
    return max(kls) - 1 if off > 1 else 1 - min(kls)


def start(kind, off, **options):
    return kind(beta=RIGHT * off, target_nats=TARGET, **options)


@on_every_plant
@pytest.mark.parametrize("kind", [PIDBeta, DualBeta, ZieglerBeta])
def test_controllers_overshoot_little_and_settle(kind, gain, lag, off):
    assert overshoot(follow(start(kind, off), gain, lag), off) < OVERSHOOT[kind]
    settled = [follow(start(kind, off), gain, lag, noise=0.1, seed=seed)[160:] for seed in range(3)]
    assert all(0.9 < sum(kls) / len(kls) < 1.1 for kls in settled)


def test_the_published_horizon_is_too_slow_for_hundreds_of_updates_and_a_fixed_beta_for_any():
    published = start(ZieglerBeta, 10.0, horizon=10_000)
    assert follow(published, 0.3, 0, sequences=64)[199] < 0.2
    assert follow(start(ZieglerBeta, 10.0), 0.3, 0)[199] > 0.9
    assert follow(FixedBeta(beta=RIGHT * 10), 0.3, 0)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", [PIDBeta, DualBeta, ZieglerBeta])
def test_a_controller_without_its_proportional_term_overshoots(kind):
    plain, damped = (follow(start(kind, 0.1, **gains), 0.05, 3) for gains in ({"proportional": 0.0}, {}))
    assert overshoot(plain, 0.1) > 1.5 * overshoot(damped, 0.1)
