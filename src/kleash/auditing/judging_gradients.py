"""Findings about the expected gradient."""

from dataclasses import replace
from math import isclose, isnan

from kleash.auditing.evidence import Evidence
from kleash.auditing.exact import sequence_gradient, token_gradient
from kleash.auditing.judging_edges import validity
from kleash.auditing.naming import NOISE, Name
from kleash.auditing.worlds import SAMPLINGS, Sampling
from kleash.records.audit import Finding, GradientRow

FUTURE = 1e-3
"""The relative error above which a gradient is not that of the sequences."""


def gradient_findings(evidence: Evidence) -> list[Finding]:
    """What descending on it does; nothing for a metric."""
    if not evidence.asks_gradient:
        return []
    if evidence.detached:
        sentence = "No gradient reaches the policy: what it returns is detached from it."
        return [Finding(kind="detached", severity="wrong", sentence=sentence)]
    if not evidence.gradient_is_right:
        name = evidence.gradient_names["on-policy"]
        zero = name is not None and name.quantity == "zero"
        kind = "zero_gradient" if zero else "wrong_gradient"
        return [Finding(kind=kind, severity="wrong", sentence=gradient_sentence(evidence), where="on-policy")]
    if evidence.gradient_over_steps.level == "neither" and not _scaled_like_the_value(evidence):
        sentence = gradient_sentence(evidence)
        where = "sequences, on-policy"
        found = Finding(kind="wrong_gradient", severity="wrong", sentence=sentence, where=where)
        return [replace(found, remedy=OVER_STEPS_REMEDY), *_off_policy(evidence)]
    return [*_off_policy(evidence), *_future(evidence)]


def gradient_sentence(evidence: Evidence) -> str:
    """What the gradient follows, in words; "" where none is asked for or none flows."""
    if not evidence.asks_gradient or evidence.detached:
        return ""
    reward = evidence.subject.convention.place == "reward"
    how = "As a reward on-policy" if reward else "Backpropagated on-policy"
    name, claimed = evidence.gradient_names["on-policy"], evidence.claimed
    if evidence.gradient_is_right:
        level = evidence.gradient_over_steps.level
        if level == "neither":
            return f"{how} it follows {claimed} for one token, and over several it does not: {_instead(evidence)}."
        within = validity(evidence, "gradient")
        within = f", {within}" if within else ", as it should"
        return f"{how} it follows {claimed}{LEVELS[level]}{within}."
    if name is not None and name.quantity == "zero":
        return f"{how} its expected gradient is zero: as a penalty it does nothing."
    row = _farthest(evidence, claimed, "on-policy")
    apart = _apart(row)
    if name is None:
        return f"{how} it follows no divergence of the table{_nearest(evidence)}, and not {claimed}: {apart}."
    if name.quantity == claimed and name.how == "itself":
        return f"{how} it follows {claimed} only where no log ratio is large: {apart}."
    only = "" if name.everywhere else ", where no log ratio is large"
    return f"{how} it follows {name}{only}, not {claimed}: {apart}."


LEVELS = {
    "": "",
    "token": " token by token",
    "sequence": " between whole responses",
    "both": " token by token and between whole responses",
}
"""What ``OverSteps.level`` is called."""
OVER_STEPS_REMEDY = (
    "give every token the same weight (token by token), or credit each with the divergence from it on "
    "(between whole responses: kleash.kl_loss with kleash.future_kl_loss)"
)


def _scaled_like_the_value(evidence: Evidence) -> bool:
    """Whether over several tokens gradient and value are the same multiple: one finding, the value's, says it."""
    value, gradient = evidence.value_over_steps, evidence.gradient_over_steps
    if not (value.level == "neither" and value.is_even and gradient.is_even):
        return False
    return isclose(value.factors[0], gradient.factors[0], rel_tol=FUTURE)


