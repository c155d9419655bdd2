"""What each controller answers, by hand and against the published rule; what is no measurement; dicts."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful

from kleash.errors import OptionError, UnknownNameError
from kleash.leash import (
    CONTROLLERS,
    DualBeta,
    EarlyStop,
    FixedBeta,
    Leash,
    PIDBeta,
    StatefulController,
    ZieglerBeta,
    beta_from_dict,
)
from kleash.leash.controller_state import with_state

NAN, INF = math.nan, math.inf
every_steered = pytest.mark.parametrize("kind", [x for x in CONTROLLERS.values() if x is not FixedBeta])


def published(beta, target, horizon, measured, sequences):
    """Ziegler et al. 2019, section 2.2, in its own words."""
    error = min(max((measured - target) / target, -0.2), 0.2)
    return beta * (1 + error * sequences / horizon)


@pytest.mark.parametrize("measured", [0.01, 4.9, 5.9, 6.0, 6.5, 7.3, 100.0])
@pytest.mark.parametrize("sequences", [1, 64, 512, 10_000])
def test_ziegler_is_the_published_rule(measured, sequences):
    controller = ZieglerBeta(beta=0.15, target_nats=6.0, horizon=10_000)
    controller = controller.after(measured, sequences=sequences, standard_error=0.3 * measured)
    assert controller.beta == pytest.approx(published(0.15, 6.0, 10_000, measured, sequences), rel=1e-14)
    assert controller.event is None


def test_ziegler_without_a_horizon_does_not_depend_on_the_batch():
    """Four updates' sequences are the horizon: a step of at most a twentieth, and the change of the KL beside it."""
    small, large = (
        ZieglerBeta(beta=0.15, target_nats=6.0).after(9.0, sequences=n).after(7.5, sequences=n)
        for n in (8, 1024)
    )
    assert small == large
    assert small.beta == pytest.approx(0.15 * (1 + 0.2 / 4) ** 2 * (7.5 / 9.0) ** 1.5, rel=1e-12)


def test_ziegler_agrees_with_verl_within_the_bounds(verl):
    ours = ZieglerBeta(beta=0.15, target_nats=6.0, horizon=3000)
    theirs = verl.core.AdaptiveKLController(0.15, 6.0, 3000)
    draw = torch.Generator().manual_seed(0)
    for measured in (12 * torch.rand(200, generator=draw)).tolist():
        ours = ours.after(measured, sequences=256)
        theirs.update(measured, 256)
        assert ours.beta == pytest.approx(theirs.value, rel=1e-12) and ours.event is None
    theirs.update(NAN, 256)
    assert math.isnan(theirs.value) and ours.after(NAN, sequences=256).beta == ours.beta
    theirs = verl.core.AdaptiveKLController(0.15, 6.0, 300)
    ours = ZieglerBeta(beta=0.15, target_nats=6.0, horizon=300)
    for _ in range(3):
        theirs.update(0.1, 2048)
        ours = ours.after(0.1, sequences=2048)
    assert theirs.value < 0 < ours.beta == 0.15 / 8
    assert ours.event == "a step of times -0.3653 bounded to 0.5"


def test_pid_of_a_small_example():
    gains = {"proportional": 0.4, "integral": 0.1, "derivative": 0.2, "largest_error": 0.5, "reach": 2.0}
    controller, log_beta, errors = PIDBeta(beta=1.0, target_nats=2.0, **gains), 0.0, []
    for measured in (3.0, 5.0, 1.0, 1.5, 0.1, 100.0):
        errors.append(max(-2.0, min(2.0, math.log(measured / 2.0))))
        push = 0.1 * max(-0.5, min(0.5, measured / 2.0 - 1))
        if len(errors) > 1:
            push += 0.4 * (errors[-1] - errors[-2])
        if len(errors) > 2:
            push += 0.2 * (errors[-1] - 2 * errors[-2] + errors[-3])
        log_beta += max(-math.log(2), min(math.log(2), push))
        controller = controller.after(measured, standard_error=0.0)
        assert math.log(controller.beta) == pytest.approx(log_beta, abs=1e-12)
    assert "bounded to 2" in controller.event


def test_dual_of_a_small_example():
    controller = DualBeta(beta=0.5, target_nats=2.0, rate=0.1, largest_error=0.6)
    assert controller.after(2.4).beta == pytest.approx(0.5 * math.exp(0.1 * 0.2))
    assert controller.after(0.0).beta == pytest.approx(0.5 * math.exp(-0.1 * 0.6))
    above = controller.after(2.2)
    assert above.after(2.4).beta == pytest.approx(above.beta * math.exp(0.1 * 0.2) * (2.4 / 2.2) ** 1.5)


@every_steered
def test_beta_is_constant_at_the_target_and_opposes_errors(kind):
    controller = kind(beta=0.3, target_nats=2.5)
    still = controller.after(2.5, sequences=64)
    assert (still.beta, still.event) == (0.3, None)
    assert controller.after(2.6, sequences=64).beta > 0.3 > controller.after(2.4, sequences=64).beta


