"""Checkpoints whose weights are stored packed: their layouts, and ordinary networks with the unpacked weights."""
