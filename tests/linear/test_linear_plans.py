"""Plans of the chunked backend: shared heads, frozen heads, near and far rows, autocast, checkpointing."""

import pytest
import torch
from linear_cases import (
    CHUNKED,
    NATIVE,
    REFERENCE,
    SMALL,
    TINY,
    head_case,
    in_float64,
    leaves_of,
    relative_rms,
)
from torch.utils.checkpoint import checkpoint

from kleash.divergences import kl
from kleash.linear import (
    Head,
    LinearOptions,
    linear_divergence_loss,
    linear_kl,
    linear_kl_loss,
    linear_objective,
)
from kleash.linear.impl import chunk_loop, kl_fast
from kleash.linear.impl.chunked import ChunkedBackend
from kleash.linear.impl.fallback import fallback_kl, replace_failed_gradients_
from kleash.linear.impl.project import has_bfloat16_gradient
from kleash.linear.impl.row_statistics import gradient_rows


def logits(distance, rows=9, vocab_size=257, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    zp = 2 * torch.randn(rows, vocab_size, generator=random, dtype=torch.float64)
    zq = zp + distance * torch.randn(rows, vocab_size, generator=random, dtype=torch.float64) + 3.0
    return zp.to(dtype), zq.to(dtype)


def truth(zp, zq, weight):
    """Value and gradients by autograd in float64."""
    rows = [z.double().detach().clone().requires_grad_() for z in (zp, zq)]
    value = kl(*(z - z.logsumexp(-1, keepdim=True) for z in rows))
    return value.detach(), *torch.autograd.grad(value, rows, weight.double())


@pytest.mark.parametrize("distance", [8.0, 1.0, 0.05, 1e-3, 1e-4])
def test_kl_fast_and_the_tanh_form_agree(distance):
    zp, zq = logits(distance)
    weight = torch.linspace(-1, 2, 9)
    exact, steady = truth(zp, zq, weight), gradient_rows(zp, zq, weight)
    actual = kl_fast.kl_gradient_rows(zp, zq, weight)
    replace_failed_gradients_(actual, zp, zq, weight, q_is_delta=False)
    (value,) = kl_fast.kl_rows(zp, zq)
    value = torch.where(value.isfinite(), value, fallback_kl(zp, zq)[0])
    for number, (right, other, ours) in enumerate(zip(exact, steady, actual, strict=True)):
        assert relative_rms(ours, right) <= 1.5 * relative_rms(other, right) + 1e-6, number
    torch.testing.assert_close(value, actual[0], rtol=1e-4, atol=0)


def test_kl_fast_marks_rows_that_it_cannot_compute():
    never = -torch.inf
    zp = torch.tensor(
        [[0.0, 1.0, 2.0], [0.0, -60.0, 0.0], [0.0, never, 1.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    )
    zq = torch.tensor(
        [[0.0, 1.0, 2.0], [0.0, 0.0, 0.0], [0.0, never, 0.0], [0.0, 1.0, 2.000001], [1.0, 0.5, 2.0]]
    )
    (actual,) = kl_fast.kl_rows(zp, zq)
    assert (
        actual[0] == 0
        and actual[1].isnan()
        and actual[2].isnan()
        and actual[3] == -torch.inf
        and actual[4] > 0
    )
    (mended,) = fallback_kl(zp, zq)
    right = truth(zp, zq, torch.ones(5))[0]
    torch.testing.assert_close(mended.double(), right, rtol=1e-5, atol=0)


@pytest.mark.parametrize("distance", [5.0, 1e-2, 1e-6])
def test_kl_from_the_difference_of_the_logits_has_all_digits(distance):
    """``zq - zp`` in float32 has more digits than the difference of two float32 logits."""
    zp, zq = logits(distance, dtype=torch.float64)
    zq = zq - 3.0
    ahead = zq - zp
    weight = torch.linspace(-1, 2, 9)
    exact = truth(zp, zq, weight)
    actual = kl_fast.kl_gradient_rows(zp.float(), ahead.float(), weight, q_is_delta=True)
    replace_failed_gradients_(actual, zp.float(), ahead.float(), weight, q_is_delta=True)
    for right, ours in zip(exact, actual, strict=True):
        assert relative_rms(ours, right) < 3e-6
    (value,) = kl_fast.kl_rows(zp.float(), ahead.float(), q_is_delta=True)
    value = torch.where(value.isfinite(), value, fallback_kl(zp.float(), ahead.float(), q_is_delta=True)[0])
    assert relative_rms(value, exact[0]) < 3e-6


def shared(dtype, distance, **traits):
    case = head_case(dtype, distance, tokens=(29,), vocab_size=211, bias=True, **traits)
    case.hidden_q = (case.hidden_p.double() + distance * torch.randn(29, 13, dtype=torch.float64)).to(dtype)
    case.head_q = case.head_p
    return case


@pytest.mark.parametrize("traits", [{}, {"scale": 0.7}, {"softcap": 3.0}, {"temperature": 1.6}], ids=str)
@pytest.mark.parametrize(
    "options", [CHUNKED, SMALL, TINY, NATIVE], ids=["chunked", "small", "tiny", "native"]
)
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


def test_a_shared_head_keeps_digits_that_two_products_lose():
    torch.manual_seed(0)
    case = shared(torch.float32, 1e-4)
    case.hidden_q = case.hidden_p + 1e-4 * torch.randn(29, 13)
    wide = Head(case.head_p.weight.double(), case.head_p.bias.double())
    exact = linear_kl(case.hidden_p.double(), wide, case.hidden_q.double(), wide, options=REFERENCE)
    copy = Head(case.head_p.weight.clone(), case.head_p.bias.clone())
    shared_head = linear_kl(case.hidden_p, case.head_p, case.hidden_q, case.head_p)
    two = linear_kl(case.hidden_p, case.head_p, case.hidden_q, copy)
    assert exact.max() < 1e-6
    assert (
        relative_rms(shared_head, exact) < 1e-5
        and relative_rms(shared_head, exact) < relative_rms(two, exact) / 20
    )


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jensen_shannon"])
def test_with_frozen_heads_the_backward_pass_computes_no_products(name, monkeypatch):
    """The gradient in the hidden states is computed with the values, and scaled row by row."""
    case = head_case(torch.float64, 1.0, tokens=(17,), vocab_size=31, bias=True)
    weights = torch.linspace(-1, 2, 17, dtype=torch.float64)
    case.hidden_p[3] = torch.nan
    weights[3] = 0.0
    grads = []
    for options in (REFERENCE, SMALL):
        hidden = case.hidden_p.clone().requires_grad_(), case.hidden_q.clone().requires_grad_()
        from kleash.linear import linear_divergence

        values = linear_divergence(
            hidden[0], case.head_p, hidden[1], case.head_q, divergence=name, options=options
        )
        total = torch.where(weights != 0, values * weights, 0.0).sum()
        with monkeypatch.context() as patch:
            if options is SMALL:
                patch.setattr(ChunkedBackend, "value_and_grad", None)
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


@pytest.mark.parametrize("name", ["kl", "jensen_shannon"])
def test_autocast_rounds_neither_loss_nor_gradient(name):
    case = head_case(torch.float32, 0.05, tokens=(11,))
    actual = []
    for inside in (False, True):
        leaf = case.head_p.weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            loss, per_token = linear_divergence_loss(
                case.hidden_p, Head(leaf), case.hidden_q, case.head_q, weights=torch.ones(11), divergence=name
            )
            values = linear_kl(case.hidden_p, Head(leaf), case.hidden_q, case.head_q).sum()
            grads = *torch.autograd.grad(loss, leaf), *torch.autograd.grad(values, leaf)
        actual.append((loss.detach(), per_token, *grads))
    for a, b in zip(*actual, strict=True):
        assert torch.equal(a, b) and a.dtype == torch.float32


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


def test_which_gradients_are_taken_in_bfloat16():
    def model(dtype, head):
        from kleash.linear.checks import checked_pair

        hidden = torch.zeros(2, 3, dtype=dtype)
        return checked_pair((hidden, head), (hidden, head), 1.0).p

    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    both = torch.bfloat16
    assert has_bfloat16_gradient(model(both, Head(torch.zeros(5, 3, dtype=both)))) is fast
    assert not has_bfloat16_gradient(model(both, Head(torch.zeros(5, 3))))
    assert not has_bfloat16_gradient(model(torch.float32, Head(torch.zeros(5, 3, dtype=both))))
    assert not has_bfloat16_gradient(model(torch.float16, Head(torch.zeros(5, 3, dtype=torch.float16))))
    assert not has_bfloat16_gradient(model(both, Head(None)))


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_gradients_with_and_without_fast_bfloat16_products(fast, monkeypatch):
    monkeypatch.setattr("kleash.linear.impl.project._cpu_is_fast_at_bfloat16", lambda: fast)
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


def test_the_gradient_of_a_bfloat16_weight_of_both_models_keeps_its_direction():
    """The gradients of the two models nearly cancel."""
    torch.manual_seed(0)
    hidden = torch.randn(40, 16).bfloat16()
    other = (hidden.float() + 0.01 * torch.randn(40, 16)).bfloat16()
    weight = torch.randn(211, 16).bfloat16()
    actual = []
    for dtype in (torch.float64, torch.bfloat16):
        leaf = weight.to(dtype).requires_grad_()
        head = Head(leaf)
        loss = linear_kl_loss(hidden.to(dtype), head, other.to(dtype), head, weights=torch.ones(40)).loss
        actual.append(torch.autograd.grad(loss, leaf)[0].double().flatten())
    assert torch.nn.functional.cosine_similarity(*actual, dim=0) > 0.9999


@pytest.mark.parametrize("options", [CHUNKED, TINY, NATIVE], ids=["chunked", "tiny", "native"])
def test_one_head_for_both_models_however_far_apart(options):
    torch.manual_seed(0)
    case = shared(torch.float64, 0.5)
    case.hidden_q[3], case.hidden_p[5], case.hidden_q[7] = (
        40 * case.hidden_q[3],
        -60 * case.hidden_p[5],
        torch.nan,
    )
    hidden = [x.clone().requires_grad_() for x in (case.hidden_p, case.hidden_q)]
    weights = torch.linspace(0.1, 1, 29, dtype=torch.float64)
    objective = lambda t, rows: weights[rows] * (t.kl + t.token_logp + t.token_logq)  # noqa: E731
    results = []
    for choice in (REFERENCE, options):
        values = linear_kl(hidden[0], case.head_p, hidden[1], case.head_p, options=choice)
        with torch.no_grad():
            plain = linear_kl(hidden[0], case.head_p, hidden[1], case.head_p, options=choice)
        other, terms = linear_objective(
            hidden[0], case.head_p, case.tokens, hidden[1], case.head_p, objective, options=choice
        )
        gradients = (
            *torch.autograd.grad((values * weights).sum(), hidden),
            *torch.autograd.grad(other, hidden),
        )
        results.append((values, plain, *terms, *gradients))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, equal_nan=True)
    assert results[0][0][[3, 5]].min() > 20 and results[0][0][7].isnan()
    assert results[0][0].isnan().sum() == 1


@pytest.fixture
def products(monkeypatch):
    """The numbers of tokens of all logit products, of both models."""
    counted = []
    original = chunk_loop.multiply_

    def multiply_(out, *rest):
        counted.append(len(out))
        original(out, *rest)

    monkeypatch.setattr(chunk_loop, "multiply_", multiply_)
    return counted


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jensen_shannon"])
@pytest.mark.parametrize(
    ("buffer_bytes", "again"),
    [(2**27, {0}), (90_000, set(range(20, 46, 2))), (1, {44})],
    ids=["whole", "some", "one"],
)
def test_the_logits_of_the_last_chunk_are_not_computed_again(buffer_bytes, again, name, products):
    """The saved gradient is scaled by the incoming one; a retained graph gives the same gradient again."""
    case = head_case(torch.float64, 0.7, tokens=(25,), vocab_size=211, bias=True, softcap=5.0)
    weights = torch.linspace(-1, 2.2, 25, dtype=torch.float64)
    weights[[3, 23]] = 0.0
    options = LinearOptions(buffer_bytes=buffer_bytes, compile="never")
    tensors, of = leaves_of(case, name)
    right = torch.autograd.grad((of(REFERENCE)(*tensors) * weights).sum(), tensors)
    tensors[0].data[23] = torch.nan
    products.clear()
    values = of(options)(*tensors)
    assert sum(products) == 50
    for retain, cost in ((True, {46}), (True, {46}), (False, again)):
        products.clear()
        actual = torch.autograd.grad(values, tensors, weights, retain_graph=retain)
        assert sum(products) in cost
        for a, b in zip(right, actual, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)


def test_a_saved_gradient_is_not_used_if_the_incoming_gradient_is_0(products):
    case = head_case(torch.float32, tokens=(4,), vocab_size=11)
    case.hidden_p[2] = torch.nan
    case.head_p.weight.requires_grad_()
    (case.kl() * 0.0).nan_to_num().sum().backward()
    assert (case.head_p.weight.grad == 0).all() and sum(products) == 8


def test_a_saved_bfloat16_gradient_is_no_less_accurate():
    case = head_case(torch.bfloat16, 0.3, tokens=(30,), vocab_size=301, bias=True)
    weights = torch.linspace(-1, 2, 30)
    actual = []
    for each, options in ((in_float64(case), REFERENCE), (case, REFERENCE), (case, CHUNKED)):
        tensors, of = leaves_of(each)
        actual.append(torch.autograd.grad((of(options)(*tensors) * weights).sum(), tensors))
    for right, plain, ours in zip(*actual, strict=True):
        assert relative_rms(ours, right) <= 2.0 * relative_rms(plain, right) + 1e-6


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "hellinger"])
@pytest.mark.parametrize("place", [1, 5], ids=["weight_p", "bias_q"])
def test_saved_gradients_of_one_model(place, name):
    case = head_case(torch.float64, 0.7, tokens=(9,), vocab_size=31, bias=True)
    weights, actual = torch.linspace(-1, 2.2, 9, dtype=torch.float64), []
    for options in (REFERENCE, CHUNKED):
        tensors, of = leaves_of(case, name)
        tensors = [x if n == place else x.detach() for n, x in enumerate(tensors)]
        (gradient,) = torch.autograd.grad((of(options)(*tensors) * weights).sum(), tensors[place])
        actual.append(gradient)
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-9, atol=1e-12)
    assert actual[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "sizes"), [("kl", range(7000, 15_000, 1500)), ("jensen_shannon", range(13_000, 21_000, 2000))]
)
def test_the_last_chunk_is_saved_with_the_plan_of_all_tokens(name, sizes):
    """With fewer tokens, the tiles of an upcast weight are larger, and so the memory for logits smaller."""
    case = head_case(torch.bfloat16, 0.5, tokens=(40,), vocab_size=101, bias=True)
    weights, actual = torch.linspace(-1, 2, 40), []
    kl_fast = ((case, LinearOptions(buffer_bytes=size, compile="never")) for size in sizes)
    for each, options in ((in_float64(case), REFERENCE), (case, REFERENCE), *kl_fast):
        tensors, of = leaves_of(each, name)
        actual.append(torch.autograd.grad((of(options)(*tensors) * weights).sum(), tensors))
    for right, plain, *ours in zip(*actual, strict=True):
        for gradient in ours:
            assert relative_rms(gradient, right) <= 2.5 * relative_rms(plain, right) + 1e-6
