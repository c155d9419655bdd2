"""The estimators of KL(p || q) on one sample, by quadrature: bias, noise, negative values and gradient.

The pairs are N(0, 1) against shifted normals, and a Gaussian against a target with two modes, to which every estimator
is made to fit it. README.md has the tables.
"""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize, root_scalar
from torch import Tensor

from kleash.estimators import ESTIMATORS, k1, k3
from kleash.losses import kl_loss
from kleash.reports.formatting import UNKNOWN, format_value

SHIFTS = (0.1, 1.0, 3.0)
REACH = 16.0
"""How far the integrals go beyond the means: there the density is below 1e-55."""
PANELS, NODES = 32, 24
MODE_WEIGHTS, MODE_CENTRES, MODE_SCALE = (0.6, 0.4), (-2.0, 2.0), 0.6
START = (-0.5, 1.0)
"""Mean and standard deviation of the Gaussian before the fit."""
MAX_STEPS, STEP_SIZE, TOLERANCE = 300, 0.2, 1e-5
ROUNDING = 1e-9
"""Relative to the KL: a smaller bias is rounding."""
CONTROLLED, EXACT = "k1 + a(w − 1)", "exact"


class Row(NamedTuple):
    """One estimator on one pair."""

    name: str
    value: float
    """Its mean."""
    bias: float
    """Its mean minus the KL."""
    standard_deviation: float
    negative_share: float
    """Share of single estimates below 0."""
    gradient_error: float | None
    """Size of (expected backpropagated gradient - gradient of KL(p || q)) over that of the latter; None if it is 0."""


class Case(NamedTuple):
    """Every estimator on one pair."""

    title: str
    kl: float
    weight: float
    """The a of the control variate."""
    rows: list[Row]

    def row(self, name: str) -> Row:
        """The row of an estimator."""
        return next(row for row in self.rows if row.name == name)


class Fit(NamedTuple):
    """A Gaussian, and its KLs to and from the target with two modes."""

    name: str
    mean: float
    standard_deviation: float
    kl_fit_target: float
    kl_target_fit: float