def _instead(evidence: Evidence) -> str:
    """What the gradient is over several tokens, where it is neither of the two that it might be."""
    over, claimed = evidence.gradient_over_steps, evidence.claimed
    if over.in_words:
        what = "token by token" if over.factors_of == "token" else "between whole responses"
        at = "" if over.is_even else " at the first, the second and the third token"
        return f"it is {over.in_words} that of {claimed} {what}{at}"
    by_token, by_response = over.cosines
    return (
        f"it is that of {claimed} neither token by token (their cosine is {by_token:.3g}) nor between whole "
        f"responses ({by_response:.3g})"
    )


def _apart(row: GradientRow) -> str:
    """How a gradient differs from that of its target."""
    if isnan(row.cosine):
        return f"on the {row.world} pair it is zero"
    return f"on the {row.world} pair their cosine is {row.cosine:.3g}, its size {row.relative_size:.3g} times"


def _farthest(evidence: Evidence, target: str, sampling: Sampling) -> GradientRow:
    """Where the gradient differs most from that of the target."""
    rows = [
        row
        for row in evidence.expected.gradient_rows
        if row.target == target and row.sampling == sampling and row.world != "sequences"
    ]
    return max(rows, key=lambda row: float("inf") if isnan(row.relative_error) else row.relative_error)


def _nearest(evidence: Evidence) -> str:
    """The divergence whose gradient points most nearly the same way, on the far pair."""
    rows = [
        row
        for row in evidence.expected.gradient_rows
        if row.world == "far" and row.sampling == "on-policy" and not isnan(row.cosine)
    ]
    if not rows:
        return ""
    best = max(rows, key=lambda row: row.cosine)
    return f" (on the far pair {best.target} is nearest, with a cosine of {best.cosine:.3g})"


def _off_policy(evidence: Evidence) -> list[Finding]:
    name: Name | None = evidence.gradient_names["off-policy"]
    if not evidence.weighs_itself:
        return []
    if evidence.is_claimed(name):
        return _off_policy_over_steps(evidence)
    told = evidence.subject.convention.takes_behaviour
    row = _farthest(evidence, evidence.claimed, "off-policy")
    why = "though it is told what the tokens were drawn from" if told else "unless it is weighted"
    return [
        Finding(
            kind="off_policy_gradient",
            severity="wrong" if told else "note",
            sentence=f"Off-policy its gradient is not that of {evidence.claimed}, {why}: {_apart(row)}.",
            where=f"{row.world}, off-policy",
        )
    ]


def _off_policy_over_steps(evidence: Evidence) -> list[Finding]:
    """Whether weights that are right for one token are so for several: of either kind of KL, or of neither."""
    if not evidence.subject.convention.takes_behaviour or evidence.gradient_over_steps.level == "neither":
        return []
    e = evidence.expected.sequences("off-policy")
    name = e.world.name
    targets = [
        *(token_gradient(name, sampling, evidence.claimed) for sampling in SAMPLINGS),
        sequence_gradient(name, evidence.subject.convention.claims),
    ]
    found, slack = e.gradient, NOISE * e.gradient_error
    if found is None or any((found - target).norm() <= FUTURE * target.norm() + slack for target in targets):
        return []
    sentence = (
        f"Off-policy its gradient is right for one token, and over several it is that of {evidence.claimed} "
        "neither token by token nor between whole responses."
    )
    return [
        Finding(
            kind="off_policy_gradient", severity="wrong", sentence=sentence, where="sequences, off-policy"
        )
    ]


def _future(evidence: Evidence) -> list[Finding]:
    over = evidence.gradient_over_steps
    if over.level != "token" and not (over.is_even and over.factors_of == "token"):
        return []
    world = evidence.expected.sequences("on-policy").world
    whole = sequence_gradient(world.name, evidence.subject.convention.claims)
    left_out = whole - token_gradient(world.name, "on-policy", evidence.claimed)
    error = (left_out.norm() / whole.norm()).item()
    return [
        Finding(
            kind="token_gradient",
            severity="note",
            sentence=f"It follows {evidence.claimed} token by token: how a token changes the divergence later in "
            "the response is left out, which in responses of three tokens is "
            f"{100 * error:.0f} % of the gradient between whole responses.",
            where="sequences, on-policy",
        )
    ]
