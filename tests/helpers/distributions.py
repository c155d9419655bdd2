"""Pairs of distributions to try things on, and gradients in their logits."""

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def pairs(draw, max_vocab: int = 12, spread: float = 300.0, zeros: bool = True):
    """Two float64 log-probability vectors over one vocabulary, peaked or flat, with zeros."""
    vocab = draw(st.integers(2, max_vocab))
    number = st.floats(-spread, spread)
    logits = st.lists(number | st.just(-torch.inf) if zeros else number, min_size=vocab, max_size=vocab)
    p, q = (draw(logits.filter(lambda xs: max(xs) > -torch.inf)) for _ in "pq")
    return tuple(torch.tensor(x, dtype=torch.float64).log_softmax(-1) for x in (p, q))


def log(*probs: float) -> Tensor:
    """Log-probabilities in float64."""
    return torch.tensor(probs, dtype=torch.float64).log()


def gradients(function, *logits: Tensor) -> tuple[Tensor, ...]:
    """Of the summed value of ``function`` of the softmax of each, in the logits of each."""
    leaves = [x.detach().clone().requires_grad_() for x in logits]
    value = function(*(x.log_softmax(-1) for x in leaves)).sum()
    return torch.autograd.grad(value, leaves)
