"""What the audited packages should compute, written out, and how their cases are called."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kleash.auditing import AuditInputs, cases_of


@dataclass(frozen=True)
class Numbers:
    """The log ratios and weights, by hand."""

    given: AuditInputs

    @property
    def u(self) -> Tensor:
        return self.given.token_logp - self.given.token_logq

    @property
    def w(self) -> Tensor:
        return (self.given.token_logp - self.given.behaviour_logp).exp()

    @property
    def k3(self) -> Tensor:
        return (-self.u).exp() - 1 + self.u

    @property
    def k3_slope(self) -> Tensor:
        return 1 - (-self.u).exp()

    def exact(self, beta: float, k: int | None = None) -> Tensor:
        """The generalised Jensen-Shannon divergence of GKD, whose ends are the two KLs."""
        p, q = self.given.logp.exp(), self.given.logq.exp()
        if beta in (0.0, 1.0):
            p, q = (p, q) if beta else (q, p)
            return (p * (p / q).log()).sum(-1)
        m = (1 - beta) * p + beta * q
        return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)


def of(
    target: str, inputs: AuditInputs, carrier: str = "token_logp", source: Path | None = None
) -> tuple[Tensor, Tensor]:
    """Value, and gradient of its sum in one of the policy's fields, of a case called by its convention."""
    (case,) = cases_of(target, source=source)
    leaf = getattr(inputs, carrier).clone().requires_grad_()
    fields = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
    given = AuditInputs(**{**fields, carrier: leaf})

    def bound(*given: Any, **keywords: Any) -> Tensor:
        return case.function(*given, **case.arguments, **keywords)

    value = torch.as_tensor(case.convention.call(bound, given))
    if not value.requires_grad:
        return value, torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum() / mask.sum()


def spread(slopes: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, slopes, 0.0) / mask.sum()


def close(found: Tensor, expected: Tensor, precision: float = 1e-12) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=precision, atol=precision)
