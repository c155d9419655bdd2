"""Precision: the error against float64 on the same rounded inputs, in float32, bfloat16 and float16."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import isnan, nan
from typing import TypeAlias

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.toy_distributions import VOCAB_SIZE, AuditInputs, make_inputs, toy_distributions
from kleash.divergences import divergence
from kleash.errors import KleashError
from kleash.estimators import ESTIMATORS
from kleash.store.audit import AccuracyRow, Finding

Formula: TypeAlias = Callable[[AuditInputs], Tensor]
"""A value of each one-token sequence, in the precision of the inputs."""

KL_LEVELS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""KL(p || q) in nats of the pairs in float32."""
DISTANT_PAIRS = ("far", "peaked", "flat")
"""Pairs on which nothing cancels. Several, since a single result can be right by chance."""
LOW_PRECISION_CASES = ((torch.bfloat16, "near"), (torch.bfloat16, "far"), (torch.float16, "far"))
"""Input dtype and pair on which the function is compared with itself in float64."""
CANCELLATION = 1e-2
"""Relative error in float32 above which cancellation is reported."""
ROUNDING = 1e-4
"""More than a computation in float32 needs to lose."""
FINAL_ROUNDING = 0.75
"""Relative error of a right result that is rounded at the end, in machine epsilons of its dtype."""


def accuracy_rows(audited: AuditedFunction, estimator: str, is_claimed: bool) -> tuple[AccuracyRow, ...]:
    """The relative error at each level of KL in float32, and on a near and a far pair in lower precision.

    In float32 the right value is that of the estimator, or of the claimed divergence if ``is_claimed``. In lower
    precision, in which rounded distributions are not normalised, it is the function's own value in float64.
    """
    formula = _right_formula(audited, estimator, is_claimed)
    rows = [_accuracy_row(audited, level, torch.float32, formula) for level in KL_LEVELS]
    for dtype, name in LOW_PRECISION_CASES:
        with suppress(KleashError):  # the function refuses such inputs
            rows.append(_accuracy_row(audited, name, dtype, _own_formula(audited)))
    return tuple(rows)


def precision_findings(audited: AuditedFunction, rows: Sequence[AccuracyRow]) -> Iterator[Finding]:
    """Yield the findings about digits lost in float32 to cancellation, and by computing in bfloat16 or float16.

    If float32 loses digits where nothing cancels, on the distant pairs, nothing else is reported.
    """
    own_rows = [_accuracy_row(audited, pair, torch.float32, _own_formula(audited)) for pair in DISTANT_PAIRS]
    worst = max(own_rows, key=lambda row: -1.0 if isnan(row.relative_error) else row.relative_error)
    if worst.relative_error > ROUNDING:
        yield Finding(
            kind="low_precision",
            severity="wrong",
            sentence=f"For float32 inputs it computes in less than float32: at a KL of {worst.kl:.2g} nats its value "
            f"differs by {worst.relative_error:.2g} (relative) from its value for the same numbers in float64.",
            where="float32",
        )
        return
    in_float32 = [row for row in rows if row.dtype == "float32" and _is_avoidable(row, CANCELLATION)]
    worst = max(in_float32, key=lambda row: row.kl, default=None)
    if worst and worst.kl < KL_LEVELS[-1] / 2:  # an error at every level is another quantity
        yield Finding(
            kind="cancellation",
            severity="note",
            sentence=f"In float32 it loses digits to cancellation: at a KL of {worst.kl:.0e} nats "
            f"{_describe_error(worst)}.",
            where="float32, near",
        )
    if inaccurate := [row for row in rows if row.dtype != "float32" and _is_avoidable(row, ROUNDING)]:
        in_bfloat16 = [row for row in inaccurate if row.dtype == "bfloat16"]
        worst = max(in_bfloat16 or inaccurate, key=lambda row: row.relative_error)
        dtype = getattr(torch, worst.dtype)
        severity, cause = "fragile", "it computes before it upcasts"
        if audited.call(_rounded("far", dtype)).dtype == dtype:
            cause = f"it computes in {worst.dtype}"
            if worst.relative_error <= FINAL_ROUNDING * torch.finfo(dtype).eps:
                severity, cause = "note", f"it returns {worst.dtype}"
        yield Finding(
            kind="low_precision",
            severity=severity,
            sentence=f"For {worst.dtype} inputs {cause}: at a KL of {worst.kl:.2g} nats {_describe_error(worst)}.",
            where=worst.dtype,
        )


def _is_avoidable(row: AccuracyRow, limit: float) -> bool:
    """Whether the error is large and avoidable; False for NaN, which the extreme inputs report."""
    return row.relative_error > max(limit, 10 * row.unavoidable_error)


