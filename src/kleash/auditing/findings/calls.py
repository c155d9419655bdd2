"""Findings about calls: state, randomness, overwritten arguments, and dependence on the batch."""

from collections.abc import Sequence

from kleash.auditing.probes.batches import BatchDependence, WrongReduction
from kleash.auditing.probes.evidence import Evidence
from kleash.auditing.probes.padding import LENGTHS
from kleash.auditing.probes.purity import Check, PurityResult
from kleash.store.audit import Finding, Severity

CHECK_LABELS: dict[Check, str] = {
    "repeated": "the same numbers again",
    "other_inputs": "other numbers of the same shape before",
    "reused_tensors": "new numbers in the same tensors",
    "final": "the same numbers at the end of the audit",
    "arguments": "the arguments after the call",
    "settings": "the settings of the process after the call",
}


def purity_findings(results: Sequence[PurityResult]) -> list[Finding]:
    """State, randomness, and overwritten arguments or settings."""
    findings: list[Finding] = []
    for result in results:
        if result.impurity is None:
            continue
        if result.check == "arguments":
            sentence = f"It is not pure: {describe_impurity(result)}, which the caller may use again."
            findings.append(Finding(kind="changes_inputs", severity="wrong", sentence=sentence))
        elif result.check == "settings":
            sentence = f"It is not pure: {describe_impurity(result)}."
            findings.append(Finding(kind="changes_settings", severity="wrong", sentence=sentence))
        elif result.is_random:
            sentence = (
                f"It is not pure: {describe_impurity(result)}. Its values and gradients are means over many calls, "
                "and precision and padding were not tried."
            )
            findings.append(Finding(kind="random", severity="note", sentence=sentence))
    stateful = [result for result in results if result.shows_state]
    if stateful:
        labels = [CHECK_LABELS[result.check] for result in stateful]
        details = "; ".join(
            f"{label}: {describe_impurity(result)}" for label, result in zip(labels, stateful, strict=True)
        )
        sentence = f"It is not pure: its result depends on earlier calls ({details})."
        findings.append(
            Finding(kind="stateful", severity="wrong", sentence=sentence, where=", ".join(labels))
        )
    return findings


def describe_impurity(result: PurityResult) -> str:
    """The impurity of a call in words; "" if it was pure."""
    match result.impurity:
        case None:
            return ""
        case "process_seed":
            return "its result is random and depends on the seed of the process"
        case "own_generator":
            return "its result is random, from a separate generator"
        case "overwritten":
            verb = "overwrites" if result.check == "arguments" else "changes"
            return f"it {verb} {', '.join(result.changed)}"
        case "error":
            call = {
                "second": "the second call fails",
                "later": "a later call fails",
                "final": "the call fails at the end",
            }
            return f"{call[result.failed_call]}: {result.error}"
        case "changed_shape":
            return "the result has another shape: a gradient appears or disappears"
        case "changed_by_batch_size":
            return (
                f"a batch of a new size gives {result.before:.6g}, and {result.after:.6g} after another batch "
                "of its size"
            )
        case "changed":
            return f"the result is {result.after:.6g}, and was {result.before:.6g}"


def batch_findings(evidence: Evidence) -> list[Finding]:
    """Findings about effects of several responses in one call on each other."""
    findings: list[Finding] = []
    batches = evidence.batches
    if batches.dependence:
        sentence = (
            f"The result for a response depends on its batch: {_describe_dependence(batches.dependence)}."
        )
        findings.append(Finding(kind="batch_dependent", severity="wrong", sentence=sentence, where="batch"))
    if batches.reduction:
        sentence = f"It is not a mean: {_describe_reduction(batches.reduction)}."
        findings.append(Finding(kind="wrong_reduction", severity="wrong", sentence=sentence, where="batch"))
    if batches.misplaced:
        positions = " and ".join(
            f"the value at token {value.position + 1} is that of token {value.source + 1}"
            for value in batches.misplaced
        )
        is_late_credit = (
            evidence.audited.convention.place == "reward"
            and evidence.gradient_positions.level != "neither"
            and evidence.gradient_is_right
        )
        severity: Severity = "note" if is_late_credit else "wrong"
        sentence = f"Values are at the wrong tokens: {positions}."
        findings.append(Finding(kind="wrong_credit", severity=severity, sentence=sentence, where="sequences"))
    if any(result.is_hidden for result in evidence.nan_inputs):
        fields = ", ".join(result.field for result in evidence.nan_inputs if result.is_hidden)
        sentence = f"It hides NaN: a NaN in {fields} at an unmasked token becomes a number."
        findings.append(Finding(kind="hides_nan", severity="fragile", sentence=sentence, where=fields))
    return findings


def _describe_dependence(dependence: BatchDependence) -> str:
    if dependence.kind == "gradient":
        return "its value is the same alone and in a batch, but its gradient reaches other responses"
    return (
        f"a value is {dependence.alone:.4g} for the response alone and {dependence.in_batch:.4g} in a batch of "
        f"{dependence.batch_size}"
    )


def _describe_reduction(reduction: WrongReduction) -> str:
    """The difference of a batch's mean from the correct one, in words."""
    match reduction.kind:
        case "sum":
            return (
                "for three responses of equal length it is the sum of their means, so it grows with the batch"
            )
        case "multiple":
            return f"for three responses of equal length it is {reduction.factor:.4g} times the mean of their means"
        case "unequal_lengths":
            lengths = ", ".join(map(str, LENGTHS))
            return (
                f"for responses of {lengths} tokens it is neither the mean over all tokens nor the mean of the "
                "responses' means, so the weight of a response depends on the lengths of the others"
            )
