"""Writes the pages of docs/reference/audits: the audits of the KL code of each known package.

python tools/make_audit_page.py                the pages of installed packages
python tools/make_audit_page.py verl liger     of these alone
python tools/make_audit_page.py slime=FOLDER   of a checkout

A page is written if it would say something else. Two audits of one function are equal on one machine. On another,
rounding errors differ, so words are compared exactly and numbers to within a factor of two, without date and versions.
"""

import platform
import re
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from kleash import __version__
from kleash.auditing import audits_of, cases_of
from kleash.auditing.targets import find_target, target_names
from kleash.store import Audit

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference" / "audits"
MADE = "Made on "
TRUNCATED = re.compile(r"is truncated: (.*) it no longer")
SEQUENCES = "sequences"
NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?%?")


def audited(name: str, source: Path | None = None) -> list[Audit]:
    """The audits of all cases of a package, or of a framework's checkout."""
    return list(audits_of(cases_of(name, source=source)))


def made_now() -> str:
    """The line that says when and with what a page was made."""
    versions = f"kleash {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"{MADE}{date.today().isoformat()} with {versions}."


def page(name: str, audits: Sequence[Audit]) -> str:
    """The page of one package."""
    target = find_target(name)
    shared = [note for note in audits[0].notes if all(note in audit.notes for audit in audits)]
    version = audits[0].versions[target.package]
    command = f"kleash audit {name}{' --source FOLDER' if target.repository else ''}"
    lines = [f"# {name}", "", f"{target.package} {version}. `{command}`."]
    if target.package != "kleash":
        lines[-1] += f" {'Get' if target.repository else 'Install'} it with `{target.install}`."
    notes = [f"- {note}" for note in shared] + [f"- not audited: {code}" for code in target.not_audited]
    usual = Counter(map(call, audits)).most_common(1)[0][0]
    lines += ["", *notes, *([""] if notes else []), *table(audits), "", "## Faults", ""]
    lines += [f"Called as `{usual}`, unless another call stands here.", ""]
    return "\n".join([*lines, *(faults(audit, usual) for audit in audits), "", made_now(), ""])


def table(audits: Sequence[Audit]) -> list[str]:
    """A row for each case."""
    heads = ["case", "place", "severity", "value", "gradient", "over several tokens", "value off-policy"]
    heads += ["gradient off-policy", "clamped", "extreme inputs", "padding"]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return [*rows, *(f"| {' | '.join(cells(audit, len(heads)))} |" for audit in audits)]


def cells(audit: Audit, columns: int) -> list[str]:
    """One row of the table."""
    kinds = {finding.kind for finding in audit.findings}
    texts = [f"`{audit.target.partition(':')[2]}`", audit.place, severity(audit)]
    if "cannot_be_called" in kinds:
        return [*texts, "cannot be called", *[""] * (columns - 4)]
    texts += [
        with_range(audit.value, audit.value_range),
        with_range(audit.gradient, audit.gradient_range) or "–",
    ]
    texts += [LEVELS[audit.gradient_level], value_off_policy(audit), gradient_off_policy(audit)]
    texts += [zones(audit), edges(audit), padding(kinds) if audit.masks else "–"]
    return [cell.replace("|", "\\|") for cell in texts]


LEVELS = {"": "–", "token": "by token", "sequence": "by response", "both": "both", "neither": "**neither**"}


def severity(audit: Audit) -> str:
    """The worst of its findings."""
    return "**wrong**" if audit.failing({"wrong"}) else "*fragile*" if audit.failing({"fragile"}) else "–"


def with_range(quantity: str, within: str) -> str:
    """The quantity, with the log ratios for which value or gradient are that quantity."""
    text = f"{quantity}, {within}" if within else quantity
    for long, short in SHORT.items():
        text = text.replace(long, short)
    return text


SHORT = {
    "log p - log q": "u",
    "E_p (u)^2 / 2": "E u²/2",
    "E_p |u|": "E |u|",
    ", where no log ratio is large": ", u small",
    ", as long as u is": ", u",
    "none of the table": "none",
}
"""Words of an audit -> those of a cell, which index.md explains."""


def value_off_policy(audit: Audit) -> str:
    """Whether the mean is the claimed divergence: for one token, and for responses at either level."""
    rows = [row for row in audit.values if row.sampling == "off-policy"]
    right = {(row.pair, row.level): abs(row.bias) <= 1e-3 * abs(row.exact) for row in rows}
    if not all(fits for (pair, _), fits in right.items() if pair != SEQUENCES):
        return "biased"
    several = [fits for (pair, _), fits in right.items() if pair == SEQUENCES]
    return "right" if any(several) or not several else "right for one token"


