"""All findings of an audit, ordered by severity, and the verdict in sentences."""

from collections.abc import Sequence
from dataclasses import replace

from kleash.auditing.conventions import Convention
from kleash.auditing.findings.calls import batch_findings, purity_findings
from kleash.auditing.findings.extremes import extreme_findings, padding_findings
from kleash.auditing.findings.finding_kinds import remedy_of
from kleash.auditing.findings.gradients import gradient_findings, gradient_sentence
from kleash.auditing.findings.log_ratios import log_ratio_findings, truncated_ratio_findings
from kleash.auditing.findings.rounding import rounding_findings
from kleash.auditing.findings.values import off_policy_sentence, value_findings, value_sentence
from kleash.auditing.probes.evidence import Evidence
from kleash.store.audit import FAULTS, Finding, Severity

SEVERITY_ORDER: tuple[Severity, ...] = ("wrong", "fragile", "note")
NO_FAULT = "No fault was found."


def all_findings(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings, ordered by severity."""
    return with_remedies(
        [
            *purity_findings(evidence.purity),
            *batch_findings(evidence),
            *value_findings(evidence),
            *gradient_findings(evidence),
            *log_ratio_findings(evidence),
            *extreme_findings(evidence),
            *truncated_ratio_findings(evidence),
            *padding_findings(evidence),
            *rounding_findings(evidence),
        ],
        evidence.audited.convention,
    )


def with_remedies(findings: Sequence[Finding], convention: Convention) -> tuple[Finding, ...]:
    """The findings about a function of this convention ordered by severity, each with a remedy."""
    sees, claims = convention.sees, convention.claims
    complete = [replace(f, remedy=f.remedy or remedy_of(f.kind, sees, claims)) for f in findings]
    return tuple(sorted(complete, key=lambda finding: SEVERITY_ORDER.index(finding.severity)))


def verdict_sentences(evidence: Evidence, findings: Sequence[Finding]) -> tuple[str, ...]:
    """The sentences of the verdict: about the value, the gradient, and all other findings."""
    summary = [value_sentence(evidence), gradient_sentence(evidence), off_policy_sentence(evidence)]
    details = [finding.sentence for finding in findings]
    conclusion = [] if any(finding.severity in FAULTS for finding in findings) else [NO_FAULT]
    return tuple(dict.fromkeys(sentence for sentence in [*summary, *details, *conclusion] if sentence))
