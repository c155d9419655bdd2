"""Audit targets: the KL code of known packages by name, and any function at a dotted path."""

from kleash.auditing.targets.cases import Case, Target
from kleash.auditing.targets.resolution import find_target, target_names

__all__ = ["Case", "Target", "find_target", "target_names"]
