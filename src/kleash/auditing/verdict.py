"""The findings of an audit, and its verdict in plain words."""

from collections.abc import Sequence
from dataclasses import replace

from kleash.auditing.evidence import Evidence
from kleash.auditing.findings import REMEDIES
from kleash.auditing.judging_calls import batch_findings, call_findings
from kleash.auditing.judging_digits import digit_findings
from kleash.auditing.judging_edges import edge_findings, mask_findings
from kleash.auditing.judging_gradients import gradient_findings, gradient_sentence
from kleash.auditing.judging_values import off_policy_sentence, value_findings, value_sentence
from kleash.records.audit import FAULTS, Finding

ORDER = ("wrong", "fragile", "note")


def judge(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings, the worst first."""
    found = [
        *call_findings(evidence.calls),
        *batch_findings(evidence),
        *value_findings(evidence),
        *gradient_findings(evidence),
        *edge_findings(evidence),
        *mask_findings(evidence),
        *digit_findings(evidence),
    ]
    return with_remedies(found)


def with_remedies(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, the worst first, each with what to change."""
    told = [replace(finding, remedy=finding.remedy or REMEDIES[finding.kind]) for finding in found]
    return tuple(sorted(told, key=lambda finding: ORDER.index(finding.severity)))


def verdict(evidence: Evidence, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """What the value is, what the gradient follows, and then every finding that these do not tell."""
    first = [value_sentence(evidence), gradient_sentence(evidence), off_policy_sentence(evidence)]
    rest = [finding.sentence for finding in findings if finding.sentence not in first]
    end = [] if any(f.severity in FAULTS for f in findings) else ["No fault was found."]
    return tuple(dict.fromkeys(sentence for sentence in [*first, *rest, *end] if sentence))
