"""Records to pages: one HTML file each, which needs no network, no server and no torch."""

from kleash.reports.audits import write_audits
from kleash.reports.comparison import write_comparison
from kleash.reports.measurement import write_report
from kleash.reports.study import write_study

__all__ = ["write_audits", "write_comparison", "write_report", "write_study"]
