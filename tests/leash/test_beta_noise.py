"""Controllers under the noise of real measurements: the filter, its gain, and the reasons that are given for a step."""

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest

from kleash.jobs import PPOJob
from kleash.leash import CONTROLLERS, DualBeta, FixedBeta, PIDBeta, beta_reason
from kleash.training.job_schedule import leash_of

NAN, INF = math.nan, math.inf
every_controller = pytest.mark.parametrize("kind", [x for x in CONTROLLERS.values() if x is not FixedBeta])


def settled(leash, *, gain, lag, noise, seed, share=1.0, updates=200, largest=INF):
    """Mean KL over the target in the second half of the plant KL <- KL + gain (target / beta - KL) from 0.

    target / beta is at most ``largest`` targets.
    """
    draw, kl, kls, betas, target = random.Random(seed), 0.0, [], [leash.beta] * (lag + 1), leash.target_nats
    for _ in range(updates):
        kl += gain * (min(largest * target, target / betas[-1 - lag]) - kl)
        kls.append(kl / target)
        measured = kl * draw.gammavariate(1 / noise**2, noise**2)
        leash = leash.after(measured, sequences=64, standard_error=share * noise * measured)
        betas.append(leash.beta)
    return fmean(kls[updates // 2 :])


@every_controller
@pytest.mark.parametrize(("gain", "lag"), [(0.07, 0), (0.25, 0), (0.12, 3)])
@pytest.mark.parametrize("noise", [0.2, 0.4])
def test_the_kl_settles_at_its_target_under_noise(kind, gain, lag, noise):
    """Controllers that extrapolated a noisy step settled at .4 to .8 of the target from noise of 20 % on."""
    for beta in (0.4, 2.5):
        leash = kind(beta=beta, target_nats=6.0)
        means = [settled(leash, gain=gain, lag=lag, noise=noise, seed=seed) for seed in range(8)]
        assert fmean(means) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", [PIDBeta, DualBeta])
@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
def test_a_slow_kl_that_a_weak_beta_does_not_raise_settles_within_a_hundred_updates(kind, beta):
    """An integral gain of .15 passes the target by 18 % here, and one of .1 stays 20 % below it."""
    leash, plant = kind(beta=beta, target_nats=6.0), {"gain": 0.02, "lag": 0, "updates": 100, "largest": 1.6}
    for noise in (0.05, 0.2):
        means = [settled(leash, **plant, noise=noise, seed=seed) for seed in range(8)]
        assert fmean(means) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("share", [0.5, 2.0, NAN])
def test_a_wrong_or_unknown_standard_error_does_not_move_the_mean(share):
    """NaN is that of a single prompt; unfiltered, the KL settled 20 % too high."""
    leash = PIDBeta(beta=1.0, target_nats=6.0)
    means = [settled(leash, gain=0.15, lag=0, noise=0.5, seed=seed, share=share) for seed in range(8)]
    assert fmean(means) == pytest.approx(1, abs=0.1)


@every_controller
def test_defaults_of_a_job_are_those_of_the_library(kind):
    job = PPOJob(prompts="p", controller=kind.kind, target_nats=6.0, beta=0.2)
    assert leash_of(job) == kind(beta=0.2, target_nats=6.0, beta_max=job.beta_max)


@pytest.mark.parametrize("exact", [[], [(1.0, 0.0), (7.0, 0.0), (0.5, 0.0)]])
def test_the_filter_by_hand(exact):
    """A scalar Kalman filter; its noise is the average of earlier squared errors, relative to KL or target: of errors
    of 0 nothing is filtered. One that is not known is the distance from the filtered KL, at most half of the scale."""
    run = [*exact, (4.0, 1.0), (9.0, 2.0), (16.0, 1.0), (6.0, 3.0), (40.0, None), (10.0, 2.0), (9.0, 1.0)]
    leash, kl, variance, noise = DualBeta(beta=1.0, target_nats=8.0), None, 0.0, 0.0
    for measured, error in run:
        leash = leash.after(measured, standard_error=error)
        if kl is None:
            kl, variance = measured, (error / 8) ** 2
            noise = variance
        else:
            scale, variance = max(kl, 8.0), variance + 0.04**2
            error = min(abs(measured - kl), scale / 2) if error is None else error
            gain = variance / (variance + noise)
            kl, variance = kl + gain * (measured - kl), (1 - gain) * variance
            noise += 0.2 * ((error / scale) ** 2 - noise)
        assert math.exp(leash.levels[0]) == pytest.approx(kl, rel=1e-12)
        assert (leash.variance, leash.noise) == pytest.approx((variance, noise), rel=1e-9)


@every_controller
def test_the_newest_error_does_not_weigh_its_own_measurement(kind):
    """The error of a KL grows with the KL, so a gain that contained it would answer high measurements less."""
    before = kind(beta=0.3, target_nats=2.0).after(2.0, standard_error=0.4)
    small, large = (before.after(3.0, standard_error=error) for error in (0.1, 2.0))
    assert small.beta == large.beta and small.levels == large.levels and small.noise < large.noise
    assert small.after(3.0, standard_error=0.4).levels[0] > large.after(3.0, standard_error=0.4).levels[0]


@every_controller
def test_an_infinite_error_is_ignored_and_nan_is_not_known(kind):
    before = kind(beta=0.3, target_nats=2.0).after(2.0, standard_error=0.4)
    after = before.after(2.5, standard_error=INF)
    assert after.event == "the standard error is inf: ignored"
    assert replace(after, event=None) == before.after(2.5)
    assert before.after(2.5, standard_error=NAN) == before.after(2.5)


# --- reasons ---


@pytest.mark.parametrize(
    ("kls", "reason"),
    [
        ([8.0, 12.0], "KL 12 is above its target of 8, 1.5 times, and rises"),
        ([8.0, INF], "KL inf (filtered 160) is above its target of 8, 20 times, and rises"),
        ([8.0, 9.52], "KL 9.52 is above its target of 8, and rises"),
        ([12.0, 9.0], "KL 9 is above its target of 8, and comes down"),
        ([4.0, 4.0], "KL 4 is below its target of 8"),
        ([5.0, 7.0], "KL 7 is below its target of 8, and rises"),
        ([8.0, 8.0], None),
        ([8.0, NAN], None),
    ],
)
def test_beta_reason_explains_each_step(kls, reason):
    before = replace(PIDBeta(beta=0.1, target_nats=8.0).after(kls[0]), beta=0.05)
    found = beta_reason(before, before.after(kls[1]), kls[1])
    assert (found is None) if reason is None else found.endswith(reason), found
    assert found is None or found.startswith("beta 0.05 -> ")


def test_beta_reason_names_the_filtered_kl():
    before = PIDBeta(beta=0.05, target_nats=8.0).after(12.0, standard_error=3.0)
    found = beta_reason(before, before.after(6.0, standard_error=2.0), 6.0)
    assert "KL 6 (filtered 8.96)" in found and "is above its target of 8" in found and "comes down" in found
    assert beta_reason(FixedBeta(beta=0.1), FixedBeta(beta=0.1), 9.0) is None
