"""The expected gradient: which divergence it follows, on- and off-policy, over one token and over several."""

from math import inf, isclose, isnan

from kleash.auditing.checks.evidence import Evidence, is_quantity
from kleash.auditing.checks.expectations import several_tokens
from kleash.auditing.checks.levels import LEVELS
from kleash.auditing.matching import MAX_STANDARD_ERRORS, TOLERANCE
from kleash.auditing.quantities import sequence_gradient, token_gradient
from kleash.auditing.toy_distributions import SAMPLINGS, SEQUENCES, Sampling
from kleash.store.audit import Finding, GradientRow

POSITION_REMEDY = (
    "give every token the same weight (token by token), or credit each with the divergence from it on "
    "(between whole responses: kleash.kl_loss with kleash.future_kl_loss)"
)


def gradient_findings(evidence: Evidence) -> list[Finding]:
    """Findings about the expected gradient; none for a metric."""
    if evidence.audited.convention.place == "metric":
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
    place = evidence.audited.convention.place
    if place == "metric" or evidence.is_detached:
        return ""
    usage = "As a reward on-policy" if place == "reward" else "Backpropagated on-policy"
    match, claimed = evidence.gradient_matches["on-policy"], evidence.claimed
    level = evidence.gradient_positions.level
    of_several = _describe_several_tokens(evidence) if level == "neither" else ""
    if evidence.gradient_is_right:
        if of_several:
            return f"{usage} it follows {claimed} for one token, but not for several: {of_several}."
        unclamped = evidence.log_ratios.unclamped_range("gradient")
        return f"{usage} it follows {claimed}{LEVELS[level]}, {unclamped or 'as it should'}."
    if match is not None and match.quantity == "zero":
        return f"{usage} its expected gradient is zero: as a penalty it has no effect."
    difference = _describe_difference(_worst_pair(evidence, "on-policy"))
    if match is None:
        return (
            f"{usage} it follows no divergence of the table{_nearest_divergence(evidence)}, and not {claimed}: "
            f"{difference}."
        )
    if is_quantity(match, claimed, everywhere=False):
        return f"{usage} it follows {claimed} only where no log ratio is large: {difference}."
    restriction = "" if match.everywhere else ", where no log ratio is large"
    of_several = f"; for several tokens {of_several}" if of_several else ""
    return f"{usage} it follows {match}{LEVELS[level]}{restriction}, not {claimed}: {difference}{of_several}."


def _is_scaled_like_the_value(evidence: Evidence) -> bool:
    """Whether over several tokens gradient and value have the same factor, which the value's finding reports."""
    value, gradient = evidence.value_positions, evidence.gradient_positions
    if not (value.level == "neither" and value.is_uniform and gradient.is_uniform):
        return False
    return isclose(value.factors[0], gradient.factors[0], rel_tol=TOLERANCE)


def _describe_several_tokens(evidence: Evidence) -> str:
    """The gradient over several tokens in words, if it is of neither level."""
    positions, match = evidence.gradient_positions, evidence.gradient_matches["on-policy"]
    if positions.factors:
        return f"it is {positions.times(f'that of {match}{LEVELS[positions.factors_of]}')}"
    return (
        f"it is that of {match} neither token by token (their cosine is {positions.token_cosine:.3g}) nor between "
        f"whole responses ({positions.sequence_cosine:.3g})"
    )


def _describe_difference(row: GradientRow) -> str:
    """The difference of a gradient from its target, in words."""
    if isnan(row.cosine):
        return f"on the {row.pair} pair it is zero"
    return f"on the {row.pair} pair their cosine is {row.cosine:.3g}, its size {row.relative_size:.3g} times"


def _worst_pair(evidence: Evidence, sampling: Sampling) -> GradientRow:
    """The pair on which the gradient differs most from that of the claimed divergence."""
    rows = [
        row
        for row in evidence.gradient_rows
        if (row.target, row.sampling) == (evidence.claimed, sampling) and row.pair != SEQUENCES
    ]
    return max(rows, key=lambda row: inf if isnan(row.relative_error) else row.relative_error)


def _nearest_divergence(evidence: Evidence) -> str:
    """The divergence whose gradient has the largest cosine on the far pair."""
    rows = [
        row
        for row in evidence.gradient_rows
        if (row.pair, row.sampling) == ("far", "on-policy") and not isnan(row.cosine)
    ]
    if not rows:
        return ""
    nearest = max(rows, key=lambda row: row.cosine)
    return f" (on the far pair {nearest.target} is nearest, with a cosine of {nearest.cosine:.3g})"


def _off_policy_findings(evidence: Evidence) -> list[Finding]:
    """Findings about the gradient on samples of another distribution; the trainer weights a plain reward."""
    convention = evidence.audited.convention
    if convention.place == "reward" and not convention.takes_behaviour:
        return []
    if is_quantity(evidence.gradient_matches["off-policy"], evidence.claimed):
        return _off_policy_position_findings(evidence)
    row = _worst_pair(evidence, "off-policy")
    condition = "without importance weights"
    if convention.takes_behaviour:
        condition = "although it takes the behaviour log-probabilities"
    return [
        Finding(
            kind="off_policy_gradient",
            severity="wrong" if convention.takes_behaviour else "note",
            sentence=f"Off-policy its gradient is not that of {evidence.claimed}, {condition}: "
            f"{_describe_difference(row)}.",
            where=f"{row.pair}, off-policy",
        )
    ]


def _off_policy_position_findings(evidence: Evidence) -> list[Finding]:
    """Whether importance weights that are right for one token are right for several, at either level."""
    e = several_tokens(evidence.expectations, "off-policy")
    takes_behaviour = evidence.audited.convention.takes_behaviour
    if not takes_behaviour or evidence.gradient_positions.level == "neither" or e.gradient is None:
        return []
    slack = MAX_STANDARD_ERRORS * e.gradient_error
    for target in (
        *(token_gradient(SEQUENCES, sampling, evidence.claimed) for sampling in SAMPLINGS),
        sequence_gradient(SEQUENCES, evidence.claimed),
    ):
        if (e.gradient - target).norm() <= TOLERANCE * target.norm() + slack:
            return []
    sentence = (
        f"Off-policy its gradient is right for one token, but for several it is that of {evidence.claimed} "
        "neither token by token nor between whole responses."
    )
    where = "sequences, off-policy"
    return [Finding(kind="off_policy_gradient", severity="wrong", sentence=sentence, where=where)]


def _token_gradient_findings(evidence: Evidence) -> list[Finding]:
    """The note that a gradient lacks the effect of a token on later tokens."""
    positions = evidence.gradient_positions
    if positions.level != "token" and not (positions.is_uniform and positions.factors_of == "token"):
        return []
    by_sequence = sequence_gradient(SEQUENCES, evidence.claimed)
    missing = by_sequence - token_gradient(SEQUENCES, "on-policy", evidence.claimed)
    share = (missing.norm() / by_sequence.norm()).item()
    sentence = (
        f"It follows {evidence.claimed} token by token: the effect of a token on the divergence at later tokens is "
        f"left out, which in responses of three tokens is {100 * share:.0f} % of the gradient between whole responses."
    )
    where = "sequences, on-policy"
    return [Finding(kind="token_gradient", severity="note", sentence=sentence, where=where)]
