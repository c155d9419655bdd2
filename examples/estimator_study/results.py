"""The results of the study as plain records."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EstimatorRow:
    """One estimator of KL(p || q) in one case."""

    name: str
    value: float
    """Its mean."""
    bias: float
    """Its mean minus the KL."""
    standard_deviation: float
    """Of a single estimate around its mean."""
    negative_share: float
    """Share of single estimates below 0."""
    gradient_error: float | None
    """Norm of (expected backpropagated gradient - gradient of KL(p || q)), relative to the norm of the latter; 1 for
    a gradient of zero. None where it is unknown, or where the KL has no gradient."""


@dataclass(frozen=True, kw_only=True)
class StudyCase:
    """Every estimator on one pair of distributions."""

    name: str
    title: str
    kl: float
    """KL(p || q) in nats."""
    rows: tuple[EstimatorRow, ...]
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> EstimatorRow:
        """The row of the estimator called ``name``; KeyError if there is none."""
        return {row.name: row for row in self.rows}[name]


@dataclass(frozen=True, kw_only=True)
class GaussianFit:
    """A Gaussian fitted to a target with two modes."""

    name: str
    """What was minimised."""
    mean: float
    standard_deviation: float
    kl_fit_target: float
    """KL(fit || target) in nats."""
    kl_target_fit: float
    """KL(target || fit) in nats."""


@dataclass(frozen=True, kw_only=True)
class TwoModes:
    """One Gaussian fitted to a target with two modes."""

    start: GaussianFit
    projections: tuple[GaussianFit, ...]
    """The minima of KL(target || fit) and of KL(fit || target)."""
    descents: tuple[GaussianFit, ...]
    """Where gradient descent on each estimator ends, from ``start``, in expectation over the fit's own samples."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Bias, noise, negative values and gradient of every estimator, case by case."""

    cases: tuple[StudyCase, ...]
    noise_crossing: float
    """The KL in nats between two normals of one variance at which k1 becomes less noisy than k3."""
    two_modes: TwoModes

    def case(self, name: str) -> StudyCase:
        """The case called ``name``; KeyError if there is none."""
        return {case.name: case for case in self.cases}[name]