def _describe_error(row: AccuracyRow) -> str:
    return f"its relative error is {row.relative_error:.2g}, where {row.unavoidable_error:.1g} is unavoidable"


@cache
def pair_with_kl(level: float) -> tuple[Tensor, Tensor]:
    """Logits [1, VOCAB_SIZE] of a pair with KL(p || q) = level: q is a step from p along a fixed random direction."""
    generator = torch.Generator().manual_seed(7)
    p, direction = torch.randn(2, 1, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    step = 1.0
    for _ in range(6):
        kl = divergence("kl", p.log_softmax(-1), (p + step * direction).log_softmax(-1)).item()
        step *= (level / kl) ** 0.5  # KL grows about as step^2, so this converges
    return p, p + step * direction


def _logits_of(pair: str | float) -> tuple[Tensor, Tensor]:
    """Logits [1, VOCAB_SIZE] of the toy pair of this name, or of ``pair_with_kl``."""
    if not isinstance(pair, str):
        return pair_with_kl(pair)
    toy = toy_distributions()[pair]
    return toy.logits_p, toy.logits_q


@cache
def _rounded(pair: str | float, dtype: torch.dtype) -> AuditInputs:
    """Every token of the vocabulary once, rounded to a dtype; p requires a gradient, as functions may need."""
    p, q = (side.expand(VOCAB_SIZE, VOCAB_SIZE).unsqueeze(1) for side in _logits_of(pair))
    return make_inputs(p, q, torch.arange(VOCAB_SIZE).unsqueeze(-1), dtype=dtype).as_leaves()


def _accuracy_row(
    audited: AuditedFunction, pair: str | float, dtype: torch.dtype, formula: Formula
) -> AccuracyRow:
    """The error of the function, and that of the right formula in float32, on the same inputs."""
    inputs = _rounded(pair, dtype)
    values, right_values = _own_formula(audited)(inputs), formula(inputs.to(torch.float64))
    return AccuracyRow(
        dtype=str(dtype).removeprefix("torch."),
        kl=divergence("kl", *(logits.log_softmax(-1) for logits in _logits_of(pair))).item(),
        relative_error=_relative_error(values, right_values),
        unavoidable_error=_relative_error(formula(inputs.to(torch.float32)), right_values),
    )


def _own_formula(audited: AuditedFunction) -> Formula:
    """The audited function's own values, in the precision of their inputs, as a formula to compare with itself."""
    return lambda inputs: audited.values(inputs).double().sum(-1)


def _right_formula(audited: AuditedFunction, estimator: str, is_claimed: bool) -> Formula:
    """The right value, made of the fields that the function reads; its own if nothing else is known to be right."""
    if not estimator and (not is_claimed or audited.convention.sees == "tokens"):
        return _own_formula(audited)
    read = (function for field, function in LOG_PROBABILITIES.items() if reads_field(audited, field))
    log_probabilities = next(read, None)

    def formula(inputs: AuditInputs) -> Tensor:
        if log_probabilities is None:  # it reads the log-probabilities of the sampled tokens
            return ESTIMATORS[estimator].of(inputs.token_logp - inputs.token_logq).squeeze(-1)
        logp, logq = log_probabilities(inputs)
        if not estimator:
            return divergence(audited.convention.claims, logp, logq).squeeze(-1)
        return ESTIMATORS[estimator].of((logp - logq).gather(-1, inputs.tokens.unsqueeze(-1))).flatten()

    return formula


LOG_PROBABILITIES: dict[str, Callable[[AuditInputs], tuple[Tensor, Tensor]]] = {
    "hidden_p": lambda x: (
        (x.hidden_p @ x.head_p.T).log_softmax(-1),
        (x.hidden_q @ x.head_q.T).log_softmax(-1),
    ),
    "logits_p": lambda x: (x.logits_p.log_softmax(-1), x.logits_q.log_softmax(-1)),
    "probs_p": lambda x: (x.probs_p.log(), x.probs_q.log()),
    "logp": lambda x: (x.logp, x.logq),
}
"""Field of the inputs -> both distributions computed from it and its twin of q."""


def reads_field(audited: AuditedFunction, field: str) -> bool:
    """Whether the result depends on this field of the inputs."""
    inputs = _rounded("near", torch.float64)
    changed = replace(inputs, **{field: getattr(inputs, field).detach().roll(1, -1)})  # still normalised
    return not torch.equal(audited.values(inputs).detach(), audited.values(changed).detach())


def _relative_error(values: Tensor, right_values: Tensor) -> float:
    """The norm of the error relative to the norm of the right values; NaN if these are 0 up to rounding."""
    size = right_values.norm().item()
    return (values - right_values).norm().item() / size if size > 1e-12 else nan
