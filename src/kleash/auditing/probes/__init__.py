"""Probes: each calls the audited function on one kind of input and returns what came out as typed records."""
