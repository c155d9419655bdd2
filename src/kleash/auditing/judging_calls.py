"""Findings about the call: what it remembers, what it changes, and what a batch does to a response."""

from collections.abc import Sequence

from kleash.auditing.evidence import Evidence
from kleash.auditing.purity import INPUTS, RANDOM, SETTINGS
from kleash.records.audit import CallRow, Finding, Severity


def call_findings(calls: Sequence[CallRow]) -> list[Finding]:
    """State, randomness, and what is overwritten."""
    found: list[Finding] = []
    kept: list[CallRow] = []
    for row in calls:
        if not row.problem:
            continue
        if row.case == INPUTS:
            sentence = f"It is not pure: {row.problem}, which its caller goes on to use."
            found.append(Finding(kind="changes_inputs", severity="wrong", sentence=sentence))
        elif row.case == SETTINGS:
            sentence = f"It is not pure: {row.problem}."
            found.append(Finding(kind="changes_settings", severity="wrong", sentence=sentence))
        elif row.problem.startswith(RANDOM):
            how = row.problem.removeprefix(RANDOM).lstrip(":, ")
            sentence = (
                f"It is not pure, but random ({how}): values and gradients are means over many calls, and "
                "precision and padding were not tried."
            )
            found.append(Finding(kind="random", severity="note", sentence=sentence))
        else:
            kept.append(row)
    if kept:
        said = "; ".join(f"{row.case}: {row.problem}" for row in kept)
        where = ", ".join(row.case for row in kept)
        begin = "It is not pure, its result depends on earlier calls"
        found.append(Finding(kind="stateful", severity="wrong", sentence=f"{begin} ({said}).", where=where))
    return found


def batch_findings(evidence: Evidence) -> list[Finding]:
    """What several responses in a call do to each other."""
    found: list[Finding] = []
    both = evidence.together
    if both.dependence:
        sentence = f"What a response comes to depends on its batch: {both.dependence}."
        found.append(Finding(kind="batch_dependent", severity="wrong", sentence=sentence, where="batch"))
    if both.reduction:
        sentence = f"It is no mean: {both.reduction}."
        found.append(Finding(kind="wrong_reduction", severity="wrong", sentence=sentence, where="batch"))
    if both.misplaced:
        sentence = f"Values stand at the wrong tokens: {both.misplaced}."
        late = (
            evidence.subject.convention.place == "reward" and evidence.gradient_over_steps.level != "neither"
        )
        severity: Severity = "note" if late and evidence.gradient_is_right else "wrong"
        found.append(Finding(kind="wrong_credit", severity=severity, sentence=sentence, where="sequences"))
    if evidence.hidden_nans and any(row.problem for row in evidence.hidden_nans):
        fields = ", ".join(row.case.partition(" ")[0] for row in evidence.hidden_nans if row.problem)
        sentence = f"It hides NaN: one in {fields} at a token that counts becomes a number."
        found.append(Finding(kind="hides_nan", severity="fragile", sentence=sentence, where=fields))
    return found
