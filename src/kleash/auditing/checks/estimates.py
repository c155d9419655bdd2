"""What the expected value and the expected gradient are, in sentences and findings."""

from collections.abc import Mapping
from math import inf, isclose, isfinite, isnan
from types import MappingProxyType

from kleash.auditing.checks.evidence import LEVELS, Evidence, Level, Matched
from kleash.auditing.checks.expectations import Expectation, one_token, several_tokens
from kleash.auditing.quantities import (
    TOLERANCE,
    exact_values,
    is_quantity,
    known_quantities,
    sequence_gradient,
    token_gradient,
)
from kleash.auditing.toy_distributions import SEQUENCES, Sampling
from kleash.store.audit import Finding

REVERSED = {
    "KL(p ‖ q)": "KL(q ‖ p)",
    "KL(q ‖ p)": "KL(p ‖ q)",
    "chi-squared(p ‖ q)": "chi-squared(q ‖ p)",
}
"""Label of a divergence -> the label with p and q exchanged."""
ESTIMATOR_LEVELS: Mapping[Level, str] = MappingProxyType(
    {
        "": "",
        "token": "; token by token it is {}",
        "both": "; token by token it is {}",
        "sequence": "; it is {} of each response's summed log ratio",
        "neither": "; for a single token it is {}",
    }
)
"""Level of the estimator -> the end of the sentence that names it."""
OFF_POLICY_LEVELS: Mapping[Level, str] = MappingProxyType(
    {
        "sequence": "between whole responses",
        "token": "of the next token along the behaviour's prefixes",
        "both": "of the next token along the behaviour's prefixes",
    }
)
POSITION_REMEDY = (
    "give every token the same weight (token by token), or credit each with the divergence from it on "
    "(between whole responses: kleash.kl_loss with kleash.future_kl_loss)"
)
ON_SEQUENCES, OFF_SEQUENCES = "sequences, on-policy", "sequences, off-policy"


def estimate_sentences(evidence: Evidence) -> tuple[str, ...]:
    """The value, the gradient, and for functions with behaviour log-probabilities the off-policy value."""
    off_policy = OFF_POLICY_LEVELS.get(evidence.value.off_policy_level)
    of_value = f"Off-policy its value is {evidence.claimed} {off_policy}." if off_policy else ""
    return _value_sentence(evidence), _gradient_sentence(evidence), of_value


def value_findings(evidence: Evidence) -> list[Finding]:
    """Findings about the expected value and about negative single values."""
    findings: list[Finding] = []
    value = evidence.value
    if not value.is_right:
        kind, where = _mismatch_kind(value), _worst_value(evidence)[0]
        severity = "note" if kind == "biased_value" and evidence.gradient.is_right else "wrong"
        sentence = _value_sentence(evidence)
        findings.append(Finding(kind=kind, severity=severity, sentence=sentence, where=where))
    if value.positions.level == "neither":
        is_only_logged = evidence.gradient.is_right and evidence.gradient.positions.level != "neither"
        findings.append(
            Finding(
                kind="wrong_scale" if value.positions.is_uniform else "wrong_later_tokens",
                severity="note" if is_only_logged else "wrong",
                sentence=f"Over responses of three tokens {_describe_positions(evidence)}.",
                where=ON_SEQUENCES,
            )
        )
    return [*findings, *_off_policy_value_findings(evidence), *_negative_value_findings(evidence)]


def _off_policy_value_findings(evidence: Evidence) -> list[Finding]:
    """A finding if the expected value is another quantity on samples of another distribution."""
    convention, value = evidence.audited.convention, evidence.value
    on, off, is_wrong, where = value.on_policy, value.off_policy, convention.takes_behaviour, OFF_SEQUENCES
    sentence = ""
    if on is not None and (off is None or (on.quantity, on.relation) != (off.quantity, off.relation)):
        pair, mean, exact = _worst_value(evidence, "off-policy")
        where, condition = f"{pair}, off-policy", "unless each token is weighted by p / behaviour"
        if convention.takes_behaviour:
            condition = "although it takes the behaviour log-probabilities"
        is_logged = convention.place == "loss" and is_quantity(evidence.gradient.off_policy, evidence.claimed)
        is_wrong = convention.takes_behaviour and not is_logged
        sentence = (
            f"Off-policy its value is biased, {condition}: on the {pair} pair its mean is {mean:.4g}, and "
            f"{evidence.claimed} {exact:.4g}."
        )
    elif value.off_policy_level == "neither":
        sentence = (
            f"Off-policy its value is right for one token, but for several it is {evidence.claimed} neither along "
            "the behaviour's prefixes nor between whole responses."
        )
    severity = "wrong" if is_wrong else "note"
    finding = Finding(kind="off_policy_value", severity=severity, sentence=sentence, where=where)
    return [finding] if sentence else []


