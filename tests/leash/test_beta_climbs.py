"""What the controllers make of a KL that is on its way: climbs from 0, runaways, swings; and how they say why."""

import math
from dataclasses import replace

import pytest

from kleash.errors import OptionError
from kleash.leash import (
    BetaSchedule,
    DualBeta,
    FixedBeta,
    PIDBeta,
    TargetSchedule,
    ZieglerBeta,
    beta_from_dict,
    beta_reason,
)

TARGET, BETA = 8.0, 0.05
LOOKING = {
    "pid": PIDBeta(beta=BETA, target_nats=TARGET),
    "ziegler": ZieglerBeta(beta=BETA, target_nats=TARGET, horizon=3, lookahead=4.0),
    "dual": DualBeta(beta=BETA, target_nats=TARGET, rate=0.2, lookahead=4.0),
}
every_looking = pytest.mark.parametrize("leash", LOOKING.values(), ids=LOOKING)


def follow(leash, kls):
    """Beta after each KL."""
    return [(leash := leash.after(kl)).beta for kl in kls]


@pytest.mark.parametrize("steps", [12, 15, 20, 30, 60])
@pytest.mark.parametrize("shape", ["linear", "square", "saturating"])
def test_beta_does_not_rise_while_the_kl_climbs_far_below_the_target(steps, shape):
    """From 0 to 7 nats under a target of 8: a rule that answered every rise raised beta from 0.05 to 0.089."""
    share = [at / steps for at in range(steps + 1)]
    climbs = {
        "linear": share,
        "square": [x * x for x in share],
        "saturating": [1 - math.exp(-4 * x) for x in share],
    }
    betas = follow(LOOKING["pid"], [7 * x for x in climbs[shape]])
    assert betas[-1] <= BETA * (1.3 if shape == "square" else 1.1), (
        "the square one is an update from passing the target"
    )
    assert max(betas[: steps // 2]) <= BETA


def test_without_lookahead_beta_rises_during_the_climb():
    blind = PIDBeta(beta=BETA, target_nats=TARGET, lookahead=0.0)
    assert follow(blind, [7 * at / 15 for at in range(16)])[-1] > 1.5 * BETA


@every_looking
def test_a_fast_rise_is_braked_before_four_times_the_target(leash):
    run = [0.0, 0.1, 0.3, 0.65, 1.05, 1.4, 1.9, 3.2, 5.2, 9.0, 16.0]
    betas = follow(leash, run)
    assert betas[6] <= BETA < betas[-1] and betas[-1] > 3 * min(betas)


@every_looking
def test_beta_falls_only_if_the_kl_will_not_reach_the_target_soon(leash):
    on_its_way = follow(leash, [2.0, 2.5, 3.0, 3.5])
    assert on_its_way[-1] == on_its_way[-2]
    late = follow(leash, [2.0, 2.01, 2.02, 2.03])
    assert late[-1] < late[-2] < BETA


@every_looking
def test_a_constant_kl_is_answered_without_prediction(leash):
    high, low = (follow(leash, [kl] * 30) for kl in (12.0, 5.0))
    assert high == sorted(high) and high[-1] > BETA > low[-1] and low == sorted(low, reverse=True)


def test_ziegler_without_lookahead_is_the_published_rule():
    leash, beta = ZieglerBeta(beta=0.15, target_nats=6.0, horizon=10_000), 0.15
    for kl in (0.0, 0.5, 2.0, 9.0, 30.0, 5.0, 6.0):
        leash = leash.after(kl, sequences=512)
        beta *= 1 + max(-0.2, min(0.2, kl / 6.0 - 1)) * 512 / 10_000
        assert leash.beta == pytest.approx(beta, rel=1e-14)
    assert leash.levels == () and not leash.reached


@every_looking
def test_caution_applies_only_far_from_a_target_that_was_reached(leash):
    careful = replace(leash, caution=0.25)
    for kls, same in (([1.0, 1.0, 1.0], True), ([16.0, 16.0, 2.0, 2.0], False), ([9.0, 8.9, 7.4], True)):
        ours, theirs = follow(careful, kls)[-1], follow(leash, kls)[-1]
        assert (ours == theirs) is same and ours >= theirs


@every_looking
def test_predictive_controllers_survive_a_dict(leash):
    for kl in (0.5, 4.0, 9.0, 8.5):
        leash = leash.after(kl)
    assert leash.reached and len(leash.levels) == 2 and beta_from_dict(leash.to_dict()) == leash


@pytest.mark.parametrize("name", ["lookahead", "brake", "caution"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_invalid_prediction_settings_are_errors(name, value):
    with pytest.raises(OptionError, match=name):
        DualBeta(beta=BETA, target_nats=TARGET, **{name: value})


@pytest.mark.parametrize(
    ("kls", "reason"),
    [
        ([8.0, 12.0], "KL 12 is above its target of 8, 1.5 times, and rises"),
        ([8.0, 9.52], "KL 9.52 is above its target of 8, and rises"),
        ([8.0, 9.68], "KL 9.68 is above its target of 8, 1.2 times, and rises"),
        ([12.0, 9.0], "KL 9 is above its target of 8, and comes down"),
        ([4.0, 4.0], "KL 4 is below its target of 8"),
        ([5.0, 7.0], "KL 7 is below its target of 8, and would pass it in 0.5 updates"),
        ([8.0, 8.0], None),
        ([8.0, math.nan], None),
    ],
)
def test_beta_reason_explains_each_step(kls, reason):
    before = replace(LOOKING["pid"].after(kls[0]), beta=BETA)
    found = beta_reason(before, before.after(kls[1]), kls[1])
    assert (found is None) if reason is None else found.endswith(reason), found
    assert found is None or found.startswith("beta 0.05 -> ")


def test_beta_reason_explains_schedules():
    schedule = BetaSchedule(begin=0.2, end=0.1, updates=4)
    assert beta_reason(schedule, schedule.after(1.0), 1.0) == "beta 0.2 -> 0.175: by its schedule"
    aimed = TargetSchedule(controller=LOOKING["dual"], begin_nats=2.0, end_nats=8.0, updates=10)
    assert "is above its target of 2, 2 times" in beta_reason(aimed, aimed.after(4.0), 4.0)
    assert beta_reason(FixedBeta(beta=0.1), FixedBeta(beta=0.1), 9.0) is None
