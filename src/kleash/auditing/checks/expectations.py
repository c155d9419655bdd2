"""Expected values and gradients of the audited function: finite sums over every response."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from jaxtyping import Float64
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.quantities import (
    LABELS,
    QuantityMatch,
    ValueOrGradient,
    candidates,
    cosine_similarities,
    exact,
    match_quantity,
)
from kleash.auditing.toy_distributions import (
    AuditInputs,
    Sampling,
    ToyDistributions,
)
from kleash.divergences import DIVERGENCES
from kleash.store.audit import GradientRow, ValueRow


@dataclass(frozen=True, kw_only=True, eq=False)
class Expectation:
    """The expected value and gradient of a function on one set of toy distributions."""

    toy: ToyDistributions
    sampling: Sampling
    totals: Float64[Tensor, " sequences"]
    """The value of each response, summed over its steps."""
    position_means: Float64[Tensor, " parts"]
    """The expected value of each token of a response, or of the whole response if the function gives only that."""
    gradient: Float64[Tensor, "prefixes vocab"] | None
    """The gradient that training follows, in expectation; None if none is needed, or none flows."""
    mean_error: float = 0.0
    """The standard error of ``mean``, for a random function."""
    gradient_error: float = 0.0
    """The standard error of ``gradient``, as a norm."""

    @cached_property
    def mean(self) -> float:
        """The expected value of a response."""
        return (self.toy.probabilities(self.sampling) * self.totals).sum().item()

    @cached_property
    def standard_deviation(self) -> float:
        """The standard deviation of the value of one sampled response."""
        squares = (self.totals - self.mean).square()
        return (self.toy.probabilities(self.sampling) * squares).sum().sqrt().item()

    def measured(self, of: ValueOrGradient) -> tuple[Tensor | None, float]:
        """The expected value or gradient, and its standard error as a norm."""
        if of == "gradient":
            return self.gradient, self.gradient_error
        return torch.tensor(self.mean, dtype=torch.float64), self.mean_error


GROUPS = 12
"""Repetitions of the expectation of a random function, from which standard errors are estimated."""


def expectation(audited: AuditedFunction, toy: ToyDistributions, sampling: Sampling) -> Expectation:
    """The expected value, and the expected gradient of training with the function as its loss or reward.

    A loss is differentiated as it is; the sampling probabilities are not. A reward is detached, and the score of
    each token is multiplied by the sum of the rewards from that token on. A random function is evaluated GROUPS
    times; the two errors are standard errors over these.
    """
    logits = toy.logits_p.clone().requires_grad_()
    inputs = toy.inputs(logits, sampling)
    groups = [
        _expectation_of_one_pass(audited, toy, sampling, logits, inputs)
        for _ in range(1 if audited.repeats == 1 else GROUPS)
    ]
    if audited.repeats == 1:
        return groups[0]
    means = torch.tensor([group.mean for group in groups], dtype=torch.float64)
    flowing = [group.gradient for group in groups if group.gradient is not None]
    gradients = torch.stack(flowing) if flowing else None
    return replace(
        groups[0],
        totals=torch.stack([group.totals for group in groups]).mean(0),
        position_means=torch.stack([group.position_means for group in groups]).mean(0),
        gradient=None if gradients is None else gradients.mean(0),
        mean_error=(means.std() / GROUPS**0.5).item(),
        gradient_error=0.0 if gradients is None else (gradients.std(0) / GROUPS**0.5).norm().item(),
    )


def _expectation_of_one_pass(
    audited: AuditedFunction, toy: ToyDistributions, sampling: Sampling, logits: Tensor, inputs: AuditInputs
) -> Expectation:
    """The expectation from one value of each response; ``inputs`` are made of p's ``logits``."""
    values = audited.values(inputs).double()
    probabilities, totals = toy.probabilities(sampling), values.sum(-1)
    if audited.convention.place == "reward":
        reward_to_go = values.detach().flip(-1).cumsum(-1).flip(-1)
        surrogate = (probabilities * (reward_to_go * inputs.token_logp).sum(-1)).sum()
        (gradient,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    else:
        (gradient,) = audited.gradients((probabilities * totals).sum(), (logits,))
    return Expectation(
        toy=toy,
        sampling=sampling,
        totals=totals.detach(),
        position_means=probabilities @ values.detach(),
        gradient=gradient,
    )


def matched_quantity(
    chosen: Sequence[Expectation], of: ValueOrGradient, claimed: str
) -> QuantityMatch | None:
    """The known quantity that is the value, or the gradient, over a single token; None if there is none."""
    measured = [e.measured(of) for e in chosen]
    flat = [part.flatten() for part, _ in measured if part is not None]
    if len(flat) < len(chosen):
        return None
    pairs, errors = [e.toy.name for e in chosen], torch.tensor([error for _, error in measured]).double()
    return match_quantity(
        torch.stack(flat),
        candidates(of, claimed),
        pairs,
        claimed,
        errors,
    )


def value_rows(expectations: Sequence[Expectation], claimed: str) -> tuple[ValueRow, ...]:
    """Bias and standard deviation of the value on each of the toy distributions."""
    return tuple(
        ValueRow(
            pair=e.toy.name,
            sampling=e.sampling,
            level=level,
            exact=value.item(),
            expected=e.mean,
            bias=e.mean - value.item(),
            standard_deviation=e.standard_deviation,
            lowest=e.totals.min().item(),
        )
        for e in expectations
        for level, value in exact("value", e.toy, e.sampling, claimed).items()
    )


def gradient_rows(expectations: Sequence[Expectation], claimed: str) -> tuple[GradientRow, ...]:
    """The expected gradient compared with that of the claimed and of every divergence, on the toy distributions."""
    rows: list[GradientRow] = []
    for e in expectations:
        if e.gradient is not None:
            gradient, (labels, targets) = e.gradient.flatten(), _target_gradients(e.toy, e.sampling, claimed)
            sizes = targets.norm(dim=-1)
            errors = (gradient - targets).norm(dim=-1) / sizes
            columns = torch.stack([cosine_similarities(gradient, targets), gradient.norm() / sizes, errors])
            rows += [
                GradientRow(
                    pair=e.toy.name,
                    sampling=e.sampling,
                    target=label,
                    cosine=cosine,
                    relative_size=size,
                    relative_error=error,
                )
                for label, (cosine, size, error) in zip(labels, columns.T.tolist(), strict=True)
            ]
    return tuple(rows)


@cache
def _target_gradients(
    toy: ToyDistributions, sampling: Sampling, claimed: str
) -> tuple[tuple[str, ...], Float64[Tensor, "labels entries"]]:
    """The labels and gradients of the claimed and of every divergence, over several tokens also between responses."""
    labels = dict.fromkeys([*(LABELS[name] for name in DIVERGENCES), claimed])
    levels = {"token": "", "sequence": "sequence "} if toy.steps > 1 else {"token": ""}
    targets = {
        f"{prefix}{label}": exact("gradient", toy, sampling, label)[level]
        for level, prefix in levels.items()
        for label in labels
    }
    return tuple(targets), torch.stack([*targets.values()]).flatten(1)
