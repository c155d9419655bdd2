"""The chunked loop: its sizes, shared and frozen heads, far rows, autocast, checkpointing, bfloat16."""

import pytest
import torch
from linear_cases import CHUNKED, REFERENCE, SMALL, TINY, head_case, leaves_of, relative_rms
from torch.utils.checkpoint import checkpoint

from kleash.linear import (
    Head,
    LinearOptions,
    chunked,
    linear_divergence,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    log_probabilities,
)
from kleash.linear.checks import checked_pair
from kleash.linear.chunked import COMPILED_BUFFERS, ENOUGH_TOKENS, ROW_BUFFERS, plan_chunks
from kleash.linear.pair import HeadPair


def shared(dtype, distance, **traits):
    case = head_case(dtype, distance, tokens=(29,), vocab_size=211, bias=True, **traits)
    case.hidden_q = (case.hidden_p.double() + distance * torch.randn(29, 13, dtype=torch.float64)).to(dtype)
    case.head_q = case.head_p
    return case


@pytest.mark.parametrize("traits", [{}, {"scale": 0.7}, {"softcap": 3.0}, {"temperature": 1.6}], ids=str)
@pytest.mark.parametrize("options", [SMALL, TINY], ids=["small", "tiny"])
def test_one_head_for_both_models(options, traits):
    torch.manual_seed(0)
    case = shared(torch.float64, 0.5, **traits)
    hidden = [x.clone().requires_grad_() for x in (case.hidden_p, case.hidden_q)]
    weight, bias = case.head_p.weight.clone().requires_grad_(), case.head_p.bias.clone().requires_grad_()
    head = Head(weight, bias, scale=case.head_p.scale, softcap=case.head_p.softcap)
    leaves = *hidden, weight, bias
    weights = torch.linspace(-1, 2.1, 29, dtype=torch.float64)
    objective = lambda t, rows: weights[rows] * (t.kl + t.token_logp - t.entropy + t.token_logq)  # noqa: E731
    results = []
    for choice in (REFERENCE, options):
        arguments = {"temperature": case.temperature, "options": choice}
        loss = linear_kl_loss(hidden[0], head, hidden[1], head, weights=weights, **arguments).loss
        values = (linear_kl(hidden[0], head, hidden[1], head, **arguments) * weights).sum()
        other, _ = linear_objective(hidden[0], head, case.tokens, hidden[1], head, objective, **arguments)
        results.append([x for y in (loss, values, other) for x in (y, *torch.autograd.grad(y, leaves))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jensen_shannon"])
def test_with_frozen_heads_the_backward_pass_computes_no_products(name, monkeypatch):
    """The gradient in the hidden states is computed with the values, and scaled row by row."""
    case = head_case(torch.float64, 1.0, tokens=(17,), vocab_size=31, bias=True)
    weights = torch.linspace(-1, 2, 17, dtype=torch.float64)
    weights[3] = 0.0
    grads = []
    for options in (REFERENCE, SMALL):
        hidden = case.hidden_p.clone().requires_grad_(), case.hidden_q.clone().requires_grad_()
        values = linear_divergence(
            hidden[0], case.head_p, hidden[1], case.head_q, divergence=name, options=options
        )
        total = torch.where(weights != 0, values * weights, 0.0).sum()
        with monkeypatch.context() as patch:
            if options is SMALL:
                patch.setattr(chunked, "value_and_grad", None)
            grads.append(torch.autograd.grad(total, hidden))
    read = weights != 0
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a[read], b[read])
        assert (b[~read] == 0).all()


def test_values_and_gradients_do_not_depend_on_where_chunks_end():
    case = head_case(torch.float64, tokens=(31,), vocab_size=70, bias=True)
    weights = torch.linspace(-1, 2.2, 31, dtype=torch.float64)
    case.head_p.weight.requires_grad_()
    actual = []
    for bytes_ in (10**9, 1, 2_000, 9_001, 33_333):
        options = LinearOptions(buffer_bytes=bytes_)
        loss = linear_kl_loss(*case.models, weights=weights, options=options).loss
        actual.append(torch.autograd.grad(loss, case.head_p.weight)[0])
    for other in actual[1:]:
        torch.testing.assert_close(other, actual[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    case = head_case(torch.float64, 1.0, tokens=(11,), vocab_size=31)
    body = torch.nn.Linear(13, 13, dtype=torch.float64)
    weights = torch.linspace(0.1, 1, 11, dtype=torch.float64)

    def loss(x):
        return linear_kl_loss(body(x), case.head_p, case.hidden_q, case.head_q, weights=weights).loss

    def mean(x):
        return (linear_kl(body(x), case.head_p, case.hidden_q, case.head_q) * weights).sum()

    case.head_p.weight.requires_grad_()
    grads = []
    for function, outside in ((loss, True), (mean, True), (loss, False), (mean, False)):
        x = case.hidden_p.clone().requires_grad_()
        body.zero_grad()
        case.head_p.weight.grad = None
        actual = function(x) if outside else checkpoint(function, x, use_reentrant=reentrant)
        actual.backward()
        grads.append((actual.detach(), x.grad, body.weight.grad.clone(), case.head_p.weight.grad))
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_gradients_with_and_without_fast_bfloat16_products(fast, monkeypatch):
    monkeypatch.setattr(
        "kleash.linear.gradient_sums.has_bfloat16_gradient",
        lambda model: fast and model.dtype == torch.float32,
    )
    case = head_case(torch.bfloat16, 1.0, tokens=(23,), vocab_size=301)
    leaves = case.hidden_p.clone().requires_grad_(), case.head_p.weight.clone().requires_grad_()
    right = case.hidden_p.double().requires_grad_(), case.head_p.weight.double().requires_grad_()
    actual = []
    for (hidden, weight), dtype in ((right, torch.float64), (leaves, torch.bfloat16)):
        other = case.hidden_q.to(dtype), Head(case.head_q.weight.to(dtype))
        loss = linear_kl_loss(hidden, Head(weight), *other, weights=torch.ones(23), options=SMALL).loss
        actual.append(torch.autograd.grad(loss, (hidden, weight)))
    for a, b in zip(*actual, strict=True):
        assert b.dtype == torch.bfloat16
        assert relative_rms(b, a) < (4e-3 if fast else 2e-3)


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "hellinger"])
@pytest.mark.parametrize("place", [1, 5], ids=["weight_p", "bias_q"])
def test_recomputed_gradients_of_one_model(place, name):
    case = head_case(torch.float64, 0.7, tokens=(9,), vocab_size=31, bias=True)
    weights, actual = torch.linspace(-1, 2.2, 9, dtype=torch.float64), []
    for options in (REFERENCE, CHUNKED):
        tensors, of = leaves_of(case, name)
        tensors = [x if n == place else x.detach() for n, x in enumerate(tensors)]
        (gradient,) = torch.autograd.grad((of(options)(*tensors) * weights).sum(), tensors[place])
        actual.append(gradient)
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-9, atol=1e-12)
    assert actual[0].abs().sum() > 0


