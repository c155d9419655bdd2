"""Findings about the expected value."""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from kleash.auditing.findings.gradients import LEVELS, describe_factors
from kleash.auditing.findings.log_ratios import unclamped_range
from kleash.auditing.matching import TOLERANCE, QuantityMatch
from kleash.auditing.probes.evidence import Evidence
from kleash.auditing.probes.expectations import Expectation, expectation
from kleash.auditing.probes.token_positions import Level
from kleash.auditing.quantities import SYMMETRIC, exact_values, known_quantities
from kleash.auditing.toy_distributions import Sampling, toy_distributions
from kleash.store.audit import Finding, Severity

REVERSED = {
    "KL(p ‖ q)": "KL(q ‖ p)",
    "KL(q ‖ p)": "KL(p ‖ q)",
    "chi-squared(p ‖ q)": "chi-squared(q ‖ p)",
}
"""Label of a divergence -> the label with p and q exchanged."""


def value_findings(evidence: Evidence) -> list[Finding]:
    """Findings about the expected value and about negative single values."""
    return [
        *_mismatch_findings(evidence),
        *_position_findings(evidence),
        *_asymmetry_findings(evidence),
        *_off_policy_findings(evidence),
        *_negative_value_findings(evidence),
    ]


def _mismatch_findings(evidence: Evidence) -> Sequence[Finding]:
    if evidence.value_is_right:
        return []
    kind = _mismatch_kind(evidence, evidence.value_matches["on-policy"])
    is_only_logged = kind == "biased_value" and evidence.gradient_is_right
    severity: Severity = "note" if is_only_logged else "wrong"
    where = _worst_pair(evidence)[0]
    return [Finding(kind=kind, severity=severity, sentence=value_sentence(evidence), where=where)]


def _position_findings(evidence: Evidence) -> Sequence[Finding]:
    """Whether the value for three tokens is the same quantity as for one."""
    positions, match = evidence.value_positions, evidence.value_matches["on-policy"]
    if positions.level != "neither" or match is None:
        return []
    if positions.factors:
        expected = "what it should be" if evidence.value_is_right else "what it is for a single token"
        where = "" if positions.is_uniform else " at the first, the second and the third token"
        if positions.factors_of == "sequence":
            expected = f"{evidence.claimed if evidence.value_is_right else match} between whole responses"
        sentence = (
            f"Over responses of three tokens its value is {describe_factors(positions)} {expected}{where}."
        )
    else:
        e = evidence.expectations.sequences("on-policy")
        exact = exact_values(e.toy, "on-policy", evidence.claimed)["token"]
        sentence = (
            f"Over responses of three tokens its mean is {e.mean:.4g}, and {evidence.claimed} {exact:.4g}."
        )
    is_only_logged = evidence.gradient_is_right and evidence.gradient_positions.level != "neither"
    return [
        Finding(
            kind="wrong_scale" if positions.is_uniform else "wrong_later_tokens",
            severity="note" if is_only_logged else "wrong",
            sentence=sentence,
            where="sequences, on-policy",
        )
    ]


def _mismatch_kind(evidence: Evidence, match: QuantityMatch | None) -> str:
    """The kind of the finding about an expected value that is not the claimed divergence."""
    if match is None:
        return "biased_value" if evidence.match_of_probabilities is None else "takes_probabilities"
    if match.quantity == evidence.claimed:
        if match.relation == "itself":
            return "biased_value"
        if match.relation == "shifted":
            return "wrong_offset"
        return "wrong_sign" if match.factor < 0 else "wrong_scale"
    if match.quantity == REVERSED.get(evidence.claimed):
        return "wrong_direction"
    return known_quantities()[match.quantity].kind


def value_sentence(evidence: Evidence) -> str:
    """The expected value in a sentence."""
    match, claimed = evidence.value_matches["on-policy"], evidence.claimed
    level = evidence.value_positions.level
    formula = f"; {_describe_estimator(evidence)}" if evidence.estimator else ""
    of_several = LEVELS[level] if level == "sequence" or (level == "token" and not formula) else ""
    if evidence.value_is_right:
        deviation = max(e.standard_deviation for e in evidence.one_token("on-policy"))
        accuracy = "an unbiased estimate of" if deviation > 1e-3 else "exactly"
        if level == "neither":
            of_several = "" if evidence.estimator_level == "neither" else formula
            return f"Its value is {accuracy} {claimed} for a single token, but not for several{of_several}."
        unclamped = unclamped_range(evidence, "value")
        return (
            f"Its value is {accuracy} {claimed}{of_several}{', ' + unclamped if unclamped else ''}{formula}."
        )
    if match is not None and (match.quantity != claimed or match.relation != "itself"):
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
    """The estimator that the function is, of each token or of a response, in words."""
    match evidence.estimator_level:
        case "token" | "both":
            return f"token by token it is {evidence.estimator}"
        case "sequence":
            return f"it is {evidence.estimator} of each response's summed log ratio"
        case _:
            return f"for a single token it is {evidence.estimator}"


