"""Audit of KL implementations: what they estimate and what they differentiate."""

from kleash.auditing.api import audit, audits_of
from kleash.auditing.conventions import CONVENTIONS, Convention, from_call, from_fields
from kleash.auditing.targets.resolution import cases_of
from kleash.auditing.toy_distributions import AuditInputs

__all__ = [
    "CONVENTIONS",
    "AuditInputs",
    "Convention",
    "audit",
    "audits_of",
    "cases_of",
    "from_call",
    "from_fields",
]
