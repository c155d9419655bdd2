"""Tests of impl='triton' in triton's interpreter on the CPU; ``test_linear_triton.py`` runs them in a process.

The interpreter has to be asked for before triton is imported, and would be everybody's from then on.
"""

import os

import pytest
import torch
from linear_cases import (
    REFERENCE,
    TRAITS,
    Case,
    head_case,
    in_float64,
    leaves_of,
    relative_rms,
    statistics_by_numpy,
)

from kleash.errors import CannotRunError
from kleash.linear import (
    Head,
    LinearOptions,
    TokenStatistics,
    linear_divergence,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    token_statistics,
)
from kleash.linear.api import token_statistics_and_top
from kleash.linear.impl.triton import fused, launch

assert os.environ["TRITON_INTERPRET"] == "1"
pytestmark = [
    # From numpy in the interpreter, about numbers that are selected away: both sides of a where are computed.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # The interpreter's own use of numpy, in older versions of triton.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]
TRITON = LinearOptions(impl="triton")
SMALL = LinearOptions(impl="triton", buffer_bytes=20_000)
FLOATS = [name for name in TokenStatistics._fields if name not in ("top1_p", "top1_q", "rank_q")]


@pytest.fixture(autouse=True)
def narrow_tiles(monkeypatch):
    """Rows of several tiles, the last of them partial, and few programs, since each takes time in the interpreter."""
    monkeypatch.setattr(launch, "WIDTH", 64)
    monkeypatch.setitem(launch.HEIGHTS, "cpu", 64)


@pytest.mark.parametrize("distance", [2.0, 0.05, 0.002], ids=["far", "near", "nearer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_statistics_equal_the_reference(dtype, distance):
    case = head_case(dtype, distance, bias=True)
    exact = in_float64(case).statistics(REFERENCE)
    plain, actual = case.statistics(REFERENCE), case.statistics(TRITON)
    assert exact.kl_pq.median() > 1e-6, "so small a divergence would hide a wrong sign"
    for name, right, cheap, ours in zip(TokenStatistics._fields, exact, plain, actual, strict=True):
        if name in FLOATS:
            assert ours.dtype == torch.float32
            assert relative_rms(ours, right) <= 1.5 * relative_rms(cheap, right) + 2e-7, name
        else:
            assert torch.equal(ours, right), name
    assert torch.equal(case.kl(TRITON), actual.kl_pq)
    budget = 1.5 * relative_rms(plain.kl_pq, exact.kl_pq) + 2e-7
    assert relative_rms(case.kl(SMALL), exact.kl_pq) <= budget, "fused"


@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS.keys())
def test_every_kind_of_head(traits):
    case = head_case(torch.float32, 0.5, vocab_size=70, **traits)
    back = linear_divergence(
        *case.models, divergence="reverse_kl", temperature=case.temperature, options=TRITON
    )
    torch.testing.assert_close(back, statistics_by_numpy(case).kl_qp.float(), rtol=2e-5, atol=1e-6)
    for name, ours, right in zip(
        TokenStatistics._fields, case.statistics(TRITON), statistics_by_numpy(case), strict=True
    ):
        if name in FLOATS:
            torch.testing.assert_close(
                ours, right.float(), rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_the_fused_kernel_with_every_kind_of_head(monkeypatch):
    """Sizes of which none is a multiple of the kernel's shares and tiles."""
    monkeypatch.setattr(fused, "SHARE", 80)
    monkeypatch.setattr(fused, "HEIGHT", 32)
    monkeypatch.setattr(fused, "WIDTH", 64)
    monkeypatch.setattr(fused, "DEPTH", 16)
    for traits in (TRAITS["temperature"], TRAITS["scale"]):
        case = head_case(torch.float32, 0.5, **traits)
        torch.testing.assert_close(
            case.kl(SMALL), statistics_by_numpy(case).kl_pq.float(), rtol=2e-5, atol=1e-6
        )
    case.head_p = Head(case.head_p.weight.T.contiguous().T, torch.full((101,), -torch.inf))
    case.head_p.bias[60:] = 0.5
    case.hidden_q[4, 2] = torch.nan
    actual = case.kl(SMALL)
    assert actual.isnan().tolist() == [n == 4 for n in range(37)]
    unaffected = torch.arange(37) != 4
    torch.testing.assert_close(
        actual[unaffected], statistics_by_numpy(case).kl_pq.float()[unaffected], rtol=2e-5, atol=1e-6
    )


def test_the_fused_kernel_is_used_where_memory_is_for_few_tokens(monkeypatch):
    case, seen = head_case(torch.bfloat16, 0.5), []
    monkeypatch.setattr(fused, "kl_values", lambda pair: seen.append(pair.tokens) or torch.zeros(pair.tokens))
    assert case.kl(TRITON).min() > 0 and not seen
    case.kl(SMALL)
    assert seen == [37]
    case.hidden_q = case.hidden_q.float()
    assert case.kl(SMALL).min() > 0 and len(seen) == 1


@pytest.mark.parametrize("distance", [0.03, 0.001])
def test_float32_has_three_digits_at_a_kl_of_a_millionth_of_a_nat(distance):
    case = head_case(torch.float32, distance, vocab_size=301)
    exact, actual = in_float64(case).statistics(REFERENCE), case.statistics(TRITON)
    for name in ("kl_pq", "kl_qp", "jensen_shannon", "total_variation"):
        right, ours = getattr(exact, name), getattr(actual, name).double()
        # An error in a logit enters total variation at first order and the others at second.
        bound = 3e-3 if name == "total_variation" else 1e-3
        assert ((ours - right).abs() / right).max() < bound, name


def test_a_peaked_p_whose_likeliest_token_comes_late():
    """The mean of the first tiles is off by far more than d spreads: its square must cancel."""
    random = torch.Generator().manual_seed(0)
    zp = torch.randn(24, 101, generator=random)
    zp[:, 90] = 25.0
    zq = zp + 0.01 * torch.randn(24, 101, generator=random)
    zq[:, 90] += 2.0
    zq[:, :90] += 2.0
    case = Case(zp, Head(None), zq, Head(None), torch.zeros(24, dtype=torch.long))
    exact = in_logits(case)
    assert exact.max() < 1e-9
    assert ((case.kl(TRITON) - exact).abs() / exact).max() < 2e-2
    zq[:, 90] -= 2.0
    exact = in_logits(case)
    assert ((case.kl(TRITON) - exact).abs() / exact).max() < 1e-4


@pytest.mark.parametrize(("offset", "in_value", "in_gradient"), [(0, 1e-5, 2e-6), (1000, 1e-3, 3e-2)])
def test_kl_of_nearly_equal_logits_keeps_all_digits(offset, in_value, in_gradient):
    """Logits on a grid, so that their difference is exact and only its mean is rounded."""
    random = torch.Generator().manual_seed(0)
    zp = torch.randint(-3000, 3000, (24, 301), generator=random) / 1024
    zq = zp + offset + torch.randint(-2, 3, (24, 301), generator=random) / 1024
    case = Case(zp, Head(None), zq, Head(None), torch.zeros(24, dtype=torch.long))
    exact = in_logits(case)
    assert exact.max() < 2e-6
    assert ((case.kl(TRITON) - exact).abs() / exact).max() < in_value
    right, actual = (
        kl_of_logits(zp.to(x), zq.to(x), o) for x, o in ((torch.float64, REFERENCE), (zp.dtype, TRITON))
    )
    for ours, gradient in zip(actual, right, strict=True):
        assert relative_rms(ours, gradient) < in_gradient


def in_logits(case):
    return linear_kl(
        case.hidden_p.double(), Head(None), case.hidden_q.double(), Head(None), options=REFERENCE
    )


def gradients(case, options, divergence="kl", weights=None):
    tensors, of = leaves_of(case, divergence, weights=weights)
    actual = of(options)(*tensors)
    values = actual if weights is None else actual.per_token
    return values.detach(), *torch.autograd.grad(actual.sum() if weights is None else actual.loss, tensors)


@pytest.mark.parametrize(
    ("dtype", "distance", "divergence"),
    [
        (torch.float32, 2.0, "kl"),
        (torch.float32, 0.002, "reverse_kl"),
        (torch.bfloat16, 2.0, "reverse_kl"),
        (torch.bfloat16, 0.002, "kl"),
        (torch.float16, 0.1, "kl"),
    ],
    ids=str,
)
def test_gradients_equal_the_reference(dtype, distance, divergence):
    case = head_case(dtype, distance, bias=True, softcap=6.0, scale=1.3, temperature=0.8)
    weights = torch.linspace(-1, 2, 37)
    weights[[0, 8, 9]] = 0.0
    exact = gradients(in_float64(case), REFERENCE, divergence, weights.double())
    plain = gradients(case, REFERENCE, divergence, weights)
    for options in (TRITON, SMALL):
        actual = gradients(case, options, divergence, weights)
        for place, (right, cheap, ours) in enumerate(zip(exact, plain, actual, strict=True)):
            assert ours.dtype == cheap.dtype
            # Where the gradient's products are of bfloat16; the interpreter cuts digits off instead of rounding.
            budget = 3.5 if place and dtype == torch.bfloat16 else 1.5
            assert relative_rms(ours, right) <= budget * relative_rms(cheap, right) + 1e-6, place


@pytest.mark.parametrize("kind", ["values", "hidden only", "one head", "one product"])
def test_every_plan_has_the_same_gradient(kind):
    case = head_case(torch.float32, 0.3)
    if kind.startswith("one"):
        case.hidden_q = case.hidden_p + (0.05 if kind == "one head" else 0.0)
        bias = torch.randn(101) if kind == "one product" else None
        if kind == "one product":
            case.hidden_q = case.hidden_p
        case.head_q = Head(case.head_p.weight, bias)
    results = []
    for options in (REFERENCE, TRITON, SMALL):
        leaves = [case.hidden_p, case.head_p.weight, case.hidden_q, case.head_q.weight]
        unique = {id(x): x.detach().clone().requires_grad_() for x in leaves}
        hp, wp, hq, wq = (unique[id(x)] for x in leaves)
        if kind == "hidden only":
            wp, wq = wp.detach(), wq.detach()
        values = linear_kl(hp, Head(wp), hq, Head(wq, case.head_q.bias), options=options)
        needed = [x for x in {id(x): x for x in (hp, wp, hq, wq)}.values() if x.requires_grad]
        results.append([values.detach(), *torch.autograd.grad((values * torch.arange(37.0)).sum(), needed)])
    for actual in results[1:]:
        for right, ours in zip(results[0], actual, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=2e-5)


def objective(terms, rows):
    share = torch.linspace(0.5, 2, 37)[rows]
    ratio = (terms.token_logp - terms.token_logq).clamp(-1, 1).exp()
    losses = share * ratio + 0.3 * terms.kl * share + 0.1 * terms.kl**2 - 0.2 * terms.entropy * share
    return torch.where(share < 1.9, losses, 0.0)


def test_an_objective_has_the_same_terms_and_gradient():
    case = head_case(torch.float32, 0.4, bias=True, softcap=5.0, temperature=1.2)
    results = []
    for options in (REFERENCE, TRITON, SMALL):
        tensors, _ = leaves_of(case)
        hp, wp, bp, hq, wq, bq = tensors
        loss, terms = linear_objective(
            hp, Head(wp, bp, softcap=5.0), case.tokens, hq, Head(wq, bq, softcap=5.0), objective,
            temperature=1.2, options=options,
        )  # fmt: skip
        results.append([loss.detach(), *terms, *torch.autograd.grad(loss, tensors)])
    for actual in results[1:]:
        for right, ours in zip(results[0], actual, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=2e-5)


def test_tokens_of_weight_0_are_not_read():
    case, dirty = (head_case(torch.float32, tokens=(3, 4), bias=True) for _ in range(2))
    weights = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 1.0, -1.0], [0.5, 1.0, 0.0, 0.0]])
    dirty.hidden_p[weights == 0], dirty.hidden_q[weights == 0] = torch.nan, torch.inf
    clean, actual = (gradients(each, TRITON, weights=weights) for each in (case, dirty))
    for a, b in zip(clean, actual, strict=True):
        assert torch.equal(a, b)

    def only(terms, rows):
        return torch.where((weights != 0).reshape(-1)[rows], terms.kl + terms.token_logp, 0.0)

    for each in (case, dirty):
        each.hidden_p.requires_grad_()
        each.head_p.weight.requires_grad_()
        p, head_p, q, head_q = each.models
        linear_objective(p, head_p, each.tokens, q, head_q, only, options=TRITON)[0].backward()
    assert torch.equal(case.hidden_p.grad, dirty.hidden_p.grad)
    assert torch.equal(case.head_p.weight.grad, dirty.head_p.weight.grad)
    assert case.head_p.weight.grad.abs().max() > 0.1


