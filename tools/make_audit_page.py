"""Writes docs/audit.md: what the audit finds in the KL code of each package that it knows by name.

python tools/make_audit_page.py                     write it
python tools/make_audit_page.py --check             exit 1 if another audit would write something else
python tools/make_audit_page.py --check verl liger  the same for these packages only

Two audits of one function are equal on one machine. On another, rounding errors differ in their
digits; so the check compares words exactly and numbers to within a factor of two. It does not look
at the line that says when and with what the page was made.
"""

import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

import torch

from kleash import __version__
from kleash.auditing import audits_of, cases_of
from kleash.auditing.hidden_nans import PROBLEM as HIDDEN
from kleash.auditing.targets import TARGETS
from kleash.records import Audit, Finding

PAGE = Path(__file__).resolve().parents[1] / "docs" / "audit.md"
HEAD = """# What known KL code really does

`kleash audit NAME` for each package that it knows by name. [auditing.md](auditing.md) says how an audit is made and
what its words mean. Every line below comes out of the run that made this page; none is repeated from elsewhere.

- p is the policy (or the student), q the reference (or the teacher); `u = log p − log q` of a sampled token.
- *Value* and *gradient* are expectations by exact enumeration: the divergence that the mean of the values is, and the
  one that the mean of the gradients is the gradient of, for tokens sampled from p. *Off-policy* is the same where they
  were sampled from another distribution, without any weights but the function's own.
- *Stands still* gives the log ratios at which the gradient is exactly zero, or, behind "value", those at which only
  the value no longer changes. For whole distributions it is the difference of two tokens' log-odds.
- *Severity*: **wrong** trains on, or reports, something else in ordinary use; *fragile* does so only at extreme log
  ratios (beyond 8 nats), in low precision, or with garbage in the padding. A trainer that puts finite numbers into its
  padding, or casts to float32 before, never meets the last two; whether one does is not audited. A top-k loss is called
  wrong because it is another quantity than the KL over the whole vocabulary, deliberately or not.
- Over several tokens the gradient is compared with two truths: *by token* is that of the next-token divergences along
  sampled prefixes, *by response* that of the divergence between whole responses; *neither* is neither.
- *Near* is the relative error in float32 where the KL is 1e-6 nats, as it is early in training.
- A case that is meant to be another divergence than KL(p || q) says so in the name of its convention.
"""
MADE = "Made on "
CAPPED = re.compile(r"is truncated: (.*) it no longer")
SEQUENCES = "sequences"
ROUNDING = 1e-4
"""A relative error up to which it is the arithmetic's, not the formula's."""
NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?%?")


def audited(name: str) -> list[Audit]:
    """The audits of everything that is known of a package."""
    return list(audits_of(cases_of(name)))


def page(names: Iterable[str], audits: Callable[[str], list[Audit]] = audited) -> str:
    """The text of the page, with the sections of these packages."""
    with_what = f"kleash {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    made = f"{MADE}{date.today().isoformat()} by `python tools/make_audit_page.py` with {with_what}."
    return "\n".join([HEAD, made, "", *(section(name, audits(name)) for name in names)])


def section(name: str, audits: Sequence[Audit]) -> str:
    """What there is to say about one package."""
    target = TARGETS[name]
    shared = [note for note in audits[0].notes if all(note in audit.notes for audit in audits)]
    version = audits[0].versions[target.package]
    lines = [f"## {name}", "", f"{target.package} {version}. `kleash audit {name}`."]
    if target.package != "kleash":
        lines[-1] += f" Install it with `{target.install}`."
    told = [f"- {note}" for note in shared] + [f"- not audited: {what}" for what in target.not_audited]
    lines += ["", *told, *([""] if told else []), *table(audits), ""]
    for audit in audits:
        lines += details(audit, shared)
    return "\n".join(lines)


