"""linear_objective: the derivative of the loss in its terms, and the closed form in the logits."""

import pytest
import torch
from linear_cases import (
    CHUNKED,
    EVERY,
    PLAIN,
    REFERENCE,
    SMALL,
    TINY,
    chosen,
    head_case,
    in_float64,
    relative_rms,
    statistics_by_numpy,
)

from kleash.errors import ShapeError, VocabularyMismatchError
from kleash.linear import Head, TokenTerms, linear_objective

NAMES = ("hidden_p", "weight_p", "bias_p", "hidden_q", "weight_q", "bias_q")


def leaves(case):
    p, q = case.head_p, case.head_q
    return [
        None if x is None else x.detach().clone().requires_grad_()
        for x in (case.hidden_p, p.weight, p.bias, case.hidden_q, q.weight, q.bias)
    ]


def run(case, objective, options, tensors=None):
    hp, wp, bp, hq, wq, bq = tensors or leaves(case)
    head_p = Head(wp, bp, scale=case.head_p.scale, softcap=case.head_p.softcap)
    head_q = Head(wq, bq, scale=case.head_q.scale, softcap=case.head_q.softcap)
    (hp, head_p, hq, head_q), options = chosen((hp, head_p, hq, head_q), options)
    return linear_objective(
        hp, head_p, case.tokens, hq, head_q, objective, temperature=case.temperature, options=options
    )


def plainly(case, tensors) -> TokenTerms:
    """The terms from all logits, by torch's functions."""
    logs = []
    for (hidden, weight, bias), head in ((tensors[:3], case.head_p), (tensors[3:], case.head_q)):
        z = head.scale * (hidden @ weight.T + (0 if bias is None else bias))
        z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
        logs.append(torch.log_softmax(z / case.temperature, -1).flatten(0, -2))
    logp, logq = logs
    column = case.tokens.reshape(-1, 1)
    return TokenTerms(
        logp.gather(-1, column)[:, 0],
        logq.gather(-1, column)[:, 0],
        (logp.exp() * (logp - logq)).sum(-1),
        -(logp.exp() * logp).sum(-1),
    )


def mixture(random):
    """A nonlinear objective in which every term has another coefficient for each token."""
    a, b, c, d = torch.randn(4, 37, generator=random, dtype=torch.float64)

    def objective(terms, rows):
        wide = (a[rows], b[rows], c[rows], d[rows])
        a_, b_, c_, d_ = (x.to(terms.kl.dtype) for x in wide)
        ratio = torch.sigmoid(terms.token_logp - terms.token_logq)
        return a_ * ratio + b_ * terms.token_logq.square() + c_ * terms.kl.sqrt() + d_ * terms.entropy

    return objective


