import math

import pytest
import torch
from compiling import compiles
from distributions import gradients, log, pairs
from hypothesis import given, settings
from textbook import textbook

from kleash.divergences import DIVERGENCES, cross_entropy, divergence, entropy, kl, renyi
from kleash.divergences.truncation import at_temperature, truncate
from kleash.errors import NotProbabilitiesError, UnknownNameError, VocabularyMismatchError
from kleash.losses import top_k_of

NAMES = sorted(DIVERGENCES)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(pair=pairs(spread=2000.0) | pairs(spread=3.0))
def test_divergences_agree_with_the_textbook_for_close_pairs_and_beyond_underflow(name, pair):
    logp, logq = pair
    got, expected = divergence(name, logp, logq).item(), textbook(name, logp, logq)
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-15 if name != "hellinger" else 1e-8)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(pair=pairs(spread=150.0))
def test_float32_overflows_only_where_the_value_overflows(name, pair):
    logp, logq = (x.float() for x in pair)
    got, expected = divergence(name, logp, logq), textbook(name, logp, logq)
    assert got.dtype == torch.float32
    if expected < 1e38:
        assert got.item() == pytest.approx(expected, rel=1e-4, abs=1e-6 if name != "hellinger" else 1e-3)
    else:
        assert got > 1e37


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(pair=pairs(spread=300.0))
def test_divergences_are_nonnegative_and_exactly_zero_for_equal_arguments(name, pair):
    logp, logq = pair
    assert divergence(name, logp, logq) >= 0
    assert divergence(name, logp, logp) == 0
    assert divergence(name, logq.float(), logq.float()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(pair=pairs(spread=120.0))
def test_gradients_are_finite_where_the_value_is(name, dtype, pair):
    logits = [x.to(dtype) for x in pair]
    value = divergence(name, *(x.log_softmax(-1) for x in logits))
    if value.isfinite() and (name != "hellinger" or value > 1e-4):
        for gradient in gradients(lambda p, q: divergence(name, p, q), *logits):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_zero_for_equal_arguments(name):
    logits = torch.tensor([[0.3, -1.0, -torch.inf, 2.0]], dtype=torch.float64)
    for gradient in gradients(lambda p, q: divergence(name, p, q), logits, logits):
        torch.testing.assert_close(gradient, torch.zeros_like(logits), rtol=0, atol=1e-15)


def test_gradients_with_a_zero_on_one_side():
    """p = (1, 0), q = (.6, .4): KL = -log q1, and the zero has no gradient."""
    logits_p, logits_q = torch.tensor([0.0, -torch.inf]), torch.tensor([0.6, 0.4]).log()
    in_p, in_q = gradients(kl, logits_p, logits_q)
    torch.testing.assert_close(in_p, torch.zeros(2))
    torch.testing.assert_close(in_q, torch.tensor([-0.4, 0.4]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, torch.inf) for name in ("kl", "reverse_kl", "jeffreys", "chi_squared")),
        *(("jensen_shannon", math.log(2)), ("total_variation", 1.0), ("hellinger", 1.0)),
    ],
)
def test_divergences_of_disjoint_supports(name, value):
    assert divergence(name, log(0.5, 0.5, 0, 0), log(0, 0, 0.25, 0.75)).item() == pytest.approx(value)


@pytest.mark.parametrize(("scale", "typical"), [(1.5e-4, 1e-4), (1.5e-3, 1e-5), (1.5e-2, 1e-6)])
def test_kl_of_close_pairs_is_accurate_in_float32(scale, typical):
    """From float32 logits, down to a KL of 1e-8 nats; of so many rows that they are computed in parts."""
    torch.manual_seed(2)
    logits = 2 * torch.randn(4, 25, 4000)
    both = logits, logits + scale * torch.randn_like(logits)
    logp, logq = (x.double().log_softmax(-1) for x in both)
    expected = (logp.exp() * (logp - logq)).sum(-1)
    off = (kl(*(x.log_softmax(-1) for x in both)) - expected).abs() / expected
    assert 0.3 * scale**2 < expected.mean() < scale**2
    assert off.median() < 2 * typical and off.max() < 20 * typical


def test_a_normaliser_error_enters_at_second_order():
    torch.manual_seed(3)
    logp, logq = (0.1 * torch.randn(2, 50, dtype=torch.float64)).log_softmax(-1)
    off = kl(logp, logq + 1e-6) - kl(logp, logq)
    assert abs(off) < 1e-6 * 1e-5 + (1e-6 * (logq.exp().sum() - logp.exp().sum())).abs()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (3, 1)])