def _mismatch_kind(value: Matched) -> str:
    """The kind of the finding about an expected value that is not the claimed divergence."""
    match = value.on_policy
    if match is None:
        return "biased_value"
    if match.quantity == value.claimed:
        kinds = {"itself": "biased_value", "shifted": "wrong_offset"}
        return kinds.get(match.relation, "wrong_sign" if match.factor < 0 else "wrong_scale")
    if match.quantity == REVERSED.get(value.claimed):
        return "wrong_direction"
    return known_quantities()[match.quantity].kind


def _value_sentence(evidence: Evidence) -> str:
    """The expected value in a sentence."""
    match, claimed, level = evidence.value.on_policy, evidence.claimed, evidence.value.positions.level
    estimator = ESTIMATOR_LEVELS[evidence.estimator_level].format(evidence.log_ratios.estimator)
    of_several = LEVELS[level] if level == "sequence" or (level == "token" and not estimator) else ""
    if evidence.value.is_right:
        deviation = max(e.standard_deviation for e in one_token(evidence.expectations, "on-policy"))
        accuracy = "an unbiased estimate of" if deviation > 1e-3 else "exactly"
        if level == "neither":
            of_several = " for a single token, but not for several"
        unclamped = evidence.log_ratios.unclamped_range("value")
        return f"Its value is {accuracy} {claimed}{of_several}{', ' + unclamped if unclamped else ''}{estimator}."
    if match is not None and not is_quantity(match, claimed, everywhere=False):
        return f"Its value is in expectation {match}{of_several}, not {claimed}{estimator}."
    pair, mean, exact = _worst_value(evidence)
    what = "estimates no divergence of the table"
    if match is not None:
        what = f"is {claimed} only where no log ratio is large"
    return (
        f"Its value {what}: on the {pair} pair its mean is {mean:.4g}, and {claimed} {exact:.4g}{estimator}."
    )


def _worst_value(evidence: Evidence, sampling: Sampling = "on-policy") -> tuple[str, float, float]:
    """The pair with the largest relative bias, the mean on it, and the right value."""

    def exact(e: Expectation) -> float:
        return exact_values(e.toy, sampling, evidence.claimed)["token"]

    def relative_bias(e: Expectation) -> float:
        bias = abs(e.mean / exact(e) - 1)
        return bias if isfinite(bias) else inf

    worst = max(one_token(evidence.expectations, sampling), key=relative_bias)
    return worst.toy.name, worst.mean, exact(worst)


def _describe_positions(evidence: Evidence) -> str:
    """The value over three tokens in words, if it is of neither level."""
    value = evidence.value
    if value.positions.factors:
        expected = "what it should be" if value.is_right else "what it is for a single token"
        if value.positions.factors_of == "sequence":
            expected = f"{evidence.claimed if value.is_right else value.on_policy} between whole responses"
        return f"its value is {value.positions.times(expected)}"
    e = several_tokens(evidence.expectations, "on-policy")
    exact = exact_values(e.toy, "on-policy", evidence.claimed)["token"]
    return f"its mean is {e.mean:.4g}, and {evidence.claimed} {exact:.4g}"


def _negative_value_findings(evidence: Evidence) -> list[Finding]:
    """Findings about negative values of single responses or tokens."""
    match = evidence.value.on_policy
    e = min(one_token(evidence.expectations, "on-policy"), key=lambda e: e.totals.min().item())
    lowest = e.totals.min().item()
    if (match is not None and match.factor < 0) or not lowest < -1e-5:
        return []
    sentence = (
        f"The value of a single token can be negative (down to {lowest:.4g} on the {e.toy.name} pair); only the mean "
        "cannot."
    )
    return [Finding(kind="negative_values", severity="note", sentence=sentence, where=e.toy.name)]


