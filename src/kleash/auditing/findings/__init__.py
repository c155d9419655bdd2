"""Findings: what the evidence contradicts or qualifies, each with kind, severity, sentence and remedy."""
