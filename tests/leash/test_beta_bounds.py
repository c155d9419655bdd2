"""No sequence of measurements drives a controller out of its bounds, or leaves what a dict cannot hold."""

import json
import math
from dataclasses import fields

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from kleash.errors import OptionError
from kleash.leash import CONTROLLERS, beta_from_dict
from kleash.leash.controller_base import TargetController

ANY_NUMBER = st.floats(allow_nan=True, allow_infinity=True)
ODD = [0.0, -1.0, math.inf, -math.inf, math.nan, 5e-324, 1e308]
MEASURED = ANY_NUMBER | st.floats(0, 20) | st.sampled_from(ODD)
SEQUENCES = st.integers(0, 4096) | st.integers(0, 10**300)
ERROR = st.none() | st.floats(0, allow_infinity=True) | st.just(math.nan)
GAIN = st.floats(0, 1e308)
ABOVE_0 = st.floats(5e-324, 1e308)
STEERED = [kind for kind in CONTROLLERS.values() if issubclass(kind, TargetController)]


@st.composite
def steered(draw):
    """A controller of any kind with any options that it accepts."""
    kind = draw(st.sampled_from(STEERED))
    low, high = sorted((draw(st.floats(1e-300, 1e300)), draw(st.floats(1e-300, 1e300))))
    options = {
        "beta": draw(st.floats(low, high)),
        "beta_min": low,
        "beta_max": high,
        "target_nats": draw(ABOVE_0),
        "largest_step": draw(st.floats(1, 1.5, exclude_min=True) | st.floats(1.5, 1e308)),
        "per": draw(st.sampled_from(["sequence", "token"])),
    }
    common = {field.name for field in fields(TargetController)} - {"proportional"}
    for name in sorted({field.name for field in fields(kind)} - common):
        options[name] = draw(GAIN if getattr(kind, name) is not None else st.none() | st.integers(1, 10**6))
    try:
        return kind(**options)
    except OptionError:
        return reject()


@given(steered(), st.lists(st.tuples(MEASURED, SEQUENCES, ERROR), max_size=12))
@settings(max_examples=200)
def test_beta_always_stays_within_its_bounds_and_survives_a_dict(controller, history):
    low, high = controller.beta_min, controller.beta_max
    for measured, sequences, error in history:
        before = controller
        controller = controller.after(measured, sequences=sequences, standard_error=error)
        assert type(controller.beta) is float and low <= controller.beta <= high
        if sequences == 0 or not measured > 0 or measured == math.inf:
            assert controller.event, "what is no KL is said"
        if sequences == 0 or math.isnan(measured) or measured == -math.inf:
            assert controller.beta == before.beta and "ignored" in controller.event
        again = beta_from_dict(json.loads(json.dumps(controller.to_dict(), allow_nan=False)))
        assert again == controller


@given(steered(), MEASURED, st.integers(1, 4096))
@settings(max_examples=200)
def test_one_step_has_the_right_sign_and_at_most_the_largest_step(controller, measured, sequences):
    after = controller.after(measured, sequences=sequences)
    factor = after.beta / controller.beta
    limit = controller.largest_step * (1 + 1e-12)
    assert 1 / limit <= factor <= limit or factor == 0 or math.isinf(limit)
    if measured > controller.target_nats:
        assert after.beta >= controller.beta
    if measured < controller.target_nats:
        assert after.beta <= controller.beta