@EVERY
@pytest.mark.parametrize(
    "traits",
    [{"bias": True}, {"softcap": 4.0, "scale": 1.2, "bias": True, "temperature": 0.7}],
    ids=["plain", "softcap"],
)
def test_the_gradient_equals_autograd_through_the_whole_graph(options, traits):
    case = head_case(torch.float64, 1.0, vocab_size=53, **traits)
    tensors, objective = leaves(case), mixture(torch.Generator().manual_seed(3))
    loss, terms = run(case, objective, options, tensors)
    actual = torch.autograd.grad(2.0 * loss, tensors)
    whole = plainly(case, tensors)
    right = objective(whole, slice(0, 37)).sum()
    torch.testing.assert_close(loss, right)
    for name, a, b in zip(TokenTerms._fields, terms, whole, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    for name, a, b in zip(NAMES, actual, torch.autograd.grad(2.0 * right, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("distance", [2.0, 0.02], ids=["far", "near"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_error_is_that_of_float32_logits(dtype, distance):
    case = head_case(dtype, distance, bias=True)
    objective = mixture(torch.Generator().manual_seed(3))

    def actual(of_case, options):
        tensors = leaves(of_case)
        loss, terms = run(of_case, objective, options, tensors)
        return *terms, *torch.autograd.grad(loss, tensors)

    exact, plain, ours = actual(in_float64(case), REFERENCE), actual(case, PLAIN), actual(case, SMALL)
    for number, (right, cheap, mine) in enumerate(zip(exact, plain, ours, strict=True)):
        budget = 2.5 if dtype == torch.bfloat16 and number >= 4 else 1.5
        assert relative_rms(mine, right) <= budget * relative_rms(cheap, right) + 1e-6, number


@EVERY
def test_terms_equal_numpy_in_float64(options):
    case = head_case(torch.float64, distance=1.0, tokens=(3, 13), vocab_size=601, bias=True, softcap=6.0)
    _, terms = run(case, lambda terms, rows: terms.kl, options)
    right = statistics_by_numpy(case)
    for a, b in zip(terms, (right.token_logp, right.token_logq, right.kl_pq, right.entropy_p), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        assert a.shape == (3, 13) and not a.requires_grad


def test_rows_are_the_slice_of_the_chunks_tokens():
    case = head_case(torch.float32, tokens=(5, 7))
    seen = []

    def objective(terms, rows):
        seen.append((rows.start, rows.stop, len(terms.kl)))
        return terms.kl

    run(case, objective, TINY)
    assert seen == [(n, n + 1, 1) for n in range(35)]
    seen.clear()
    run(case, objective, CHUNKED)
    assert seen == [(0, 35, 35)]


@EVERY
def test_tokens_of_probability_0_and_far_distributions(options):
    """Logits of minus infinity on both sides, and of q where p underflows."""
    never = -torch.inf
    z = torch.tensor([[0.0, 1.0, never, 2.0], [0.0, 90.0, 5.0, -30.0], [0.0, 1.0, 2.0, 3.0]])
    y = torch.tensor([[1.0, 0.0, never, 2.0], [99.0, -50.0, 5.0, 0.0], [0.1, 1.0, 2.0, 3.0]])
    ids = torch.tensor([1, 0, 3])
    grads = []
    for dtype, choice in ((torch.float64, REFERENCE), (torch.float32, options)):
        actual = []
        for both in (True, False):
            zp, zq = z.to(dtype).requires_grad_(), y.to(dtype).requires_grad_(both)
            loss, terms = linear_objective(
                zp, Head(None), ids, zq, Head(None),
                lambda t, rows: t.kl + 0.5 * t.token_logp - 0.3 * t.entropy + 0.2 * t.token_logq, options=choice,
            )  # fmt: skip
            actual += [*terms, *torch.autograd.grad(loss, (zp, zq) if both else (zp,))]
        grads.append(actual)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b.double(), a, rtol=1e-4, atol=1e-5)


def test_invalid_objectives_raise(unhooked):
    case = head_case(torch.float32, tokens=(4,))
    with pytest.raises(ShapeError, match=r"was given 4 tokens and returned losses of shape \(\)"):
        run(case, lambda terms, rows: terms.kl.mean(), CHUNKED)
    with pytest.raises(ShapeError, match="was given 4 tokens and returned None; return one loss"):
        run(case, lambda terms, rows: None, CHUNKED)
    case.tokens = torch.tensor([0, 1, 2, 101])
    with pytest.raises(VocabularyMismatchError, match="from 0 to 101 and the heads cover 101"):
        run(case, lambda terms, rows: terms.kl, CHUNKED)


def test_the_gradient_is_0_where_reward_and_kl_balance():
    """The optimum of E_p r - beta KL(p || q) is p ~ q exp(r / beta); the expectation is a finite sum."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(6, generator=random, dtype=torch.float64)
    reward, beta = torch.tensor([0.0, 1.0, 0.0, 0.3, -1.0, 0.0], dtype=torch.float64), 0.5
    ids = torch.arange(6)
    for start, balanced in ((q + reward / beta, True), (q, False), (q + reward, False)):
        z = start.clone().requires_grad_()
        p = start.softmax(-1)

        def objective(terms, rows, p=p):
            return p[rows] * (beta * terms.kl - reward[rows] * terms.token_logp)

        rows = z.expand(6, 6)
        loss, _ = linear_objective(rows, Head(None), ids, q.expand(6, 6), Head(None), objective)
        loss.backward()
        assert bool(z.grad.abs().max() < 1e-12) is balanced


@pytest.mark.parametrize("options", [CHUNKED, TINY], ids=["chunked", "tiny"])
def test_large_logits_lose_no_digits_of_log_probabilities(options):
    random = torch.Generator().manual_seed(0)
    z = 110 + 15 * torch.rand(64, 1, generator=random) + torch.randn(64, 40, generator=random)
    y = z + 0.1 * torch.randn(64, 40, generator=random)
    ids = z.argmax(-1)
    _, actual = linear_objective(
        z, Head(None), ids, y, Head(None), lambda terms, rows: terms.kl, options=options
    )
    exact = [x.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0] for x in (z, y)]
    assert (actual.token_logp - exact[0]).abs().max() < 5e-7
    assert (actual.token_logq - exact[1]).abs().max() < 2e-6


@EVERY
def test_a_term_with_coefficient_0_may_be_infinite(options):
    """q gives probability 0 to a token of p: KL is inf, and the loss does not read it."""
    z = torch.tensor([[0.0, 1.0, 2.0], [0.5, 0.0, 1.0]], dtype=torch.float64).requires_grad_()
    y = torch.tensor([[0.0, -torch.inf, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    ids = torch.tensor([2, 0])
    loss, terms = linear_objective(
        z, Head(None), ids, y, Head(None), lambda t, rows: -t.token_logp, options=options
    )
    (actual,) = torch.autograd.grad(loss, z)
    right = z.detach().softmax(-1) - torch.nn.functional.one_hot(ids, 3)
    assert terms.kl[0] == torch.inf and terms.kl[1] > 0
    torch.testing.assert_close(actual, right)
