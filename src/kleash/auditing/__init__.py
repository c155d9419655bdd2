"""Audit of KL implementations: what they estimate and what they differentiate."""

from kleash.auditing.api import audit, audits_of
from kleash.auditing.conventions import CONVENTIONS, Convention, from_fields
from kleash.auditing.inputs import AuditInputs
from kleash.auditing.targets.case_resolution import cases_of

__all__ = [
    "CONVENTIONS",
    "AuditInputs",
    "Convention",
    "audit",
    "audits_of",
    "cases_of",
    "from_fields",
]
