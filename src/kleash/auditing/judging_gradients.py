"""Findings about the expected gradient."""

from math import isnan

from kleash.auditing.evidence import Evidence
from kleash.auditing.exact import sequence_gradient, token_gradient
from kleash.auditing.naming import Name
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
        return [Finding(kind="detached", severity="fault", sentence=sentence)]
    if not evidence.gradient_is_right:
        name = evidence.gradient_names["on-policy"]
        zero = name is not None and name.quantity == "zero"
        kind = "zero_gradient" if zero else "wrong_gradient"
        return [Finding(kind=kind, severity="fault", sentence=gradient_sentence(evidence), where="on-policy")]
    return [*_off_policy(evidence), *_future(evidence)]


def gradient_sentence(evidence: Evidence) -> str:
    """What the gradient follows, in words; "" where none is asked for or none flows."""
    if not evidence.asks_gradient or evidence.detached:
        return ""
    reward = evidence.subject.convention.place == "reward"
    how = "As a reward on-policy" if reward else "Backpropagated on-policy"
    name, claimed = evidence.gradient_names["on-policy"], evidence.claimed
    if evidence.gradient_is_right:
        whole = (
            ""
            if evidence.sequence_error("on-policy") > FUTURE
            else " token by token and between whole responses"
        )
        return f"{how} it follows {claimed}{whole}, as it should."
    if name is not None and name.quantity == "zero":
        return f"{how} its expected gradient is zero: as a penalty it does nothing."
    row = _farthest(evidence, claimed, "on-policy")
    apart = (
        f"on the {row.world} pair their cosine is {row.cosine:.3g}, its size {row.relative_size:.3g} times"
    )
    if name is None:
        return f"{how} it follows no divergence of the table{_nearest(evidence)}, and not {claimed}: {apart}."
    if name.quantity == claimed and name.how == "itself":
        return f"{how} it follows {claimed} only where no log ratio is large: {apart}."
    only = "" if name.everywhere else ", where no log ratio is large"
    return f"{how} it follows {name}{only}, not {claimed}: {apart}."


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
            severity="fault" if told else "note",
            sentence=f"Off-policy its gradient is not that of {evidence.claimed}, {why}: on the {row.world} pair "
            f"their cosine is {row.cosine:.3g}, its size {row.relative_size:.3g} times.",
            where=f"{row.world}, off-policy",
        )
    ]


def _off_policy_over_steps(evidence: Evidence) -> list[Finding]:
    """Whether weights that are right for one token are so for several: of either kind of KL, or of neither."""
    if not evidence.subject.convention.takes_behaviour:
        return []
    e = evidence.expected.sequences("off-policy")
    name = e.world.name
    targets = [
        *(token_gradient(name, sampling, evidence.claimed) for sampling in SAMPLINGS),
        sequence_gradient(name, evidence.subject.convention.claims),
    ]
    found = e.gradient
    if found is None or any((found - target).norm() <= FUTURE * target.norm() for target in targets):
        return []
    sentence = (
        f"Off-policy its gradient is right for one token, and over several it is that of {evidence.claimed} "
        "neither token by token nor between whole responses."
    )
    return [
        Finding(
            kind="off_policy_gradient", severity="fault", sentence=sentence, where="sequences, off-policy"
        )
    ]


def _future(evidence: Evidence) -> list[Finding]:
    error = evidence.sequence_error("on-policy")
    if not error > FUTURE:
        return []
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
