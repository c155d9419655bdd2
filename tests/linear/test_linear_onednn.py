"""Products by oneDNN: when they are used, their accuracy, and their memory."""

from pathlib import Path

import pytest
import torch
from linear_cases import SMALL, head_case, in_float64, relative_rms

from kleash.linear import Head, LinearOptions, linear_kl, linear_kl_loss
from kleash.linear import products as onednn

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)


@pytest.fixture
def machine(monkeypatch):
    """Sets whether oneDNN is faster on this machine."""

    def sets(faster: bool) -> None:
        monkeypatch.setattr(onednn, "onednn_is_faster", lambda: faster)

    return sets


@pytest.fixture
def products(monkeypatch):
    """The shapes of the products by oneDNN."""
    seen, product = [], onednn.product

    def noted(a, b):
        if onednn.uses_onednn(a.dtype, a.device):
            seen.append((*a.shape, len(b)))
        return product(a, b)

    monkeypatch.setattr(onednn, "product", noted)
    return seen


def loss_and_gradients(case, options):
    """Value and gradients of the hidden states and heads of both models."""
    tensors = [case.hidden_p, case.head_p.weight, case.hidden_q, case.head_q.weight]
    for x in tensors:
        x.requires_grad_()
        x.grad = None
    weights = torch.linspace(0.1, 1.0, len(case.tokens), dtype=torch.float64).to(case.hidden_p)
    loss = linear_kl_loss(*case.models, weights=weights, temperature=case.temperature, options=options).loss
    loss.backward()
    return [loss.detach(), *(x.grad.double() for x in tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_with_and_without_onednn(machine, products, dtype):
    case = head_case(dtype, softcap=2.5, bias=True, scale=1.7)
    right = loss_and_gradients(in_float64(case), LinearOptions(impl="reference"))
    budget = 3e-6 if dtype == torch.float32 else 8e-3
    for faster in (False, True):
        machine(faster)
        for mine, other in zip(loss_and_gradients(case, SMALL), right, strict=True):
            assert relative_rms(mine, other) < budget, faster
        assert bool(products) == faster
        if dtype == torch.float32:  # the gradient, too: a narrow one is multiplied as it is
            assert any(made[2] == case.hidden_p.shape[1] for made in products) == faster


def test_which_machines_use_onednn(monkeypatch, tmp_path):
    kind = torch.float32, torch.device("cpu")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    actual = {}
    for name, text in {"amd": "vendor_id\t: AuthenticAMD\n", "intel": "vendor_id\t: GenuineIntel\n"}.items():
        monkeypatch.setattr(onednn, "CPUINFO", tmp_path / name)
        onednn.CPUINFO.write_text(text)
        onednn.onednn_is_faster.cache_clear()
        actual[name] = onednn.uses_onednn(*kind)
    assert actual == {"amd": True, "intel": False}
    monkeypatch.setattr(onednn, "CPUINFO", Path("/nowhere/cpuinfo"))
    onednn.onednn_is_faster.cache_clear()
    assert not onednn.uses_onednn(*kind)
    monkeypatch.setattr(onednn, "CPUINFO", tmp_path / "amd")
    onednn.onednn_is_faster.cache_clear()
    assert onednn.uses_onednn(*kind)
    assert not onednn.uses_onednn(torch.float64, kind[1])
    assert not onednn.uses_onednn(kind[0], torch.device("meta"))
    torch.backends.mkldnn.set_flags(False)
    try:
        assert not onednn.uses_onednn(*kind)
    finally:
        torch.backends.mkldnn.set_flags(True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    onednn.onednn_is_faster.cache_clear()
    assert not onednn.uses_onednn(*kind)
    onednn.onednn_is_faster.cache_clear()


def test_a_nan_row_does_not_affect_other_rows(machine, products):
    machine(True)
    case = head_case(tokens=(5,))
    case.hidden_p[2] = torch.nan
    kl = linear_kl(*case.models, options=SMALL)
    assert kl.isnan().tolist() == [False, False, True, False, False]
    assert products


@pytest.mark.parametrize("tokens, hidden, vocab_size", [(0, 8, 50), (1, 8, 50), (3, 1, 2), (5, 33, 1)])
def test_odd_sizes(machine, products, tokens, hidden, vocab_size):
    machine(True)
    random = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randn(2, tokens, hidden, generator=random),
        torch.randn(2, vocab_size, hidden, generator=random),
    )
    kl = linear_kl(x[0], Head(weight[0]), x[1], Head(weight[1]), options=SMALL)
    exact = [torch.log_softmax(h.double() @ w.double().T, -1) for h, w in zip(x, weight, strict=True)]
    right = (exact[0].exp() * (exact[0] - exact[1])).sum(-1)
    assert torch.allclose(kl.double(), right, rtol=1e-5, atol=1e-7)
    assert bool(products) == (tokens > 0)


def test_the_rounding_of_onednn_is_at_most_twice_that_of_torch():
    random = torch.Generator().manual_seed(3)
    a, b = torch.randn(64, 1024, generator=random), torch.randn(512, 1024, generator=random)
    exact = a.double() @ b.double().T
    assert relative_rms(onednn.product(a, b), exact) < 2.5 * relative_rms(a @ b.T, exact) < 2e-6
