"""Records to pages: one HTML file each, which needs no network, no server and no torch."""

from kleash.reports.comparison import write_comparison
from kleash.reports.measurement import write_report

__all__ = ["write_comparison", "write_report"]
