"""The function on extreme inputs, in float32 and a few in bfloat16."""

from collections.abc import Mapping
from math import inf, isfinite, isnan, nan
from types import MappingProxyType

import torch
from torch import Tensor

from kleash.auditing.situations import make_situation
from kleash.auditing.subject import Subject
from kleash.divergences import divergence
from kleash.errors import KleashError
from kleash.records.audit import EdgeRow

NAN_FOR_INFINITY = "value is NaN where the divergence is infinite"

IN_BFLOAT16 = "in bfloat16, "

TOKENS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "p and q agree": (-1.0, -1.0),
        "both are certain of the token": (0.0, 0.0),
        "q all but rules out the token (80 nats)": (-0.5, -80.5),
        "p all but rules out the token (80 nats)": (-80.5, -0.5),
        "q rules out the token": (-0.5, -inf),
        f"{IN_BFLOAT16}q is behind by 30 nats": (-0.5, -30.5),
        f"{IN_BFLOAT16}p is behind by 30 nats": (-30.5, -0.5),
    }
)
"""Log-probabilities of one sampled token under p and under q."""

PAIRS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = MappingProxyType(
    {
        "p and q agree": ((0.3, 1.0, -2.0, 0.5), (0.3, 1.0, -2.0, 0.5)),
        "p is all but certain (80 nats)": ((80.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)),
        "q is all but certain (80 nats)": ((0.0, 0.0, 0.0, 0.0), (80.0, 0.0, 0.0, 0.0)),
        "p rules out a token": ((0.3, 1.0, -inf, 0.5), (0.1, 0.2, 0.5, 0.3)),
        "q rules out a token": ((0.1, 0.2, 0.5, 0.3), (0.3, 1.0, -inf, 0.5)),
        f"{IN_BFLOAT16}they are 30 nats apart": ((30.0, 0.0, 0.0, 0.0), (0.0, 30.0, 0.0, 0.0)),
        "both rule out a token": ((0.3, 1.0, -inf, 0.5), (0.1, 0.2, -inf, 0.3)),
    }
)
"""Logits under p and under q."""


def edge_rows(subject: Subject) -> tuple[EdgeRow, ...]:
    """What the function makes of each extreme."""
    if subject.convention.sees == "tokens":
        return tuple(_at_token(subject, case, *pair) for case, pair in TOKENS.items())
    finite = subject.convention.sees == "hidden"  # a product of finite matrices rules nothing out
    return tuple(
        _at_pair(subject, case, torch.tensor(p), torch.tensor(q))
        for case, (p, q) in PAIRS.items()
        if not (finite and -inf in (*p, *q))
    )


def _at_token(subject: Subject, case: str, token_logp: float, token_logq: float) -> EdgeRow:
    p, q = (
        torch.stack([x, torch.log1p(-x.exp())]).reshape(1, 1, 2)
        for x in (torch.tensor(token_logp).double(), torch.tensor(token_logq).double())
    )
    exact = inf if token_logq == -inf and subject.convention.claims == "kl" else nan
    return _row(subject, case, p, q, exact)


def _at_pair(subject: Subject, case: str, p: Tensor, q: Tensor) -> EdgeRow:
    p, q = p.double().reshape(1, 1, -1), q.double().reshape(1, 1, -1)
    exact = divergence(subject.convention.claims, p.log_softmax(-1), q.log_softmax(-1)).item()
    return _row(subject, case, p, q, exact)


def _row(subject: Subject, case: str, p: Tensor, q: Tensor, exact: float) -> EdgeRow:
    p = p.clone().requires_grad_()
    dtype = torch.bfloat16 if case.startswith(IN_BFLOAT16) else torch.float32
    situation = make_situation(p, q, torch.zeros(1, 1, dtype=torch.int64), dtype=dtype)
    try:
        value = subject.parts(situation).sum()
    except KleashError as error:
        return EdgeRow(case=case, exact=exact, value=nan, gradient=nan, problem=str(error))
    asked = subject.differentiated and value.requires_grad
    gradient = _steepest(subject, value, situation.token_logp, p) if asked else nan
    return EdgeRow(
        case=case,
        exact=exact,
        value=value.item(),
        gradient=gradient,
        problem=_problem(value.item(), gradient, exact, asked),
    )


def _steepest(subject: Subject, value: Tensor, token_logp: Tensor, logits_p: Tensor) -> float:
    """The largest entry of the gradient: in the token's log-probability where the function reads that."""
    in_token, in_logits = subject.gradients(value, (token_logp, logits_p))
    if in_token is not None:
        found = in_token.flatten()
    elif in_logits is not None:
        found = in_logits[logits_p.isfinite()]
    else:  # it has parameters of its own, and reaches nothing else
        return 0.0
    return found[found.abs().nan_to_num(nan=inf).argmax()].item()


def _problem(value: float, gradient: float, exact: float, asked: bool) -> str:
    if isnan(value):
        return NAN_FOR_INFINITY if exact == inf else "value is NaN"
    if exact == inf:
        return "" if value == inf else "value is finite where the divergence is infinite"
    if not isfinite(value):
        return "value is infinite where the divergence is finite"
    if asked and isnan(gradient):
        return "gradient is NaN"
    if asked and not isfinite(gradient):
        return "gradient is infinite"
    if abs(value - exact) > 1e-3 + 1e-2 * abs(exact):
        return f"value is {value:.4g} where the divergence is {exact:.4g}"
    return ""
