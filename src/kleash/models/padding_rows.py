"""Rows of a head that are no tokens of its tokenizer: their probability, and the KL without and with them."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import kl
from kleash.linear import Head
from kleash.models.heads import head_logits
from kleash.store.statistics import KL_DIRECTIONS

POSITIONS_AT_ONCE, LOGITS_AT_ONCE = 512, 2**22
"""Positions, and logits of these rows, that are in memory at once: 32 MiB in float64, some times over."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddingRows:
    """The rows of a head that are no tokens."""

    ids: tuple[int, ...]
    """In rising order."""
    head: Head
    """The rows ``ids``, in this order; ``Head(weight=None)`` if the network gives logits alone."""

    @classmethod
    def of(cls, head: Head, rows: Set[int]) -> "PaddingRows | None":
        """Some rows of a whole head; None if several ranks store it."""
        weight, bias, ids = head.weight, head.bias, sorted(rows)
        if hasattr(weight, "device_mesh") or head.vocabulary_group is not None:
            return None
        if weight is not None:
            head = replace(head, weight=weight[ids], bias=None if bias is None else bias[ids])
        return cls(ids=tuple(ids), head=head)

    def log_weights(
        self, hidden: Float[Tensor, "positions dim"], temperature: float, ids: Sequence[int]
    ) -> Float[Tensor, "positions rows"]:
        """The logits over the temperature of the rows ``ids``, in float64: -inf of one that the head does not have.

        NaN of one that is cut off logits that the network gives.
        """
        if self.head.weight is None:
            logits = hidden[:, [row for row in self.ids if row < hidden.shape[1]]].double()
        else:
            logits = self.head.logits_of_product(
                hidden.double() @ self.head.weight.to(hidden.device).double().T
            )
        weights = logits.new_full((len(hidden), len(ids)), -torch.inf)
        places = np.searchsorted(ids, self.ids)
        weights[:, places] = torch.nan
        weights[:, places[: logits.shape[1]]] = logits / temperature
        return weights


class Outside(NamedTuple):
    """Rows apart from the others of a distribution, in float64."""

    logp: Float[Tensor, "positions rows"]
    log_rest: Float[Tensor, "positions"]
    """log of the probability of the other rows."""

    def kl_part(self, other: "Outside") -> Tensor:
        """sum_x p(x) log p(x)/q(x) of these rows, the others taken for one.

        KL(p || q) is this plus p(the others) times the KL between the two distributions restricted to the others.
        """
        logp, logq = (torch.cat([side.logp, side.log_rest[:, None]], dim=1) for side in (self, other))
        return torch.where(logp == -torch.inf, 0.0, logp.exp() * (logp - logq)).sum(-1)


def padding_columns(
    rows: tuple[PaddingRows, PaddingRows],
    inputs: tuple[Tensor, Head, Tensor, Head],
    columns: Mapping[str, np.ndarray],
    tokens: Int[Tensor, "positions"],
    temperature: float,
) -> dict[str, np.ndarray]:
    """The columns ``PADDING_COLUMNS`` of the token table.

    The KL over the tokens and that over all rows follow from the measured one and the rows that are no tokens, see
    ``Outside.kl_part``. Where such rows have most of the probability, that would magnify rounding, so the KL over the
    tokens is computed from all logits.

    Args:
        rows: of policy and reference; the heads may have been cut since.
        inputs: hidden states and measured head of policy and reference.
        columns: of the token table, over the rows of the measured heads.
        tokens: the scored tokens.
        temperature: divides the logits of both.
    """
    ids = sorted({*rows[0].ids, *rows[1].ids})
    step = max(1, min(POSITIONS_AT_ONCE, LOGITS_AT_ONCE // max(1, len(ids))))
    hidden_p, head_p, hidden_q, head_q = inputs
    parts = [
        _columns_of_part(
            rows,
            ids,
            (hidden_p[part], head_p, hidden_q[part], head_q),
            {name: values[part] for name, values in columns.items()},
            tokens[part],
            temperature,
        )
        for part in (slice(start, start + step) for start in range(0, len(tokens), step))
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _columns_of_part(
    rows: tuple[PaddingRows, PaddingRows],
    ids: list[int],
    inputs: tuple[Tensor, Head, Tensor, Head],
    columns: Mapping[str, np.ndarray],
    tokens: Tensor,
    temperature: float,
) -> dict[str, np.ndarray]:
    """``padding_columns`` of some positions; ``ids`` are the rows of either head that are no tokens."""
    measured = inputs[1].vocabulary(inputs[0])
    num_kept = sum(row < measured for row in ids)
    inside: list[Outside] = []
    cut: list[Outside] = []
    sides = ((inputs[0], inputs[1]), (inputs[2], inputs[3]))
    for place, (role, (hidden, head)) in enumerate(zip(("policy", "reference"), sides, strict=True)):
        top = torch.from_numpy(columns[f"top1_{role}"]).to(hidden.device)
        log_top = torch.from_numpy(columns[f"top1_probability_{role}"]).to(hidden.device).double().log()
        log_total = _logit(hidden, head, top) / temperature - log_top
        logp = rows[place].log_weights(hidden, temperature, ids) - log_total[:, None]
        log_rest = torch.log1p(-logp[:, :num_kept].exp().sum(-1))
        inside.append(Outside(logp[:, :num_kept], log_rest))
        log_all = torch.nn.functional.pad(logp[:, num_kept:], (1, 0)).logsumexp(-1)
        cut.append(Outside(logp[:, num_kept:] - log_all[:, None], -log_all))
    values_of: dict[str, Tensor] = {"is_padding": torch.isin(tokens, torch.tensor(ids, device=tokens.device))}
    values_of |= {
        f"padding_probability_{role}": -torch.expm1(inside[place].log_rest + cut[place].log_rest)
        for place, role in enumerate(("policy", "reference"))
    }
    is_token = torch.ones(measured, dtype=torch.bool, device=tokens.device)
    is_token[ids[:num_kept]] = False
    least = torch.minimum(inside[0].log_rest, inside[1].log_rest)
    for name, (p, q) in zip(KL_DIRECTIONS, ((0, 1), (1, 0)), strict=True):
        measured_kl = torch.from_numpy(columns[name]).to(tokens.device).double()
        values_of[f"{name}_over_tokens"] = (measured_kl - inside[p].kl_part(inside[q])) / inside[
            p
        ].log_rest.exp()
        values_of[f"{name}_over_rows"] = cut[p].kl_part(cut[q]) + cut[p].log_rest.exp() * measured_kl
        for row in (least < math.log(0.5)).nonzero()[:, 0].tolist():
            logits = (head_logits(sides[place][0][row : row + 1], sides[place][1]) for place in (p, q))
            logp, logq = ((z[:, is_token].double() / temperature).log_softmax(-1) for z in logits)
            values_of[f"{name}_over_tokens"][row] = kl(logp, logq)[0]
    return {name: values.float().cpu().numpy() for name, values in values_of.items()}


def _logit(hidden: Tensor, head: Head, tokens: Tensor) -> Tensor:
    """The logit of one token at each position, in float64."""
    if head.weight is None:
        return hidden.gather(-1, tokens.long()[:, None])[:, 0].double()
    product = (hidden.double() * head.weight[tokens].double()).sum(-1)
    bias = None if head.bias is None else head.bias[tokens]
    return replace(head, weight=None, bias=bias).logits_of_product(product)
