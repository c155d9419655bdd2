"""Small pairs of distributions on which every expectation is a finite sum."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from kleash.auditing.situations import Situation, make_situation
from kleash.divergences.enumeration import every_sequence

Sampling = Literal["on-policy", "off-policy"]
SAMPLINGS: tuple[Sampling, ...] = ("on-policy", "off-policy")

VOCAB = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """p, q and a behaviour distribution over responses of a few tokens, by a row of logits per prefix."""

    name: str
    steps: int
    logits_p: Float64[Tensor, "prefixes vocab"]
    logits_q: Float64[Tensor, "prefixes vocab"]
    logits_behaviour: Float64[Tensor, "prefixes vocab"]
    """What the tokens are drawn from off-policy."""

    @property
    def vocab(self) -> int:
        """How many tokens there are."""
        return self.logits_p.shape[-1]

    @cached_property
    def tokens(self) -> Int[Tensor, "sequences steps"]:
        """Every response there is."""
        return every_sequence(self.vocab, self.steps)

    @cached_property
    def prefixes(self) -> Int[Tensor, "sequences steps"]:
        """The row of logits from which each token of each response is drawn.

        Prefixes are numbered by length, and as numbers in base ``vocab`` among those of one length.
        """
        tokens, rows = self.tokens, []
        number = torch.zeros(len(tokens), dtype=torch.int64)
        for step in range(self.steps):
            shorter = sum(self.vocab**length for length in range(step))
            rows.append(shorter + number)
            number = number * self.vocab + tokens[:, step]
        return torch.stack(rows, dim=1)

    def drawn_from(self, sampling: Sampling) -> Float64[Tensor, "prefixes vocab"]:
        """The logits of the distribution that the tokens are drawn from."""
        return self.logits_p if sampling == "on-policy" else self.logits_behaviour

    def masses(self, sampling: Sampling) -> Float64[Tensor, " sequences"]:
        """The probability of each response."""
        return self.prefix_masses(sampling)[:, -1]

    def prefix_masses(self, sampling: Sampling) -> Float64[Tensor, "sequences steps"]:
        """The probability of each response's tokens up to and including each."""
        logp = self.drawn_from(sampling).log_softmax(-1)[self.prefixes]
        return logp.gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1).cumsum(-1).exp()

    def situation(self, logits_p: Float64[Tensor, "prefixes vocab"], sampling: Sampling) -> Situation:
        """Every response once, p being what these logits say."""
        rows = self.prefixes
        return make_situation(
            logits_p[rows],
            self.logits_q[rows],
            self.tokens,
            logits_behaviour=self.drawn_from(sampling)[rows],
        )


@cache
def worlds() -> Mapping[str, World]:
    """Five pairs over one token and one over responses of three, by name."""
    draw = torch.Generator().manual_seed(20)

    def noise(prefixes: int = 1, vocab: int = VOCAB) -> Tensor:
        return torch.randn(prefixes, vocab, generator=draw, dtype=torch.float64)

    first_half = (torch.arange(VOCAB) < VOCAB // 2).double()
    favourite = (torch.arange(VOCAB) == 2).double()
    base, flat = noise(), 0.2 * noise()
    pairs = {
        "near": (base, base + 0.1 * noise()),
        "far": (1.5 * noise(), 1.5 * noise()),
        "peaked": (5 * favourite + 0.5 * noise(), 4 * favourite + noise()),
        "flat": (flat, flat + 0.4 * noise()),
        "barely overlapping": (6 * first_half + 0.5 * noise(), -6 * first_half + 0.5 * noise()),
        "sequences": (0.8 * noise(13, 3), 0.8 * noise(13, 3)),
    }
    made = {
        name: World(
            name=name,
            steps=3 if name == "sequences" else 1,
            logits_p=p,
            logits_q=q,
            logits_behaviour=0.6 * p + 0.3 * q + 0.4 * noise(*p.shape),
        )
        for name, (p, q) in pairs.items()
    }
    return MappingProxyType(made)


def one_token_worlds() -> tuple[World, ...]:
    """Those of one position: the next-token divergence is all there is."""
    return tuple(world for world in worlds().values() if world.steps == 1)