def table(audits: Sequence[Audit]) -> list[str]:
    """A row for each case."""
    heads = ["case", "place", "severity", "value", "gradient", "over several tokens", "value off-policy"]
    heads += ["gradient off-policy"]
    heads += ["stands still", "edges", "padding", "near", "bfloat16"]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return [*rows, *(f"| {' | '.join(cells(audit, len(heads)))} |" for audit in audits)]


def cells(audit: Audit, columns: int) -> list[str]:
    """One row of the table."""
    kinds = {finding.kind for finding in audit.findings}
    found = [f"`{audit.target.partition(':')[2]}`", audit.place, severity(audit)]
    if "cannot_be_called" in kinds:
        return [*found, "cannot be called", *[""] * (columns - 4)]
    found += [ranged(audit.value, audit.value_range), ranged(audit.gradient, audit.gradient_range) or "–"]
    found += [LEVELS[audit.gradient_level], value_off_policy(audit), gradient_off_policy(audit)]
    found += [
        zones(audit),
        edges(audit),
        padding(kinds) if audit.masks else "–",
        near(audit),
        in_bfloat16(audit),
    ]
    return [cell.replace("|", "\\|") for cell in found]


LEVELS = {"": "–", "token": "by token", "sequence": "by response", "both": "both", "neither": "**neither**"}


def severity(audit: Audit) -> str:
    """The worst of its findings."""
    return "**wrong**" if audit.failing({"wrong"}) else "*fragile*" if audit.failing({"fragile"}) else "–"


def ranged(words: str, within: str) -> str:
    """What it is, with the log ratios for which it is that."""
    return f"{words}, {within.replace('log p - log q', 'u')}" if within else words


def value_off_policy(audit: Audit) -> str:
    """Whether the mean is still the claimed divergence: of one token, and of responses by either level."""
    rows = [row for row in audit.values if row.sampling == "off-policy"]
    right = {(row.world, row.level): abs(row.bias) <= 1e-3 * abs(row.exact) for row in rows}
    if not all(fits for (world, _), fits in right.items() if world != SEQUENCES):
        return "biased"
    long = [fits for (world, _), fits in right.items() if world == SEQUENCES]
    return "right" if any(long) or not long else "right for one token"


def gradient_off_policy(audit: Audit) -> str:
    """The divergence whose gradient it is on every pair."""
    rows = [row for row in audit.gradients if row.sampling == "off-policy"]
    if not rows:
        return "–"
    if all(row.relative_size < 1e-6 for row in rows):
        return "zero"
    capped = "".join(
        f"; ratio truncated {CAPPED.findall(f.sentence)[0]}" for f in audit.failing({"truncated_ratio"})
    )
    long = any(row.relative_error < 1e-3 for row in rows if row.world == SEQUENCES)
    for target in dict.fromkeys(row.target for row in rows if row.world != SEQUENCES):
        chosen = [row for row in rows if row.target == target and row.world != SEQUENCES]
        if all(row.relative_error < 1e-3 for row in chosen):
            return (target if long else f"{target} for one token") + capped
    return "none of the table"


def zones(audit: Audit) -> str:
    """Where the gradient is zero; where there is none such, where the value does not change."""
    dead = [row for row in audit.zones if row.of == "gradient"]
    flat = [row for row in audit.zones if row.of == "value"]
    rows = dead or flat
    said = ", ".join(interval(row.low, row.high) for row in rows)
    return f"value: {said}" if rows and not dead else said or "nowhere"


def interval(low: float, high: float) -> str:
    """A range of the log ratio."""
    if low == float("-inf"):
        return f"u < {high:.3g}" if high != float("inf") else "everywhere"
    return f"u > {low:.3g}" if high == float("inf") else f"{low:.3g} to {high:.3g}"


def edges(audit: Audit) -> str:
    """On which extreme inputs something is wrong."""
    wrong: dict[str, list[str]] = {}
    for row in audit.edges:
        if row.problem:
            what = next((word for word in ("NaN", "finite") if f"is {word}" in row.problem), "another value")
            what = "a number" if row.problem == HIDDEN else what
            wrong.setdefault(what, []).append(row.case)
    return "; ".join(f"{what} where {', '.join(cases)}" for what, cases in wrong.items()) or "fine"


