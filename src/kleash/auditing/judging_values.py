"""Findings about the value."""

from dataclasses import replace
from math import isfinite

from kleash.auditing.evidence import Evidence
from kleash.auditing.exact import SYMMETRIC, exact_values, quantities
from kleash.auditing.expectations import Expectation, expectation
from kleash.auditing.judging_edges import validity
from kleash.auditing.naming import TOLERANCE, Name
from kleash.auditing.worlds import Sampling, worlds
from kleash.records.audit import Finding, Severity

SWAPPED = {
    "KL(p || q)": "KL(q || p)",
    "KL(q || p)": "KL(p || q)",
    "chi-squared(p || q)": "chi-squared(q || p)",
}


def value_findings(evidence: Evidence) -> list[Finding]:
    """What is wrong with the expected value, and how low single values go."""
    return [
        *_expected(evidence),
        *_over_steps(evidence),
        *_asymmetry(evidence),
        *_off_policy(evidence),
        *_negative(evidence),
    ]


def _expected(evidence: Evidence) -> list[Finding]:
    name = evidence.value_names["on-policy"]
    if evidence.value_is_right:
        return []
    kind = _kind(evidence, name)
    softened = kind == "biased_value" and evidence.gradient_is_right
    severity: Severity = "note" if softened else "wrong"
    return [
        Finding(kind=kind, severity=severity, sentence=value_sentence(evidence), where=_worst(evidence)[0])
    ]


def _over_steps(evidence: Evidence) -> list[Finding]:
    """Whether what it is for one token it still is for a response of three."""
    over, name = evidence.value_over_steps, evidence.value_names["on-policy"]
    if over.level != "neither" or name is None:
        return []
    e = evidence.expected.sequences("on-policy")
    exact = exact_values(e.world, "on-policy", evidence.subject.convention.claims)["token"]
    of = "what it should be" if evidence.value_is_right else "what it is for a single token"
    if over.in_words:
        at = "" if over.is_even else " at the first, the second and the third token"
        sentence = f"Over responses of three tokens its value is {over.in_words} {of}{at}."
    else:
        sentence = (
            f"Over responses of three tokens its mean is {e.mean:.4g}, and {evidence.claimed} {exact:.4g}."
        )
    only_logged = evidence.gradient_over_steps.level in ("token", "sequence", "both")
    return [
        Finding(
            kind="wrong_scale" if over.is_even else "wrong_later_tokens",
            severity="note" if only_logged else "wrong",
            sentence=sentence,
            where="sequences, on-policy",
        )
    ]


def _kind(evidence: Evidence, name: Name | None) -> str:
    if name is None:
        return "biased_value" if evidence.with_probabilities is None else "takes_probabilities"
    if name.quantity == evidence.claimed:
        if name.how == "itself":
            return "biased_value"
        if name.factor < 0 and name.how != "shifted":
            return "wrong_sign"
        return "wrong_offset" if name.how == "shifted" else "wrong_scale"
    if name.quantity == SWAPPED.get(evidence.claimed):
        return "wrong_direction"
    return quantities()[name.quantity][0]


def value_sentence(evidence: Evidence) -> str:
    """What the value is, in words."""
    name, claimed = evidence.value_names["on-policy"], evidence.claimed
    formula = f"; token by token it is {evidence.estimator}" if evidence.estimator else ""
    if evidence.value_is_right:
        spread = max(e.standard_deviation for e in evidence.one_token("on-policy"))
        what = "an unbiased estimate of" if spread > 1e-3 else "exactly"
        within = validity(evidence, "value")
        if evidence.value_over_steps.level == "neither":
            return f"Its value is {what} {claimed} for a single token, and over several it is not."
        return f"Its value is {what} {claimed}{', ' + within if within else ''}{formula}."
    if name is not None and (name.quantity != claimed or name.how != "itself"):
        return f"Its value is in expectation {name}, not {claimed}{formula}."
    if evidence.with_probabilities is not None:
        return (
            f"It wants probabilities, not their logarithms: given those, its value is "
            f"{evidence.with_probabilities}."
        )
    world, mean, exact = _worst(evidence)
    if name is not None:
        return (
            f"Its value is {claimed} only where no log ratio is large: on the {world} pair its mean is "
            f"{mean:.4g}, and {claimed} {exact:.4g}{formula}."
        )
    return (
        f"Its value estimates no divergence of the table: on the {world} pair its mean is {mean:.4g}, "
        f"and {claimed} {exact:.4g}{formula}."
    )


