"""The expected value: which quantity it is, on- and off-policy, over one token and over several."""

from dataclasses import replace
from math import inf, isfinite

from kleash.auditing.checks.evidence import Evidence, is_quantity
from kleash.auditing.checks.expectations import (
    Expectation,
    expectation,
    one_token,
    several_tokens,
    standard_deviation,
)
from kleash.auditing.checks.levels import LEVELS, Level
from kleash.auditing.matching import TOLERANCE
from kleash.auditing.quantities import SYMMETRIC, exact_values, known_quantities
from kleash.auditing.toy_distributions import Sampling, toy_distributions
from kleash.store.audit import Finding

REVERSED = {
    "KL(p ‖ q)": "KL(q ‖ p)",
    "KL(q ‖ p)": "KL(p ‖ q)",
    "chi-squared(p ‖ q)": "chi-squared(q ‖ p)",
}
"""Label of a divergence -> the label with p and q exchanged."""


def value_findings(evidence: Evidence) -> list[Finding]:
    """Findings about the expected value and about negative single values."""
    findings: list[Finding] = []
    if not evidence.value_is_right:
        kind, where = _mismatch_kind(evidence), _worst_pair(evidence)[0]
        severity = "note" if kind == "biased_value" and evidence.gradient_is_right else "wrong"
        sentence = value_sentence(evidence)
        findings.append(Finding(kind=kind, severity=severity, sentence=sentence, where=where))
    findings += _position_findings(evidence)
    findings += _asymmetry_findings(evidence)
    findings += _off_policy_findings(evidence)
    return findings + _negative_value_findings(evidence)


def _mismatch_kind(evidence: Evidence) -> str:
    """The kind of the finding about an expected value that is not the claimed divergence."""
    match = evidence.value_matches["on-policy"]
    if match is None:
        return "biased_value" if evidence.match_of_probabilities is None else "takes_probabilities"
    if match.quantity == evidence.claimed:
        kinds = {"itself": "biased_value", "shifted": "wrong_offset"}
        return kinds.get(match.relation, "wrong_sign" if match.factor < 0 else "wrong_scale")
    if match.quantity == REVERSED.get(evidence.claimed):
        return "wrong_direction"
    return known_quantities()[match.quantity].kind


def value_sentence(evidence: Evidence) -> str:
    """The expected value in a sentence."""
    match, claimed = evidence.value_matches["on-policy"], evidence.claimed
    level, formula = evidence.value_positions.level, _describe_estimator(evidence)
    of_several = LEVELS[level] if level == "sequence" or (level == "token" and not formula) else ""
    if evidence.value_is_right:
        deviation = max(standard_deviation(e) for e in one_token(evidence.expectations, "on-policy"))
        accuracy = "an unbiased estimate of" if deviation > 1e-3 else "exactly"
        if level == "neither":
            of_several = "" if evidence.estimator_level == "neither" else formula
            return f"Its value is {accuracy} {claimed} for a single token, but not for several{of_several}."
        unclamped = evidence.log_ratios.unclamped_range("value")
        return (
            f"Its value is {accuracy} {claimed}{of_several}{', ' + unclamped if unclamped else ''}{formula}."
        )
    if match is not None and not is_quantity(match, claimed, everywhere=False):
        return f"Its value is in expectation {match}{of_several}, not {claimed}{formula}."
    if evidence.match_of_probabilities is not None:
        return (
            "It expects probabilities, not log-probabilities: given probabilities, its value is "
            f"{evidence.match_of_probabilities}."
        )
    pair, mean, exact = _worst_pair(evidence)
    difference = f"on the {pair} pair its mean is {mean:.4g}, and {claimed} {exact:.4g}{formula}."
    if match is not None:
        return f"Its value is {claimed} only where no log ratio is large: {difference}"
    return f"Its value estimates no divergence of the table: {difference}"


def _describe_estimator(evidence: Evidence) -> str:
    """The estimator that the function is, of each token or of a response, at the end of a sentence; "" without one."""
    estimator = evidence.log_ratios.estimator
    match evidence.estimator_level:
        case "":
            return ""
        case "token" | "both":
            return f"; token by token it is {estimator}"
        case "sequence":
            return f"; it is {estimator} of each response's summed log ratio"
        case "neither":
            return f"; for a single token it is {estimator}"


def _worst_pair(evidence: Evidence, sampling: Sampling = "on-policy") -> tuple[str, float, float]:
    """The pair with the largest relative bias, the mean on it, and the right value."""

    def exact(e: Expectation) -> float:
        return exact_values(e.toy, sampling, evidence.claimed)["token"]

    def relative_bias(e: Expectation) -> float:
        bias = abs(e.mean / exact(e) - 1)
        return bias if isfinite(bias) else inf

    worst = max(one_token(evidence.expectations, sampling), key=relative_bias)
    return worst.toy.name, worst.mean, exact(worst)


