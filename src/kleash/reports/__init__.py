"""Reports: records to HTML pages, one self-contained file each, without torch."""

from kleash.reports.audit import write_audits
from kleash.reports.comparison import write_comparison
from kleash.reports.demonstration import write_demonstration
from kleash.reports.folder_report import write_report_of
from kleash.reports.measurement import write_report
from kleash.reports.training import write_training_report

__all__ = [
    "write_audits",
    "write_comparison",
    "write_demonstration",
    "write_report",
    "write_report_of",
    "write_training_report",
]
