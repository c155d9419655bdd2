"""What the study of estimators found: plain numbers, exact where their error is 0."""

from collections.abc import Mapping
from dataclasses import dataclass

from kleash.records.codec import to_json
from kleash.records.number import Number


@dataclass(frozen=True, kw_only=True)
class EstimatorRow:
    """One estimator of KL(p || q) in one case."""

    name: str
    value: Number
    """Its mean."""
    bias: Number
    """Its mean minus the KL."""
    spread: Number
    """Standard deviation of a single estimate around its mean."""
    negative: Number
    """Share of single estimates below 0."""
    gradient_error: float | None
    """Size of (expected backpropagated gradient - gradient of KL(p || q)), relative to the latter; 1 is what
    no gradient at all gives. None where it is not known, or where the KL has no gradient."""


@dataclass(frozen=True, kw_only=True)
class StudyCase:
    """Every estimator on one pair of distributions."""

    name: str
    """A short name, for anchors and for programs."""
    title: str
    drawn: str
    """In words: what a single estimate is made from."""
    kl: Number
    """KL(p || q) in nats."""
    rows: tuple[EstimatorRow, ...]
    notes: tuple[str, ...] = ()
    """What else was found, in sentences."""

    def row(self, name: str) -> EstimatorRow:
        """The row of the estimator called ``name``; KeyError if there is none."""
        found = {row.name: row for row in self.rows}
        return found[name]


@dataclass(frozen=True, kw_only=True)
class SpreadCurves:
    """How noisy each estimator is for N(0, 1) against N(shift, 1), as the KL between them grows."""

    kl: tuple[float, ...]
    spread: Mapping[str, tuple[float, ...]]
    """Name to standard deviation over the KL, at each ``kl``."""
    crossing: float
    """The KL in nats at which k1 becomes less noisy than k3."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A Gaussian that was to imitate a target with two modes."""

    name: str
    """What was minimised or followed."""
    mean: float
    standard_deviation: float
    kl_fit_target: float
    """KL(fit || target) in nats."""
    kl_target_fit: float
    """KL(target || fit) in nats."""
    density: tuple[float, ...]
    """At each ``x`` of the ``TwoModes`` it belongs to."""


@dataclass(frozen=True, kw_only=True)
class TwoModes:
    """One Gaussian fitted to two modes."""

    x: tuple[float, ...]
    target: tuple[float, ...]
    """Density of the target at each ``x``."""
    start: Fit
    projections: tuple[Fit, ...]
    """Where each direction of the KL is smallest."""
    followed: tuple[Fit, ...]
    """Where descending on each estimator ends, from ``start``, in expectation over the fit's own samples."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Bias, noise, negative values and gradient of every estimator, case by case."""

    kleash: str
    """Version that computed it."""
    cases: tuple[StudyCase, ...]
    normals: SpreadCurves
    two_modes: TwoModes

    def case(self, name: str) -> StudyCase:
        """The case called ``name``; KeyError if there is none."""
        found = {case.name: case for case in self.cases}
        return found[name]

    def to_json(self) -> str:
        """The study as JSON text."""
        return to_json(self)
