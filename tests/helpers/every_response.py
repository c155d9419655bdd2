"""Every response of a tiny world, so that expectations and their gradients are finite sums in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kleash.auditing.toy_distributions import every_sequence
from kleash.divergences import kl


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """Three policies over all responses of ``steps`` tokens; each prefix has its own distribution.

    ``end``: this token ends a response, what follows does not count. ``tool``: the token at this step comes
    from outside, from the same distribution for all, and does not count.
    """

    vocab: int = 3
    steps: int = 3
    seed: int = 0
    end: int | None = None
    tool: int | None = None
    on_policy: bool = False
    spread: float = 1.0

    @property
    def tokens(self) -> Tensor:
        return every_sequence(self.vocab, self.steps)

    @property
    def mask(self) -> Tensor:
        counts = torch.ones(self.tokens.shape, dtype=torch.bool)
        if self.end is not None:
            ended = (self.tokens == self.end).cumsum(-1)
            counts &= torch.cat([torch.zeros(len(ended), 1), ended[:, :-1]], 1) == 0
        if self.tool is not None:
            counts[:, self.tool] = False
        return counts

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of p, q and the behaviour distribution: a row for each prefix."""
        rows = sum(self.vocab**t for t in range(self.steps))
        draw = torch.Generator().manual_seed(self.seed)
        p, q, mu = self.spread * torch.randn(3, rows, self.vocab, generator=draw, dtype=torch.float64)
        mu = p.clone() if self.on_policy else p + 0.7 * mu
        if self.tool is not None:
            start = sum(self.vocab**t for t in range(self.tool))
            outside = slice(start, start + self.vocab**self.tool)
            q[outside] = mu[outside] = p[outside]
        return p, q, mu

    def next_logp(self, table: Tensor) -> Tensor:
        """[sequences, steps, vocab]: what each token is drawn from."""
        index, rows, start = torch.zeros(len(self.tokens), dtype=torch.long), [], 0
        for t in range(self.steps):
            rows.append(start + index)
            start += self.vocab**t
            index = index * self.vocab + self.tokens[:, t]
        return table.log_softmax(-1)[torch.stack(rows, 1)]

    def token_logp(self, table: Tensor) -> Tensor:
        return self.next_logp(table).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)

    def probability(self, table: Tensor) -> Tensor:
        return self.token_logp(table).sum(-1).exp()

    def sequence_kl(self, p: Tensor) -> Tensor:
        """KL between responses, from their probabilities alone."""
        log_ratio = self.token_logp(p) - self.token_logp(self.tables[1])
        return (self.probability(self._moving(p)) * torch.where(self.mask, log_ratio, 0.0).sum(-1)).sum()

    def token_kl(self, p: Tensor, prefixes: Tensor) -> Tensor:
        """The sum of each token's exact KL, along prefixes drawn from that table, which does not move."""
        exact = kl(self.next_logp(p), self.next_logp(self.tables[1]))
        return (self.probability(prefixes.detach()) * torch.where(self.mask, exact, 0.0).sum(-1)).sum()

    def _moving(self, p: Tensor) -> Tensor:
        if self.tool is None:
            return p
        start = sum(self.vocab**t for t in range(self.tool))
        fixed = torch.zeros(len(p), 1, dtype=torch.bool)
        fixed[start : start + self.vocab**self.tool] = True
        return torch.where(fixed, p.detach(), p)


def gradient(function, table: Tensor) -> Tensor:
    """Of a scalar function of the table's logits."""
    leaf = table.detach().clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


def expected(world: World, per_token, table: Tensor) -> Tensor:
    """The mean over the behaviour's responses of the sum over tokens of ``per_token(table)``."""
    return (world.probability(world.tables[2]).unsqueeze(-1) * per_token(table)).sum()


def error(got: Tensor, truth: Tensor) -> float:
    """Relative, in norm."""
    return ((got - truth).norm() / truth.norm()).item()
