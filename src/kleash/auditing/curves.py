"""Value and gradient against the log ratio, beside the right ones: the picture of a function."""

import torch
from torch import Tensor

from kleash.auditing.exact import label
from kleash.auditing.scanning import Scan
from kleash.auditing.subject import Subject
from kleash.divergences import divergence
from kleash.estimators import ESTIMATORS
from kleash.records.audit import CurveRow

REACH = 30.0
"""As far as the picture can go, in nats."""


def curve_rows(subject: Subject, scan: Scan, estimator: str) -> tuple[tuple[CurveRow, ...], str]:
    """The rows, and what the right value is: an estimator of the sampled token, or the divergence of the pair.

    A loss of sampled tokens is right if its gradient in the token's log-probability is the log ratio, but for a
    constant, which changes no expectation. Sampled tokens have such a curve only where KL(p || q) is claimed.
    """
    convention = subject.convention
    keep = scan.log_ratios.abs() <= REACH
    u, values = scan.log_ratios[keep], scan.values[keep]
    nowhere = torch.full_like(u, torch.nan)
    gradients = nowhere if scan.gradients is None else scan.gradients[keep]
    if convention.sees != "tokens":
        slopes = nowhere if scan.gradients is None or scan.slopes is None else scan.slopes[keep]
        return _rows(u, values, _of_pairs(u, convention.claims), gradients, slopes), label(convention.claims)
    if convention.claims != "kl":
        return (), ""
    named = estimator or ("k1" if convention.place == "reward" else "k3")
    right_gradients = nowhere if scan.gradients is None else u
    return _rows(u, values, ESTIMATORS[named].of(u), gradients, right_gradients), named


def _of_pairs(log_odds: Tensor, claims: str) -> Tensor:
    """The divergence between a fair coin and a loaded one, as ``scanning`` has them."""
    loaded = torch.stack([log_odds / 2, -log_odds / 2], dim=-1).log_softmax(-1)
    fair = torch.zeros_like(loaded).log_softmax(-1)
    p, q = (loaded, fair) if claims == "reverse_kl" else (fair, loaded)
    return divergence(claims, p, q)


def _rows(
    u: Tensor, values: Tensor, right: Tensor, gradients: Tensor, right_gradients: Tensor
) -> tuple[CurveRow, ...]:
    columns = (x.tolist() for x in (u, values, right, gradients, right_gradients))
    return tuple(
        CurveRow(log_ratio=a, value=b, right_value=c, gradient=d, right_gradient=e)
        for a, b, c, d, e in zip(*columns, strict=True)
    )
