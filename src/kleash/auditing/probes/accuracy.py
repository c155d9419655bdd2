"""Precision: the error against float64 on the same rounded inputs, in float32, bfloat16 and float16."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.inputs import AuditInputs, make_inputs
from kleash.auditing.probes.log_ratio_scan import float64_values
from kleash.auditing.toy_distributions import VOCAB_SIZE, toy_distributions
from kleash.divergences import divergence
from kleash.errors import KleashError
from kleash.estimators import ESTIMATORS
from kleash.store.audit import AccuracyRow

Formula: TypeAlias = Callable[[AuditInputs], Tensor]

LOW_PRECISION_CASES = (
    (torch.bfloat16, "near"),
    (torch.bfloat16, "far"),
    (torch.float16, "far"),
)
"""Input dtype and pair on which the function is compared with itself in float64."""
KL_LEVELS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""KL(p || q) in nats of the pairs in float32."""


def matching_estimator(audited: AuditedFunction) -> str:
    """The name of the estimator that the function computes for each sampled token, or ""."""
    if audited.convention.sees != "tokens":
        return ""
    log_ratios = torch.linspace(-2.3, 2.3, 24, dtype=torch.float64)
    values = float64_values(audited, log_ratios)
    for name, estimator in ESTIMATORS.items():
        if torch.allclose(values, estimator.of(log_ratios), rtol=1e-4, atol=1e-5):
            return name
    return ""


def probe_precision(audited: AuditedFunction, estimator: str, is_claimed: bool) -> tuple[AccuracyRow, ...]:
    """The relative error at each level of KL in float32, and on a near and a far pair in lower precision.

    In float32 the right value is that of the estimator, or of the claimed divergence if ``is_claimed``. In lower
    precision, in which rounded distributions are not normalised, it is the function's own value in float64.
    """
    formula = _right_formula(audited, estimator, is_claimed)
    rows = [_accuracy_row(audited, pair_with_kl(level), torch.float32, formula) for level in KL_LEVELS]
    own_formula = _right_formula(audited, "", False)
    for dtype, name in LOW_PRECISION_CASES:
        toy = toy_distributions()[name]
        try:
            rows.append(_accuracy_row(audited, (toy.logits_p, toy.logits_q), dtype, own_formula))
        except KleashError:
            continue
    return tuple(rows)


def float32_error(audited: AuditedFunction) -> float:
    """The relative error in float32 on the far pair, where nothing cancels, against the function in float64."""
    inputs = _far_inputs(torch.float32)
    values = audited.values(inputs).detach().double()
    return _relative_error(values, audited.values(inputs.to(torch.float64)).detach().double())


def dtype_for_bfloat16(audited: AuditedFunction) -> torch.dtype | None:
    """The dtype of the result for bfloat16 inputs; None if the function refuses them, which is no fault."""
    try:
        return audited.call(_far_inputs(torch.bfloat16)).dtype
    except KleashError:
        return None


@cache
def pair_with_kl(level: float) -> tuple[Tensor, Tensor]:
    """Logits of a pair with this KL: q is a step from p along a fixed random direction."""
    generator = torch.Generator().manual_seed(7)
    p, direction = torch.randn(2, 1, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    step = 1.0
    for _ in range(6):
        kl = divergence("kl", p.log_softmax(-1), (p + step * direction).log_softmax(-1)).item()
        step *= (level / kl) ** 0.5
    return p, p + step * direction


def _far_inputs(dtype: torch.dtype) -> AuditInputs:
    toy = toy_distributions()["far"]
    return _every_token((toy.logits_p, toy.logits_q), dtype)


def _every_token(pair: tuple[Tensor, Tensor], dtype: torch.dtype) -> AuditInputs:
    """Every token of the vocabulary once; p requires a gradient, since some functions need one."""
    p, q = (side.expand(VOCAB_SIZE, VOCAB_SIZE).unsqueeze(1) for side in pair)
    return make_inputs(p.clone().requires_grad_(), q, torch.arange(VOCAB_SIZE).unsqueeze(-1), dtype=dtype)


def _accuracy_row(
    audited: AuditedFunction, pair: tuple[Tensor, Tensor], dtype: torch.dtype, formula: Formula
) -> AccuracyRow:
    """The error of the function, and that of the right formula in float32, on the same inputs."""
    inputs = _every_token(pair, dtype)
    values = audited.values(inputs).detach().double().sum(-1)
    right_values = formula(inputs.to(torch.float64)).detach()
    float32_values = formula(inputs.to(torch.float32)).detach().double()
    return AccuracyRow(
        dtype=str(dtype).removeprefix("torch."),
        kl=divergence("kl", *(side.log_softmax(-1) for side in pair)).item(),
        relative_error=_relative_error(values, right_values),
        unavoidable_error=_relative_error(float32_values, right_values),
    )


def _right_formula(audited: AuditedFunction, estimator: str, is_claimed: bool) -> Formula:
    """The right value of each one-token sequence, in the precision of the inputs."""
    if not estimator and (not is_claimed or audited.convention.sees == "tokens"):
        return lambda inputs: audited.values(inputs).sum(-1)
    fields = ("hidden_p", "logits_p", "probs_p", "logp")
    field = next((field for field in fields if reads_field(audited, field)), "token_logp")

    def formula(inputs: AuditInputs) -> Tensor:
        if field == "token_logp":
            return ESTIMATORS[estimator].of(inputs.token_logp - inputs.token_logq).squeeze(-1)
        logp, logq = _log_probabilities(inputs, field)
        if not estimator:
            return divergence(audited.convention.claims, logp, logq).squeeze(-1)
        log_ratios = (logp - logq).gather(-1, inputs.tokens.unsqueeze(-1))
        return ESTIMATORS[estimator].of(log_ratios).flatten()

    return formula


def _log_probabilities(inputs: AuditInputs, field: str) -> tuple[Tensor, Tensor]:
    """Both distributions computed from the fields that the function reads."""
    if field == "hidden_p":
        logits_p, logits_q = inputs.hidden_p @ inputs.head_p.T, inputs.hidden_q @ inputs.head_q.T
        return logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    if field == "logits_p":
        return inputs.logits_p.log_softmax(-1), inputs.logits_q.log_softmax(-1)
    if field == "probs_p":
        return inputs.probs_p.log(), inputs.probs_q.log()
    return inputs.logp, inputs.logq


def reads_field(audited: AuditedFunction, field: str) -> bool:
    """Whether the result depends on this field of the inputs."""
    toy = toy_distributions()["near"]
    inputs = _every_token((toy.logits_p, toy.logits_q), torch.float64)
    changed = replace(inputs, **{field: getattr(inputs, field).detach() * 0.9 - 0.05})
    return not torch.equal(audited.values(inputs).detach(), audited.values(changed).detach())


def _relative_error(values: Tensor, right_values: Tensor) -> float:
    """The norm of the error relative to the norm of the right values."""
    return ((values - right_values).norm() / right_values.norm()).item()
