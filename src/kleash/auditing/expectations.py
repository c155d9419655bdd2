"""Values and gradients of the audited function in expectation: finite sums over every response."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float64
from torch import Tensor

from kleash.auditing.exact import (
    exact_values,
    gradient_candidates,
    label,
    quantity_values,
    sequence_gradient,
    token_gradient,
)
from kleash.auditing.naming import Name, cosine, name_gradients, name_values
from kleash.auditing.subject import Subject
from kleash.auditing.worlds import SAMPLINGS, Sampling, World, one_token_worlds, worlds
from kleash.divergences import DIVERGENCES
from kleash.records.audit import GradientRow, ValueRow


@dataclass(frozen=True, kw_only=True, eq=False)
class Expectation:
    """What a function amounts to in one world."""

    world: World
    sampling: Sampling
    values: Float64[Tensor, " sequences"]
    """Of each response, summed over its steps."""
    masses: Float64[Tensor, " sequences"]
    gradient: Float64[Tensor, "prefixes vocab"] | None
    """Of the expectation as training forms it; None where no gradient is asked for, or none flows."""
    parts: Float64[Tensor, "sequences parts"]
    """The values of a response's tokens, or where there is only one for the response, that."""
    mean_error: float = 0.0
    """The standard error of ``mean`` where the function is random; what is averaged is a sample then."""
    gradient_error: float = 0.0
    """The standard error of ``gradient``, as a length."""

    @cached_property
    def mean(self) -> float:
        """The expected value."""
        return (self.masses * self.values).sum().item()

    @cached_property
    def standard_deviation(self) -> float:
        """Of one sampled response's value."""
        return (self.masses * (self.values - self.mean).square()).sum().sqrt().item()


GROUPS = 12
"""Of a random function's calls: their means' spread tells how far the mean of all is off."""


def expectation(subject: Subject, world: World, sampling: Sampling) -> Expectation:
    """The function's expected value, and what is expected of its gradient where it has its place.

    A loss is differentiated as it stands, the probabilities of the samples are not. A reward is
    detached, and each token's score is multiplied by the rewards from that token on. A random function
    is called again and again, and averaged.
    """
    if subject.repeats == 1:
        return _one_expectation(subject, world, sampling)
    groups = [_one_expectation(subject, world, sampling) for _ in range(GROUPS)]
    means = torch.tensor([group.mean for group in groups], dtype=torch.float64)
    flowing = [group.gradient for group in groups if group.gradient is not None]
    gradients = torch.stack(flowing) if flowing else None
    return replace(
        groups[0],
        values=torch.stack([group.values for group in groups]).mean(0),
        parts=torch.stack([group.parts for group in groups]).mean(0),
        gradient=None if gradients is None else gradients.mean(0),
        mean_error=(means.std() / GROUPS**0.5).item(),
        gradient_error=0.0 if gradients is None else (gradients.std(0) / GROUPS**0.5).norm().item(),
    )


def _one_expectation(subject: Subject, world: World, sampling: Sampling) -> Expectation:
    leaf = world.logits_p.clone().requires_grad_()
    situation = world.situation(leaf, sampling)
    parts = subject.parts(situation).double()
    masses = world.masses(sampling)
    surrogate: Tensor | None = None
    if subject.convention.place == "loss" and parts.requires_grad:
        surrogate = (masses * parts.sum(-1)).sum()
    elif subject.convention.place == "reward":
        to_come = parts.detach().flip(-1).cumsum(-1).flip(-1)
        surrogate = (masses * (to_come * situation.token_logp).sum(-1)).sum()
    gradient = None
    if surrogate is not None:
        (gradient,) = subject.gradients(surrogate, leaf)
    return Expectation(
        world=world,
        sampling=sampling,
        values=parts.detach().sum(-1),
        masses=masses,
        gradient=gradient,
        parts=parts.detach(),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Expectations:
    """The function in every world."""

    subject: Subject
    found: tuple[Expectation, ...]

    @property
    def claims(self) -> str:
        """The label of the claimed divergence."""
        return label(self.subject.convention.claims)

    def one_token(self, sampling: Sampling) -> list[Expectation]:
        """In the worlds of one position."""
        return [e for e in self.found if e.sampling == sampling and e.world.steps == 1]

    def sequences(self, sampling: Sampling) -> Expectation:
        """In the world of three tokens."""
        return next(e for e in self.found if e.sampling == sampling and e.world.steps > 1)

    def value_name(self, sampling: Sampling = "on-policy") -> Name | None:
        """Which quantity the expected value is."""
        found = self.one_token(sampling)
        names = [world.name for world in one_token_worlds()]
        errors = tuple(e.mean_error for e in found)
        return name_values(tuple(e.mean for e in found), quantity_values(), names, self.claims, errors)

    def gradient_name(self, sampling: Sampling = "on-policy") -> Name | None:
        """Which quantity the expected gradient is that of."""
        gradients = {e.world.name: e.gradient for e in self.one_token(sampling)}
        flowing = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        if len(flowing) < len(gradients):
            return None
        candidates = {
            quantity: {world: token_gradient(world, sampling, quantity) for world in flowing}
            for quantity in gradient_candidates()
        }
        errors = {e.world.name: e.gradient_error for e in self.one_token(sampling)}
        return name_gradients(flowing, candidates, self.claims, errors)

    def value_rows(self) -> tuple[ValueRow, ...]:
        """Bias and spread in every world."""
        return tuple(
            ValueRow(
                world=e.world.name,
                sampling=e.sampling,
                level=level,
                exact=exact,
                expected=e.mean,
                bias=e.mean - exact,
                standard_deviation=e.standard_deviation,
                lowest=e.values.min().item(),
            )
            for e in self.found
            for level, exact in exact_values(e.world, e.sampling, self.subject.convention.claims).items()
        )

    @cached_property
    def gradient_rows(self) -> tuple[GradientRow, ...]:
        """The expected gradient beside that of every divergence of the table, in every world."""
        return tuple(
            _beside(e, target, right)
            for e in self.found
            if e.gradient is not None
            for target, right in _targets(e, self.subject.convention.claims).items()
        )


def expectations(subject: Subject) -> Expectations:
    """The function in every world; off-policy as a reward only if it is told the behaviour.

    A reward that is not told the behaviour is weighted by its trainer.
    """
    return Expectations(
        subject=subject,
        found=tuple(
            expectation(subject, world, sampling) for world in worlds().values() for sampling in SAMPLINGS
        ),
    )


def _targets(e: Expectation, claims: str) -> dict[str, Tensor]:
    found = {label(name): token_gradient(e.world.name, e.sampling, label(name)) for name in DIVERGENCES}
    if e.world.steps > 1:
        found[f"sequence {label(claims)}"] = sequence_gradient(e.world.name, claims)
    return found


def _beside(e: Expectation, target: str, right: Tensor) -> GradientRow:
    found = e.gradient if e.gradient is not None else torch.zeros_like(right)
    return GradientRow(
        world=e.world.name,
        sampling=e.sampling,
        target=target,
        cosine=cosine(found, right),
        relative_size=(found.norm() / right.norm()).item(),
        relative_error=((found - right).norm() / right.norm()).item(),
    )