def pair_of(vocab_size, dim=64, dtype=torch.bfloat16, tokens=8192):
    hidden = torch.empty(tokens, dim, dtype=dtype)
    head = Head(torch.empty(vocab_size, dim, dtype=dtype))
    return checked_pair((hidden, head), (hidden, head), 1.0)


@pytest.mark.parametrize("vocab_size", [1000, 32_768, 151_936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_chunk_fits_the_memory(vocab_size, dtype, is_compiled):
    pair = pair_of(vocab_size, dtype=dtype)
    for nbytes in (2**20, 2**24, 2**27):
        plan = plan_chunks(pair, LinearOptions(buffer_bytes=nbytes), pair.tokens, is_compiled)
        logits = 2 * plan.chunk_tokens * vocab_size * 4
        rows = plan.block_rows * vocab_size * (COMPILED_BUFFERS * 4 if is_compiled else ROW_BUFFERS * 8)
        assert logits + rows <= nbytes or plan.chunk_tokens == 1
        assert plan.chunk_tokens <= ENOUGH_TOKENS
        assert 2 * logits + rows > nbytes / 4 or plan.chunk_tokens == ENOUGH_TOKENS


def test_a_gpu_gets_1024_tokens_a_chunk_and_few_blocks(monkeypatch):
    """With 128 MiB a chunk would have 110 tokens of 151 936 logits; each reads all weights, each block takes .5 ms."""
    pair = pair_of(151_936)
    monkeypatch.setattr(HeadPair, "device", property(lambda self: torch.device("cuda", 0)))
    plan = plan_chunks(pair, LinearOptions(), pair.tokens, True)
    assert plan.chunk_tokens == ENOUGH_TOKENS and plan.block_rows >= ENOUGH_TOKENS
    small = plan_chunks(pair, LinearOptions(buffer_bytes=2**27), pair.tokens, True)
    assert 50 < small.chunk_tokens < ENOUGH_TOKENS and small.block_rows >= small.chunk_tokens


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("function", [linear_kl, linear_kl_loss])
def test_gradients_of_a_backward_pass_under_autocast_are_those_without(function, impl):
    """Nothing is rounded, forward or backward."""
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in ((6, 16), (40, 16), (6, 16), (40, 16))]
    found = []
    for enabled in (False, True):
        hidden_p, weight_p, hidden_q, weight_q = (x.clone().requires_grad_() for x in given)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            options = LinearOptions(impl=impl)
            more = {"weights": torch.ones(6)} if function is linear_kl_loss else {}
            value = function(hidden_p, Head(weight_p), hidden_q, Head(weight_q), options=options, **more)
            loss = value.sum() if isinstance(value, torch.Tensor) else value.loss
            gradients = torch.autograd.grad(loss, [hidden_p, weight_p, hidden_q, weight_q], allow_unused=True)
            logp = log_probabilities(hidden_p.detach(), Head(weight_p.detach()))
        found.append([loss.detach(), logp, *(x for x in gradients if x is not None)])
    for plain, under_autocast in zip(*found, strict=True):
        torch.testing.assert_close(under_autocast, plain, rtol=1e-6, atol=1e-6)
