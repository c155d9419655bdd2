"""Reward against KL: what best-of-n costs, and where optimising a proxy stops paying."""

__all__: list[str] = []
