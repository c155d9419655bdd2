"""What the expected value and the expected gradient are, in sentences and findings."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isclose, isnan
from types import MappingProxyType
from typing import Literal, TypeVar

from kleash.auditing.checks.evidence import LEVELS, Evidence, Level, Matched
from kleash.auditing.conventions import Convention
from kleash.auditing.finding_kinds import remedy_of
from kleash.auditing.quantities import (
    EXCHANGED,
    TOLERANCE,
    exact,
    is_quantity,
    quantity_of,
)
from kleash.auditing.toy_distributions import SEQUENCES, Sampling, toy_distributions
from kleash.store.audit import Finding, GradientRow, ValueRow

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
SURROGATE_VALUES = ("cross_entropy", "wrong_offset")
"""Kinds of a loss's value that do no harm, as zero does none, if the gradient is right; in a reward, a constant for
each token is one for the length."""
POSITION_REMEDY = (
    "give every token the same weight (token by token), or credit each with the divergence from it on "
    "(between whole responses: kleash.kl_loss with kleash.future_kl_loss)"
)
K1_REMEDY = "leave it in a reward, in which k1 has the right gradient and k3 has not"
Row = TypeVar("Row", ValueRow, GradientRow)
ON_SEQUENCES = "sequences, on-policy"


def estimate_sentences(evidence: Evidence) -> tuple[str, ...]:
    """The value, the gradient, and for functions with behaviour log-probabilities the off-policy value."""
    off_policy = OFF_POLICY_LEVELS.get(evidence.value.off_policy_level)
    of_value = f"Off-policy its value is {evidence.claimed} {off_policy}." if off_policy else ""
    return _value_sentence(evidence), _gradient_sentence(evidence), of_value


def value_findings(evidence: Evidence) -> Iterator[Finding]:
    """Yield findings about the expected value and about negative single values."""
    value, of_gradient = evidence.value, _mismatch_kind(evidence.gradient)
    if not value.is_right:
        is_multiple = (
            getattr(value.on_policy, "relation", "") == "multiple"
            and _mismatch_kind(value) == "biased_value"
            and of_gradient in ("wrong_sign", "wrong_scale")
        )
        culprit = evidence.gradient if is_multiple else value  # the factor is the fault of 2 x k2
        kind, where = _mismatch_kind(culprit), _worst_value(evidence, "on-policy")[0]
        is_of_surrogate = kind == "biased_value" or (
            evidence.audited.convention.place == "loss" and (kind in SURROGATE_VALUES or str(value) == "zero")
        )
        yield Finding(
            kind=kind,
            severity="note" if is_of_surrogate and evidence.gradient.is_right else "wrong",
            sentence=_value_sentence(evidence),
            where=where,
            remedy=_mismatch_remedy(culprit, evidence.audited.convention),
        )
    if value.positions.level == "neither" and str(value.on_policy) != "zero":
        is_only_logged = evidence.gradient.is_right and evidence.gradient.positions.level != "neither"
        yield Finding(
            kind="wrong_scale" if value.positions.is_uniform else "wrong_later_tokens",
            severity="note" if is_only_logged else "wrong",
            sentence=f"Over responses of three tokens {_describe_positions(evidence)}.",
            where=ON_SEQUENCES,
        )
    on, off = value.on_policy, value.off_policy
    is_same = on is None or (off is not None and (on.quantity, on.relation) == (off.quantity, off.relation))
    yield from _off_policy_findings(evidence, "value", is_same, _worst_value(evidence, "off-policy"))
    row = min(_of_one_token(evidence.value_rows, "on-policy"), key=lambda row: row.lowest)
    if row.lowest < -1e-5 and not (on is not None and on.factor < 0):
        yield Finding(
            kind="negative_values",
            severity="note",
            sentence=f"The value of a single token can be negative (down to {row.lowest:.4g} on the {row.pair} pair)"
            f"{'; only the mean cannot' if value.is_right else ''}.",
            where=row.pair,
            remedy=K1_REMEDY if evidence.audited.convention.place == "reward" else "",
        )


def _off_policy_findings(
    evidence: Evidence, of: Literal["value", "gradient"], is_same: bool, difference: tuple[str, str]
) -> list[Finding]:
    """A finding if value or gradient are another quantity on samples of another distribution.

    Args:
        evidence: about the function.
        of: what the finding is about.
        is_same: whether for one token it is the quantity that it should be.
        difference: the worst pair off-policy, and how it differs there, in words.
    """
    convention, claimed = evidence.audited.convention, evidence.claimed
    matched = evidence.value if of == "value" else evidence.gradient
    if is_same and matched.off_policy_level != "neither":
        return []
    if is_same:
        where = "sequences, off-policy"
        sentence = (
            f"Off-policy its {of} is right for one token, but for several it is that of {claimed} neither along the "
            "behaviour's prefixes nor between whole responses."
        )
    else:
        where = f"{difference[0]}, off-policy"
        condition = "unless each token is weighted by p / behaviour"
        if convention.takes_behaviour:
            condition = "although it takes the behaviour log-probabilities"
        sentence = f"Off-policy its {of} is not that of {claimed}, {condition}: {difference[1]}."
    is_logged = of == "value" and convention.place == "loss" and not is_same  # the gradient is what trains
    is_harmless = is_logged and is_quantity(evidence.gradient.off_policy, claimed)
    severity = "wrong" if convention.takes_behaviour and not is_harmless else "note"
    return [Finding(kind=f"off_policy_{of}", severity=severity, sentence=sentence, where=where)]


def _mismatch_kind(value: Matched) -> str:
    """The kind of the finding about an expected value that is not the claimed divergence."""
    match = value.on_policy
    if match is None:
        return "biased_value"
    if match.quantity == value.claimed:
        kinds = {"itself": "biased_value", "shifted": "wrong_offset"}
        return kinds.get(match.relation, "wrong_sign" if match.factor < 0 else "wrong_scale")
    if _is_exchanged(value):
        return "wrong_direction"
    return quantity_of(match.quantity).kind


def _is_exchanged(matched: Matched) -> bool:
    """Whether on-policy it is the claimed divergence with p and q exchanged."""
    exchanged = REVERSED.get(matched.claimed, matched.claimed + EXCHANGED)
    return matched.on_policy is not None and matched.on_policy.quantity == exchanged


def _mismatch_remedy(matched: Matched, convention: Convention) -> str:
    """What to change in a value or gradient that is not the claimed one: of a sample, not the order of arguments."""
    if str(matched) == "zero for one token":
        return (
            "take the softmax over the vocabulary, the last axis; where the function drops a token, lengthen its "
            "inputs by one in the convention (F.pad)"
        )
    is_order = _is_exchanged(matched) and convention.sees == "tokens"
    return remedy_of("biased_value" if is_order else _mismatch_kind(matched), convention)


def _value_sentence(evidence: Evidence) -> str:
    """The expected value in a sentence."""
    match, claimed, level = evidence.value.on_policy, evidence.claimed, evidence.value.positions.level
    estimator = ESTIMATOR_LEVELS[evidence.estimator_level].format(evidence.log_ratios.estimator)
    of_several = (
        LEVELS[level] if level == "sequence" or (level in ("token", "neither") and not estimator) else ""
    )
    if evidence.value.is_right:
        deviation = max(row.standard_deviation for row in _of_one_token(evidence.value_rows, "on-policy"))
        accuracy = "an unbiased estimate of" if deviation > 1e-3 else "exactly"
        if level == "neither":
            of_several = " for a single token, but not for several"
        unclamped = evidence.log_ratios.unclamped_range("value")
        return f"Its value is {accuracy} {claimed}{of_several}{', ' + unclamped if unclamped else ''}{estimator}."
    if match is not None and not is_quantity(match, claimed, everywhere=False):
        is_zero = str(evidence.value) == "zero for one token"
        end = f"; over responses of three tokens {_describe_positions(evidence)}" if is_zero else estimator
        return f"Its value is in expectation {match}{of_several}{match.restriction}, not {claimed}{end}."
    what = "estimates no divergence of the table"
    if match is not None:
        what = f"is {claimed} only where no log ratio is large"
    return f"Its value {what}: {_worst_value(evidence, 'on-policy')[1]}{estimator}."


def _worst_value(evidence: Evidence, sampling: Sampling) -> tuple[str, str]:
    """The pair with the largest relative bias, and its mean there, in words."""
    row = max(
        _of_one_token(evidence.value_rows, sampling),
        key=lambda row: inf if isnan(row.expected) else abs(row.expected / row.exact - 1),
    )
    return row.pair, (
        f"on the {row.pair} pair its mean is {row.expected:.4g}, and {evidence.claimed} {row.exact:.4g}"
    )


def _of_one_token(rows: Sequence[Row], sampling: Sampling) -> list[Row]:
    """The rows over a single token."""
    return [row for row in rows if row.sampling == sampling and row.pair != SEQUENCES]


def _describe_positions(evidence: Evidence) -> str:
    """The value over three tokens in words, if it is of neither level."""
    value = evidence.value
    if value.positions.factors:
        expected = "what it should be" if value.is_right else "what it is for a single token"
        if value.positions.factors_of == "sequence":
            expected = f"{evidence.claimed if value.is_right else value.on_policy} between whole responses"
        return f"its value is {value.positions.times(expected)}"
    row = next(
        row
        for row in evidence.value_rows
        if (row.pair, row.sampling, row.level) == (SEQUENCES, "on-policy", "token")
    )
    return f"its mean is {row.expected:.4g}, and {evidence.claimed} {row.exact:.4g}"


def gradient_findings(evidence: Evidence) -> Iterator[Finding]:
    """Yield findings about the expected gradient; none for a metric."""
    gradient, convention = evidence.gradient, evidence.audited.convention
    if convention.place == "metric":
        return
    if evidence.is_detached:
        yield Finding(
            kind="detached",
            severity="wrong",
            sentence="No gradient reaches the policy: its result is detached from it.",
        )
        return
    sentence = _gradient_sentence(evidence)
    if not gradient.is_right:
        is_zero = str(gradient) == "zero"  # everywhere, and for several tokens
        is_same = _mismatch_kind(gradient) in (
            "wrong_sign",
            "wrong_scale",
            "other_temperature",
            _mismatch_kind(evidence.value),
        )
        yield Finding(
            kind="zero_gradient" if is_zero else "wrong_gradient",
            severity="wrong",
            sentence=sentence,
            where="on-policy",
            remedy=_mismatch_remedy(gradient, convention) if is_same and not is_zero else "",
        )
        return
    if convention.place == "loss" or convention.takes_behaviour:  # the trainer weights a plain reward
        is_same = is_quantity(gradient.off_policy, evidence.claimed)
        difference = _worst_gradient(evidence, "off-policy")
        yield from _off_policy_findings(evidence, "gradient", is_same, difference)
    yield from _gradient_position_findings(evidence, sentence)


def _gradient_position_findings(evidence: Evidence, sentence: str) -> Iterator[Finding]:
    """Yield the finding about a gradient over several tokens, if it is not that between whole responses."""
    positions, of_value = evidence.gradient.positions, evidence.value.positions
    is_like_value = (  # then the value's finding has the factor
        of_value.is_uniform
        and positions.is_uniform
        and isclose(of_value.factors[0], positions.factors[0], rel_tol=TOLERANCE)
    )
    if positions.level == "neither" and not is_like_value:
        yield Finding(
            kind="wrong_gradient",
            severity="wrong",
            sentence=sentence,
            where=ON_SEQUENCES,
            remedy=POSITION_REMEDY,
        )
    elif positions.level == "token" or positions.factors_of == "token":
        levels = exact("gradient", toy_distributions()[SEQUENCES], "on-policy", evidence.claimed)
        by_token, by_sequence = levels.values()
        share = ((by_sequence - by_token).norm() / by_sequence.norm()).item()
        yield Finding(
            kind="token_gradient",
            severity="note",
            sentence=f"It follows {evidence.claimed} token by token: the effect of a token on the divergence at later "
            f"tokens is left out, in responses of three tokens {100 * share:.0f} % of the gradient between whole "
            "responses.",
            where=ON_SEQUENCES,
        )


def _gradient_sentence(evidence: Evidence) -> str:
    """The divergence that the expected gradient follows, in a sentence; "" without a gradient."""
    place = evidence.audited.convention.place
    if place == "metric" or evidence.is_detached:
        return ""
    gradient, claimed = evidence.gradient, evidence.claimed
    usage = "As a reward on-policy" if place == "reward" else "Backpropagated on-policy"
    match, positions = gradient.on_policy, gradient.positions
    of_several = (
        f"it is that of {match} neither token by token (their cosine is {positions.cosines[0]:.3g}) nor "
        f"between whole responses ({positions.cosines[1]:.3g})"
    )
    if positions.factors:
        of_several = f"it is {positions.times(f'that of {match}{LEVELS[positions.factors_of]}')}"
    if gradient.is_right and positions.level == "neither":
        return f"{usage} it follows {claimed} for one token, but not for several: {of_several}."
    if gradient.is_right:
        unclamped = evidence.log_ratios.unclamped_range("gradient")
        return f"{usage} it follows {claimed}{LEVELS[positions.level]}, {unclamped or 'as it should'}."
    if str(gradient) == "zero":
        return f"{usage} its expected gradient is zero: as a penalty it has no effect."
    if str(gradient) == "zero for one token":
        return (
            f"{usage} its expected gradient is zero for one token, but not for several: its cosine with that of "
            f"{claimed} is {positions.cosines[0]:.3g} token by token, and {positions.cosines[1]:.3g} between "
            "whole responses."
        )
    what = f"no divergence of the table, and not {claimed}"
    if is_quantity(match, claimed, everywhere=False):
        what = f"{claimed} only where no log ratio is large"
    elif match is not None:
        what = f"{match}{LEVELS[positions.level]}{match.restriction}, not {claimed}"
    end = f"; for several tokens {of_several}" if positions.level == "neither" else ""
    return f"{usage} it follows {what}: {_worst_gradient(evidence, 'on-policy')[1]}{end}."


def _worst_gradient(evidence: Evidence, sampling: Sampling) -> tuple[str, str]:
    """The pair on which the gradient differs most from that of the claimed divergence, and how, in words."""
    row = max(
        (row for row in _of_one_token(evidence.gradient_rows, sampling) if row.target == evidence.claimed),
        key=lambda row: inf if isnan(row.relative_error) else row.relative_error,
    )
    as_vectors = f"their cosine is {row.cosine:.3g}, its size {row.relative_size:.3g} times"
    words = f"it is {100 * row.relative_error:.2g} % off" if row.relative_error < 0.02 else as_vectors
    if isnan(row.cosine):
        words = "it is zero" if row.relative_size < 1 else "it is NaN or infinite"
    return row.pair, f"on the {row.pair} pair {words}"
