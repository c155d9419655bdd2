"""The record of an audit: findings, numbers and verdict."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isinf
from pathlib import Path
from typing import Literal

from kleash.errors import RunFolderError
from kleash.store.codec import decode, parse_json
from kleash.store.summary import Result

AUDIT_SCHEMA = 4
"""Raised when a field of an audit is renamed or its meaning changes."""

Severity = Literal["wrong", "fragile", "note"]

FAULTS: tuple[Severity, ...] = ("wrong", "fragile")
"""The severities of a fault."""

IMPURITIES = ("stateful", "random", "changes_inputs", "changes_settings")
"""The kinds of findings about the call itself."""

ZoneKind = Literal[
    "value",
    "gradient",
    "gradient is NaN",
    "value along the importance ratio",
    "gradient along the importance ratio",
]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a user of the audited function should know."""

    kind: str
    """A key of ``FINDINGS``: what ``--fail-on`` takes."""
    severity: Severity
    """"wrong": in ordinary use it trains on, or reports, another quantity than the convention claims. "fragile": only
    at extreme log ratios, in low precision, or with unusual numbers in the padding. "note": no fault."""
    sentence: str
    where: str = ""
    """The pair, the sampling or the precision that shows it."""
    remedy: str = ""
    """What to change, in one line."""

    def __str__(self) -> str:
        """Kind, sentence and where it shows, in a line."""
        return f"{self.kind}: {self.sentence}{f' ({self.where})' if self.where else ''}"


@dataclass(frozen=True, kw_only=True)
class ValueRow:
    """The expected value on one pair of distributions, by exact enumeration."""

    pair: str
    """The toy distributions: "near", "far", "peaked", "flat", "barely overlapping" or "sequences"."""
    sampling: str
    """"on-policy" or "off-policy"."""
    level: str
    """The level of ``exact``: "token" (the sum of next-token divergences along sampled prefixes) or "sequence"."""
    exact: float
    """The divergence that the convention claims, in nats."""
    expected: float
    """The mean of the function's value, with the sign of +KL, summed over the steps."""
    bias: float
    """expected − exact."""
    standard_deviation: float
    """Of the value of one sampled response."""
    lowest: float
    """The smallest value of a single response."""


@dataclass(frozen=True, kw_only=True)
class GradientRow:
    """The expected gradient in the policy's logits, compared with that of one divergence."""

    pair: str
    sampling: str
    target: str
    """The divergence whose gradient it is compared with: "KL(p || q)", …, "sequence KL(p || q)"."""
    cosine: float
    """Between the two gradients; NaN where either is zero."""
    relative_size: float
    """The norm of the function's gradient over that of the target's."""
    relative_error: float
    """The norm of their difference over that of the target's."""


@dataclass(frozen=True, kw_only=True)
class ZoneRow:
    """A range of the log ratio, log p − log q, in which value or gradient does not follow it."""

    kind: ZoneKind
    """"value" (it is constant), "gradient" (it is zero), or another condition."""
    low: float
    """The lower end in nats; -Infinity if the range extends beyond the scan."""
    high: float
    """The upper end in nats; Infinity if the range extends beyond the scan."""
    value: float
    """The function's value in the range."""

    @property
    def span(self) -> str:
        """The range in words: "below -2.61", "above 11", "between 21 and 87"."""
        if isinf(self.high):
            return "any number" if isinf(self.low) else f"above {self.low:.3g}"
        return f"below {self.high:.3g}" if isinf(self.low) else f"between {self.low:.3g} and {self.high:.3g}"


@dataclass(frozen=True, kw_only=True)
class EdgeRow:
    """Value and gradient on one extreme input, in float32 unless the case says otherwise."""

    case: str
    exact: float
    """The claimed divergence, or NaN where a single sampled token does not determine it."""
    value: float
    gradient: float
    """The entry with the largest absolute value; NaN if any is NaN, or if there is no gradient."""
    problem: str
    """What is wrong, in words: "value is NaN", "gradient is NaN", the message of an error; "" if nothing is."""


