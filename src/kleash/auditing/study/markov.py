"""Case (c): whole sequences of a random Markov model; means and variances by dynamic programming."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from kleash.auditing.study.candidates import EXACT, candidates
from kleash.auditing.study.worlds import World, known, relative_error
from kleash.divergences.enumeration import MarkovModel, random_markov
from kleash.records import Number
from kleash.records.study import EstimatorRow, StudyCase
from kleash.uncertainty import clustered_mean

VOCAB, STEPS = 50, 30
APART = (0.05, 0.2, 0.5, 1.0)
"""How far the logits of q are from p's, in standard normal draws."""
SEQUENCES = 20_000
MIXED = "k1 − a(k1 − exact)"
WITH_FUTURE = "exact, future credited"


class Moments(NamedTuple):
    """Of sums along a sequence, one entry for each kind of term."""

    mean: Float64[Tensor, "terms"]
    covariance: Float64[Tensor, "terms terms"]


def moments_of_sums(
    p: MarkovModel,
    first: Float64[Tensor, "terms vocab"],
    then: Float64[Tensor, "terms vocab vocab"],
    steps: int,
) -> Moments:
    """Mean and covariance of sums along a sequence from p: exact, by backward recursion.

    Args:
        p: what sequences are drawn from.
        first: what each first token adds to each sum.
        then: what each later token adds, given the token before (the middle axis).
        steps: tokens in a sequence.
    """
    mean = torch.zeros(len(first), len(p.first), dtype=torch.float64)
    second = torch.zeros(len(first), len(first), len(p.first), dtype=torch.float64)
    for _ in range(steps - 1):
        mean, second = _earlier(p.then, then, mean, second)
    mean, second = _earlier(p.first.unsqueeze(0), first.unsqueeze(1), mean, second)
    mean, second = mean.squeeze(-1), second.squeeze(-1)
    return Moments(mean, second - mean.unsqueeze(0) * mean.unsqueeze(1))


