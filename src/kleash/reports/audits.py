"""The page of an audit: what each function estimates, what it differentiates, and what is wrong with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kleash.records import AccuracyRow, Audit, Finding, ValueRow, ZoneRow
from kleash.records.audit import Severity
from kleash.reports.audit_charts import interval, picture
from kleash.reports.figures import ACCENT, INK, MUTED, Chart, escape, figure, finite
from kleash.reports.page import write_page
from kleash.reports.words import plain

ROUNDING = 1e-6
"""Relative; a function may compute in float32."""
MANY = 3
"""More functions than this are folded away, each behind its name."""


def write_audits(path: Path, audits: Sequence[Audit], command: str = "") -> Path:
    """Write one page about one or more audited functions.

    Args:
        path: the HTML file, in a folder that exists.
        audits: what was found, in the order of the page.
        command: the command that makes the page again, if there is one.

    Returns:
        ``path``.

    Raises:
        RunFolderError: if the page cannot be written.
        MissingExtraError: if Jinja2 or Plotly is not installed.
    """
    context: dict[str, Any] = {
        "audits": audits,
        "command": command,
        "accuracy": [accuracy_chart(f"accuracy-{at}", audit) for at, audit in enumerate(audits, 1)],
        "pictures": [picture(at, audit) for at, audit in enumerate(audits, 1)],
        "bias": bias,
        "bound": bound,
        "folded": len(audits) > MANY,
        "of": of_severity,
        "summary": summary,
        "zone": zone,
        "kinds": kinds,
        "title": title,
    }
    return write_page(path, "audits.html", context, ("plotly", "charts.js"))


def title(audit: Audit) -> str:
    """What was audited with the arguments bound to it."""
    if not audit.arguments:
        return audit.target
    return f"{audit.target} ({', '.join(f'{name}={value}' for name, value in audit.arguments.items())})"


def kinds(findings: Sequence[Finding]) -> list[str]:
    """Their kinds, each once."""
    return list(dict.fromkeys(finding.kind for finding in findings))


def of_severity(audit: Audit, severity: Severity) -> list[str]:
    """The kinds of findings of this severity, each once."""
    return kinds([finding for finding in audit.findings if finding.severity == severity])


def summary(audit: Audit) -> list[str]:
    """The sentences of the verdict that are not those of findings, which stand in their own table."""
    said = {finding.sentence for finding in audit.findings}
    return [line for line in audit.verdict if line not in said]


def bias(row: ValueRow) -> str:
    """The bias of a value, 0 where it is no more than rounding."""
    scale = max(abs(row.exact), abs(row.expected))
    return "0" if abs(row.bias) <= ROUNDING * scale else bound(row.bias)


def bound(value: float) -> str:
    """A number that may be infinite, missing or tiny."""
    return "–" if value != value else plain(value, 4)


def zone(row: ZoneRow) -> str:
    """A range of log ratios in words."""
    return interval(row)


def accuracy_chart(name: str, audit: Audit) -> Chart | None:
    """The relative error as the divergence shrinks, beside the error that rounding forces."""
    rows = [row for row in audit.accuracy if row.kl > 0]
    if not rows:
        return None
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    data: list[dict[str, Any]] = []
    for dtype, color in zip(dtypes, (ACCENT, INK, MUTED), strict=False):
        chosen = [row for row in rows if row.dtype == dtype]
        data.append(_line(chosen, [row.relative_error for row in chosen], dtype, color, "solid"))
        forced = f"{dtype}, computed with care"
        data.append(_line(chosen, [row.forced for row in chosen], forced, color, "dot"))
    worst = max(
        rows, key=lambda row: -1.0 if row.relative_error != row.relative_error else row.relative_error
    )
    return Chart(
        name=name,
        title="Relative error against float64 as the divergence goes to zero",
        figure=figure(
            data,
            height=300,
            x="KL of the pair, nats",
            y="relative error",
            xaxis={"type": "log", "exponentformat": "power", "dtick": 1},
            yaxis={"type": "log", "exponentformat": "power"},
            showlegend=True,
        ),
        described=(
            f"The largest error is {bound(worst.relative_error)} of the value, with {worst.dtype} inputs at "
            f"{bound(worst.kl)} nats; the dotted lines are the same formula computed with care on the same inputs."
        ),
        header=("Inputs", "KL, nats", "Relative error", "Computed with care"),
        rows=tuple((row.dtype, bound(row.kl), bound(row.relative_error), bound(row.forced)) for row in rows),
    )


def _line(
    rows: Sequence[AccuracyRow], values: Sequence[float], name: str, color: str, dash: str
) -> dict[str, Any]:
    """A line of errors; an error of nothing lies at the bottom, since a logarithm of 0 cannot be drawn."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if dash == "solid" else "lines",
        "name": escape(name),
        "x": finite([row.kl for row in rows]),
        "y": finite([max(value, 1e-9) for value in values]),
        "line": {"color": color, "dash": dash, "width": 2},
        "marker": {"color": color, "size": 7},
        "hovertemplate": f"%{{x:.1e}} nats: %{{y:.2g}}<extra>{escape(name)}</extra>",
    }
