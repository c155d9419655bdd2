"""Derivatives of the public losses beyond the first: right where a loss is its own divergence, refused elsewhere."""

import pytest
import torch
from torch.autograd import forward_ad

from kleash import losses
from kleash.divergences import kl
from kleash.errors import CannotRunError
from kleash.linear import Head, LinearOptions, linear_kl, linear_objective
from kleash.losses import (
    Drawn,
    KLTerm,
    aggregate,
    controlled_kl_loss,
    distillation_loss,
    divergence_loss,
    dpo_loss,
    free_bits,
    future_kl_loss,
    implicit_reward,
    kl_loss,
    kl_per_dimension,
    response_log_ratio,
    sampled_tail_loss,
    tail_bucket_loss,
    top_k_distillation_loss,
    top_k_of,
)

RANDOM = torch.Generator().manual_seed(3)
AT, OTHER = (torch.randn(4, 3, 6, generator=RANDOM, dtype=torch.float64) for _ in range(2))
TRAINED = OTHER.clone().requires_grad_()
IDS = torch.randint(6, (4, 3), generator=RANDOM)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
WEIGHTS = torch.rand(4, 3, generator=RANDOM, dtype=torch.float64) + 0.5
LIKELIEST = OTHER.topk(2).indices
LOGQ = OTHER.log_softmax(-1)


def of_tokens(logits):
    return logits.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1)


TOKEN_LOGQ = of_tokens(OTHER)
HEAD = Head(torch.randn(9, 6, generator=RANDOM, dtype=torch.float64))
CHUNKED = LinearOptions(impl="chunked")


def exact_kl(logits):
    return kl(logits.log_softmax(-1), LOGQ)


def lists(logits):
    return top_k_of(logits.log_softmax(-1), LIKELIEST), top_k_of(LOGQ, LIKELIEST)


def log_ratios(logits):
    return response_log_ratio(of_tokens(logits), TOKEN_LOGQ, MASK)


def trained_by_objective(logits):
    def objective(terms, rows):
        return kl_loss(terms.token_logp, TOKEN_LOGQ.reshape(-1)[rows], MASK.reshape(-1)[rows])

    return linear_objective(logits, HEAD, IDS, OTHER, HEAD, objective, options=CHUNKED)[0]


SURROGATES = {
    "kl_loss": lambda z: kl_loss(of_tokens(z), TOKEN_LOGQ, MASK),
    "kl_loss of q": lambda z: kl_loss(TOKEN_LOGQ, of_tokens(z), MASK),
    "kl_loss weighted": lambda z: kl_loss(of_tokens(z), TOKEN_LOGQ, MASK, weights=WEIGHTS),
    "future_kl_loss": lambda z: future_kl_loss(of_tokens(z), WEIGHTS, MASK),
    "divergence_loss": lambda z: divergence_loss(of_tokens(z), TOKEN_LOGQ, MASK, divergence="jensen_shannon"),
    "controlled_kl_loss": lambda z: (
        controlled_kl_loss(of_tokens(z), TOKEN_LOGQ, exact_kl(z), MASK).per_sequence
    ),
    "sampled_tail_loss": lambda z: sampled_tail_loss(
        *lists(z), Drawn(LIKELIEST[..., 0].add(1) % 6, of_tokens(z), TOKEN_LOGQ), MASK
    ),
    "KLTerm": lambda z: KLTerm().per_token(of_tokens(z), TOKEN_LOGQ, MASK),
    "KLTerm.loss": lambda z: KLTerm().loss(of_tokens(z), TOKEN_LOGQ, MASK).value,
    "KLTerm of sequences": lambda z: KLTerm(
        estimator="exact", gradient="backpropagated", scope="sequence"
    ).per_token(of_tokens(z), TOKEN_LOGQ, MASK, token_kl=exact_kl(z)),
    "aggregate of kl_loss": lambda z: aggregate(kl_loss(of_tokens(z), TOKEN_LOGQ, MASK), MASK).value,
    "kl_loss in an objective": trained_by_objective,
    "kl_loss of a fused head": lambda z: kl_loss(
        -linear_kl(z, HEAD, OTHER, HEAD, options=CHUNKED), TOKEN_LOGQ, MASK
    ),
}
"""Losses whose gradient is not that of their value."""
EXACT = {
    "distillation_loss": lambda z: distillation_loss(OTHER, z, MASK, temperature=1.3),
    "distillation_loss of the teacher": lambda z: distillation_loss(z, TRAINED, MASK, divergence="reverse_kl"),
    "top_k_distillation_loss": lambda z: (
        top_k_distillation_loss(LIKELIEST, LOGQ.gather(-1, LIKELIEST), z, MASK)
    ),
    "tail_bucket_loss": lambda z: tail_bucket_loss(*lists(z), MASK),
    "KLTerm backpropagated": lambda z: (
        KLTerm(estimator="k2", gradient="backpropagated").per_token(of_tokens(z), TOKEN_LOGQ, MASK)
    ),
    "response_log_ratio": log_ratios,
    "dpo_loss": lambda z: dpo_loss(log_ratios(z)[:2], log_ratios(z)[2:], beta=0.4).loss,
    "implicit_reward": lambda z: implicit_reward(log_ratios(z), beta=0.4, divergence="jensen_shannon"),
    "aggregate": lambda z: aggregate(distillation_loss(OTHER, z, MASK), MASK, "sequence_mean").value,
    "kl_per_dimension": lambda z: kl_per_dimension(z, OTHER),
    "kl_per_dimension of variances": lambda z: kl_per_dimension(OTHER, z),
    "free_bits": lambda z: free_bits(kl_per_dimension(z[0], OTHER[0]), 0.3),
    "a reference head": lambda z: distillation_loss(
        OTHER, z, MASK
    ) + linear_kl(z, HEAD, OTHER, HEAD, options=LinearOptions(impl="reference")),
}  # fmt: skip
"""Losses that are functions like any other."""
WITHOUT_A_GRADIENT = {
    "ActiveUnits", "active_units", "AGGREGATIONS", "Aggregation", "ControlledLoss", "count_of",
    "cyclical_annealing", "Drawn", "ExtremeTokens", "extreme_tokens", "gkd_record", "linear_annealing",
    "PreferenceLoss", "require_log_probabilities", "TopK", "top_k_from", "top_k_of",
}  # fmt: skip


