import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from torch.distributions import Normal, kl_divergence

from kleash.divergences import kl_from_probs, kl_gaussian
from kleash.errors import NotProbabilitiesError, ShapeError


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, dtype=np.float32)]
)
def test_accepts_lists_tuples_arrays_and_tensors(kind):
    value = kl_from_probs(kind([0.7, 0.3]), kind([0.5, 0.5]))
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(0.0822831, abs=1e-6)


def test_batches_agree_with_scipy():
    p, q = np.random.default_rng(0).dirichlet(np.ones(6), size=(2, 3, 4))
    p[0, 0] = [0, 0, 0.5, 0.25, 0.25, 0]
    np.testing.assert_allclose(kl_from_probs(p, q).numpy(), rel_entr(p, q).sum(-1), rtol=1e-12)


def test_accepts_read_only_arrays_and_integers():
    assert kl_from_probs([1, 0], np.array([1, 0])) == 0
    p = np.array([1.0, 0.0])
    p.flags.writeable = False
    assert kl_from_probs(p, [0.5, 0.5]).item() == pytest.approx(np.log(2))
    assert kl_from_probs([0.5, 0.5], p) == torch.inf


def test_rounding_of_the_sum_is_normalised_and_gradients_flow_to_tensors():
    p = torch.rand(50_000).softmax(-1).requires_grad_()
    value = kl_from_probs(p * (1 + 4e-6), p.detach())
    assert value.item() == pytest.approx(0, abs=1e-13)
    assert torch.autograd.grad(value, p)[0].isfinite().all()


@pytest.mark.parametrize(
    ("p", "message"),
    [
        ([0.5, -0.1, 0.6], r"p\[1\] is -0.1, which is not a probability; for log-probabilities use kl"),
        ([[0.5, 0.5, 0], [0.5, float("nan"), 0.5]], r"p\[1, 1\] is nan"),
        ([0.5, 0.4, 0], r"p sums to 0.9, not to 1; divide it by its sum first, in float64"),
        ([[0.5, 0.5], [1.0]], r"p is not an array of numbers .*; give rows of equal length"),
        (torch.ones(1).cfloat(), "p is torch.complex64 of .*; give real numbers in a dense tensor"),
        (torch.ones(1).to_sparse(), "p is torch.float32 of layout torch.sparse_coo on cpu"),
        (torch.ones(1, device="meta"), "p is torch.float32 of layout torch.strided on meta"),
    ],
)
def test_invalid_probabilities_raise_a_value_error(p, message):
    with pytest.raises(NotProbabilitiesError, match=message) as caught:
        kl_from_probs(p, [0.2, 0.3, 0.5])
    assert isinstance(caught.value, ValueError)
    with pytest.raises(NotProbabilitiesError, match=r"q sums to 1\.1"):
        kl_from_probs([0.5, 0.5], [0.5, 0.6])


def test_kl_gaussian_of_close_pairs_is_accurate_in_float32():
    got = kl_gaussian(torch.zeros(1), torch.tensor([1e-4])).item()
    assert got == pytest.approx(1e-8 / 4, rel=1e-4)
    for dtype in (torch.float32, torch.float64):  # 1 / variance overflows in float32
        equal = torch.tensor([0.1], dtype=dtype), torch.tensor([-100.1], dtype=dtype)
        assert kl_gaussian(*equal, *equal) == kl_gaussian(*equal, 0.1, -100.1) == 0
    coarse = torch.tensor([0.1]).bfloat16()
    assert kl_gaussian(coarse, 0 * coarse, 0.1).item() == pytest.approx(
        (coarse.item() - 0.1) ** 2 / 2, rel=1e-4
    )
    for wide in range(4):  # the one of the arguments that is in float64
        given = [torch.tensor([0.3 + n], dtype=(torch.float32, torch.float64)[n == wide]) for n in range(4)]
        means, deviations = given[::2], [(x.double() / 2).exp() for x in given[1::2]]
        p, q = (Normal(mean.double(), deviation) for mean, deviation in zip(means, deviations, strict=True))
        assert kl_gaussian(*given).item() == pytest.approx(kl_divergence(p, q).item(), rel=1e-13)


def test_kl_gaussian_broadcasts_or_raises(unhooked):
    assert kl_gaussian(torch.zeros(5, 3), torch.zeros(3), torch.ones(3)).tolist() == pytest.approx([1.5] * 5)
    with pytest.raises(ShapeError, match=r"of shapes \(2,\), \(3,\), \(\), \(\) do not broadcast"):
        kl_gaussian(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ShapeError, match="no axis to sum over"):
        kl_gaussian(torch.tensor(0.0), torch.tensor(0.0))
