"""Checkpoints on disk: where a name leads, what their files hold, and the checks before anything is built."""