def _worst_pair(evidence: Evidence, sampling: Sampling = "on-policy") -> tuple[str, float, float]:
    """The pair with the largest relative bias, the mean on it, and the right value."""

    def exact(e: Expectation) -> float:
        return exact_values(e.toy, sampling, evidence.claimed)["token"]

    def relative_bias(e: Expectation) -> float:
        bias = abs(e.mean / exact(e) - 1)
        return bias if isfinite(bias) else float("inf")

    worst = max(evidence.one_token(sampling), key=relative_bias)
    return worst.toy.name, worst.mean, exact(worst)


def _asymmetry_findings(evidence: Evidence) -> Sequence[Finding]:
    """Whether the value for a symmetric divergence changes when p and q are exchanged."""
    audited = evidence.audited
    if audited.convention.claims not in SYMMETRIC or audited.convention.sees == "tokens":
        return []
    toy = toy_distributions()["far"]
    exchanged = replace(toy, logits_p=toy.logits_q, logits_q=toy.logits_p)
    mean, exchanged_mean = (expectation(audited, pair, "on-policy").mean for pair in (toy, exchanged))
    if abs(mean - exchanged_mean) <= TOLERANCE * abs(mean):
        return []
    return [
        Finding(
            kind="not_symmetric",
            severity="wrong",
            sentence=f"It is not symmetric: on the far pair it is {mean:.4g}, and with p and q exchanged "
            f"{exchanged_mean:.4g}.",
            where="far",
        )
    ]


def _off_policy_findings(evidence: Evidence) -> Sequence[Finding]:
    """A finding if the expected value is another quantity on samples of another distribution."""
    on, off = evidence.value_matches["on-policy"], evidence.value_matches["off-policy"]
    is_same = (
        on is not None and off is not None and (on.quantity, on.relation) == (off.quantity, off.relation)
    )
    if on is None or is_same:
        return _off_policy_several_tokens_findings(evidence)
    convention = evidence.audited.convention
    takes_behaviour = convention.takes_behaviour
    is_only_logged = convention.place == "loss" and evidence.is_claimed(
        evidence.gradient_matches["off-policy"]
    )
    pair, mean, exact = _worst_pair(evidence, "off-policy")
    condition = (
        "although it takes the behaviour log-probabilities"
        if takes_behaviour
        else "unless each token is weighted by p / behaviour"
    )
    return [
        Finding(
            kind="off_policy_value",
            severity="wrong" if takes_behaviour and not is_only_logged else "note",
            sentence=f"Off-policy its value is biased, {condition}: on the {pair} pair its mean is {mean:.4g}, "
            f"and {evidence.claimed} {exact:.4g}.",
            where=f"{pair}, off-policy",
        )
    ]


def _negative_value_findings(evidence: Evidence) -> Sequence[Finding]:
    """Findings about negative values of single responses or tokens."""
    match = evidence.value_matches["on-policy"]
    if match is not None and match.factor < 0:
        return []
    e = min(evidence.one_token("on-policy"), key=lambda e: e.totals.min().item())
    lowest = e.totals.min().item()
    if not lowest < -1e-5:
        return []
    return [
        Finding(
            kind="negative_values",
            severity="note",
            sentence=f"The value of a single token can be negative (down to {lowest:.4g} on the {e.toy.name} pair); "
            "only the mean cannot.",
            where=e.toy.name,
        )
    ]


def off_policy_sentence(evidence: Evidence) -> str:
    """The KL that a function with behaviour log-probabilities estimates off-policy; "" for other functions."""
    level = _off_policy_level(evidence)
    if level == "sequence":
        return f"Off-policy its value is {evidence.claimed} between whole responses."
    if level == "token":
        return f"Off-policy its value is {evidence.claimed} of the next token along the behaviour's prefixes."
    return ""


def _off_policy_level(evidence: Evidence) -> Level:
    """The level of the off-policy value: "token", "sequence" or "neither"; "" without behaviour log-probabilities."""
    if not evidence.audited.convention.takes_behaviour or not evidence.value_is_right:
        return ""
    if not evidence.is_claimed(evidence.value_matches["off-policy"]):
        return ""
    e = evidence.expectations.sequences("off-policy")
    exact = exact_values(e.toy, "off-policy", evidence.claimed)
    if abs(e.mean - exact["token"]) <= TOLERANCE * exact["token"]:
        return "token"
    return "sequence" if abs(e.mean - exact["sequence"]) <= TOLERANCE * exact["sequence"] else "neither"


def _off_policy_several_tokens_findings(evidence: Evidence) -> Sequence[Finding]:
    """A finding if the off-policy value, right for one token, is wrong for several."""
    if _off_policy_level(evidence) != "neither":
        return []
    sentence = (
        f"Off-policy its value is right for one token, but for several it is {evidence.claimed} neither along "
        "the behaviour's prefixes nor between whole responses."
    )
    return [
        Finding(kind="off_policy_value", severity="wrong", sentence=sentence, where="sequences, off-policy")
    ]
