"""Case (c): whole sequences of a random Markov model; means and variances by dynamic programming."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from markov_models import MarkovModel, random_markov
from torch import Tensor

from estimator_study.enumeration import (
    EXACT,
    EnumeratedPair,
    estimator_functions,
    relative_error,
)
from estimator_study.results import EstimatorRow, StudyCase

VOCAB_SIZE, STEPS = 50, 30
LOGIT_NOISE = (0.05, 0.2, 0.5, 1.0)
"""Scale of the standard normal noise between the logits of p and of q."""
SEQUENCES = 20_000
MIXTURE = "k1 − a(k1 − exact)"
WITH_FUTURE = "exact, future credited"


class Moments(NamedTuple):
    """Mean and covariance of several sums along a sequence."""

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
        p: the model that sequences are sampled from.
        first: the term of each first token, for each sum.
        then: the term of each later token, given the previous token (the middle axis).
        steps: tokens in a sequence.
    """
    mean = torch.zeros(len(first), len(p.first), dtype=torch.float64)
    second = torch.zeros(len(first), len(first), len(p.first), dtype=torch.float64)
    for _ in range(steps - 1):
        mean, second = _moments_one_step_earlier(p.then, then, mean, second)
    mean, second = _moments_one_step_earlier(p.first.unsqueeze(0), first.unsqueeze(1), mean, second)
    mean, second = mean.squeeze(-1), second.squeeze(-1)
    return Moments(mean, second - mean.unsqueeze(0) * mean.unsqueeze(1))


def _moments_one_step_earlier(
    logp: Tensor, terms: Tensor, mean: Tensor, second: Tensor
) -> tuple[Tensor, Tensor]:
    """First and second moments of the sums after one more token is prepended."""
    probs = logp.exp()
    after = terms + mean.unsqueeze(1)
    variance = second - mean.unsqueeze(0) * mean.unsqueeze(1)
    products = torch.einsum("bx,kbx,lbx->klb", probs, after, after)
    return (probs * after).sum(-1), products + torch.einsum("bx,klx->klb", probs, variance)


def with_gradients(model: MarkovModel) -> MarkovModel:
    """The model with logits that require a gradient."""
    return MarkovModel(first=model.first.clone().requires_grad_(), then=model.then.clone().requires_grad_())


def markov_pair(p: MarkovModel, q: MarkovModel, steps: int) -> EnumeratedPair:
    """Every context of a Markov sequence as a position: the start, and each previous token; visits under p."""
    logits = with_gradients(p)
    logp = torch.cat([logits.first.unsqueeze(0), logits.then]).log_softmax(-1)
    visits = torch.zeros(len(p.first) + 1, dtype=torch.float64)
    visits[0] = 1.0
    marginal = p.first.exp()
    for _ in range(steps - 1):
        visits[1:] += marginal
        marginal = marginal @ p.then.exp()
    return EnumeratedPair(
        logp=logp,
        logq=torch.cat([q.first.unsqueeze(0), q.then]),
        measure=torch.ones_like(logp),
        visits=visits,
        parameters=(logits.first, logits.then),
    )


def sequence_kl(pair: EnumeratedPair, steps: int) -> Tensor:
    """KL between whole sequences with its full gradient, including that of the probabilities of the prefixes."""
    divergences = (pair.logp.exp() * pair.log_ratio).sum(-1)
    later = torch.zeros_like(divergences[1:])
    for _ in range(steps - 1):
        later = divergences[1:] + pair.logp[1:].exp() @ later
    return divergences[0] + pair.logp[0].exp() @ later


def markov_case(
    noise: float, *, vocab_size: int = VOCAB_SIZE, steps: int = STEPS, seed: int = 0
) -> StudyCase:
    """Every estimator, summed along sequences of a random Markov model."""
    p = random_markov(vocab_size, seed=seed)
    pair = markov_pair(p, p.moved(seed + 1, noise), steps)
    kl = sequence_kl(pair, steps)
    terms = estimator_terms(pair)
    moments = moments_of_sums(p, terms.values[:, 0], terms.values[:, 1:], steps)
    a, moments = _with_mixture(moments, terms.names)
    credited = terms.of(EXACT) + pair.gradient(future_credit(p, pair, steps))
    gradients = [*terms.gradients, (1 - a) * terms.of("k1") + a * terms.of(EXACT), credited]
    kl_gradient = pair.gradient(kl)
    negative_shares = _negative_shares(pair, terms, a, steps)
    return StudyCase(
        name=f"markov-{noise:g}",
        title=f"Sequences of {steps} tokens, logits {noise:g} × noise apart",
        kl=kl.item(),
        rows=tuple(
            EstimatorRow(
                name=name,
                value=moments.mean[index].item(),
                bias=moments.mean[index].item() - kl.item(),
                standard_deviation=max(0.0, moments.covariance[index, index].item()) ** 0.5,
                negative_share=negative_shares[index],
                gradient_error=relative_error(gradients[index], kl_gradient),
            )
            for index, name in enumerate([*terms.names, MIXTURE, WITH_FUTURE])
        ),
        notes=(
            f"the control variate has a = {pair.control_weight():.3f} at each token, and the mixture a = {a:.3f}",
            f"the shares below 0 were counted on {SEQUENCES} sequences; everything else is exact",
        ),
    )


