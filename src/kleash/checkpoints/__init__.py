"""Checkpoints on disk: resolving names, reading their files, and checks before a network is built."""
