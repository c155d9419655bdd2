"""Audit targets: the KL code of known packages by name, and any function at a dotted path."""

from kleash.auditing.targets.case_resolution import function_at, parse_arguments
from kleash.auditing.targets.cases import Case, Target
from kleash.auditing.targets.target_registry import TARGETS

__all__ = ["TARGETS", "Case", "Target", "function_at", "parse_arguments"]