@every_steered
@pytest.mark.parametrize(
    ("measured", "sequences", "direction", "event"),
    [
        (NAN, 8, 0, "ignored: the measured KL is nan"),
        (-INF, 8, 0, "ignored: the measured KL is -inf"),
        (3.0, 0, 0, "ignored: no sequence was measured"),
        (INF, 8, 1, "the measured KL is infinite: taken as the largest deviation"),
        (0.0, 8, -1, "the measured KL is 0, as before the first update: taken as the largest deviation"),
        (-0.25, 8, -1, "the measured KL is -0.25 and none is below 0: answered as 0"),
    ],
)
def test_invalid_measurements_are_ignored_or_replaced(kind, measured, sequences, direction, event):
    before = kind(beta=0.3, target_nats=1.0).after(1.0, sequences=8)
    after = before.after(measured, sequences=sequences)
    assert after.event.split("; ")[0] == event
    assert (after.beta > before.beta) - (after.beta < before.beta) == direction
    assert after.after(1.0, sequences=8).after(1.0, sequences=8).event is None
    if direction == 0:
        assert replace(after, event=None) == before, "what is ignored leaves no trace"


@every_steered
def test_bounds_limit_beta_with_an_event_and_release_it(kind):
    controller = kind(beta=0.3, target_nats=1.0, beta_min=0.25, beta_max=0.4)
    for _ in range(30):
        controller = controller.after(9.0, sequences=2000)
    assert controller.beta == 0.4 and controller.event.endswith("bounded to beta_max 0.4")
    longer = controller
    for _ in range(1000):
        longer = longer.after(9.0, sequences=2000)
    late, soon = (one.after(0.5).after(0.5).beta for one in (longer, controller))
    assert late == soon < 0.4, "it is left as fast"
    for _ in range(60):
        controller = controller.after(0.2, sequences=2000)
    assert controller.beta == 0.25 and controller.event.endswith("bounded to beta_min 0.25")
    assert controller.after(9.0, sequences=2000).beta > 0.25, "nothing was wound up"


def test_a_change_of_the_target_gives_no_jump():
    """The proportional part answers the KL; that the target moved is left to the integral."""
    steady = PIDBeta(beta=0.3, target_nats=2.0).after(2.0)
    nearer = replace(steady, target_nats=1.5)
    assert nearer.after(2.0).beta == pytest.approx(0.3 * math.exp(0.12 * (2 / 1.5 - 1)))
    assert replace(steady, beta=0.6).after(2.0).beta == 0.6, "set by hand, it is the new starting point"


def test_tensors_and_numpy_numbers_are_accepted_as_measurements():
    for measured in (torch.tensor(3.0), torch.tensor(3, dtype=torch.int32), 3):
        after = PIDBeta(beta=0.3, target_nats=2.0).after(measured)
        assert after == PIDBeta(beta=0.3, target_nats=2.0).after(3.0)
        assert type(after.beta) is float


def test_a_fixed_beta_is_constant_and_may_be_zero():
    fixed = FixedBeta(beta=0.0)
    assert fixed.after(NAN, sequences=0) is fixed and fixed.beta == 0
    assert fixed.event is None and fixed.target_nats is None and fixed.per == "sequence"


# --- early stop ---


@pytest.mark.parametrize(
    ("measured", "stops"),
    [(0.0, False), (0.03, False), (0.0301, True), (INF, True), (NAN, True), (-0.01, False)],
)
def test_early_stop_compares_with_a_multiple_of_the_target(measured, stops):
    assert EarlyStop(target_nats=0.02).stops(measured) is stops
    assert EarlyStop(target_nats=0.02).stops(torch.tensor(measured, dtype=torch.float64)) is stops
    assert EarlyStop(target_nats=0.03, factor=1.0, per="sequence").stops(measured) is stops


# --- dicts ---

EVERYTHING = [
    FixedBeta(beta=0.0, per="token"),
    ZieglerBeta(beta=0.1, target_nats=6.0, horizon=300).after(NAN),
    PIDBeta(beta=0.1, target_nats=6.0, derivative=0.1).after(5.0).after(INF),
    PIDBeta(beta=0.1, target_nats=6.0).after(5.0, standard_error=2.0).after(7.0, standard_error=1.5),
    DualBeta(beta=100.0, target_nats=6.0).after(9.0),
]


@pytest.mark.parametrize("controller", EVERYTHING, ids=lambda one: one.kind)
def test_controllers_continue_after_a_round_trip_through_a_dict(controller):
    record = json.loads(json.dumps(controller.to_dict(), allow_nan=False))
    again = beta_from_dict(record)
    assert again == controller and type(again) is type(controller) and isinstance(again, Leash)
    assert record["kind"] == controller.kind and CONTROLLERS[controller.kind] is type(controller)
    assert again.after(4.0, sequences=8) == controller.after(4.0, sequences=8)
    assert beta_from_dict({"kind": "pid", **PID}) == PIDBeta(**PID), "missing fields have their defaults"


