"""The inputs of an audited function: all that a convention may pass to it."""

from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditInputs:
    """Sampled responses with their probabilities under p (the policy), q (the reference) and the behaviour.

    Tensors of p require a gradient.
    """

    tokens: Int[Tensor, "sequences steps"]
    mask: Bool[Tensor, "sequences steps"]
    """False in the padding."""
    token_logp: Float[Tensor, "sequences steps"]
    token_logq: Float[Tensor, "sequences steps"]
    behaviour_logp: Float[Tensor, "sequences steps"]
    """Of the sampled tokens, under the distribution that they were sampled from."""
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

    def clone(self) -> "AuditInputs":
        """The same numbers and gradients in new tensors, which may be changed in place."""
        return replace(self, **{field.name: getattr(self, field.name).clone() for field in fields(self)})

    def select(self, sequences: slice | list[int], steps: slice = slice(None)) -> "AuditInputs":
        """Some of the sequences, or of the steps of each."""
        parts = {
            field.name: getattr(self, field.name)[sequences, steps]
            for field in fields(self)
            if not field.name.startswith("head_")
        }
        return replace(self, **parts)

    def to(self, dtype: torch.dtype) -> "AuditInputs":
        """The same numbers in another precision."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: x.to(dtype) for name, x in tensors.items() if x.is_floating_point()})


P_FIELDS = ("token_logp", "logp", "probs_p", "logits_p", "hidden_p")
Q_FIELDS = ("token_logq", "behaviour_logp", "logq", "probs_q", "logits_q", "hidden_q")


def make_inputs(
    logits_p: Float[Tensor, "sequences steps vocab"],
    logits_q: Float[Tensor, "sequences steps vocab"],
    tokens: Int[Tensor, "sequences steps"],
    *,
    logits_behaviour: Float[Tensor, "sequences steps vocab"] | None = None,
    mask: Bool[Tensor, "sequences steps"] | None = None,
    dtype: torch.dtype = torch.float64,
) -> AuditInputs:
    """The inputs for these tokens, computed in float64 and rounded to ``dtype`` at the end.

    Without ``logits_behaviour`` the tokens were sampled from p.
    """
    logp, logq = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    behaviour = logp.detach() if logits_behaviour is None else logits_behaviour.log_softmax(-1)
    head_p, head_q = orthogonal_head(logits_p.shape[-1], 1), orthogonal_head(logits_p.shape[-1], 2)

    def at_tokens(distributions: Tensor) -> Tensor:
        return distributions.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    return AuditInputs(
        tokens=tokens,
        mask=torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask,
        token_logp=at_tokens(logp).to(dtype),
        token_logq=at_tokens(logq).to(dtype),
        behaviour_logp=at_tokens(behaviour).to(dtype),
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
def orthogonal_head(size: int, seed: int) -> Tensor:
    """A fixed orthogonal matrix, used as a head whose hidden states are known."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
