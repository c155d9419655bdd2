"""An audit with a row of every kind and hostile text in every field that takes any."""

import math
from dataclasses import replace

from kleash.records import Audit, Finding
from kleash.store.audit import AccuracyRow, CurveRow, EdgeRow, GradientRow, MaskRow, ValueRow, ZoneRow

HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken=2'>"


FINDING = Finding(
    kind="wrong_gradient",
    severity="wrong",
    sentence="it follows KL(q ‖ p)",
    where="far",
    remedy=f"use another {HOSTILE}",
)
VALUE = {"pair": "near", "sampling": "on-policy", "level": "token", "exact": 0.0123456, "expected": 0.0123456}
VALUE |= {"bias": 0.0, "standard_deviation": math.inf, "lowest": -0.5}
GRADIENT = {"pair": "far", "sampling": "off-policy", "target": "KL(q ‖ p)", "cosine": math.nan}
GRADIENT |= {"relative_size": 1.25, "relative_error": 3e-17}
EDGE = {"case": "q rules the token out", "exact": math.inf, "value": 10.0, "gradient": math.nan}


def synthetic_audit(target: str = f"their.module:kl {HOSTILE}") -> Audit:
    """What could be said of a clamped k3, and worse."""
    return Audit(
        target=target,
        convention="loss",
        summary="f(token_logp, token_logq) -> [sequences, steps]",
        place="loss",
        claims="kl",
        arguments={"kind": HOSTILE},
        value="KL(p ‖ q)",
        gradient="KL(q ‖ p)",
        estimator="k3",
        verdict=(f"its value is KL(p ‖ q) {HOSTILE}", "Backpropagated it follows KL(q ‖ p)."),
        findings=(FINDING, Finding(kind="negative_values", severity="note", sentence=HOSTILE, where=HOSTILE)),
        values=(ValueRow(**VALUE),),
        gradients=(GradientRow(**GRADIENT),),
        zones=(
            ZoneRow(kind="gradient", low=-math.inf, high=-2.6112, value=10.0),
            ZoneRow(kind="value", low=11.0, high=math.inf, value=10.0),
            ZoneRow(kind="gradient", low=-1.0, high=1.5, value=0.0),
        ),
        edges=(EdgeRow(**EDGE, problem="gradient is NaN"),),
        masks=(MaskRow(case="NaN", value_change=math.nan, gradient_change=0.0, problem="value is NaN"),),
        accuracy=(
            AccuracyRow(dtype="float32", kl=1e-8, relative_error=0.4, unavoidable_error=1e-6),
            AccuracyRow(dtype="float32", kl=1e-2, relative_error=0.0, unavoidable_error=1e-7),
            AccuracyRow(dtype="bfloat16", kl=1e-8, relative_error=math.nan, unavoidable_error=1e-6),
        ),
        notes=(HOSTILE,),
        versions={"kleash": "0", "torch": HOSTILE},
    )


def drawn_audit() -> Audit:
    """One with a picture: a k3 that is clamped at 10."""
    log_ratios = [at / 2 for at in range(-60, 61)]

    def k3(u: float) -> float:
        return math.expm1(-u) + u

    curve = tuple(
        CurveRow(
            log_ratio=u,
            value=min(10.0, k3(u)),
            right_value=k3(u),
            gradient=0.0 if k3(u) > 10 else 1 - math.exp(-u),
            right_gradient=u,
        )
        for u in log_ratios
    )
    return replace(synthetic_audit("drawn"), curve=curve, right_value_is="k3")


def plain_audit() -> Audit:
    """One in which nothing was asked for that has a table."""
    tables = ("findings", "values", "gradients", "zones", "edges", "masks", "accuracy")
    return replace(synthetic_audit("kleash:kl"), **dict.fromkeys(tables, ()))