def _position_findings(evidence: Evidence) -> list[Finding]:
    """Whether the value for three tokens is the same quantity as for one."""
    positions, match = evidence.value_positions, evidence.value_matches["on-policy"]
    if positions.level != "neither" or match is None:
        return []
    if positions.factors:
        expected = "what it should be" if evidence.value_is_right else "what it is for a single token"
        if positions.factors_of == "sequence":
            expected = f"{evidence.claimed if evidence.value_is_right else match} between whole responses"
        of_several = f"its value is {positions.times(expected)}"
    else:
        e = several_tokens(evidence.expectations, "on-policy")
        exact = exact_values(e.toy, "on-policy", evidence.claimed)["token"]
        of_several = f"its mean is {e.mean:.4g}, and {evidence.claimed} {exact:.4g}"
    is_only_logged = evidence.gradient_is_right and evidence.gradient_positions.level != "neither"
    return [
        Finding(
            kind="wrong_scale" if positions.is_uniform else "wrong_later_tokens",
            severity="note" if is_only_logged else "wrong",
            sentence=f"Over responses of three tokens {of_several}.",
            where="sequences, on-policy",
        )
    ]


def _asymmetry_findings(evidence: Evidence) -> list[Finding]:
    """Whether the value for a symmetric divergence changes when p and q are exchanged."""
    audited = evidence.audited
    if audited.convention.claims not in SYMMETRIC or audited.convention.sees == "tokens":
        return []
    toy = toy_distributions()["far"]
    exchanged = replace(toy, logits_p=toy.logits_q, logits_q=toy.logits_p)
    mean, exchanged_mean = (expectation(audited, pair, "on-policy").mean for pair in (toy, exchanged))
    if abs(mean - exchanged_mean) <= TOLERANCE * abs(mean):
        return []
    sentence = (
        f"It is not symmetric: on the far pair it is {mean:.4g}, and with p and q exchanged "
        f"{exchanged_mean:.4g}."
    )
    return [Finding(kind="not_symmetric", severity="wrong", sentence=sentence, where="far")]


def _off_policy_findings(evidence: Evidence) -> list[Finding]:
    """A finding if the expected value is another quantity on samples of another distribution."""
    on, off = evidence.value_matches["on-policy"], evidence.value_matches["off-policy"]
    if on is None or (off is not None and (on.quantity, on.relation) == (off.quantity, off.relation)):
        if _off_policy_level(evidence) != "neither":
            return []
        sentence = (
            f"Off-policy its value is right for one token, but for several it is {evidence.claimed} neither along "
            "the behaviour's prefixes nor between whole responses."
        )
        where = "sequences, off-policy"
        return [Finding(kind="off_policy_value", severity="wrong", sentence=sentence, where=where)]
    convention, gradient = evidence.audited.convention, evidence.gradient_matches["off-policy"]
    is_only_logged = convention.place == "loss" and is_quantity(gradient, evidence.claimed)
    pair, mean, exact = _worst_pair(evidence, "off-policy")
    condition = "unless each token is weighted by p / behaviour"
    if convention.takes_behaviour:
        condition = "although it takes the behaviour log-probabilities"
    return [
        Finding(
            kind="off_policy_value",
            severity="wrong" if convention.takes_behaviour and not is_only_logged else "note",
            sentence=f"Off-policy its value is biased, {condition}: on the {pair} pair its mean is {mean:.4g}, "
            f"and {evidence.claimed} {exact:.4g}.",
            where=f"{pair}, off-policy",
        )
    ]


def off_policy_sentence(evidence: Evidence) -> str:
    """The KL that a function with behaviour log-probabilities estimates off-policy; "" for other functions."""
    levels = {
        "sequence": "between whole responses",
        "token": "of the next token along the behaviour's prefixes",
    }
    level = levels.get(_off_policy_level(evidence))
    return f"Off-policy its value is {evidence.claimed} {level}." if level else ""


def _off_policy_level(evidence: Evidence) -> Level:
    """The level of the off-policy value: "token", "sequence" or "neither"; "" without behaviour log-probabilities."""
    is_right = is_quantity(evidence.value_matches["off-policy"], evidence.claimed)
    if not (evidence.audited.convention.takes_behaviour and evidence.value_is_right and is_right):
        return ""
    e = several_tokens(evidence.expectations, "off-policy")
    exact = exact_values(e.toy, "off-policy", evidence.claimed)
    if abs(e.mean - exact["token"]) <= TOLERANCE * exact["token"]:
        return "token"
    return "sequence" if abs(e.mean - exact["sequence"]) <= TOLERANCE * exact["sequence"] else "neither"


def _negative_value_findings(evidence: Evidence) -> list[Finding]:
    """Findings about negative values of single responses or tokens."""
    match = evidence.value_matches["on-policy"]
    e = min(one_token(evidence.expectations, "on-policy"), key=lambda e: e.totals.min().item())
    lowest = e.totals.min().item()
    if (match is not None and match.factor < 0) or not lowest < -1e-5:
        return []
    sentence = (
        f"The value of a single token can be negative (down to {lowest:.4g} on the {e.toy.name} pair); only the mean "
        "cannot."
    )
    return [Finding(kind="negative_values", severity="note", sentence=sentence, where=e.toy.name)]