def gradient_findings(evidence: Evidence) -> list[Finding]:
    """Findings about the expected gradient; none for a metric."""
    gradient, sentence = evidence.gradient, _gradient_sentence(evidence)
    if evidence.audited.convention.place == "metric":
        return []
    if evidence.is_detached:
        sentence = "No gradient reaches the policy: its result is detached from it."
        return [Finding(kind="detached", severity="wrong", sentence=sentence)]
    if not gradient.is_right:
        is_zero = gradient.on_policy is not None and gradient.on_policy.quantity == "zero"
        kind = "zero_gradient" if is_zero else "wrong_gradient"
        return [Finding(kind=kind, severity="wrong", sentence=sentence, where="on-policy")]
    findings = _off_policy_gradient_findings(evidence)
    positions, of_value = gradient.positions, evidence.value.positions
    is_like_value = of_value.is_uniform and positions.is_uniform  # then the value's finding has the factor
    if is_like_value:
        is_like_value = isclose(of_value.factors[0], positions.factors[0], rel_tol=TOLERANCE)
    if positions.level == "neither" and not is_like_value:
        of_positions = Finding(
            kind="wrong_gradient",
            severity="wrong",
            sentence=sentence,
            where=ON_SEQUENCES,
            remedy=POSITION_REMEDY,
        )
        findings.append(of_positions)
    elif positions.level == "token" or positions.factors_of == "token":
        by_sequence = sequence_gradient(SEQUENCES, evidence.claimed)
        missing = by_sequence - token_gradient(SEQUENCES, "on-policy", evidence.claimed)
        share = (missing.norm() / by_sequence.norm()).item()
        sentence = (
            f"It follows {evidence.claimed} token by token: the effect of a token on the divergence at later tokens is "
            f"left out, in responses of three tokens {100 * share:.0f} % of the gradient between whole responses."
        )
        findings.append(
            Finding(kind="token_gradient", severity="note", sentence=sentence, where=ON_SEQUENCES)
        )
    return findings


def _off_policy_gradient_findings(evidence: Evidence) -> list[Finding]:
    """Findings about the gradient on samples of another distribution; the trainer weights a plain reward."""
    convention, gradient, claimed = evidence.audited.convention, evidence.gradient, evidence.claimed
    is_weighted_by_trainer = convention.place == "reward" and not convention.takes_behaviour
    if is_weighted_by_trainer:
        return []
    sentence, where = "", OFF_SEQUENCES
    if not is_quantity(gradient.off_policy, claimed):
        pair, difference = _worst_gradient(evidence, "off-policy")
        where, condition = f"{pair}, off-policy", "without importance weights"
        if convention.takes_behaviour:
            condition = "although it takes the behaviour log-probabilities"
        sentence = f"Off-policy its gradient is not that of {claimed}, {condition}: {difference}."
    elif gradient.off_policy_level == "neither" and gradient.positions.level != "neither":
        sentence = (
            f"Off-policy its gradient is right for one token, but for several it is that of {claimed} neither token by "
            "token nor between whole responses."
        )
    severity = "wrong" if convention.takes_behaviour else "note"
    finding = Finding(kind="off_policy_gradient", severity=severity, sentence=sentence, where=where)
    return [finding] if sentence else []


def _gradient_sentence(evidence: Evidence) -> str:
    """The divergence that the expected gradient follows, in a sentence; "" without a gradient."""
    place = evidence.audited.convention.place
    if place == "metric" or evidence.is_detached:
        return ""
    gradient, claimed = evidence.gradient, evidence.claimed
    usage = "As a reward on-policy" if place == "reward" else "Backpropagated on-policy"
    match, positions = gradient.on_policy, gradient.positions
    of_several = (
        f"it is that of {match} neither token by token (their cosine is {positions.token_cosine:.3g}) nor "
    )
    of_several += f"between whole responses ({positions.sequence_cosine:.3g})"
    if positions.factors:
        of_several = f"it is {positions.times(f'that of {match}{LEVELS[positions.factors_of]}')}"
    if gradient.is_right and positions.level == "neither":
        return f"{usage} it follows {claimed} for one token, but not for several: {of_several}."
    if gradient.is_right:
        unclamped = evidence.log_ratios.unclamped_range("gradient")
        return f"{usage} it follows {claimed}{LEVELS[positions.level]}, {unclamped or 'as it should'}."
    if match is not None and match.quantity == "zero":
        return f"{usage} its expected gradient is zero: as a penalty it has no effect."
    what = f"no divergence of the table, and not {claimed}"
    if is_quantity(match, claimed, everywhere=False):
        what = f"{claimed} only where no log ratio is large"
    elif match is not None:
        restriction = "" if match.everywhere else ", where no log ratio is large"
        what = f"{match}{LEVELS[positions.level]}{restriction}, not {claimed}"
    end = f"; for several tokens {of_several}" if positions.level == "neither" else ""
    return f"{usage} it follows {what}: {_worst_gradient(evidence, 'on-policy')[1]}{end}."


def _worst_gradient(evidence: Evidence, sampling: Sampling) -> tuple[str, str]:
    """The pair on which the gradient differs most from that of the claimed divergence, and how, in words."""
    rows = [
        row
        for row in evidence.gradient_rows
        if (row.target, row.sampling) == (evidence.claimed, sampling) and row.pair != SEQUENCES
    ]
    row = max(rows, key=lambda row: inf if isnan(row.relative_error) else row.relative_error)
    if isnan(row.cosine):
        return row.pair, f"on the {row.pair} pair it is zero"
    size = f"its size {row.relative_size:.3g} times"
    return row.pair, f"on the {row.pair} pair their cosine is {row.cosine:.3g}, {size}"
