"""What an audit found out about somebody's KL: its findings, its numbers and its verdict."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from kleash.records.codec import decode, to_json

AUDIT_SCHEMA = 2
"""Raised when a field of an audit is renamed or means something else; readers take theirs and older."""

Severity = Literal["wrong", "fragile", "note"]

FAULTS: tuple[Severity, ...] = ("wrong", "fragile")
"""The severities that "fault" stands for."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that whoever uses the audited function should know."""

    kind: str
    """A key of ``FINDINGS``: what ``--fail-on`` takes."""
    severity: Severity
    """"wrong": in ordinary use it trains on, or reports, something else than the convention claims. "fragile": it
    does so only at extreme log ratios, in low precision, or with garbage in the padding. "note": worth knowing."""
    sentence: str
    where: str = ""
    """On which pair, how sampled, in which precision."""
    remedy: str = ""
    """What to change, in a line."""


@dataclass(frozen=True, kw_only=True)
class ValueRow:
    """What the value is in expectation on one pair of distributions, by exact enumeration."""

    world: str
    """The pair: "near", "far", "peaked", "flat", "barely overlapping" or "sequences"."""
    sampling: str
    """"on-policy" or "off-policy"."""
    level: str
    """What ``exact`` is: "token" (next-token divergences at the sampled prefixes) or "sequence"."""
    exact: float
    """The divergence that the convention claims, in nats."""
    expected: float
    """The mean of the function's value, its sign turned to +KL; summed over the steps."""
    bias: float
    """expected − exact."""
    standard_deviation: float
    """Of one sampled response's value."""
    lowest: float
    """The smallest value of a single response (of a token, where the world has one step)."""


@dataclass(frozen=True, kw_only=True)
class GradientRow:
    """The expected gradient in the policy's logits, beside that of one divergence."""

    world: str
    sampling: str
    target: str
    """Whose gradient it is compared with: "KL(p || q)", …, "sequence KL(p || q)"."""
    cosine: float
    """Between the two; NaN where either is zero."""
    relative_size: float
    """The length of the function's gradient over that of the target's."""
    relative_error: float
    """The length of their difference over that of the target's."""


@dataclass(frozen=True, kw_only=True)
class ZoneRow:
    """A range of the log ratio, log p − log q, over which something stands still."""

    of: str
    """"value" (it does not change) or "gradient" (it is zero)."""
    low: float
    """Where the range begins, in nats; -Infinity where it goes on beyond what was scanned."""
    high: float
    """Where it ends; Infinity where it goes on beyond what was scanned."""
    value: float
    """The function's value there."""


@dataclass(frozen=True, kw_only=True)
class EdgeRow:
    """One extreme input, in float32 unless the case says otherwise."""

    case: str
    exact: float
    """The claimed divergence there (of whole distributions), or NaN where one sampled token has none."""
    value: float
    gradient: float
    """The largest entry by size; NaN if any is NaN; NaN also where no gradient is asked for."""
    problem: str
    """"", or what is wrong: "value is NaN", "gradient is NaN", "raised …"."""


@dataclass(frozen=True, kw_only=True)
class MaskRow:
    """What happens to the result when what is masked changes."""

    case: str
    """What stood in the padding."""
    value_change: float
    """The largest change of a value that counts; NaN if one became NaN."""
    gradient_change: float
    """The largest change of the gradient, the padding's own included; NaN if it became NaN."""
    problem: str


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """The error against float64 on the same rounded inputs."""

    dtype: str
    """Of the inputs."""
    kl: float
    """KL(p || q) of the pair, in nats."""
    relative_error: float
    """Root mean square of the error over that of the right values."""
    forced: float
    """The same for the formula evaluated with care in float32."""


@dataclass(frozen=True, kw_only=True)
class CallRow:
    """Whether a call depends on, or changes, anything but its arguments."""

    case: str
    """What was done."""
    problem: str
    """"" if the result was that of a pure function; otherwise what happened."""


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """Value and gradient at one log ratio, in float32, beside the right ones."""

    log_ratio: float
    """log p - log q of the sampled token; for whole distributions of two tokens, the difference of their log-odds."""
    value: float
    right_value: float
    gradient: float
    """In the token's log-probability, or in the first token's logit; NaN where no gradient is asked for."""
    right_gradient: float


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What a KL implementation estimates and what it differentiates."""

    schema: int = AUDIT_SCHEMA
    target: str
    """What was audited."""
    convention: str
    """The name of the convention by which it was called."""
    summary: str
    """How it was called, in a line."""
    place: str
    """"loss", "reward" or "metric"."""
    claims: str
    """The divergence it should be: a key of ``DIVERGENCES``."""
    arguments: Mapping[str, str]
    """Keyword arguments bound to it, as Python would print them."""
    value: str
    """What its expected value is, in words: "KL(p || q)", "2 x KL(p || q)", … or "none of the table"."""
    gradient: str
    """What its expected gradient follows on-policy, in the same words, or "zero"; "none" where no gradient
    flows, "" where none is asked for."""
    estimator: str
    """The estimator it computes token by token ("k1", "abs", "k2", "k3"), or ""."""
    verdict: tuple[str, ...]
    """The result in sentences."""
    findings: tuple[Finding, ...]
    values: tuple[ValueRow, ...]
    gradients: tuple[GradientRow, ...]
    zones: tuple[ZoneRow, ...]
    edges: tuple[EdgeRow, ...]
    masks: tuple[MaskRow, ...]
    accuracy: tuple[AccuracyRow, ...]
    value_range: str = ""
    """As long as which log ratios ``value`` holds, in words, where it is clamped beyond; "" where it is not."""
    gradient_range: str = ""
    """The same for ``gradient``."""
    gradient_level: str = ""
    """Over responses of several tokens, whose gradient it is on-policy: "token" (the sum of the next-token
    divergences along sampled prefixes), "sequence" (the divergence between whole responses), "both", "neither";
    "" where that was not asked."""
    calls: tuple[CallRow, ...] = ()
    curve: tuple[CurveRow, ...] = ()
    right_value_is: str = ""
    """What ``right_value`` of the curve is: an estimator, or a divergence."""
    notes: tuple[str, ...] = ()
    """What the reader should know about how the target was run: stubs, adapters."""
    versions: Mapping[str, str]
    """kleash, python, torch and, where it has one, the target's package."""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that contradict what the convention claims: those that are wrong or fragile."""
        return tuple(finding for finding in self.findings if finding.severity in FAULTS)

    @property
    def is_pure(self) -> bool:
        """Whether the result depends on the arguments alone, and changes nothing but itself."""
        return not any(row.problem for row in self.calls)

    def failing(self, kinds: Collection[str]) -> tuple[Finding, ...]:
        """The findings of these kinds, whatever their severity.

        "wrong", "fragile" and "note" stand for all of that severity, "fault" for wrong and fragile.
        """
        chosen = {*kinds, *(FAULTS if "fault" in kinds else ())}
        return tuple(f for f in self.findings if f.kind in chosen or f.severity in chosen)

    def to_json(self) -> str:
        """The audit as JSON text; what is not finite is a string."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Audit":
        """The audit that ``to_json`` made this text of.

        Schema 1 knew one severity above "note", "fault": it is read as "wrong".

        Raises:
            ValueError, TypeError, KeyError: if the text is something else.
        """
        data = json.loads(text)
        for finding in data["findings"]:
            if finding["severity"] == "fault":
                finding["severity"] = "wrong"
        return decode(cls, data)
