"""What a given KL implementation, anyone's, really estimates and really differentiates."""

from kleash.auditing.conventions import CONVENTIONS, Convention
from kleash.auditing.findings import FINDINGS
from kleash.auditing.situations import Situation

__all__ = ["CONVENTIONS", "FINDINGS", "Convention", "Situation"]