def _earlier(logp: Tensor, adds: Tensor, mean: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """First and second moments of the sums once one more token is drawn in front."""
    probs = logp.exp()
    after = adds + mean.unsqueeze(1)
    spread = second - mean.unsqueeze(0) * mean.unsqueeze(1)
    products = torch.einsum("bx,kbx,lbx->klb", probs, after, after)
    return (probs * after).sum(-1), products + torch.einsum("bx,klx->klb", probs, spread)


def leaf(model: MarkovModel) -> MarkovModel:
    """The same model, with logits that collect gradients."""
    return MarkovModel(first=model.first.clone().requires_grad_(), then=model.then.clone().requires_grad_())


def world_of(p: MarkovModel, q: MarkovModel, steps: int) -> World:
    """Every place of a sequence at which a token is drawn from p: the start, and after each token."""
    logits = leaf(p)
    logp = torch.cat([logits.first.unsqueeze(0), logits.then]).log_softmax(-1)
    visits = torch.zeros(len(p.first) + 1, dtype=torch.float64)
    visits[0] = 1.0
    reached = p.first.exp()
    for _ in range(steps - 1):
        visits[1:] += reached
        reached = reached @ p.then.exp()
    return World(
        logp=logp,
        logq=torch.cat([q.first.unsqueeze(0), q.then]),
        measure=torch.ones_like(logp),
        visits=visits,
        parameters=(logits.first, logits.then),
    )


def sequence_kl(world: World, steps: int) -> Tensor:
    """KL between whole sequences with all of its gradient: also of which prefixes p makes likely."""
    divergences = (world.logp.exp() * world.log_ratio).sum(-1)
    later = torch.zeros_like(divergences[1:])
    for _ in range(steps - 1):
        later = divergences[1:] + world.logp[1:].exp() @ later
    return divergences[0] + world.logp[0].exp() @ later


def markov_case(apart: float, *, vocab: int = VOCAB, steps: int = STEPS, seed: int = 0) -> StudyCase:
    """Every estimator, summed along sequences of a random Markov model."""
    p = random_markov(vocab, seed=seed)
    world = world_of(p, p.moved(seed + 1, apart), steps)
    whole = sequence_kl(world, steps)
    terms = terms_of(world)
    moments = moments_of_sums(p, terms.values[:, 0], terms.values[:, 1:], steps)
    a, moments = _with_mixture(moments, terms.names)
    credited = terms.of(EXACT) + world.gradient(future_credit(p, world, steps))
    gradients = [*terms.gradients, (1 - a) * terms.of("k1") + a * terms.of(EXACT), credited]
    wanted = world.gradient(whole)
    negative = _negative_shares(world, terms, a, steps)
    return StudyCase(
        name=f"markov-{apart:g}",
        title=f"Sequences of {steps} tokens, logits {apart:g} × noise apart",
        drawn=f"one sequence of {steps} tokens from p, a random Markov model over {vocab} tokens; each estimate "
        "is a sum over its tokens, and the gradient, in p's logits, is that of the KL between whole sequences",
        kl=known(whole.item()),
        rows=tuple(
            EstimatorRow(
                name=name,
                value=known(moments.mean[place].item()),
                bias=known(moments.mean[place].item() - whole.item()),
                spread=known(max(0.0, moments.covariance[place, place].item()) ** 0.5),
                negative=negative[place],
                gradient_error=relative_error(gradients[place], wanted),
            )
            for place, name in enumerate([*terms.names, MIXED, WITH_FUTURE])
        ),
        notes=(
            f"the controlled estimate has a = {world.control_weight():.3f} at each token, and the mixture a = {a:.3f}",
            f"the shares below 0 were counted on {SEQUENCES} sequences; everything else is exact",
        ),
    )


class Terms(NamedTuple):
    """What each drawn token adds to each sum, and the gradient that backpropagating the sum has in expectation."""

    names: tuple[str, ...]
    values: Float64[Tensor, "terms places outcomes"]
    gradients: tuple[Tensor, ...]

    def of(self, name: str) -> Tensor:
        """The gradient of the sum called ``name``."""
        return self.gradients[self.names.index(name)]


def terms_of(world: World) -> Terms:
    """Of every estimator, and of the exact next-token KL."""
    of_draws = {name: of(world.log_ratio) for name, of in candidates(world.control_weight()).items()}
    exact = (world.logp.exp() * world.log_ratio).sum(-1, keepdim=True).expand_as(world.logp)
    gradients = [world.gradient(world.mean(values)) for values in of_draws.values()]
    return Terms(
        names=(*of_draws, EXACT),
        values=torch.stack([*of_draws.values(), exact]).detach(),
        gradients=(*gradients, world.gradient(world.exact())),
    )


def future_credit(p: MarkovModel, world: World, steps: int) -> Tensor:
    """A term of value 0 whose gradient is what the exact next-token KLs miss: that tokens choose what follows.

    sum_t log p(y_t | y_<t) sg(KL of all that follows y_t),   minus the same without a gradient
    """
    divergences = (world.mass * world.log_ratio.detach()).sum(-1)[1:]
    later = [torch.zeros_like(divergences)]
    for _ in range(steps - 1):
        later.append(divergences + p.then.exp() @ later[-1])
    scored = world.mass * (world.logp - world.logp.detach())
    credit = scored[0] @ later[steps - 1]
    reached = p.first.exp()
    for left in range(steps - 2, 0, -1):
        credit = credit + reached @ (scored[1:] @ later[left])
        reached = reached @ p.then.exp()
    return credit


def _with_mixture(moments: Moments, names: tuple[str, ...]) -> tuple[float, Moments]:
    """The a for which ``U - a (U - C)`` varies least, and the moments of all sums and of two more.

    The first of them is that mixture, the second C once more, to which future credit adds nothing.
    """
    u, c = names.index("k1"), names.index(EXACT)
    both = moments.covariance[[u, u, c], [u, c, c]]
    a = ((both[0] - both[1]) / (both[0] - 2 * both[1] + both[2])).item()
    weights = torch.zeros(2, len(names), dtype=torch.float64)
    weights[0, u], weights[0, c], weights[1, c] = 1 - a, a, 1.0
    taken = torch.cat([torch.eye(len(names), dtype=torch.float64), weights])
    return a, Moments(taken @ moments.mean, taken @ moments.covariance @ taken.T)


def _negative_shares(world: World, terms: Terms, a: float, steps: int) -> list[Number]:
    """The share of sequences on which each sum is below 0, on sequences drawn from p."""
    place, token = draw_sequences(world, steps)
    sums = terms.values[:, place, token].sum(-1)
    u, c = (sums[terms.names.index(name)] for name in ("k1", EXACT))
    below = torch.cat([sums, (u - a * (u - c)).unsqueeze(0), c.unsqueeze(0)]) < 0
    each = np.arange(below.shape[1])
    return [
        Number.of(clustered_mean(row.astype(np.float64), each, unit="probability", lower=0.0, upper=1.0))
        for row in below.numpy()
    ]


def draw_sequences(world: World, steps: int, count: int = SEQUENCES, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The place (0 at the start, else 1 + the token before) and the token at each step of drawn sequences."""
    reached = world.mass.cumsum(-1) / world.mass.sum(-1, keepdim=True)
    uniform = torch.from_numpy(np.random.default_rng(seed).random((steps, count)))
    place = torch.zeros(count, dtype=torch.int64)
    places: list[Tensor] = []
    tokens: list[Tensor] = []
    for row in uniform:
        token = torch.searchsorted(reached[place], row.unsqueeze(-1), right=True).squeeze(-1)
        places.append(place)
        tokens.append(token)
        place = token + 1
    return torch.stack(places, dim=1), torch.stack(tokens, dim=1)