@pytest.mark.parametrize(
    ("traits", "p", "q"),
    [({}, torch.nan, torch.inf), ({"bias": True, "softcap": 3.0}, torch.inf, torch.nan)],
    ids=["plain", "softcap"],
)
@pytest.mark.parametrize("options", [TRITON, SMALL], ids=["logits", "fused"])
def test_a_token_with_incoming_gradient_0_adds_0_to_every_gradient(options, traits, p, q):
    """An incoming gradient of 0, a weight of 0, or an objective that does not select the token."""
    case = head_case(torch.float32, tokens=(7,), vocab_size=70, **traits)
    counted = torch.tensor([1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    weights = torch.where(counted, 1.5, 0.0)
    case.hidden_p[2, 3], case.hidden_q[4] = p, q

    def where(terms, rows):
        return torch.where(counted[rows], terms.kl - terms.token_logp - 0.3 * terms.entropy, 0.0)

    def product(terms, rows):
        return weights[rows] * (terms.kl - terms.token_logp - 0.3 * terms.entropy)

    def loss(name, tensors, how, keep):
        hp, wp, bp, hq, wq, bq = tensors
        head_p, head_q = (Head(w, b, softcap=case.head_p.softcap) for w, b in ((wp, bp), (wq, bq)))
        models, some = (hp[keep], head_p, hq[keep], head_q), weights[keep]
        if name == "values":
            return torch.where(some != 0, linear_kl(*models, options=how) * 1.5, 0.0).sum()
        if name == "loss":
            return linear_kl_loss(*models, weights=some, options=how).loss
        each = where if name == "where" else product
        at = torch.arange(7)[keep]
        return linear_objective(
            *models[:2], case.tokens[keep], *models[2:], lambda t, rows: each(t, at[rows]), options=how
        )[0]

    leaves = [case.hidden_p, case.head_p.weight, case.head_p.bias]
    leaves += [case.hidden_q, case.head_q.weight, case.head_q.bias]
    for name in ("values", "loss", "where", "product"):
        results = []
        for how, keep in ((options, torch.ones_like(counted)), (REFERENCE, counted)):
            tensors = [x if x is None else x.clone().requires_grad_() for x in leaves]
            needed = [x for x in tensors if x is not None]
            results.append(torch.autograd.grad(loss(name, tensors, how, keep), needed))
        for ours, right in zip(*results, strict=True):
            assert relative_rms(ours, right.double()) < 1e-4, name
        for side in (results[0][0], results[0][-2 if len(results[0]) == 4 else 3]):
            assert (side[~counted] == 0).all(), name


def test_nan_affects_only_its_token():
    case = head_case(torch.float32, tokens=(9,))
    whole = case.statistics(TRITON)
    case.hidden_q[4, 2] = torch.nan
    spoilt, unaffected = case.statistics(TRITON), torch.arange(9) != 4
    for name in ("kl_pq", "kl_qp", "jensen_shannon", "total_variation", "token_logq", "entropy_q"):
        assert getattr(spoilt, name)[4].isnan(), name
    for before, after in zip(whole, spoilt, strict=True):
        assert torch.equal(after[unaffected], before[unaffected])
    assert torch.equal(case.kl(TRITON).isnan(), ~unaffected)


def test_rows_with_infinite_logits_do_not_affect_other_rows():
    never = -torch.inf
    zp = torch.tensor(
        [[0.0, 1.0, never, never], [1.0, 2.0, never, 0.5], [0.0, 1.0, 2.0, 3.0], [never, 0, 1, 2]]
    )
    zq = torch.tensor(
        [[never, never, 0.0, 1.0], [2.0, 1.0, never, 0.5], [0.0, 1.0, 2.0, 2.5], [-9, 0.1, 1, 2]]
    )
    # The same with forbidden tiles at either end.
    ends = torch.full((4, 64), never)
    for pair in ((zp, zq), (torch.cat([ends, zp, ends], -1), torch.cat([ends, zq, ends], -1))):
        shift = pair[0].shape[-1] // 2 - 2
        case = Case(pair[0], Head(None), pair[1], Head(None), torch.tensor([0, 1, 3, 0]) + shift)
        actual = case.statistics(TRITON)
        assert actual.kl_pq[0] == actual.kl_qp[0] == actual.kl_qp[3] == torch.inf
        for name, numbers, right in zip(
            TokenStatistics._fields, actual, statistics_by_numpy(case), strict=True
        ):
            torch.testing.assert_close(
                numbers, right.to(numbers.dtype), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_a_tile_with_probability_0_under_p_loses_no_digits():
    case = head_case(torch.float32, distance=0.01, tokens=(20,), vocab_size=70)
    random = torch.Generator().manual_seed(3)
    zp, zq = (h @ head.weight.T for h, head in (case.models[:2], case.models[2:]))
    faint = torch.randn(20, 64, generator=random) - 16
    for where in (0, 1):
        parts = [(torch.full_like(faint, -torch.inf), faint), (zp, zq)]
        sides = [torch.cat(x, -1) for x in zip(*(parts if where else parts[::-1]), strict=True)]
        actual = Case(sides[0], Head(None), sides[1], Head(None), case.tokens)
        exact = in_logits(actual)
        assert exact.min() < 1e-4
        assert ((actual.kl(TRITON) - exact).abs() / exact).max() < 1e-3


def test_tokens_of_probability_0_add_0_to_the_gradient():
    case = head_case(torch.float32, 0.5, tokens=(9,), vocab_size=80)
    p, head_p, q, head_q = case.models
    never = torch.zeros(80)
    never[66:] = -torch.inf
    for both in (True, False):
        hidden_p, hidden_q = (x.clone().requires_grad_() for x in (p, q))
        cut = Head(head_q.weight, never if both else None)
        actual = linear_kl(hidden_p, Head(head_p.weight, never), hidden_q, cut, options=TRITON)
        ours = torch.autograd.grad(actual.sum(), (hidden_p, hidden_q))
        leaves = [x.double().requires_grad_() for x in (p, q)]
        zp, zq = leaves[0] @ head_p.weight.double()[:66].T, leaves[1] @ head_q.weight.double().T
        logp, logq = zp.log_softmax(-1), (zq[:, :66] if both else zq).log_softmax(-1)[:, :66]
        right = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), leaves)
        for a, b in zip(ours, right, strict=True):
            assert relative_rms(a, b) < 1e-5


def test_far_distributions_do_not_overflow():
    zp, zq = torch.tensor([[0.0, 500.0, -300.0]]), torch.tensor([[400.0, -600.0, 0.0]])
    case = Case(zp.repeat(1, 30), Head(None), zq.repeat(1, 30), Head(None), torch.tensor([0]))
    actual = case.statistics(TRITON)
    torch.testing.assert_close(actual.kl_pq, torch.tensor([1000.0]))
    torch.testing.assert_close(actual.kl_qp, torch.tensor([500.0]))
    torch.testing.assert_close(actual.total_variation, torch.tensor([1.0]))
    assert actual.rank_q == 0
    forbidden = Case(
        torch.cat([torch.full((1, 64), -torch.inf), zp / 100], -1), Head(None),
        torch.cat([torch.full((1, 64), 200.0), zq / 100], -1), Head(None), torch.tensor([65]),
    )  # fmt: skip
    torch.testing.assert_close(forbidden.kl(TRITON), statistics_by_numpy(forbidden).kl_pq.float())
    value, in_p, in_q = kl_of_logits(zp, zq, TRITON)
    right, right_p, right_q = kl_of_logits(zp, zq, REFERENCE)
    torch.testing.assert_close((value, in_p, in_q), (right, right_p, right_q))


def kl_of_logits(zp, zq, options):
    zp, zq = zp.clone().requires_grad_(), zq.clone().requires_grad_()
    value = linear_kl(zp, Head(None), zq, Head(None), options=options)
    return value.detach(), *torch.autograd.grad(value.sum(), (zp, zq))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_against_itself_is_exactly_zero(dtype):
    case = head_case(dtype, bias=True, softcap=3.0, scale=1.3, temperature=0.7)
    copy = Head(case.head_p.weight.clone(), case.head_p.bias.clone(), softcap=3.0, scale=1.3)
    case.hidden_q, case.head_q = case.hidden_p.clone(), copy
    actual = case.statistics(TRITON)
    for name in ("kl_pq", "kl_qp", "jensen_shannon", "total_variation"):
        assert torch.equal(getattr(actual, name), torch.zeros(37)), name
    for gradient in gradients(case, TRITON)[1:]:
        assert (gradient == 0).all()


@pytest.mark.parametrize("options", [TRITON, SMALL])
@pytest.mark.parametrize("shared", [False, True])
def test_the_likeliest_tokens_are_those_of_the_reference(options, shared):
    case = head_case(bias=True, softcap=3.0, scale=1.3, temperature=0.7)
    if shared:
        case.hidden_q, case.head_q = case.hidden_p + 0.1, case.head_p
    actual, needed = (
        token_statistics_and_top(*case.models, case.tokens, top=5, temperature=0.7, options=each)
        for each in (options, REFERENCE)
    )
    for ours, right in ((actual.top_p, needed.top_p), (actual.top_q, needed.top_q)):
        torch.testing.assert_close(ours.probability, right.probability, rtol=1e-4, atol=1e-7)
        assert (ours.token_ids == right.token_ids).float().mean() > 0.9  # a softcap leaves ties
    torch.testing.assert_close(actual.statistics.kl_pq, needed.statistics.kl_pq, rtol=1e-3, atol=1e-6)


def test_no_statistic_is_negative():
    for distance in (1e-5, 1e-6, 1e-7, 3e-8):
        case = head_case(torch.float32, distance, tokens=(60,))
        for name, numbers in zip(TokenStatistics._fields, case.statistics(TRITON), strict=True):
            assert name.startswith("token") or numbers.min() >= 0, (name, distance)
    z = torch.randn(200, 90, generator=torch.Generator().manual_seed(0))
    assert linear_kl(z, Head(None), z + 1000.0 * z[:, :1], Head(None), options=TRITON).min() >= 0


def test_a_softcap_far_above_the_logits_loses_no_digits():
    case = head_case(torch.float32, 0.002, softcap=3000.0)
    exact, plain = in_float64(case).kl(REFERENCE), case.kl(REFERENCE)
    assert relative_rms(case.kl(TRITON), exact) <= 1.5 * relative_rms(plain, exact)


@pytest.mark.parametrize("tokens", [(0,), (1,), (2, 0)], ids=str)
def test_no_token_and_one(tokens):
    case = head_case(torch.bfloat16, tokens=tokens, bias=True)
    actual, right = case.statistics(TRITON), case.statistics(REFERENCE)
    for a, b in zip(actual, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
    torch.testing.assert_close(actual.kl_pq, right.kl_pq, rtol=1e-4, atol=1e-5)
    for numbers in gradients(case, TRITON, weights=torch.ones(tokens)):
        assert numbers.isfinite().all()


def test_non_contiguous_inputs_and_temperatures_per_token():
    case = head_case(torch.float32, 0.3, tokens=(3, 5), bias=True)
    temperature = torch.linspace(0.5, 2, 15).reshape(3, 5)
    right = linear_kl(*case.models, temperature=temperature, options=REFERENCE)

    def strewn(x):
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]

    def turned(x):
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    for change in (strewn, turned):
        heads = [Head(change(h.weight), strewn(h.bias)) for h in (case.head_p, case.head_q)]
        arguments = change(case.hidden_p), heads[0], change(case.hidden_q), heads[1]
        actual = linear_kl(*arguments, temperature=strewn(temperature), options=TRITON)
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-6)
    weights = strewn(torch.rand(3, 5) + 0.1)
    case.hidden_p.requires_grad_()
    actual = []
    for layout in (weights, weights.contiguous()):
        loss = linear_kl_loss(*case.models, weights=layout, temperature=temperature, options=TRITON).loss
        torch.testing.assert_close(loss, (weights * right).sum(), rtol=1e-4, atol=1e-5)
        actual.append(torch.autograd.grad(loss, case.hidden_p)[0])
    assert torch.equal(*actual)
    # What autograd says about a plain sum is one number, expanded.
    ones = torch.ones(3, 5)
    whole = linear_kl_loss(*case.models, weights=ones, options=TRITON).loss
    p, head_p, q, head_q = case.models
    summed, _ = linear_objective(p, head_p, case.tokens, q, head_q, lambda x, rows: x.kl, options=TRITON)
    assert torch.equal(*(torch.autograd.grad(x, case.hidden_p)[0] for x in (whole, summed)))


