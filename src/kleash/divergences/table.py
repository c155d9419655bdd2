"""Every divergence, once: what the exact functions, the surrogates and the bounds are made from."""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

import torch

from kleash.divergences.families import KL, jensen_shannon_record, weighted_sum
from kleash.divergences.record import Divergence, Side, square_root

DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {
        "kl": KL,
        "reverse_kl": KL.swapped,
        "jeffreys": weighted_sum(KL, KL.swapped, (1.0, 1.0)),
        "jensen_shannon": jensen_shannon_record(0.5),
        "chi_squared": Divergence(
            from_p=Side(
                of=lambda u: torch.expm1(-u).square(),
                score=lambda u: 2 * torch.expm1(u),
                alone=inf,
                growth=1.0,
            ),
            from_q=Side(
                of=lambda v: torch.expm1(-v).square(), score=lambda v: -torch.expm1(-2 * v), alone=1.0
            ),
        ),
        "total_variation": Divergence(
            from_p=Side(of=lambda u: torch.expm1(-u).abs() / 2, score=lambda u: u.sign() / 2, alone=0.5),
            from_q=Side(of=lambda v: torch.expm1(-v).abs() / 2, score=lambda v: v.sign() / 2, alone=0.5),
        ),
        "hellinger": Divergence(
            from_p=Side(
                of=lambda u: torch.expm1(-u / 2).square() / 2,
                score=lambda u: -torch.expm1(-u / 2) / 2,
                alone=0.5,
            ),
            from_q=Side(
                of=lambda v: torch.expm1(-v / 2).square() / 2,
                score=lambda v: -torch.expm1(-v / 2) / 2,
                alone=0.5,
            ),
            finish=square_root,
        ),
    }
)
"""Name -> record. Families with a parameter are functions that make records: ``*_record``."""
