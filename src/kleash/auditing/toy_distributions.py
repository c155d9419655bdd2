"""The inputs of an audited function, and toy p, q and behaviour distributions over short responses that make them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import product
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

IGNORED = -100
"""The label of positions that do not count, as in ``torch.nn.functional.cross_entropy``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditInputs:
    """Sampled responses with their probabilities under p (the policy), q (the reference) and the behaviour.

    Tensors of p require a gradient.
    """

    tokens: Int[Tensor, "sequences steps"]
    mask: Bool[Tensor, "sequences steps"]
    """False in the padding."""
    labels: Int[Tensor, "sequences steps"]
    """The tokens, and ``IGNORED`` in the padding."""
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

    def mapped(self, change: Callable[[str, Tensor], Tensor]) -> "AuditInputs":
        """Each tensor changed by a function of its name and itself."""
        return AuditInputs(
            **{field.name: change(field.name, getattr(self, field.name)) for field in fields(self)}
        )

    def clone(self) -> "AuditInputs":
        """Copies of all tensors, which may be changed in place and pass gradients on."""
        return self.mapped(lambda _, x: x.clone())

    def select(self, sequences: slice | list[int], steps: slice = slice(None)) -> "AuditInputs":
        """Some of the sequences, or of the steps of each."""
        return self.mapped(lambda name, x: x if name in HEADS else x[sequences, steps])

    def to(self, dtype: torch.dtype) -> "AuditInputs":
        """These inputs with all floating-point tensors in another precision."""
        return self.mapped(lambda _, x: x.to(dtype) if x.is_floating_point() else x)

    def as_leaves(self) -> "AuditInputs":
        """These numbers with p's tensors as leaves, so that no call can free a graph that another one needs."""
        return self.mapped(lambda name, x: x.detach().clone().requires_grad_() if name in P_FIELDS else x)


HEADS = ("head_p", "head_q")
"""The fields without an axis of sequences."""
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
        labels=tokens.clone() if mask is None else torch.where(mask, tokens, IGNORED),
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


Sampling = Literal["on-policy", "off-policy"]
SAMPLINGS: tuple[Sampling, ...] = ("on-policy", "off-policy")

VOCAB_SIZE = 8
SEQUENCES = "sequences"
"""The name of the toy distributions over responses of three tokens."""


def every_sequence(vocab: int, steps: int) -> Int[Tensor, "sequences steps"]:
    """All ``vocab ** steps`` sequences, in lexicographic order."""
    return torch.tensor(list(product(range(vocab), repeat=steps)))


@dataclass(frozen=True, kw_only=True, eq=False)
class ToyDistributions:
    """p, q and a behaviour distribution over responses of a few tokens: a row of logits per prefix."""

    name: str
    steps: int
    logits_p: Float64[Tensor, "prefixes vocab"]
    logits_q: Float64[Tensor, "prefixes vocab"]
    logits_behaviour: Float64[Tensor, "prefixes vocab"]
    """Of the distribution that off-policy tokens are sampled from."""

    @cached_property
    def tokens(self) -> Int[Tensor, "sequences steps"]:
        """Every possible response."""
        return every_sequence(self.logits_p.shape[-1], self.steps)

    @cached_property
    def prefix_rows(self) -> Int[Tensor, "sequences steps"]:
        """The row of logits of the prefix before each token of each response: shorter prefixes first, then in order."""
        vocabulary = range(self.logits_p.shape[-1])
        prefixes = [prefix for length in range(self.steps) for prefix in product(vocabulary, repeat=length)]
        rows = {prefix: row for row, prefix in enumerate(prefixes)}
        return torch.tensor(
            [
                [rows[tuple(response[:step])] for step in range(self.steps)]
                for response in self.tokens.tolist()
            ]
        )

    def sampling_logits(self, sampling: Sampling) -> Float64[Tensor, "prefixes vocab"]:
        """The logits of the distribution that the tokens are sampled from."""
        return self.logits_p if sampling == "on-policy" else self.logits_behaviour

    def probabilities(self, sampling: Sampling) -> Float64[Tensor, " sequences"]:
        """The probability of sampling each response."""
        return response_logp(self, self.sampling_logits(sampling)).exp()

    def inputs(self, logits_p: Float64[Tensor, "prefixes vocab"], sampling: Sampling) -> AuditInputs:
        """Every response once, with p given by ``logits_p``."""
        rows = self.prefix_rows
        return make_inputs(
            logits_p[rows],
            self.logits_q[rows],
            self.tokens,
            logits_behaviour=self.sampling_logits(sampling)[rows],
        )


@cache
def leaf_inputs(toy_name: str, sampling: Sampling = "on-policy") -> AuditInputs:
    """Every response once; p's tensors are leaves. Calls get copies, so that audits can share them."""
    toy = toy_distributions()[toy_name]
    return toy.inputs(toy.logits_p, sampling).as_leaves()


def response_logp(
    toy: ToyDistributions, logits: Float64[Tensor, "prefixes vocab"]
) -> Float64[Tensor, " sequences"]:
    """The log-probability of each response under the distributions that ``logits`` give."""
    logp = logits.log_softmax(-1)[toy.prefix_rows]
    return logp.gather(-1, toy.tokens.unsqueeze(-1)).squeeze(-1).sum(-1)


@cache
def toy_distributions() -> Mapping[str, ToyDistributions]:
    """Five pairs over one token and one over responses of three tokens, by name."""
    generator = torch.Generator().manual_seed(20)

    def noise(prefixes: int = 1, vocab_size: int = VOCAB_SIZE) -> Tensor:
        return torch.randn(prefixes, vocab_size, generator=generator, dtype=torch.float64)

    first_half = (torch.arange(VOCAB_SIZE) < VOCAB_SIZE // 2).double()
    favourite = (torch.arange(VOCAB_SIZE) == 2).double()
    base, flat = noise(), 0.2 * noise()
    pairs = {
        "near": (base, base + 0.1 * noise()),
        "far": (1.5 * noise(), 1.5 * noise()),
        "peaked": (5 * favourite + 0.5 * noise(), 4 * favourite + noise()),
        "flat": (flat, flat + 0.4 * noise()),
        "barely overlapping": (6 * first_half + 0.5 * noise(), -6 * first_half + 0.5 * noise()),
        SEQUENCES: (0.8 * noise(13, 3), 0.8 * noise(13, 3)),
    }
    return MappingProxyType(
        {
            name: ToyDistributions(
                name=name,
                steps=3 if name == SEQUENCES else 1,
                logits_p=p,
                logits_q=q,
                logits_behaviour=0.6 * p + 0.3 * q + 0.4 * noise(*p.shape),
            )
            for name, (p, q) in pairs.items()
        }
    )


def one_token_distributions() -> tuple[ToyDistributions, ...]:
    """The toy distributions over a single token."""
    return tuple(toy for toy in toy_distributions().values() if toy.steps == 1)