PID = {"beta": 0.1, "target_nats": 6.0}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: beta_from_dict({"beta": 0.1}), OptionError, "has no kind; there are fixed, ziegler, pid"),
        (lambda: beta_from_dict({"kind": "pdi", **PID}), UnknownNameError, "did you mean 'pid'"),
        (lambda: beta_from_dict({"kind": "pid", **PID, "gain": 1.0}), OptionError, "PIDBeta has no gain; it"),
        (lambda: beta_from_dict({"kind": "pid", "beta": 0.1}), OptionError, "target_nats"),
        (lambda: beta_from_dict({"kind": None, **PID}), UnknownNameError, "called None; there are fixed"),
        (lambda: beta_from_dict({"kind": "pid", **PID, "levels": None}), OptionError, "or no numbers"),
        (lambda: beta_from_dict({"kind": "pid", **PID, "beta": NAN}), OptionError, "beta is nan, outside"),
        (lambda: PIDBeta(beta=0.1, target_nats=0.0), OptionError, "target_nats is 0.0; give a finite number"),
        (lambda: PIDBeta(beta=0.0, target_nats=1.0), OptionError, "beta is 0.0, outside"),
        (lambda: PIDBeta(**PID, beta_min=0.0), OptionError, "beta_min is 0.0 and beta_max 100.0"),
        (lambda: PIDBeta(**PID, beta_max=INF), OptionError, "beta_max inf; give finite bounds"),
        (lambda: DualBeta(**PID, beta_min=2.0, beta_max=1.0), OptionError, "beta_min is 2.0 and beta_max"),
        (lambda: DualBeta(**PID, largest_step=1.0), OptionError, "largest_step is 1.0; give a finite number"),
        (lambda: DualBeta(**PID, rate=-1.0), OptionError, "rate is -1.0; give a finite number"),
        (lambda: DualBeta(**PID, largest_error=0.0), OptionError, "largest_error is 0.0"),
        (lambda: PIDBeta(**PID, integral=NAN), OptionError, "integral is nan"),
        (lambda: PIDBeta(**PID, reach=0.0), OptionError, "reach is 0.0"),
        (lambda: PIDBeta(**PID, levels=(NAN,)), OptionError, r"levels are \(nan,\)"),
        (lambda: ZieglerBeta(**PID, horizon=0), OptionError, "horizon is 0"),
        (lambda: ZieglerBeta(**PID).after(1.0, sequences=-1), OptionError, "sequences is -1"),
        (lambda: DualBeta(**PID).after(1.0, sequences=NAN), OptionError, "sequences is nan; give a whole"),
        (lambda: PIDBeta(**PID).after(1.0, sequences=True), OptionError, "sequences is True; give a whole"),
        (lambda: PIDBeta(**PID).after(1.0, standard_error=-0.1), OptionError, "standard_error is -0.1"),
        (lambda: DualBeta(**PID, variance=INF), OptionError, "variance is inf"),
        (lambda: FixedBeta(beta=-0.1), OptionError, "beta is -0.1"),
        (lambda: FixedBeta(beta=0.1, per="word"), OptionError, "per is 'word'"),
        (lambda: FixedBeta(beta=None), OptionError, "beta is None"),
        (lambda: PIDBeta(beta=0.1, target_nats="4"), OptionError, "target_nats is '4'"),
        (lambda: EarlyStop(target_nats=1.0, factor=0.5), OptionError, "factor is 0.5; give a finite number"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_invalid_controller_settings_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_stateful_controller_replaces_its_controller_and_restores_a_saved_state(unhooked):
    first = ZieglerBeta(beta=0.1, target_nats=2.0, horizon=100)
    stateful = StatefulController(first)
    stateful.update(4.0, 50, 0.5)
    assert stateful.leash == first.after(4.0, sequences=50, standard_error=0.5)
    assert stateful.value == stateful.leash.beta != 0.1
    resumed = StatefulController(replace(first, beta_max=0.5))
    assert isinstance(stateful, Stateful), "so that checkpoints of PyTorch can hold it"
    resumed.load_state_dict(json.loads(json.dumps(stateful.state_dict())))
    assert resumed.leash == replace(first, beta_max=0.5, beta=stateful.value, event=None)
    saved = PIDBeta(**PID).after(5.0).after(6.0).to_dict()
    for other, beta in (
        (PIDBeta(beta=0.2, target_nats=0.1, per="token"), saved["beta"]),
        (PIDBeta(beta=0.1, target_nats=0.1, per="token", beta_max=0.12), 0.12),
        (FixedBeta(beta=0.2), 0.2),
    ):
        assert with_state(other, saved) == replace(other, beta=beta), "no levels of another unit"
    assert "0.25" in json.dumps(FixedBeta(beta=torch.tensor(0.25)).to_dict())