def test_ties_go_to_the_first_and_do_not_lower_the_rank():
    z = torch.zeros(2, 103)
    z[0, [30, 70, 102]] = 2.0
    z[1, 101:] = 1.0
    actual = token_statistics(z, Head(None), z, Head(None), torch.tensor([70, 5]), options=TRITON)
    assert actual.top1_p.tolist() == [30, 101] == actual.top1_q.tolist()
    assert actual.rank_q.tolist() == [0, 2]


def test_programs_of_one_row_and_of_many_agree(monkeypatch):
    case = head_case(torch.float32, 0.3, tokens=(3,), bias=True)
    many = case.statistics(TRITON), gradients(case, TRITON)
    monkeypatch.setitem(launch.HEIGHTS, "cpu", 1)
    one_row = case.statistics(TRITON), gradients(case, TRITON)
    for a, b in zip([*many[0], *many[1]], [*one_row[0], *one_row[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("unhooked")
def test_unsupported_calls_raise():
    case = head_case(torch.float64, tokens=(2,))
    with pytest.raises(CannotRunError, match=r"computes in float32 and a tensor is torch.float64"):
        case.kl(TRITON)
    case = head_case(torch.float32, tokens=(2,))
    with pytest.raises(CannotRunError, match="KL in both directions and for no other divergence"):
        linear_divergence(*case.models, divergence="jeffreys", options=TRITON)
