"""Case (d): one Gaussian fitted to two modes, in both directions and by every estimator."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from estimator_study.enumeration import (
    CONTROL_VARIATE,
    EXACT,
    EnumeratedPair,
    enumerated_rows,
    estimator_functions,
)
from estimator_study.normals import Split, gauss_legendre, gaussian_pair, log_normal
from estimator_study.results import GaussianFit, StudyCase, TwoModes

MODE_WEIGHTS, MODE_CENTRES, MODE_SCALE = (0.6, 0.4), (-2.0, 2.0), 0.6
ENDS = (-16.0, 16.0)
START = (-0.5, 1.0)
"""Mean and standard deviation of the Gaussian before the fit."""
MAX_STEPS, STEP_SIZE, TOLERANCE = 300, 0.2, 1e-5
MODE_COVERING, MODE_SEEKING = "smallest KL(target ‖ fit)", "smallest KL(fit ‖ target)"


def log_target(x: Tensor) -> Tensor:
    """The log density of the target: two modes, the left one with more mass."""
    centres = torch.tensor(MODE_CENTRES, dtype=torch.float64)
    log_scale = torch.tensor(MODE_SCALE, dtype=torch.float64).log()
    parts = log_normal(x.unsqueeze(-1), centres, log_scale)
    return (parts + torch.tensor(MODE_WEIGHTS, dtype=torch.float64).log()).logsumexp(-1)


def pair_at(mean: float, scale: float, *, split: Split = "estimates") -> EnumeratedPair:
    """The fit against the target."""
    return gaussian_pair(mean, scale, log_target, ENDS, split=split)


def descend_on(name: str) -> GaussianFit:
    """The fit that gradient descent on an estimator reaches, in expectation over the fit's own samples.

    Natural-gradient steps: divided by the Fisher information of the mean and of the log of the scale.
    """
    mean, scale = START
    for _ in range(MAX_STEPS):
        pair = pair_at(mean, scale, split="log ratio" if name == "abs" else "nowhere")
        loss = (
            pair.kl()
            if name == EXACT
            else pair.mean(estimator_functions(pair.control_weight())[name](pair.log_ratio))
        )
        mean_gradient, log_scale_gradient = pair.gradient(loss).tolist()
        step = STEP_SIZE * scale**2 * mean_gradient, STEP_SIZE * log_scale_gradient / 2
        mean, scale = mean - step[0], scale * math.exp(-step[1])
        if math.hypot(*step) < TOLERANCE:
            break
    return fit_at(name, mean, scale)


def projections() -> tuple[GaussianFit, GaussianFit]:
    """The Gaussians that minimise KL(target || fit), and KL(fit || target)."""
    return fit_at(MODE_COVERING, *_minimise(_kl_target_fit)), fit_at(MODE_SEEKING, *_minimise(_kl_fit_target))


def _kl_fit_target(parameters: Tensor) -> Tensor:
    x, weights = gauss_legendre(ENDS)
    logp = log_normal(x, parameters[0], parameters[1])
    return weights @ (logp.exp() * (logp - log_target(x)))


def _kl_target_fit(parameters: Tensor) -> Tensor:
    x, weights = gauss_legendre(ENDS)
    logp = log_target(x)
    return weights @ (logp.exp() * (logp - log_normal(x, parameters[0], parameters[1])))


def _minimise(distance: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Mean and scale of the Gaussian that minimises ``distance``: the best of three starts."""
    minima = [_lbfgs(distance, mean) for mean in (*MODE_CENTRES, 0.0)]
    best = min(minima, key=lambda parameters: distance(parameters).item())
    return best[0].item(), best[1].exp().item()


def _lbfgs(distance: Callable[[Tensor], Tensor], mean: float) -> Tensor:
    parameters = torch.tensor([mean, 0.0], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [parameters],
        max_iter=100,
        tolerance_grad=1e-12,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimiser.zero_grad()
        loss = distance(parameters)
        loss.backward()
        return loss.item()

    optimiser.step(closure)
    return parameters.detach()


def fit_at(name: str, mean: float, scale: float) -> GaussianFit:
    """A Gaussian with both KLs to the target."""
    parameters = torch.tensor([mean, math.log(scale)], dtype=torch.float64)
    return GaussianFit(
        name=name,
        mean=mean,
        standard_deviation=scale,
        kl_fit_target=_kl_fit_target(parameters).item(),
        kl_target_fit=_kl_target_fit(parameters).item(),
    )


def two_modes() -> TwoModes:
    """Both projections, and the fit that each estimator reaches."""
    names = [name for name in estimator_functions(0.0) if name != CONTROL_VARIATE]
    return TwoModes(
        start=fit_at("start", *START),
        projections=projections(),
        descents=tuple(descend_on(name) for name in (*names, EXACT)),
    )


def two_mode_cases(fits: TwoModes) -> tuple[StudyCase, ...]:
    """Every estimator on one sample from the fit: at the start, and at both projections."""
    covering, seeking = fits.projections
    cases = (
        ("two-modes-start", "Two modes, before the fit", fits.start),
        ("two-modes-covering", f"Two modes, {covering.name}", covering),
        ("two-modes-seeking", f"Two modes, {seeking.name}", seeking),
    )
    return tuple(_case(name, title, fit) for name, title, fit in cases)


def _case(name: str, title: str, fit: GaussianFit) -> StudyCase:
    pair = pair_at(fit.mean, fit.standard_deviation)
    return StudyCase(
        name=name,
        title=title,
        kl=pair.kl().item(),
        rows=enumerated_rows(pair),
        notes=(f"the control variate has a = {pair.control_weight():.3f}",),
    )
