"""The command line: parsing, progress, summaries and errors."""

from kleash.cli.entry import main

__all__ = ["main"]