def test_empty_batches_and_a_vocabulary_of_one_token(shape):
    logp = torch.zeros(shape).log_softmax(-1).requires_grad_()
    value = kl(logp, logp.detach())
    assert value.shape == shape[:-1]
    value.sum().backward()
    assert logp.grad is not None and (logp.grad == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_nan_propagates(name):
    for other in (torch.tensor([-1.0, -0.5]), torch.tensor([-torch.inf, 0.0])):
        assert divergence(name, torch.tensor([torch.nan, 0.0]), other).isnan()
        assert divergence(name, other, torch.tensor([torch.nan, 0.0])).isnan()


def test_invalid_arguments_raise(unhooked):
    with pytest.raises(VocabularyMismatchError, match="logp covers 5 tokens and logq 4; pad or project one"):
        kl(torch.zeros(2, 5), torch.zeros(2, 4))
    logp = log(0.5, 0.5)
    with pytest.raises(UnknownNameError, match=r"no divergence is called 'hellinge'; .* did you mean"):
        divergence("hellinge", logp, logp)


@pytest.mark.parametrize(
    "function",
    [
        *(kl, cross_entropy, lambda p, q: renyi(q, p, 2.0), lambda p, q: entropy(q)),
        *(lambda p, q: truncate(q, top_k=9).log_kept_mass, lambda p, q: top_k_of(q, q.topk(9)[1]).log_rest),
    ],
)
def test_a_row_of_logits_is_refused_and_rounded_and_padded_rows_are_not(function):
    torch.manual_seed(4)
    logits = 5 * torch.randn(2, 4, 3000) - 60
    logp, logq = logits.log_softmax(-1)
    one_row = torch.where(torch.arange(4).unsqueeze(-1) == 2, logits[1], logq)
    with pytest.raises(
        NotProbabilitiesError, match=r"log[pq] is not normalised: .* 1 of 4 rows; give log_softmax"
    ):
        function(logp, one_row)
    assert torch.func.vmap(function)(logp, one_row).isnan().tolist() == [False, False, True, False]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        coarse = logits.to(dtype)
        for p, q in (coarse.log_softmax(-1).float(), coarse - coarse.logsumexp(-1, keepdim=True)):
            assert not function(p, q).isnan().any()
    for padding in (torch.nan, -torch.inf, *([0.0] if function in (kl, cross_entropy) else [])):
        padded = torch.stack([logp, logq]).index_fill(1, torch.tensor(1), padding)
        assert function(*padded)[[0, 2, 3]].isfinite().all()
    for infinity in (-torch.inf, torch.inf):  # on one side: no distribution
        assert function(logp, logq.index_fill(0, torch.tensor(1), infinity))[1].nan_to_num() == 0


@given(pairs())
def test_cross_entropy_is_entropy_plus_kl(pair):
    logp, logq = pair
    expected = entropy(logp) + kl(logp, logq)
    torch.testing.assert_close(cross_entropy(logp, logq), expected, rtol=1e-9, atol=1e-12)


def test_entropy_value_and_gradient():
    logp = log(0.5, 0.25, 0.25, 0)
    assert entropy(logp).item() == pytest.approx(1.5 * math.log(2))
    (gradient,) = gradients(entropy, logp)
    p, h = logp.exp(), entropy(logp)
    expected = torch.where(p > 0, -p * (torch.where(p > 0, logp, 0.0) + h), 0.0)
    torch.testing.assert_close(gradient, expected)
    with pytest.raises(NotProbabilitiesError, match="sum to 3 in 2 of 2 rows"):
        entropy(torch.zeros(2, 3))  # logits, whose sum was 0


@compiles
@pytest.mark.parametrize(("name", "backend"), [("kl", "inductor"), *((name, "aot_eager") for name in NAMES)])
def test_divergence_compiles_without_graph_breaks(name, backend, compiler):
    torch._dynamo.reset()  # torch recompiles one function eight times at most
    torch.manual_seed(6)
    logits = torch.randn(2, 6, 33)
    logits[:, :3, 4] = -torch.inf

    def value(a, b, temperature=0.7):  # with dynamic=True a symbol, as every float
        return divergence(name, at_temperature(a, temperature), at_temperature(b, temperature))

    compiled = torch.compile(value, fullgraph=True, backend=backend, dynamic=backend != "inductor" or None)
    plain, fused = ([x.clone().requires_grad_(backend != "inductor") for x in logits] for _ in "ab")
    expected, got = value(*plain), compiled(*fused)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    if backend == "inductor":  # whose gradients the tests of linear compile
        return
    slopes = torch.autograd.grad(got.sum(), fused), torch.autograd.grad(expected.sum(), plain)
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)
