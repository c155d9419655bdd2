"""What a given KL implementation, anyone's, really estimates and really differentiates."""

from kleash.auditing.asking import audits_of, cases_of
from kleash.auditing.conventions import CONVENTIONS, Convention, from_fields
from kleash.auditing.findings import FINDINGS, require_kinds
from kleash.auditing.running import audit
from kleash.auditing.situations import Situation

__all__ = [
    "CONVENTIONS",
    "FINDINGS",
    "Convention",
    "Situation",
    "audit",
    "audits_of",
    "cases_of",
    "from_fields",
    "require_kinds",
]