def _worst(evidence: Evidence, sampling: Sampling = "on-policy") -> tuple[str, float, float]:
    """The world with the largest relative bias, the mean there, and what is right."""
    claims = evidence.subject.convention.claims

    def of(e: Expectation) -> tuple[float, str, float, float]:
        exact = exact_values(e.world, sampling, claims)["token"]
        bias = abs(e.mean / exact - 1)
        return bias if isfinite(bias) else float("inf"), e.world.name, e.mean, exact

    _, world, mean, exact = max((of(e) for e in evidence.one_token(sampling)), key=lambda found: found[0])
    return world, mean, exact


def _asymmetry(evidence: Evidence) -> list[Finding]:
    """Whether what should be symmetric is."""
    subject = evidence.subject
    if subject.convention.claims not in SYMMETRIC or subject.convention.sees == "tokens":
        return []
    world = worlds()["far"]
    swapped = replace(world, logits_p=world.logits_q, logits_q=world.logits_p)
    one, other = (expectation(subject, pair, "on-policy").mean for pair in (world, swapped))
    if abs(one - other) <= TOLERANCE * abs(one):
        return []
    return [
        Finding(
            kind="not_symmetric",
            severity="wrong",
            sentence=f"It is not symmetric: on the far pair it is {one:.4g}, and with p and q exchanged {other:.4g}.",
            where="far",
        )
    ]


def _off_policy(evidence: Evidence) -> list[Finding]:
    """Whether samples of another distribution change what it estimates."""
    on, off = evidence.value_names["on-policy"], evidence.value_names["off-policy"]
    same = on is not None and off is not None and (on.quantity, on.how) == (off.quantity, off.how)
    if on is None or same:
        return _off_policy_over_steps(evidence)
    convention = evidence.subject.convention
    told = convention.takes_behaviour
    only_logged = convention.place == "loss" and evidence.is_claimed(evidence.gradient_names["off-policy"])
    world, mean, exact = _worst(evidence, "off-policy")
    why = (
        "though it is told what they were drawn from"
        if told
        else "unless each token is weighted by p / behaviour"
    )
    return [
        Finding(
            kind="off_policy_value",
            severity="wrong" if told and not only_logged else "note",
            sentence=f"Off-policy its value is biased, {why}: on the {world} pair its mean is {mean:.4g}, "
            f"and {evidence.claimed} {exact:.4g}.",
            where=f"{world}, off-policy",
        )
    ]


def _negative(evidence: Evidence) -> list[Finding]:
    name = evidence.value_names["on-policy"]
    if name is not None and name.factor < 0:
        return []
    lowest = min(evidence.one_token("on-policy"), key=lambda e: e.values.min().item())
    value = lowest.values.min().item()
    if not value < -1e-5:
        return []
    return [
        Finding(
            kind="negative_values",
            severity="note",
            sentence=f"A single token's value can be negative (down to {value:.4g} on the "
            f"{lowest.world.name} pair): only their mean cannot.",
            where=lowest.world.name,
        )
    ]


def off_policy_sentence(evidence: Evidence) -> str:
    """Which KL a function that is told the behaviour comes to over whole responses; "" for all others."""
    level = _level_off_policy(evidence)
    if level == "sequence":
        return f"Off-policy its value is {evidence.claimed} between whole responses."
    if level == "token":
        return f"Off-policy its value is {evidence.claimed} of the next token along the behaviour's prefixes."
    return ""


def _level_off_policy(evidence: Evidence) -> str:
    """Over what the value is the divergence off-policy: "token", "sequence", "neither", or "" if not asked."""
    if not evidence.subject.convention.takes_behaviour or not evidence.value_is_right:
        return ""
    if not evidence.is_claimed(evidence.value_names["off-policy"]):
        return ""
    e = evidence.expected.sequences("off-policy")
    levels = exact_values(e.world, "off-policy", evidence.subject.convention.claims)
    found = [level for level, exact in levels.items() if abs(e.mean - exact) <= TOLERANCE * exact]
    return found[0] if found else "neither"


def _off_policy_over_steps(evidence: Evidence) -> list[Finding]:
    """Whether weights that are right for one token are so for several."""
    if _level_off_policy(evidence) != "neither":
        return []
    sentence = (
        f"Off-policy its value is right for one token, and over several it is {evidence.claimed} neither along "
        "the behaviour's prefixes nor between whole responses."
    )
    return [
        Finding(kind="off_policy_value", severity="wrong", sentence=sentence, where="sequences, off-policy")
    ]