class Pair(NamedTuple):
    """p and q at the points of a quadrature."""

    logp: Tensor
    logq: Tensor
    measure: Tensor
    """The weight of each point."""
    parameters: Tensor
    """Mean and log standard deviation of p, which a trainer would update."""

    def mean(self, values: Tensor) -> Tensor:
        """The expectation of values under p, whose sampling has no gradient."""
        return (self.measure * self.logp.detach().exp()) @ values

    def kl(self) -> Tensor:
        """KL(p || q), with its gradient."""
        return (self.measure * self.logp.exp()) @ (self.logp - self.logq)

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of a loss in the parameters."""
        (gradient,) = torch.autograd.grad(loss, self.parameters, allow_unused=True, retain_graph=True)
        return torch.zeros_like(self.parameters) if gradient is None else gradient

    def control_weight(self) -> float:
        """The a that minimises the variance of ``u + a (w - 1)``."""
        u = (self.logp - self.logq).detach()
        change = torch.expm1(-u)
        centred = change - self.mean(change)
        return -(self.mean(u * centred) / self.mean(centred.square())).item()


def estimators(weight: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """The estimators by name, functions of log ratios; ``weight`` is the a of the control variate."""
    return {
        **{name: estimator.of for name, estimator in ESTIMATORS.items()},
        "kl_loss": lambda u: kl_loss(u, torch.zeros_like(u), torch.ones_like(u, dtype=torch.bool)),
        CONTROLLED: lambda u: k1(u) + weight * (k3(u) - k1(u)),
    }


# --- pairs ---


def log_normal(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """The log density of a normal distribution."""
    return -((x - mean) / log_scale.exp()).square() / 2 - log_scale - math.log(2 * math.pi) / 2


def log_target(x: Tensor) -> Tensor:
    """The log density of the target with two modes, of which the left one has more mass."""
    centres, weights = torch.tensor([MODE_CENTRES, MODE_WEIGHTS], dtype=torch.float64)
    log_scale = torch.tensor(MODE_SCALE, dtype=torch.float64).log()
    return (log_normal(x.unsqueeze(-1), centres, log_scale) + weights.log()).logsumexp(-1)


def quadrature(ends: Iterable[float]) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre points and weights: on each interval between ``ends`` 32 panels of 24 points."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    edges = np.concatenate([np.linspace(low, high, PANELS + 1)[:-1] for low, high in pairwise(ends)])
    half = np.diff([*edges, max(ends)])[:, None] / 2
    x = (edges[:, None] + half + half * nodes).ravel()
    return torch.from_numpy(x), torch.from_numpy((half * weights).ravel())


def sign_changes(function: Callable[[Tensor], Tensor], low: float, high: float) -> list[float]:
    """Where the sign of a function changes, looked for on a grid of 1000 intervals."""
    x = torch.linspace(low, high, 1001, dtype=torch.float64)
    changes = torch.signbit(function(x)).diff().nonzero().flatten().tolist()

    def at(x: float) -> float:
        return function(torch.tensor([x], dtype=torch.float64)).item()

    return [root_scalar(at, bracket=x[place : place + 2].tolist(), xtol=1e-13).root for place in changes]


def pair_of(
    mean: float, scale: float, log_q: Callable[[Tensor], Tensor], reach: float, *, of_estimates: bool = True
) -> Pair:
    """p = N(mean, scale^2) against a density q, with integrals from ``-REACH`` to ``reach``.

    They are split where |u| has a kink, and with ``of_estimates`` also where the controlled estimate changes its sign.
    """
    parameters = torch.tensor([mean, math.log(scale)], dtype=torch.float64, requires_grad=True)

    def log_ratio(x: Tensor) -> Tensor:
        return log_normal(x, *parameters).detach() - log_q(x)

    def split_at(splits: Iterable[float]) -> Pair:
        x, measure = quadrature([-REACH, *sorted(splits), reach])
        return Pair(log_normal(x, *parameters), log_q(x), measure, parameters)

    splits = sign_changes(log_ratio, -REACH, reach)
    pair = split_at(splits)
    if not of_estimates:
        return pair
    controlled = estimators(pair.control_weight())[CONTROLLED]
    return split_at({*splits, *sign_changes(lambda x: controlled(log_ratio(x)), -REACH, reach)})


# --- cases ---


def case_of(title: str, pair: Pair) -> Case:
    """Moments and gradient of every estimator; the exact KL comes last."""
    kl, weight = pair.kl(), pair.control_weight()
    kl_gradient, rows = pair.gradient(kl), []
    size = kl_gradient.norm().item()
    for name, function in estimators(weight).items():
        values = function(pair.logp - pair.logq)
        error = (pair.gradient(pair.mean(values)) - kl_gradient).norm().item()
        values = values.detach()
        mean = pair.mean(values).item()
        spread = pair.mean((values - mean).square()).sqrt().item()
        below = pair.mean((values < 0).double()).item()
        rows.append(Row(name, mean, mean - kl.item(), spread, below, error / size if size > 1e-7 else None))
    rows.append(Row(EXACT, kl.item(), 0.0, 0.0, 0.0, 0.0 if size > 1e-7 else None))
    return Case(title, kl.item(), weight, rows)


def normal_case(shift: float) -> Case:
    """Every estimator on one sample from N(0, 1) against N(shift, 1)."""
    q = torch.tensor([shift, 0.0], dtype=torch.float64)
    pair = pair_of(0.0, 1.0, lambda x: log_normal(x, *q), REACH + shift)
    return case_of(f"N(0, 1) against N({shift:g}, 1)", pair)


def noise_crossing() -> float:
    """The KL in nats at which k1 becomes less noisy than k3 for N(0, 1) against N(m, 1)."""
    return root_scalar(lambda x: math.expm1(x) - 2 * x, bracket=(0.1, 10.0), xtol=1e-14).root / 2


def fit_at(name: str, mean: float, scale: float) -> Fit:
    """A Gaussian with both KLs to the target."""
    pair = pair_of(mean, scale, log_target, REACH, of_estimates=False)
    back = (pair.measure * pair.logq.exp()) @ (pair.logq - pair.logp)
    return Fit(name, mean, scale, pair.kl().item(), back.item())


def projections() -> tuple[Fit, Fit]:
    """The Gaussians that minimise KL(target || fit), which has the target's moments, and KL(fit || target)."""
    centres, weights = np.array(MODE_CENTRES), np.array(MODE_WEIGHTS)
    mean = weights @ centres
    scale = math.sqrt(MODE_SCALE**2 + weights @ (centres - mean) ** 2)

    def value_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        pair = pair_of(x[0], math.exp(x[1]), log_target, REACH, of_estimates=False)
        return pair.kl().item(), pair.gradient(pair.kl()).numpy()

    optimum = minimize(value_and_gradient, [MODE_CENTRES[0], 0.0], jac=True, options={"gtol": 1e-10}).x
    return (
        fit_at("smallest KL(target ‖ fit)", float(mean), scale),
        fit_at("smallest KL(fit ‖ target)", float(optimum[0]), math.exp(optimum[1])),
    )


