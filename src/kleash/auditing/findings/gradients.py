"""Findings about the expected gradient."""

from collections.abc import Sequence
from math import isclose, isnan

from kleash.auditing.findings.log_ratios import unclamped_range
from kleash.auditing.matching import MAX_STANDARD_ERRORS
from kleash.auditing.probes.evidence import Evidence
from kleash.auditing.probes.token_positions import Level, PositionMatch
from kleash.auditing.quantities import sequence_gradient, token_gradient
from kleash.auditing.toy_distributions import SAMPLINGS, SEQUENCES, Sampling
from kleash.store.audit import Finding, GradientRow

GRADIENT_TOLERANCE = 1e-3
"""Relative error above which a gradient over several tokens is another one."""

LEVELS: dict[Level, str] = {
    "": "",
    "token": " token by token",
    "sequence": " between whole responses",
    "both": " token by token and between whole responses",
    "neither": " for one token",
}
"""The levels of a value or gradient in words."""
POSITION_REMEDY = (
    "give every token the same weight (token by token), or credit each with the divergence from it on "
    "(between whole responses: kleash.kl_loss with kleash.future_kl_loss)"
)


def gradient_findings(evidence: Evidence) -> list[Finding]:
    """Findings about the expected gradient; none for a metric."""
    if not evidence.needs_gradient:
        return []
    if evidence.is_detached:
        sentence = "No gradient reaches the policy: its result is detached from it."
        return [Finding(kind="detached", severity="wrong", sentence=sentence)]
    sentence = gradient_sentence(evidence)
    if not evidence.gradient_is_right:
        match = evidence.gradient_matches["on-policy"]
        is_zero = match is not None and match.quantity == "zero"
        kind = "zero_gradient" if is_zero else "wrong_gradient"
        return [Finding(kind=kind, severity="wrong", sentence=sentence, where="on-policy")]
    if evidence.gradient_positions.level == "neither" and not _is_scaled_like_the_value(evidence):
        finding = Finding(
            kind="wrong_gradient",
            severity="wrong",
            sentence=sentence,
            where="sequences, on-policy",
            remedy=POSITION_REMEDY,
        )
        return [finding, *_off_policy_findings(evidence)]
    return [*_off_policy_findings(evidence), *_token_gradient_findings(evidence)]


def gradient_sentence(evidence: Evidence) -> str:
    """The divergence that the expected gradient follows, in a sentence; "" without a gradient."""
    if not evidence.needs_gradient or evidence.is_detached:
        return ""
    is_reward = evidence.audited.convention.place == "reward"
    usage = "As a reward on-policy" if is_reward else "Backpropagated on-policy"
    match, claimed = evidence.gradient_matches["on-policy"], evidence.claimed
    if evidence.gradient_is_right:
        level = evidence.gradient_positions.level
        if level == "neither":
            return (
                f"{usage} it follows {claimed} for one token, but not for several: "
                f"{_describe_several_tokens(evidence)}."
            )
        unclamped = unclamped_range(evidence, "gradient")
        return f"{usage} it follows {claimed}{LEVELS[level]}, {unclamped or 'as it should'}."
    if match is not None and match.quantity == "zero":
        return f"{usage} its expected gradient is zero: as a penalty it has no effect."
    difference = _describe_difference(_worst_pair(evidence, claimed, "on-policy"))
    if match is None:
        return (
            f"{usage} it follows no divergence of the table{_nearest_divergence(evidence)}, and not {claimed}: "
            f"{difference}."
        )
    if match.quantity == claimed and match.relation == "itself":
        return f"{usage} it follows {claimed} only where no log ratio is large: {difference}."
    restriction = "" if match.everywhere else ", where no log ratio is large"
    level = evidence.gradient_positions.level
    of_several = f"; for several tokens {_describe_several_tokens(evidence)}" if level == "neither" else ""
    return f"{usage} it follows {match}{LEVELS[level]}{restriction}, not {claimed}: {difference}{of_several}."


def describe_factors(positions: PositionMatch) -> str:
    """The factors of value or gradient at each of the three tokens of the responses, in words.

    "2 times" if all are the same, "1, 2 and 3 times" otherwise, and "" without factors.
    """
    if not positions.factors:
        return ""
    if positions.is_uniform:
        return f"{positions.factors[0]:.4g} times"
    first, second, third = (
        f"{factor:.3g}" if abs(factor) > GRADIENT_TOLERANCE else "0" for factor in positions.factors
    )
    return f"{first}, {second} and {third} times"


def _is_scaled_like_the_value(evidence: Evidence) -> bool:
    """Whether over several tokens gradient and value have the same factor, which the value's finding reports."""
    value, gradient = evidence.value_positions, evidence.gradient_positions
    if not (value.level == "neither" and value.is_uniform and gradient.is_uniform):
        return False
    return isclose(value.factors[0], gradient.factors[0], rel_tol=GRADIENT_TOLERANCE)


