"""Case (d): one Gaussian fitted to two modes, in both directions and by every estimator."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kleash.auditing.study.candidates import CONTROLLED, EXACT, candidates
from kleash.auditing.study.normals import Cut, gaussian_world, log_normal
from kleash.auditing.study.quadrature import points_between
from kleash.auditing.study.worlds import World, known, rows_of
from kleash.records.study import Fit, StudyCase, TwoModes

WEIGHTS, CENTRES, SCALE = (0.6, 0.4), (-2.0, 2.0), 0.6
ENDS = (-16.0, 16.0)
START = (-0.5, 1.0)
"""Mean and standard deviation before anything is fitted."""
STEPS, STEP, ARRIVED = 300, 0.2, 1e-5
DRAWN = tuple(-6 + 12 * at / 240 for at in range(241))
"""Where densities are drawn."""
COVERING, SEEKING = "smallest KL(target ‖ fit)", "smallest KL(fit ‖ target)"


def log_target(x: Tensor) -> Tensor:
    """The log density of the target: two modes, the left one with more in it."""
    centres = torch.tensor(CENTRES, dtype=torch.float64)
    log_scale = torch.tensor(SCALE, dtype=torch.float64).log()
    parts = log_normal(x.unsqueeze(-1), centres, log_scale)
    return (parts + torch.tensor(WEIGHTS, dtype=torch.float64).log()).logsumexp(-1)


def world_at(mean: float, scale: float, *, cut: Cut = "estimates") -> World:
    """One draw from the fit, against the target."""
    return gaussian_world(mean, scale, log_target, ENDS, cut=cut)


def followed(name: str) -> Fit:
    """Where descending on an estimator ends, in expectation over the fit's own samples at each step.

    Steps of natural gradient: divided by the Fisher information of the mean and of the log of the scale.
    """
    mean, scale = START
    for _ in range(STEPS):
        world = world_at(mean, scale, cut="log ratio" if name == "abs" else "nowhere")
        loss = (
            world.exact()
            if name == EXACT
            else world.mean(candidates(world.control_weight())[name](world.log_ratio))
        )
        for_mean, for_log_scale = world.gradient(loss).tolist()
        step = STEP * scale**2 * for_mean, STEP * for_log_scale / 2
        mean, scale = mean - step[0], scale * math.exp(-step[1])
        if math.hypot(*step) < ARRIVED:
            break
    return fit_at(name, mean, scale)


def projections() -> tuple[Fit, Fit]:
    """Where KL(target || fit) is smallest, and where KL(fit || target) is."""
    return fit_at(COVERING, *_smallest(_from_target)), fit_at(SEEKING, *_smallest(_from_fit))


def _from_fit(parameters: Tensor) -> Tensor:
    x, width = points_between(ENDS)
    logp = log_normal(x, parameters[0], parameters[1])
    return width @ (logp.exp() * (logp - log_target(x)))


def _from_target(parameters: Tensor) -> Tensor:
    x, width = points_between(ENDS)
    logp = log_target(x)
    return width @ (logp.exp() * (logp - log_normal(x, parameters[0], parameters[1])))


def _smallest(distance: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Mean and scale of the Gaussian at which ``distance`` is smallest: the best of three searches."""
    found = [_search(distance, mean) for mean in (*CENTRES, 0.0)]
    best = min(found, key=lambda parameters: distance(parameters).item())
    return best[0].item(), best[1].exp().item()


def _search(distance: Callable[[Tensor], Tensor], mean: float) -> Tensor:
    parameters = torch.tensor([mean, 0.0], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [parameters],
        max_iter=100,
        tolerance_grad=1e-12,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        search.zero_grad()
        loss = distance(parameters)
        loss.backward()
        return loss.item()

    search.step(closure)
    return parameters.detach()


def fit_at(name: str, mean: float, scale: float) -> Fit:
    """The Gaussian with its distances from the target, and its density where densities are drawn."""
    parameters = torch.tensor([mean, math.log(scale)], dtype=torch.float64)
    density = log_normal(torch.tensor(DRAWN, dtype=torch.float64), parameters[0], parameters[1]).exp()
    return Fit(
        name=name,
        mean=mean,
        standard_deviation=scale,
        kl_fit_target=_from_fit(parameters).item(),
        kl_target_fit=_from_target(parameters).item(),
        density=tuple(density.tolist()),
    )


def two_modes() -> TwoModes:
    """Both projections, and where each estimator leads."""
    names = [name for name in candidates(0.0) if name != CONTROLLED]
    return TwoModes(
        x=DRAWN,
        target=tuple(log_target(torch.tensor(DRAWN, dtype=torch.float64)).exp().tolist()),
        start=fit_at("start", *START),
        projections=projections(),
        followed=tuple(followed(name) for name in (*names, EXACT)),
    )


def two_mode_cases(found: TwoModes) -> tuple[StudyCase, ...]:
    """Every estimator on one draw from the fit: at the start, and at both projections."""
    covering, seeking = found.projections
    places = (
        ("two-modes-start", "Two modes, before the fit", found.start),
        ("two-modes-covering", f"Two modes, {covering.name}", covering),
        ("two-modes-seeking", f"Two modes, {seeking.name}", seeking),
    )
    return tuple(_case(name, title, fit) for name, title, fit in places)


def _case(name: str, title: str, fit: Fit) -> StudyCase:
    world = world_at(fit.mean, fit.standard_deviation)
    return StudyCase(
        name=name,
        title=title,
        drawn=f"one draw from p, a Gaussian with mean {fit.mean:.3g} and standard deviation "
        f"{fit.standard_deviation:.3g}, with q the target; the gradient is in p's mean and in the log of its scale",
        kl=known(world.exact().item()),
        rows=rows_of(world),
        notes=(f"the controlled estimate has a = {world.control_weight():.3f}",),
    )
