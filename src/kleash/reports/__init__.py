"""Reports: records to HTML pages, one self-contained file each, without torch."""

from kleash.reports.audit import write_audits
from kleash.reports.comparison import write_comparison, write_training_comparison
from kleash.reports.measurement import write_report
from kleash.reports.training import write_training_report

__all__ = [
    "write_audits",
    "write_comparison",
    "write_report",
    "write_training_comparison",
    "write_training_report",
]
