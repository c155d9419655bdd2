"""What can be audited: the KL code of known packages by name, and any function at a dotted path."""

from kleash.auditing.targets.case import Case, Target
from kleash.auditing.targets.dotted import arguments_of, function_at
from kleash.auditing.targets.peers import TARGETS

__all__ = ["TARGETS", "Case", "Target", "arguments_of", "function_at"]