@dataclass(frozen=True, kw_only=True)
class MaskRow:
    """The effect of the numbers at masked positions."""

    case: str
    """The numbers in the padding."""
    value_change: float
    """The largest change of an unmasked value; NaN if one became NaN."""
    gradient_change: float
    """The largest change of the gradient, the padding's own included; NaN if it became NaN."""
    problem: str
    """What is wrong, in words; "" if nothing is."""


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """The error against float64 on the same rounded inputs, for one pair."""

    dtype: str
    """Of the inputs."""
    kl: float
    """KL(p || q) of the pair, in nats."""
    relative_error: float
    """Root mean square of the error over that of the right values."""
    unavoidable_error: float
    """``relative_error`` of an accurate formula evaluated in float32."""


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """Value and gradient at one log ratio in float32, and the right ones."""

    log_ratio: float
    """log p - log q of the sampled token; for whole distributions of two tokens, the difference of their log-odds."""
    value: float
    right_value: float
    gradient: float
    """In the token's log-probability, or in the first token's logit; NaN if there is none."""
    right_gradient: float


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Audit(Result):
    """What a KL implementation estimates and what it differentiates.

    >>> kleash.audit(kleash.sampled_kl, "metric").value
    'KL(p ‖ q)'
    """

    schema: int = AUDIT_SCHEMA
    target: str
    """The name of the audited function."""
    convention: str
    """The name of the convention."""
    summary: str
    """How it was called, in one line."""
    place: str
    """"loss", "reward" or "metric"."""
    claims: str
    """The divergence that it should compute: a key of ``DIVERGENCES``."""
    arguments: Mapping[str, str]
    """Keyword arguments bound to it, as their ``repr``."""
    versions: Mapping[str, str]
    """Of kleash, python, torch and the target's package."""
    verdict: tuple[str, ...]
    """The result in sentences."""
    findings: tuple[Finding, ...]
    value: str = ""
    """The quantity that its expected value is: "KL(p ‖ q)", "2 x KL(p ‖ q)", … or "none of the table"."""
    gradient: str = ""
    """The quantity whose gradient its expected gradient is on-policy, or "zero"; "none" if it is detached, "" for a
    metric."""
    estimator: str = ""
    """The estimator that it computes for one sampled token ("k1", "abs", "k2", "k3"), or ""."""
    value_range: str = ""
    """The log ratios for which ``value`` is true, if it is clamped beyond; "" otherwise."""
    gradient_range: str = ""
    """The log ratios for which ``gradient`` is true, if it is clamped beyond; "" otherwise."""
    value_level: str = ""
    """Over responses of several tokens, the level at which the on-policy value is the quantity ``value``: "token" (the
    sum of that of each next token along sampled prefixes), "sequence" (that of the distributions over whole responses),
    "both" or "neither"; "" if it is not determined."""
    gradient_level: str = ""
    """The level of the on-policy gradient and ``gradient``."""
    estimator_level: str = ""
    """The level of ``estimator``: "token" if it is the sum over the tokens, "sequence" if it is that of the summed log
    ratio of a response, "both" for k1."""
    values: tuple[ValueRow, ...] = ()
    gradients: tuple[GradientRow, ...] = ()
    zones: tuple[ZoneRow, ...] = ()
    edges: tuple[EdgeRow, ...] = ()
    masks: tuple[MaskRow, ...] = ()
    accuracy: tuple[AccuracyRow, ...] = ()
    curve: tuple[CurveRow, ...] = ()
    right_value_is: str = ""
    """The estimator or the divergence that ``right_value`` of the curve is."""
    notes: tuple[str, ...] = ()
    """How the target was run: stand-ins, adapters."""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are wrong or fragile."""
        return tuple(finding for finding in self.findings if finding.severity in FAULTS)

    @property
    def is_pure(self) -> bool:
        """Whether the result depends on the arguments alone, and the call changes nothing else."""
        return not self.failing(IMPURITIES)

    def failing(self, kinds: Collection[str]) -> tuple[Finding, ...]:
        """The findings of these kinds, whatever their severity.

        "wrong", "fragile" and "note" mean all findings of that severity, "fault" means wrong and fragile.
        """
        names = {*kinds, *(FAULTS if "fault" in kinds else ())}
        return tuple(f for f in self.findings if f.kind in names or f.severity in names)


def read_audits(path: Path) -> tuple[Audit, ...]:
    """The audits in a file that ``kleash audit --json`` or ``Audit.to_json`` made.

    Raises:
        RunFolderError: if it cannot be read, holds something else, or is of another schema.
    """
    try:
        data = parse_json(path.read_bytes())
        return tuple(decode(Audit, record) for record in data.get("audits", [data]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunFolderError(
            f"{path} cannot be read as audits of kleash audit --json; give the folder of any other result ({error})"
        ) from error