def _describe_several_tokens(evidence: Evidence) -> str:
    """The gradient over several tokens in words, if it is of neither level."""
    positions, match = evidence.gradient_positions, evidence.gradient_matches["on-policy"]
    if positions.factors:
        where = "" if positions.is_uniform else " at the first, the second and the third token"
        return f"it is {describe_factors(positions)} that of {match}{LEVELS[positions.factors_of]}{where}"
    return (
        f"it is that of {match} neither token by token (their cosine is {positions.token_cosine:.3g}) nor between "
        f"whole responses ({positions.sequence_cosine:.3g})"
    )


def _describe_difference(row: GradientRow) -> str:
    """The difference of a gradient from its target, in words."""
    if isnan(row.cosine):
        return f"on the {row.pair} pair it is zero"
    return f"on the {row.pair} pair their cosine is {row.cosine:.3g}, its size {row.relative_size:.3g} times"


def _worst_pair(evidence: Evidence, target: str, sampling: Sampling) -> GradientRow:
    """The pair on which the gradient differs most from that of the target."""
    rows = [
        row
        for row in evidence.expectations.gradient_rows
        if row.target == target and row.sampling == sampling and row.pair != SEQUENCES
    ]
    return max(rows, key=lambda row: float("inf") if isnan(row.relative_error) else row.relative_error)


def _nearest_divergence(evidence: Evidence) -> str:
    """The divergence whose gradient has the largest cosine on the far pair."""
    rows = [
        row
        for row in evidence.expectations.gradient_rows
        if row.pair == "far" and row.sampling == "on-policy" and not isnan(row.cosine)
    ]
    if not rows:
        return ""
    nearest = max(rows, key=lambda row: row.cosine)
    return f" (on the far pair {nearest.target} is nearest, with a cosine of {nearest.cosine:.3g})"


def _off_policy_findings(evidence: Evidence) -> Sequence[Finding]:
    """Findings about the gradient on samples of another distribution."""
    if not evidence.applies_own_weights:
        return []
    if evidence.is_claimed(evidence.gradient_matches["off-policy"]):
        return _off_policy_position_findings(evidence)
    takes_behaviour = evidence.audited.convention.takes_behaviour
    row = _worst_pair(evidence, evidence.claimed, "off-policy")
    condition = (
        "although it takes the behaviour log-probabilities"
        if takes_behaviour
        else "without importance weights"
    )
    return [
        Finding(
            kind="off_policy_gradient",
            severity="wrong" if takes_behaviour else "note",
            sentence=f"Off-policy its gradient is not that of {evidence.claimed}, {condition}: "
            f"{_describe_difference(row)}.",
            where=f"{row.pair}, off-policy",
        )
    ]


def _off_policy_position_findings(evidence: Evidence) -> Sequence[Finding]:
    """Whether importance weights that are right for one token are right for several, at either level."""
    if not evidence.audited.convention.takes_behaviour or evidence.gradient_positions.level == "neither":
        return []
    e = evidence.expectations.sequences("off-policy")
    targets = [
        *(token_gradient(e.toy.name, sampling, evidence.claimed) for sampling in SAMPLINGS),
        sequence_gradient(e.toy.name, evidence.claimed),
    ]
    gradient, slack = e.gradient, MAX_STANDARD_ERRORS * e.gradient_error
    if gradient is None or any(
        (gradient - target).norm() <= GRADIENT_TOLERANCE * target.norm() + slack for target in targets
    ):
        return []
    sentence = (
        f"Off-policy its gradient is right for one token, but for several it is that of {evidence.claimed} "
        "neither token by token nor between whole responses."
    )
    return [
        Finding(
            kind="off_policy_gradient", severity="wrong", sentence=sentence, where="sequences, off-policy"
        )
    ]


def _token_gradient_findings(evidence: Evidence) -> Sequence[Finding]:
    """The note that a gradient lacks the effect of a token on later tokens."""
    positions = evidence.gradient_positions
    if positions.level != "token" and not (positions.is_uniform and positions.factors_of == "token"):
        return []
    toy = evidence.expectations.sequences("on-policy").toy
    by_sequence = sequence_gradient(toy.name, evidence.claimed)
    missing = by_sequence - token_gradient(toy.name, "on-policy", evidence.claimed)
    share = (missing.norm() / by_sequence.norm()).item()
    return [
        Finding(
            kind="token_gradient",
            severity="note",
            sentence=f"It follows {evidence.claimed} token by token: the effect of a token on the divergence at later "
            f"tokens is left out, which in responses of three tokens is {100 * share:.0f} % of the gradient between "
            "whole responses.",
            where="sequences, on-policy",
        )
    ]
