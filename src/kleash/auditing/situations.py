"""What a training step could know about some tokens: all that a convention may hand to a function."""

from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Situation:
    """Sampled responses with everything that p (the policy), q (the reference) and the behaviour say of them.

    What belongs to p carries the gradient.
    """

    tokens: Int[Tensor, "sequences steps"]
    mask: Bool[Tensor, "sequences steps"]
    """True for the tokens that count."""
    token_logp: Float[Tensor, "sequences steps"]
    token_logq: Float[Tensor, "sequences steps"]
    behaviour_logp: Float[Tensor, "sequences steps"]
    """Of the sampled tokens, under the distribution that they were drawn from."""
    logp: Float[Tensor, "sequences steps vocab"]
    logq: Float[Tensor, "sequences steps vocab"]
    probs_p: Float[Tensor, "sequences steps vocab"]
    probs_q: Float[Tensor, "sequences steps vocab"]
    logits_p: Float[Tensor, "sequences steps vocab"]
    """Not normalised."""
    logits_q: Float[Tensor, "sequences steps vocab"]
    hidden_p: Float[Tensor, "sequences steps dim"]
    """``hidden_p @ head_p.T`` are p's logits."""
    hidden_q: Float[Tensor, "sequences steps dim"]
    head_p: Float[Tensor, "vocab dim"]
    head_q: Float[Tensor, "vocab dim"]

    def copied(self) -> "Situation":
        """The same numbers and gradients in tensors of their own, which may be changed in place."""
        return replace(self, **{field.name: getattr(self, field.name).clone() for field in fields(self)})

    def only(self, sequences: slice, steps: slice = slice(None)) -> "Situation":
        """Some of the sequences, or of the steps of each."""
        parts = {
            field.name: getattr(self, field.name)[sequences, steps]
            for field in fields(self)
            if not field.name.startswith("head_")
        }
        return replace(self, **parts)

    def to(self, dtype: torch.dtype) -> "Situation":
        """The same numbers in another precision."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{n: x.to(dtype) for n, x in parts.items() if x.is_floating_point()})


def make_situation(
    logits_p: Float[Tensor, "sequences steps vocab"],
    logits_q: Float[Tensor, "sequences steps vocab"],
    tokens: Int[Tensor, "sequences steps"],
    *,
    logits_behaviour: Float[Tensor, "sequences steps vocab"] | None = None,
    mask: Bool[Tensor, "sequences steps"] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Situation:
    """The situation in which these tokens were drawn; float64 until everything is rounded to ``dtype``.

    Without ``logits_behaviour`` the tokens were drawn from p as it stands.
    """
    logp, logq = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    behaviour = logp.detach() if logits_behaviour is None else logits_behaviour.log_softmax(-1)
    head_p, head_q = rotation(logits_p.shape[-1], 1), rotation(logits_p.shape[-1], 2)

    def chosen(of_all: Tensor) -> Tensor:
        return of_all.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    return Situation(
        tokens=tokens,
        mask=torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask,
        token_logp=chosen(logp).to(dtype),
        token_logq=chosen(logq).to(dtype),
        behaviour_logp=chosen(behaviour).to(dtype),
        logp=logp.to(dtype),
        logq=logq.to(dtype),
        probs_p=logp.exp().to(dtype),
        probs_q=logq.exp().to(dtype),
        logits_p=logits_p.to(dtype),
        logits_q=logits_q.to(dtype),
        hidden_p=(logits_p @ head_p).to(dtype),
        hidden_q=(logits_q @ head_q).to(dtype),
        head_p=head_p.to(dtype),
        head_q=head_q.to(dtype),
    )


@cache
def rotation(size: int, seed: int) -> Tensor:
    """A fixed orthogonal matrix: a head that can be undone."""
    draw = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))[0]
