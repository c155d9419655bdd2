"""Responses of several tokens: whose value and whose gradient it is, token by token or between whole responses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from kleash.auditing.exact import exact_values, prefix_weights, quantities, sequence_gradient, token_gradient
from kleash.auditing.expectations import Expectation, Expectations, expectation
from kleash.auditing.naming import NOISE, TOLERANCE, Name, cosine
from kleash.auditing.subject import Subject
from kleash.auditing.worlds import World, worlds
from kleash.errors import KleashError

Level = Literal["", "token", "sequence", "both", "neither"]

SEQUENCES = "sequences"
ORDINALS = ("first", "second", "third")


@dataclass(frozen=True, kw_only=True)
class OverSteps:
    """What a value or a gradient amounts to over responses of three tokens, on-policy."""

    level: Level
    """Which of the two truths it is; "" where it is no multiple of a known quantity for one token already."""
    factors: tuple[float, ...] = ()
    """Where neither: how many times the truth it is at the first, the second and the third token, if that is so."""
    factors_of: str = ""
    """Whose multiples those are: "token" or "sequence"."""
    cosines: tuple[float, float] = (float("nan"), float("nan"))
    """Of a gradient, with that of the next-token divergences and with that between responses."""

    @property
    def is_even(self) -> bool:
        """Whether it is the same multiple of what is right at every token."""
        return bool(self.factors) and max(self.factors) - min(self.factors) <= TOLERANCE * max(
            map(abs, self.factors)
        )

    @property
    def in_words(self) -> str:
        """Where neither: what it is instead; "" if that has no short description."""
        if not self.factors:
            return ""
        if self.is_even:
            return f"{self.factors[0]:.4g} times"
        each = [f"{factor:.3g}" if abs(factor) > TOLERANCE else "0" for factor in self.factors]
        return f"{each[0]}, {each[1]} and {each[2]} times"


def value_over_steps(subject: Subject, expected: Expectations, name: Name | None) -> OverSteps:
    """The expected value of a response beside what it is for one token, summed, and beside that between responses."""
    if name is None or name.how == "shifted" or name.quantity == "zero":
        return OverSteps(level="")
    if quantities()[name.quantity][0] == "truncated":  # of a vocabulary that is not this one's
        return OverSteps(level="")
    e = expected.sequences("on-policy")
    exact = _at_each_step(e.world, name)
    slack = NOISE * e.mean_error
    by_token = abs(e.mean - sum(exact)) <= TOLERANCE * abs(sum(exact)) + slack
    by_response = False
    if name.quantity == expected.claims:
        right = name.factor * exact_values(e.world, "on-policy", subject.convention.claims)["sequence"]
        by_response = abs(e.mean - right) <= TOLERANCE * abs(right) + slack
    factors = _value_factors(subject, e, name, exact)
    placed = not factors or subject.convention.gives not in ("token", "vocabulary")
    loose = TOLERANCE + slack / min(map(abs, exact))
    placed = placed or all(abs(factor - 1) <= loose for factor in factors)
    if (by_token or by_response) and (placed or subject.convention.place != "metric"):
        level: Level = "both" if by_token and by_response else "token" if by_token else "sequence"
        return OverSteps(level=level)
    return OverSteps(level="neither", factors=factors, factors_of="token")


def gradient_over_steps(subject: Subject, expected: Expectations) -> OverSteps:
    """The expected gradient beside both truths; of a function whose gradient is right for one token."""
    claims, e = subject.convention.claims, expected.sequences("on-policy")
    if e.gradient is None:
        return OverSteps(level="")
    by_token = token_gradient(SEQUENCES, "on-policy", expected.claims)
    by_response = sequence_gradient(SEQUENCES, claims)
    slack = NOISE * e.gradient_error
    fits = [
        (e.gradient - truth).norm() <= TOLERANCE * truth.norm() + slack for truth in (by_token, by_response)
    ]
    if any(fits):
        return OverSteps(level="both" if all(fits) else "token" if fits[0] else "sequence")
    cosines = cosine(e.gradient, by_token), cosine(e.gradient, by_response)
    for truth, level in ((by_token, "token"), (by_response, "sequence")):
        factors = _gradient_factors(e, truth)
        if factors:
            return OverSteps(level="neither", factors=factors, factors_of=level, cosines=cosines)
    return OverSteps(level="neither", cosines=cosines)


def _at_each_step(world: World, name: Name) -> list[float]:
    """What is right at each token of a response, in expectation."""
    _, of = quantities()[name.quantity]
    each = of(world.logits_p.log_softmax(-1), world.logits_q.log_softmax(-1)) * prefix_weights(
        world, "on-policy"
    )
    return [name.factor * each[_of_length(world, step)].sum().item() for step in range(world.steps)]


def _of_length(world: World, length: int) -> Bool[Tensor, " prefixes"]:
    """The prefixes of this many tokens."""
    chosen = torch.zeros(len(world.logits_p), dtype=torch.bool)
    chosen[world.prefixes[:, length].unique()] = True
    return chosen


def _value_factors(subject: Subject, e: Expectation, name: Name, exact: Sequence[float]) -> tuple[float, ...]:
    """How many times what is right its value is at each token; () if that cannot be told."""
    if e.parts.shape[1] == e.world.steps > 1:
        means = (e.masses.unsqueeze(-1) * e.parts).sum(0).tolist()
    else:  # one number a response: let p and q differ at one token only
        pairs = [(world, _at_each_step(world, name)) for world in one_step_worlds()]
        try:
            means = [expectation(subject, world, "on-policy").mean for world, _ in pairs]
        except KleashError:  # it refuses p = q
            return ()
        exact = [right[step] for step, (_, right) in enumerate(pairs)]
    if any(right == 0 for right in exact):
        return ()
    factors = tuple(mean / right for mean, right in zip(means, exact, strict=True))
    return factors if all(abs(factor) < 1e6 for factor in factors) else ()


@cache
def one_step_worlds() -> tuple[World, ...]:
    """The world of three tokens, with q equal to p but at the first, the second or the third."""
    world = worlds()[SEQUENCES]
    return tuple(
        replace(
            world,
            name=f"{SEQUENCES}, apart at the {ORDINALS[step]} token",
            logits_q=torch.where(_of_length(world, step).unsqueeze(-1), world.logits_q, world.logits_p),
        )
        for step in range(world.steps)
    )


def _gradient_factors(e: Expectation, truth: Float64[Tensor, "prefixes vocab"]) -> tuple[float, ...]:
    """How many times the truth the gradient is at each token; () if it is no multiple of it."""
    assert e.gradient is not None
    factors: list[float] = []
    for step in range(e.world.steps):
        rows = _of_length(e.world, step)
        found, right = e.gradient[rows], truth[rows]
        factor = ((found * right).sum() / right.square().sum()).item()
        if (found - factor * right).norm() > TOLERANCE * right.norm() + NOISE * e.gradient_error:
            return ()
        factors.append(factor)
    return tuple(factors)