def test_every_public_loss_is_tested():
    covered = {name.split()[0].split(".")[0] for name in (*SURROGATES, *EXACT)}
    assert set(losses.__all__) == (covered & set(losses.__all__)) | WITHOUT_A_GRADIENT


def gradient(function, at, **how):
    leaf = at.clone().requires_grad_()
    return leaf, torch.autograd.grad(function(leaf).sum(), leaf, **how)[0]


DIRECTION = torch.randn(AT.shape, generator=RANDOM, dtype=torch.float64)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_has_one_derivative_in_backward_mode(name):
    """A second one would be that of a part of the divergence, or 0."""
    function = SURROGATES[name]
    assert gradient(function, AT)[1].abs().max() > 0
    with pytest.raises(CannotRunError, match=r"one\s+derivative|differentiated once"):
        leaf, first = gradient(function, AT, create_graph=True)
        torch.autograd.grad(first.square().sum(), leaf)
    refused = r"second or forward-mode derivatives|forward-mode derivative and cannot run inside"
    for transform in (
        lambda f: torch.func.hessian(f)(AT),
        lambda f: torch.func.jvp(f, (AT,), (DIRECTION,)),
        lambda f: torch.func.grad(lambda z: torch.func.grad(f)(z).square().sum())(AT),
    ):
        with pytest.raises(CannotRunError, match=refused):
            transform(lambda z: function(z).sum())
    with forward_ad.dual_level(), pytest.raises(CannotRunError, match=refused):
        function(forward_ad.make_dual(AT.clone().requires_grad_(), DIRECTION))


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_loss_has_every_derivative(name):
    """Against central differences of its gradient, and its gradient."""
    function, step = EXACT[name], 1e-5
    plain = gradient(function, AT)[1]
    moved = [gradient(function, AT + by * DIRECTION)[1] for by in (step, -step)]
    exact = (moved[0] - moved[1]) / (2 * step)
    leaf, first = gradient(function, AT, create_graph=True)
    (second,) = torch.autograd.grad((first * DIRECTION).sum(), leaf)
    torch.testing.assert_close(second, exact, rtol=1e-6, atol=1e-8)
    hessian = torch.func.hessian(lambda z: function(z).sum())(AT)
    torch.testing.assert_close((hessian * DIRECTION).sum((-3, -2, -1)), exact, rtol=1e-6, atol=1e-8)
    assert exact.abs().max() > 1e-3, "so small a second derivative would hide that it is 0"
    with forward_ad.dual_level():
        value = function(forward_ad.make_dual(AT.clone().requires_grad_(), DIRECTION)).sum()
        tangent = forward_ad.unpack_dual(value).tangent
    torch.testing.assert_close(tangent, (plain * DIRECTION).sum(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_an_attached_ratio_has_the_divergence_s_second_derivative_in_expectation(estimator):
    """Over all tokens: the ratio is 1 with every derivative of p / p, so p times it is p to any order."""
    term = KLTerm(estimator=estimator, gradient="ratio_attached", ratio="token")
    every = torch.ones(6, 1, dtype=torch.bool)

    def expected(logits):
        logp = logits.log_softmax(-1).unsqueeze(-1)
        drawn = term.per_token(logp, LOGQ[0, 0].unsqueeze(-1), every, behaviour_logp=logp.detach())
        return (logp.detach().exp() * drawn).sum()

    found, exact = (
        torch.autograd.functional.hessian(f, AT[0, 0])
        for f in (expected, lambda z: kl(z.log_softmax(-1), LOGQ[0, 0]))
    )
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
