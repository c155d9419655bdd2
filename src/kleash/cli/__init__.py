"""The command line: parsing, progress, summaries and errors."""

from kleash.cli.entry import main, run_process

__all__ = ["main", "run_process"]