def descend_on(name: str) -> Fit:
    """The fit that gradient descent on an estimator reaches, in expectation over the fit's own samples.

    Natural-gradient steps: divided by the Fisher information of the mean and of the log of the scale.
    """
    mean, scale = START
    for _ in range(MAX_STEPS):
        pair = pair_of(mean, scale, log_target, REACH, of_estimates=False)
        loss = pair.kl() if name == EXACT else pair.mean(estimators(0.0)[name](pair.logp - pair.logq))
        of_mean, of_log_scale = pair.gradient(loss).tolist()
        step = STEP_SIZE * scale**2 * of_mean, STEP_SIZE * of_log_scale / 2
        mean, scale = mean - step[0], scale * math.exp(-step[1])
        if math.hypot(*step) < TOLERANCE:
            break
    return fit_at(name, mean, scale)


def two_mode_fits() -> list[Fit]:
    """The start, both projections, and where descent on each estimator ends."""
    names = [name for name in (*estimators(0.0), EXACT) if name != CONTROLLED]
    return [fit_at("start", *START), *projections(), *map(descend_on, names)]


def two_mode_cases(fits: list[Fit]) -> list[Case]:
    """Every estimator on one sample from the fit: at the start, and at both projections."""
    titles = ("before the fit", *(fit.name for fit in fits[1:3]))
    pairs = [pair_of(fit.mean, fit.standard_deviation, log_target, REACH) for fit in fits[:3]]
    return [case_of(f"Two modes, {title}", pair) for title, pair in zip(titles, pairs, strict=True)]


# --- tables ---


def tables(fits: list[Fit]) -> str:
    """Every table of README.md, with ``two_mode_fits()``."""
    parts = []
    for case in (*map(normal_case, SHIFTS), *two_mode_cases(fits)):
        heads = ("Estimator", "Mean, nats", "Bias / KL", "SD / KL", "Below 0", "Gradient error")
        table = markdown(heads, [cells(case, row) for row in case.rows])
        parts.append(
            f"### {case.title}: KL {case.kl:.4g} nats\n\n{table}\n\nThe control variate has a = {case.weight:.3f}."
        )
    heads = ("Gaussian", "Mean", "SD", "KL(fit ‖ target)", "KL(target ‖ fit)")
    table = markdown(heads, [(fit.name, *map(format_value, fit[1:])) for fit in fits])
    return "\n\n".join([*parts, f"### One Gaussian for two modes: where each estimator leads\n\n{table}"])


def markdown(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table whose first column has words and the others numbers."""
    lines = [heads, ("---", *["---:"] * (len(heads) - 1)), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cells(case: Case, row: Row) -> tuple[str, ...]:
    """A row of a case's table."""
    bias, error = row.bias / case.kl, row.gradient_error
    return (
        row.name,
        format_value(round(row.value, 9), 4),  # else the quadrature's rounding decides a tie
        "0" if abs(bias) <= ROUNDING else f"{format_value(100 * bias, 4)} %",
        format_value(row.standard_deviation / case.kl, 4) if row.standard_deviation else "0",
        f"{100 * row.negative_share:.2f} %" if row.negative_share else "0",
        UNKNOWN if error is None else "0" if error < ROUNDING else f"{format_value(100 * error, 3)} %",
    )