def gradient_off_policy(audit: Audit) -> str:
    """The divergence whose gradient the expected gradient is on every pair."""
    rows = [row for row in audit.gradients if row.sampling == "off-policy"]
    if not rows:
        return "–"
    if all(row.relative_size < 1e-6 for row in rows):
        return "zero"
    truncation = "".join(
        f"; ratio truncated {TRUNCATED.findall(f.sentence)[0]}" for f in audit.failing({"truncated_ratio"})
    )
    is_right_for_several = any(row.relative_error < 1e-3 for row in rows if row.pair == SEQUENCES)
    for target in dict.fromkeys(row.target for row in rows if row.pair != SEQUENCES):
        chosen = [row for row in rows if row.target == target and row.pair != SEQUENCES]
        if all(row.relative_error < 1e-3 for row in chosen):
            return (target if is_right_for_several else f"{target} for one token") + truncation
    return "none"


def zones(audit: Audit) -> str:
    """Where the gradient is zero; if nowhere, where the value is constant."""
    dead = [row for row in audit.zones if row.kind == "gradient"]
    flat = [row for row in audit.zones if row.kind == "value"]
    rows = dead or flat
    ranges = ", ".join(f"u {row.span}" for row in rows)
    return f"value: {ranges}" if rows and not dead else ranges or "nowhere"


WRONG_RESULTS = {
    "value is NaN": "NaN",
    "value is NaN where the divergence is infinite": "NaN",
    "gradient is NaN": "NaN",
    "value is finite where the divergence is infinite": "finite",
}
"""Problem on an extreme input -> the wrong result."""


def edges(audit: Audit) -> str:
    """The extreme inputs on which value or gradient are wrong."""
    by_result: dict[str, list[str]] = {}
    for row in audit.edges:
        if row.problem:
            by_result.setdefault(WRONG_RESULTS.get(row.problem, "another value"), []).append(row.case)
    for finding in audit.failing({"hides_nan"}):
        by_result["a number"] = [f"{finding.where} is NaN at an unmasked token"]
    return "; ".join(f"{result} where {', '.join(cases)}" for result, cases in by_result.items()) or "fine"


def padding(kinds: set[str]) -> str:
    """The effect of the numbers at masked positions."""
    effects = {
        "padding_in_denominator": "counted in the denominator",
        "padding_counts": "counts",
        "nan_from_padding": "NaN passes",
    }
    return "; ".join(effect for kind, effect in effects.items() if kind in kinds) or "ignored"


def call(audit: Audit) -> str:
    """The call of the audited function, without what it returns."""
    return audit.summary.partition(" -> ")[0]


def faults(audit: Audit, usual: str) -> str:
    """The kinds of the faults of one case, with its call where that is not the usual one."""
    kinds = dict.fromkeys(STYLES[finding.severity].format(finding.kind) for finding in audit.faults)
    calls = "" if call(audit) == usual else f", `{call(audit)}`"
    arguments = "".join(f", `{key}={value}`" for key, value in audit.arguments.items())
    name = audit.target.partition(":")[2]
    return f"- `{name}`{calls}{arguments}: {', '.join(kinds) or 'none'}"


STYLES = {"wrong": "**{}**", "fragile": "*{}*"}


def alike(a: str, b: str) -> bool:
    """Whether two texts are one number, or numbers of which one is between half and twice the other."""
    x, y = (float(text.rstrip("%").replace("−", "-")) for text in (a, b))
    return a == b or (x * y > 0 and 0.5 <= x / y <= 2)


def differs(name: str, new: str) -> bool:
    """Whether the stored page of a package says something else than a new one, but for date and versions."""
    stored = FOLDER / f"{name}.md"
    old = stored.read_text(encoding="utf-8") if stored.exists() else ""
    before, after = ("\n".join(x for x in text.splitlines() if not x.startswith(MADE)) for text in (old, new))
    has_other_words = NUMBER.split(before) != NUMBER.split(after)
    return has_other_words or not all(map(alike, NUMBER.findall(before), NUMBER.findall(after)))


def main(words: Sequence[str]) -> None:
    """Write the pages that would say something else than they do."""
    folders = {
        name: Path(folder) if folder else None for name, _, folder in (w.partition("=") for w in words)
    }
    for name in list(folders) or [name for name in target_names() if not find_target(name).repository]:
        text = page(name, audited(name, folders.get(name)))
        if differs(name, text):
            print(f"{name} has changed")
            (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
