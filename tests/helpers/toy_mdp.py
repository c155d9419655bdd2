"""Three tokens, three steps, an end token: every response, every pair of them, and what training does in expectation.

The policy is a table: logits for each of the seven prefixes. The objective is

    J = E_policy[score] - beta KL(policy || reference),    both over whole responses

and its gradient comes from autograd through the sum over all 15 responses. An algorithm's expected update is the
same sum over what it may draw (responses, or pairs of them), each with the update that it makes of them. Both
are exact, so that what is compared is the algorithm and not luck.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kleash.divergences import kl
from kleash.leash import generalised_advantages, sequence_rewards, shape_rewards
from kleash.losses import KLTerm, aggregate

END, STEPS, BETA, GROUP = 2, 3, 0.3, 2
PREFIXES = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def _responses() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, where they count, and at which prefix each is drawn: [responses, steps]."""
    whole = [
        word for n in range(1, STEPS + 1) for word in product(range(3), repeat=n)
        if END not in word[:-1] and (word[-1] == END or n == STEPS)
    ]  # fmt: skip
    tokens = torch.tensor([list(word) + [0] * (STEPS - len(word)) for word in whole])
    mask = torch.tensor([[t < len(word) for t in range(STEPS)] for word in whole])
    at = [[PREFIXES.index(word[:t]) if t < len(word) else 0 for t in range(STEPS)] for word in whole]
    return tokens, mask, torch.tensor(at)


TOKENS, MASK, AT = _responses()


def _table(seed: int, spread: float) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return spread * torch.randn(len(PREFIXES), 3, generator=draw, dtype=torch.float64)


POLICY, REFERENCE = _table(0, 1.0), _table(1, 1.0)
OLD = POLICY + _table(2, 0.15)
SCORES = _table(3, 1.0).flatten()[: len(TOKENS)]
WRONG_VALUES = _table(4, 0.5)[:, 0]


class Said(NamedTuple):
    """What the models say of some responses: rows of ``TOKENS``."""

    token_logp: Tensor
    """Under the policy, with its gradient."""
    reference_logp: Tensor
    old_logp: Tensor
    token_kl: Tensor
    """KL(policy || reference) of each next-token distribution, with its gradient."""
    mask: Tensor
    scores: Tensor


def said(logits: Tensor, rows: Tensor, old: Tensor | None = None) -> Said:
    """Of the responses in ``rows``; ``old`` is what drew them, if it is not the policy."""
    at, tokens = AT[rows], TOKENS[rows].unsqueeze(-1)
    next_logp, next_logq = logits.log_softmax(-1)[at], REFERENCE.log_softmax(-1)[at]
    behaviour = (logits.detach() if old is None else old).log_softmax(-1)[at]
    token_logp, reference, old_logp = (
        x.gather(-1, tokens).squeeze(-1) for x in (next_logp, next_logq, behaviour)
    )
    return Said(token_logp, reference, old_logp, kl(next_logp, next_logq), MASK[rows], SCORES[rows])


def chances(logits: Tensor) -> Tensor:
    """The probability of each response."""
    every = said(logits, torch.arange(len(TOKENS)))
    return torch.where(MASK, every.token_logp, 0.0).sum(-1).exp()


def analytic_gradient(score: float = 1.0, beta: float = BETA) -> Tensor:
    """Of ``score * E[score] - beta * KL`` by summing over every response."""
    logits = POLICY.clone().requires_grad_()
    every = said(logits, torch.arange(len(TOKENS)))
    log_ratio = torch.where(MASK, every.token_logp - every.reference_logp, 0.0).sum(-1)
    objective = (chances(logits) * (score * SCORES - beta * log_ratio)).sum()
    return torch.autograd.grad(objective, logits)[0].flatten()


Algorithm = Callable[[Said], Tensor]
"""From what the models say of the drawn responses to their losses, one number per token."""


def expected_update(
    algorithm: Algorithm, *, group: int = 1, aggregation: str = "sequence_sum", old: Tensor | None = None
) -> Tensor:
    """Minus the gradient of the loss, averaged over everything that can be drawn.

    Responses of a group are drawn independently; ``algorithm`` sees all groups at once, one after the other.
    """
    logits = POLICY.clone().requires_grad_()
    one = chances(POLICY if old is None else old)
    draws = torch.cartesian_prod(*[torch.arange(len(TOKENS))] * group).view(-1, group)
    per_token = algorithm(said(logits, draws.flatten(), old)).view(*draws.shape, STEPS)
    masks = MASK[draws]
    losses = torch.stack(
        [aggregate(part, mask, aggregation).value for part, mask in zip(per_token, masks, strict=True)]
    )
    return -torch.autograd.grad((one[draws].prod(-1) * losses).sum(), logits)[0].flatten()


def surrogate(of: Said, advantages: Tensor, clip: float | None = None) -> Tensor:
    """PPO's policy loss per token; with ratio 1 its gradient is that of -advantage * log p."""
    ratio = torch.where(of.mask, of.token_logp - of.old_logp, 0.0).exp()
    plain = ratio * advantages
    if clip is not None:
        plain = torch.minimum(plain, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -torch.where(of.mask, plain, 0.0)


def k1(of: Said) -> Tensor:
    return KLTerm(estimator="k1", place="reward").per_token(of.token_logp, of.reference_logp, of.mask)


def in_the_loss(of: Said, estimator: str, scope: str = "sequence", **how: Any) -> Tensor:
    """beta times a KL term."""
    term = KLTerm(estimator=estimator, scope=scope, aggregation="sequence_sum", **how)
    exact = of.token_kl if estimator == "exact" else None
    return BETA * term.per_token(of.token_logp, of.reference_logp, of.mask, token_kl=exact)


def values_at(table: Tensor, rows: Tensor) -> Tensor:
    """A critic that knows the prefix."""
    return table[AT[rows]]


def true_values() -> Tensor:
    """What the rewards to go average to at each prefix, with k1 in the reward."""
    every = said(POLICY, torch.arange(len(TOKENS)))
    rewards = shape_rewards(every.scores, k1(every), MASK, beta=BETA)
    to_go = generalised_advantages(rewards, torch.zeros_like(rewards), MASK).returns
    weight = chances(POLICY).unsqueeze(-1) * MASK
    total = torch.zeros(len(PREFIXES), dtype=torch.float64).index_add(
        0, AT.flatten(), (weight * to_go).flatten()
    )
    mass = torch.zeros_like(total).index_add(0, AT.flatten(), weight.flatten())
    return total / mass


def rewards_of(of: Said, kind: str) -> Tensor:
    """Per response: the score, and the KL in it by ``kind`` ("none" for none)."""
    cost = {"none": torch.zeros_like(of.token_kl), "k1": k1(of), "exact": of.token_kl}[kind]
    return sequence_rewards(of.scores, cost, of.mask, beta=BETA)


def apart(update: Tensor, truth: Tensor) -> tuple[float, float]:
    """Relative error, and the cosine of the angle between both."""
    return (
        ((update - truth).norm() / truth.norm()).item(),
        torch.nn.functional.cosine_similarity(update, truth, dim=0).item(),
    )