def padding(kinds: set[str]) -> str:
    """What comes of garbage behind the mask."""
    said = {
        "padding_in_denominator": "counts in the mean",
        "padding_counts": "counts",
        "nan_from_padding": "NaN and infinity get through",
    }
    return "; ".join(words for kind, words in said.items() if kind in kinds) or "ignored"


def near(audit: Audit) -> str:
    """The relative error in float32 at a KL of 1e-6 nats."""
    rows = [row for row in audit.accuracy if row.dtype == "float32" and 5e-7 < row.kl < 5e-6]
    return f"{rows[0].relative_error:.1g}" if rows else "–"


def in_bfloat16(audit: Audit) -> str:
    """The largest relative error in bfloat16."""
    errors = [row.relative_error for row in audit.accuracy if row.dtype == "bfloat16"]
    if not errors:
        return "–"
    return "NaN" if any(error != error for error in errors) else f"{max(errors):.1g}"


def details(audit: Audit, shared: Sequence[str]) -> list[str]:
    """The verdict on one case, and how it was run."""
    lines = [f"### {audit.target}", "", f"Called as `{audit.summary}` ({audit.convention}), a {audit.place}."]
    if audit.arguments:
        lines[-1] += f" With {', '.join(f'`{key}={value}`' for key, value in audit.arguments.items())}."
    own = [note.rstrip(".") for note in audit.notes if note not in shared]
    lines[-1] += f" How: {'; '.join(own)}." if own else ""
    findings = {finding.sentence: finding for finding in audit.findings}
    return [*lines, "", *(f"- {severe(line, findings)}" for line in audit.verdict), ""]


def severe(line: str, findings: Mapping[str, Finding]) -> str:
    """A sentence of the verdict, with its severity and what to change where it is a fault."""
    finding = findings.get(line)
    if finding is None or finding.severity == "note":
        return line
    mark = "**wrong**" if finding.severity == "wrong" else "*fragile*"
    return f"{mark}: {line} To change: {finding.remedy}."


def says_the_same(old: str, new: str) -> bool:
    """Whether two texts have the same words, and numbers within a factor of two of each other or next to nothing."""
    if NUMBER.split(old) != NUMBER.split(new):
        return False
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    return all(a == b or alike(number(a), number(b)) for a, b in pairs)


def number(text: str) -> float:
    """The number that is written there."""
    return float(text.rstrip("%").replace("−", "-"))


def alike(a: float, b: float) -> bool:
    """Whether one is between half and twice the other, or both are roundings, which every processor has of its own."""
    return max(abs(a), abs(b)) <= ROUNDING or (a * b > 0 and 0.5 <= a / b <= 2)


def sections(text: str) -> dict[str, str]:
    """The parts of a page by their heading; what stands before the first under ""; without when it was made."""
    kept = "\n".join(line for line in text.splitlines() if not line.startswith(MADE))
    parts = re.split(r"^## (\w+)$", kept, flags=re.MULTILINE)
    return {"": parts[0].strip(), **{n: t.strip() for n, t in zip(parts[1::2], parts[2::2], strict=True)}}


def differences(old: str, new: str) -> list[str]:
    """The headings of ``new`` that say something else in ``old``."""
    before = sections(old)
    return [name for name, text in sections(new).items() if not says_the_same(before.get(name, ""), text)]


if __name__ == "__main__":
    chosen = [word for word in sys.argv[1:] if word != "--check"] or list(TARGETS)
    if "--check" in sys.argv[1:]:
        stored = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        changed = differences(stored, page(chosen))
        print(
            "docs/audit.md is out of date: " + ", ".join(changed)
            if changed
            else "docs/audit.md is up to date"
        )
        sys.exit(1 if changed else 0)
    PAGE.write_text(page(chosen), encoding="utf-8")
