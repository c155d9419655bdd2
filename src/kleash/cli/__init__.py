"""The command line, nothing else."""

from kleash.cli.entry import main

__all__ = ["main"]
