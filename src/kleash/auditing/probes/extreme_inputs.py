"""The function on extreme inputs, in float32 and partly in bfloat16, and with a NaN at an unmasked token."""

from dataclasses import dataclass, replace
from math import inf, isfinite, isnan, nan
from typing import Literal

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.inputs import P_FIELDS, Q_FIELDS, AuditInputs, make_inputs
from kleash.auditing.toy_distributions import SEQUENCES, toy_distributions
from kleash.divergences import divergence
from kleash.errors import KleashError

ExtremeDefect = Literal[
    "nan_value",
    "nan_for_infinity",
    "infinite_value",
    "finite_for_infinity",
    "nan_gradient",
    "infinite_gradient",
    "inexact_value",
    "error",
]
"""What is wrong on an extreme input; "..._for_infinity" where the divergence is infinite."""


@dataclass(frozen=True, kw_only=True)
class TokenCase:
    """Log-probabilities of one sampled token under p and under q."""

    name: str
    token_logp: float
    token_logq: float
    dtype: torch.dtype = torch.float32
    is_ordinary: bool = False
    """Whether any training run meets it."""


@dataclass(frozen=True, kw_only=True)
class LogitsCase:
    """Logits over a vocabulary of four tokens under p and under q."""

    name: str
    logits_p: tuple[float, ...]
    logits_q: tuple[float, ...]
    dtype: torch.dtype = torch.float32
    is_ordinary: bool = False


TOKEN_CASES = (
    TokenCase(name="p and q agree", token_logp=-1.0, token_logq=-1.0, is_ordinary=True),
    TokenCase(name="both are certain of the token", token_logp=0.0, token_logq=0.0, is_ordinary=True),
    TokenCase(name="q almost rules out the token (80 nats)", token_logp=-0.5, token_logq=-80.5),
    TokenCase(name="p almost rules out the token (80 nats)", token_logp=-80.5, token_logq=-0.5),
    TokenCase(name="q rules out the token", token_logp=-0.5, token_logq=-inf),
    TokenCase(
        name="in bfloat16, q is 30 nats below p", token_logp=-0.5, token_logq=-30.5, dtype=torch.bfloat16
    ),
    TokenCase(
        name="in bfloat16, p is 30 nats below q", token_logp=-30.5, token_logq=-0.5, dtype=torch.bfloat16
    ),
)

_UNIFORM = (0.0, 0.0, 0.0, 0.0)
LOGITS_CASES = (
    LogitsCase(
        name="p and q agree", logits_p=(0.3, 1.0, -2.0, 0.5), logits_q=(0.3, 1.0, -2.0, 0.5), is_ordinary=True
    ),
    LogitsCase(name="p is almost certain (80 nats)", logits_p=(80.0, 0.0, 0.0, 0.0), logits_q=_UNIFORM),
    LogitsCase(name="q is almost certain (80 nats)", logits_p=_UNIFORM, logits_q=(80.0, 0.0, 0.0, 0.0)),
    LogitsCase(name="p rules out a token", logits_p=(0.3, 1.0, -inf, 0.5), logits_q=(0.1, 0.2, 0.5, 0.3)),
    LogitsCase(name="q rules out a token", logits_p=(0.1, 0.2, 0.5, 0.3), logits_q=(0.3, 1.0, -inf, 0.5)),
    LogitsCase(
        name="in bfloat16, they are 30 nats apart",
        logits_p=(30.0, 0.0, 0.0, 0.0),
        logits_q=(0.0, 30.0, 0.0, 0.0),
        dtype=torch.bfloat16,
    ),
    LogitsCase(name="both rule out a token", logits_p=(0.3, 1.0, -inf, 0.5), logits_q=(0.1, 0.2, -inf, 0.3)),
)


@dataclass(frozen=True, kw_only=True)
class ExtremeResult:
    """Value and gradient on one extreme input."""

    case: TokenCase | LogitsCase
    exact: float
    """The claimed divergence; NaN if a single sampled token does not determine it."""
    value: float
    gradient: float
    """The entry with the largest absolute value; NaN if there is no gradient."""
    defect: ExtremeDefect | None
    error: str = ""
    """The message, for the defect "error"."""


def probe_extreme_inputs(audited: AuditedFunction) -> tuple[ExtremeResult, ...]:
    """Value and gradient on each extreme input."""
    if audited.convention.sees == "tokens":
        return tuple(_probe_token(audited, case) for case in TOKEN_CASES)
    is_finite = audited.convention.sees == "hidden"  # a product of finite matrices has no -inf
    return tuple(
        _probe_logits(audited, case)
        for case in LOGITS_CASES
        if not (is_finite and -inf in (*case.logits_p, *case.logits_q))
    )


