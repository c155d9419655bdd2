"""Everything that was found out about a function, before anyone judges it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kleash.auditing.accuracy import accuracy_rows, error_in_float32, estimator_of, returned_dtype
from kleash.auditing.batches import Together, together
from kleash.auditing.edges import edge_rows
from kleash.auditing.exact import label
from kleash.auditing.expectations import Expectation, Expectations, expectations
from kleash.auditing.hidden_nans import nan_rows
from kleash.auditing.masks import mask_rows, over_a_batch
from kleash.auditing.naming import Name
from kleash.auditing.purity import Purity, averaged, later_call
from kleash.auditing.ratios import ratio_zones
from kleash.auditing.scanning import Course, course
from kleash.auditing.situations import Situation
from kleash.auditing.steps import OverSteps, gradient_over_steps, value_over_steps
from kleash.auditing.subject import Subject
from kleash.auditing.worlds import SAMPLINGS, Sampling
from kleash.errors import KleashError
from kleash.records.audit import AccuracyRow, CallRow, EdgeRow, MaskRow, ZoneRow

Names: TypeAlias = dict[Sampling, Name | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What the probes saw."""

    subject: Subject
    expected: Expectations
    value_names: Names
    gradient_names: Names
    estimator: str
    course: Course
    edges: tuple[EdgeRow, ...]
    masks: tuple[MaskRow, ...]
    accuracy: tuple[AccuracyRow, ...]
    error_in_float32: float
    """Where nothing cancels, beside the same numbers in float64."""
    returned_dtype: torch.dtype | None
    """Of the result for inputs in bfloat16."""
    with_probabilities: Name | None
    """Which quantity its value would be, were it given probabilities; only asked where it is none."""
    over_a_batch: str
    """How it averages over responses of unequal lengths, in words; "" where there is nothing to say."""
    calls: tuple[CallRow, ...]
    is_random: bool
    value_over_steps: OverSteps
    gradient_over_steps: OverSteps
    together: Together
    hidden_nans: tuple[EdgeRow, ...]
    ratios: tuple[ZoneRow, ...]

    @property
    def claimed(self) -> str:
        """The label of the claimed divergence."""
        return label(self.subject.convention.claims)

    @property
    def asks_gradient(self) -> bool:
        """Whether the function's place gives it a gradient."""
        return self.subject.convention.place != "metric"

    @property
    def weighs_itself(self) -> bool:
        """Whether off-policy the gradient is the function's own affair: a reward is weighted by its trainer."""
        return self.subject.convention.place == "loss" or self.subject.convention.takes_behaviour

    @property
    def detached(self) -> bool:
        """Whether no gradient reaches the policy."""
        return self.asks_gradient and any(e.gradient is None for e in self.expected.found)

    @cached_property
    def value_is_right(self) -> bool:
        """Whether on-policy it is the claimed divergence everywhere."""
        return self.is_claimed(self.value_names["on-policy"])

    @cached_property
    def gradient_is_right(self) -> bool:
        """Whether on-policy it is that of the claimed divergence everywhere."""
        return self.is_claimed(self.gradient_names["on-policy"])

    @property
    def is_about_the_claimed(self) -> bool:
        """Whether on-policy, for modest log ratios at least, the value is the claimed divergence."""
        name = self.value_names["on-policy"]
        return name is not None and name.quantity == self.claimed and name.how == "itself"

    def is_claimed(self, name: Name | None) -> bool:
        """Whether this is the claimed divergence itself, in every world."""
        return name is not None and name.quantity == self.claimed and name.how == "itself" and name.everywhere

    def one_token(self, sampling: Sampling) -> list[Expectation]:
        """The worlds of one position."""
        return self.expected.one_token(sampling)


REPEATS = 12
"""Calls in each of the groups over which a random function is averaged."""


def gather(subject: Subject, purity: Purity) -> Evidence:
    """Run every probe; precision and padding only of what is not random."""
    subject = averaged(subject, purity, REPEATS)
    certain = not purity.is_random
    steady = certain and not purity.has_state  # results of two calls can be compared
    expected = expectations(subject)
    values: Names = {sampling: expected.value_name(sampling) for sampling in SAMPLINGS}
    asks = subject.convention.place != "metric"
    gradients: Names = {
        sampling: expected.gradient_name(sampling) if asks else None for sampling in SAMPLINGS
    }
    estimator = estimator_of(subject)
    name = values["on-policy"]
    is_claimed = name is not None and name.quantity == expected.claims and name.how == "itself"
    follows = gradients["on-policy"]
    follows_claimed = (
        follows is not None
        and follows.quantity == expected.claims
        and follows.how == "itself"
        and follows.everywhere
    )
    masks = mask_rows(subject) if certain else ()
    found = Evidence(
        subject=subject,
        expected=expected,
        value_names=values,
        gradient_names=gradients,
        estimator=estimator,
        course=course(subject),
        edges=edge_rows(subject),
        masks=masks,
        accuracy=accuracy_rows(subject, estimator, is_claimed) if certain else (),
        error_in_float32=error_in_float32(subject) if steady else 0.0,
        returned_dtype=returned_dtype(subject),
        with_probabilities=_with_probabilities(subject) if name is None else None,
        over_a_batch=over_a_batch(subject) if certain else "",
        calls=(),
        is_random=purity.is_random,
        value_over_steps=value_over_steps(subject, expected, name),
        gradient_over_steps=gradient_over_steps(subject, expected)
        if follows_claimed
        else OverSteps(level=""),
        together=together(subject, pads_rightly=not any(row.problem for row in masks[:1]))
        if steady
        else Together(),
        hidden_nans=nan_rows(subject) if steady else (),
        ratios=ratio_zones(subject),
    )
    return replace(found, calls=(*purity.rows, later_call(replace(subject, repeats=1), purity)))


def _with_probabilities(subject: Subject) -> Name | None:
    """Which quantity the value is when every log-probability comes as a probability."""
    call = subject.convention.call

    def exponentiated(function: Callable[..., Any], given: Situation) -> Tensor:
        logs = ("token_logp", "token_logq", "behaviour_logp", "logp", "logq")
        return call(function, replace(given, **{name: getattr(given, name).exp() for name in logs}))

    other = replace(subject, convention=replace(subject.convention, call=exponentiated))
    try:
        name = expectations(other).value_name()
    except KleashError:
        return None
    return name if name is not None and name.quantity != "zero" else None
