"""Divergences as the textbooks write them, in 60-digit decimals: an oracle whose range no exponent leaves."""

from decimal import Context, Decimal, localcontext

import torch
from torch import Tensor

DIGITS = 60


def _probs(logits: Tensor) -> list[Decimal]:
    weights = [Decimal(0) if x == -torch.inf else Decimal(x).exp() for x in logits.tolist()]
    return [w / sum(weights) for w in weights]


def _kl(p, q):
    if any(a > 0 and b == 0 for a, b in zip(p, q, strict=True)):
        return Decimal("Infinity")
    return sum((a * (a / b).ln() for a, b in zip(p, q, strict=True) if a > 0), Decimal(0))


def _between(p, q, weight):
    w = Decimal(weight)
    return [w * a + (1 - w) * b for a, b in zip(p, q, strict=True)]


def _jensen_shannon(p, q, weight):
    w, m = Decimal(weight), _between(p, q, weight)
    return w * _kl(p, m) + (1 - w) * _kl(q, m)


def _power_sum(p, q, order):
    total = Decimal(0)
    for a, b in zip(p, q, strict=True):
        if a > 0 and b > 0:
            total += (Decimal(order) * a.ln() + (1 - Decimal(order)) * b.ln()).exp()
        elif (a > 0 and order > 1) or (b > 0 and order < 0):
            return Decimal("Infinity")
    return total


def _alpha(p, q, alpha):
    alpha = Decimal(alpha)
    return (_power_sum(p, q, alpha) - 1) / (alpha * (alpha - 1))


def _renyi(p, q, order):
    total = _power_sum(p, q, Decimal(order))
    return Decimal("Infinity") if total == 0 else total.ln() / (Decimal(order) - 1)


def _chi_squared(p, q):
    if any(a > 0 and b == 0 for a, b in zip(p, q, strict=True)):
        return Decimal("Infinity")
    return sum(((a - b) ** 2 / b for a, b in zip(p, q, strict=True) if b > 0), Decimal(0))


TEXTBOOK = {
    "kl": _kl,
    "reverse_kl": lambda p, q: _kl(q, p),
    "jeffreys": lambda p, q: _kl(p, q) + _kl(q, p),
    "jensen_shannon": lambda p, q: _jensen_shannon(p, q, 0.5),
    "chi_squared": _chi_squared,
    "total_variation": lambda p, q: sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
    "hellinger": lambda p, q: (sum((a.sqrt() - b.sqrt()) ** 2 for a, b in zip(p, q, strict=True)) / 2).sqrt(),
    "skew_kl": lambda p, q, mix: _kl(p, _between(p, q, mix)),
    "jensen_shannon_of": _jensen_shannon,
    "alpha_divergence": _alpha,
    "renyi": _renyi,
}


def textbook(name: str, logits_p: Tensor, logits_q: Tensor, *parameters: float) -> float:
    """The value, rounded to float64 only at the end."""
    with localcontext(Context(prec=DIGITS, Emax=10**9, Emin=-(10**9))):
        value = TEXTBOOK[name](_probs(logits_p), _probs(logits_q), *parameters)
        return float(value)
