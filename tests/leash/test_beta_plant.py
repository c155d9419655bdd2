"""Controllers on a plant: KL <- KL + gain (drive / beta - KL), seen late and with noise.

The KL starts where the first beta, ten times off, would hold it. Overshoot is how far a noiseless KL goes past
the target, as a share of it; what starts on the wrong side by a factor of ten is no overshoot.
"""

import itertools
import random

import pytest

from kleash.leash import DualBeta, FixedBeta, PIDBeta, TargetSchedule, ZieglerBeta

PLANTS = [
    pytest.param(gain, lag, off, id=f"gain {gain}, lag {lag}, beta times {off}")
    for gain, lag, off in itertools.product((0.05, 0.3), (0, 1, 3), (0.1, 10.0))
]
on_every_plant = pytest.mark.parametrize(("gain", "lag", "off"), PLANTS)
TARGET, RIGHT = 4.0, 0.2  # nats, and the beta that holds the KL there
SEQUENCES = 1000  # a tenth of Ziegler's horizon


def follow(controller, gain, lag, *, noise=0.0, seed=0, updates=260):
    """The KL of every update, over the target."""
    draw, betas, kls = random.Random(seed), [controller.beta] * (lag + 1), []
    kl = TARGET * RIGHT / controller.beta
    for _ in range(updates):
        kl += gain * (TARGET * RIGHT / betas[-1 - lag] - kl)
        kls.append(kl / TARGET)
        controller = controller.after(kl * (1 + noise * draw.gauss(0, 1)), sequences=SEQUENCES)
        betas.append(controller.beta)
    return kls


def overshoot(kls, off):
    """Past the target: above it where beta began too strong, below it where it began too weak."""
    return max(kls) - 1 if off > 1 else 1 - min(kls)


def start(kind, off, **options):
    return kind(beta=RIGHT * off, target_nats=TARGET, **options)


@on_every_plant
def test_pid_overshoots_little_and_settles(gain, lag, off):
    assert overshoot(follow(start(PIDBeta, off), gain, lag), off) < 0.06
    for seed in range(3):
        settled = follow(start(PIDBeta, off), gain, lag, noise=0.1, seed=seed)[199:]
        assert all(0.9 < kl < 1.1 for kl in settled)


@on_every_plant
def test_ziegler_at_a_tenth_of_its_horizon_and_dual_settle(gain, lag, off):
    for kind, most in ((ZieglerBeta, 0.2), (DualBeta, 0.12)):
        assert overshoot(follow(start(kind, off), gain, lag), off) < most
        settled = [follow(start(kind, off), gain, lag, noise=0.1, seed=seed)[199] for seed in range(3)]
        assert all(0.9 < kl < 1.1 for kl in settled)


@pytest.mark.parametrize(("horizon", "fails"), [(20_000, "late"), (2500, "overshoots")])
def test_ziegler_at_another_horizon_does_not_settle(horizon, fails):
    runs = [
        (follow(start(ZieglerBeta, off, horizon=horizon), *plant), off)
        for *plant, off in (param.values for param in PLANTS)
    ]
    if fails == "late":
        assert max(abs(kls[199] - 1) for kls, _ in runs) > 0.5
    else:
        assert max(overshoot(kls, off) for kls, off in runs) > 0.4


def test_pid_without_its_proportional_term_overshoots():
    assert overshoot(follow(start(PIDBeta, 0.1, proportional=0.0), 0.05, 3), 0.1) > 0.2
    assert overshoot(follow(start(PIDBeta, 0.1), 0.05, 3), 0.1) < 0.06


def test_the_kl_of_a_fixed_beta_does_not_reach_the_target():
    assert follow(FixedBeta(beta=RIGHT * 10), 0.3, 0)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("gain", [0.05, 0.3])
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_moving_target_is_followed(gain, shape):
    inner = start(PIDBeta, 1.0)
    schedule = TargetSchedule(
        controller=inner, begin_nats=TARGET, end_nats=TARGET / 2, updates=100, shape=shape
    )
    kls = follow(schedule, gain, 1, noise=0.1)
    assert min(kls) > 0.5 * 0.85 and max(kls) < 1.1
    assert all(0.45 < kl < 0.55 for kl in kls[199:])
