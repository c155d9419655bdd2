"""The pytest fixture ``kleash_audit``."""