class Terms(NamedTuple):
    """The term of each token in each sum, and the expected gradient of backpropagating the sum."""

    names: tuple[str, ...]
    values: Float64[Tensor, "terms positions outcomes"]
    gradients: tuple[Tensor, ...]

    def of(self, name: str) -> Tensor:
        """The gradient of the sum called ``name``."""
        return self.gradients[self.names.index(name)]


def estimator_terms(pair: EnumeratedPair) -> Terms:
    """The terms of every estimator, and of the exact next-token KL."""
    values = {
        name: function(pair.log_ratio)
        for name, function in estimator_functions(pair.control_weight()).items()
    }
    exact = (pair.logp.exp() * pair.log_ratio).sum(-1, keepdim=True).expand_as(pair.logp)
    gradients = [pair.gradient(pair.mean(estimates)) for estimates in values.values()]
    return Terms(
        names=(*values, EXACT),
        values=torch.stack([*values.values(), exact]).detach(),
        gradients=(*gradients, pair.gradient(pair.kl())),
    )


def future_credit(p: MarkovModel, pair: EnumeratedPair, steps: int) -> Tensor:
    """A term of value 0 whose gradient is missing in the exact next-token KLs: the effect of a token on later KLs.

    sum_t log p(y_t | y_<t) sg(sum of the next-token KLs after y_t),   minus the same without a gradient
    """
    divergences = (pair.mass * pair.log_ratio.detach()).sum(-1)[1:]
    later = [torch.zeros_like(divergences)]
    for _ in range(steps - 1):
        later.append(divergences + p.then.exp() @ later[-1])
    scored = pair.mass * (pair.logp - pair.logp.detach())
    credit = scored[0] @ later[steps - 1]
    marginal = p.first.exp()
    for left in range(steps - 2, 0, -1):
        credit = credit + marginal @ (scored[1:] @ later[left])
        marginal = marginal @ p.then.exp()
    return credit


def _with_mixture(moments: Moments, names: tuple[str, ...]) -> tuple[float, Moments]:
    """The a that minimises the variance of ``U - a (U - C)``, and the moments with two sums appended.

    The first is that mixture; the second is C again, since future credit has value 0.
    """
    u, c = names.index("k1"), names.index(EXACT)
    both = moments.covariance[[u, u, c], [u, c, c]]
    a = ((both[0] - both[1]) / (both[0] - 2 * both[1] + both[2])).item()
    weights = torch.zeros(2, len(names), dtype=torch.float64)
    weights[0, u], weights[0, c], weights[1, c] = 1 - a, a, 1.0
    combinations = torch.cat([torch.eye(len(names), dtype=torch.float64), weights])
    return a, Moments(combinations @ moments.mean, combinations @ moments.covariance @ combinations.T)


def _negative_shares(pair: EnumeratedPair, terms: Terms, a: float, steps: int) -> list[float]:
    """The share of sampled sequences on which each sum is below 0."""
    context, token = sample_sequences(pair, steps)
    sums = terms.values[:, context, token].sum(-1)
    u, c = (sums[terms.names.index(name)] for name in ("k1", EXACT))
    below = torch.cat([sums, (u - a * (u - c)).unsqueeze(0), c.unsqueeze(0)]) < 0
    return below.double().mean(-1).tolist()


def sample_sequences(
    pair: EnumeratedPair, steps: int, count: int = SEQUENCES, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The context (0 at the start, else 1 + the previous token) and the token at each step of sampled sequences."""
    cumulative = pair.mass.cumsum(-1) / pair.mass.sum(-1, keepdim=True)
    uniform = torch.from_numpy(np.random.default_rng(seed).random((steps, count)))
    context = torch.zeros(count, dtype=torch.int64)
    contexts: list[Tensor] = []
    tokens: list[Tensor] = []
    for row in uniform:
        token = torch.searchsorted(cumulative[context], row.unsqueeze(-1), right=True).squeeze(-1)
        contexts.append(context)
        tokens.append(token)
        context = token + 1
    return torch.stack(contexts, dim=1), torch.stack(tokens, dim=1)