def _probe_token(audited: AuditedFunction, case: TokenCase) -> ExtremeResult:
    p, q = (
        torch.stack([x, torch.log1p(-x.exp())]).reshape(1, 1, 2)
        for x in (torch.tensor(case.token_logp).double(), torch.tensor(case.token_logq).double())
    )
    exact = inf if case.token_logq == -inf and audited.convention.claims == "kl" else nan
    return _result(audited, case, p, q, exact)


def _probe_logits(audited: AuditedFunction, case: LogitsCase) -> ExtremeResult:
    p, q = (torch.tensor(side).double().reshape(1, 1, -1) for side in (case.logits_p, case.logits_q))
    exact = divergence(audited.convention.claims, p.log_softmax(-1), q.log_softmax(-1)).item()
    return _result(audited, case, p, q, exact)


def _result(
    audited: AuditedFunction, case: TokenCase | LogitsCase, logits_p: Tensor, logits_q: Tensor, exact: float
) -> ExtremeResult:
    logits_p = logits_p.clone().requires_grad_()
    inputs = make_inputs(logits_p, logits_q, torch.zeros(1, 1, dtype=torch.int64), dtype=case.dtype)
    try:
        value = audited.values(inputs).sum()
    except KleashError as error:
        return ExtremeResult(
            case=case, exact=exact, value=nan, gradient=nan, defect="error", error=str(error)
        )
    has_gradient = audited.is_differentiated and value.requires_grad
    gradient = _largest_gradient(audited, value, inputs.token_logp, logits_p) if has_gradient else nan
    return ExtremeResult(
        case=case,
        exact=exact,
        value=value.item(),
        gradient=gradient,
        defect=_defect(value.item(), gradient, exact, has_gradient),
    )


def _largest_gradient(audited: AuditedFunction, value: Tensor, token_logp: Tensor, logits_p: Tensor) -> float:
    """The largest gradient entry: in the token's log-probability if the function reads it, else in the logits."""
    in_token, in_logits = audited.gradients(value, (token_logp, logits_p))
    if in_token is not None:
        entries = in_token.flatten()
    elif in_logits is not None:
        entries = in_logits[logits_p.isfinite()]
    else:  # only parameters of the function itself receive a gradient
        return 0.0
    return entries[entries.abs().nan_to_num(nan=inf).argmax()].item()


def _defect(value: float, gradient: float, exact: float, has_gradient: bool) -> ExtremeDefect | None:
    if isnan(value):
        return "nan_for_infinity" if exact == inf else "nan_value"
    if exact == inf:
        return None if value == inf else "finite_for_infinity"
    if not isfinite(value):
        return "infinite_value"
    if has_gradient and isnan(gradient):
        return "nan_gradient"
    if has_gradient and not isfinite(gradient):
        return "infinite_gradient"
    if abs(value - exact) > 1e-3 + 1e-2 * abs(exact):
        return "inexact_value"
    return None


@dataclass(frozen=True, kw_only=True)
class NanResult:
    """The value when one input is NaN at an unmasked token."""

    field: str
    """The field of ``AuditInputs`` that is NaN."""
    value: float

    @property
    def is_hidden(self) -> bool:
        """Whether the NaN became a number."""
        return not isnan(self.value)


def probe_nan_inputs(audited: AuditedFunction) -> tuple[NanResult, ...]:
    """For each input that the result depends on, the value when it is NaN at one token."""
    results: list[NanResult] = []
    for field in (*P_FIELDS, *Q_FIELDS):
        inputs = _two_responses()
        is_per_token = getattr(inputs, field).dim() == 2
        if is_per_token and audited.convention.sees != "tokens" and field != "token_logp":
            continue
        try:
            before = audited.values(inputs).detach()
            after = audited.values(_with_second_token(inputs, field, None)).detach()
            if torch.equal(before, after):
                continue  # the function does not read this input
            value = audited.values(_with_second_token(inputs, field, torch.nan)).detach()[0].sum().item()
        except KleashError:
            continue  # the function refuses NaN
        results.append(NanResult(field=field, value=value))
    return tuple(results)


def _two_responses() -> AuditInputs:
    """Two responses of three tokens, in float32."""
    toy = toy_distributions()[SEQUENCES]
    logits = toy.logits_p.clone().requires_grad_()
    return toy.inputs(logits, "on-policy").select(slice(3, 5)).to(torch.float32)


def _with_second_token(inputs: AuditInputs, field: str, number: float | None) -> AuditInputs:
    """The field set to ``number`` at the second token of the first response; slightly changed if None."""
    tensor = getattr(inputs, field)
    changed = tensor.clone()
    changed[0, 1] = tensor[0, 1] * 0.9 - 0.05 if number is None else number
    return replace(inputs, **{field: changed})
