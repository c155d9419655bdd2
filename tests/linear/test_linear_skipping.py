"""skip_below: the skipped part of a gradient is within the bound and is reported."""

import pytest
import torch
from linear_cases import CHUNKED, REFERENCE, head_case, in_float64, leaves_of, relative_rms

from kleash.errors import CannotRunError
from kleash.linear import (
    Head,
    LinearOptions,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    ops,
    packing,
    token_statistics,
)
from kleash.linear.impl import skipping
from kleash.linear.impl.skipping import keep_mask

WEIGHTS = torch.linspace(-1, 2.1, 150, dtype=torch.float64)
KINDS = pytest.mark.parametrize(
    ("distance", "peak"),
    [(2.0, 1.0), (1e-3, 1.0), (0.1, 8.0), (1e-3, 8.0)],
    ids=["far", "near", "peaked", "both"],
)


def skipped(below, seen=None, **more):
    report = None if seen is None else seen.append
    return LinearOptions(impl="chunked", compile="never", skip_below=below, report=report, **more)


def peaked(dtype, distance, peak, tokens=(150,), vocab_size=3001, **traits):
    case = head_case(dtype, distance, tokens=tokens, vocab_size=vocab_size, bias=True, **traits)
    case.hidden_p, case.hidden_q = case.hidden_p * peak, case.hidden_q * peak
    return case


def loss_of(case, options, divergence="kl", weights=WEIGHTS):
    tensors, of = leaves_of(case, divergence, weights=weights.to(case.hidden_p.dtype))
    loss, per_token = of(options)(*tensors)
    return loss.detach(), per_token, torch.autograd.grad(loss, tensors)


def in_logits(case, weights, divergence):
    """The gradients in both ``hidden W^T``, by autograd of the reference in float64."""
    products = [
        (h.double() @ head.weight.double().T).requires_grad_()
        for h, head in ((case.hidden_p, case.head_p), (case.hidden_q, case.head_q))
    ]
    heads = [
        Head(None, head.bias.double(), scale=head.scale, softcap=head.softcap)
        for head in (case.head_p, case.head_q)
    ]
    from kleash.linear import linear_divergence

    values = linear_divergence(
        products[0], heads[0], products[1], heads[1], divergence=divergence, options=REFERENCE
    )
    return torch.autograd.grad((values * weights).sum(), products)


@KINDS
@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "jensen_shannon"])
@pytest.mark.parametrize("below", [0.1, 1e-3])
def test_the_error_is_within_the_report_and_the_report_within_skip_below(below, divergence, distance, peak):
    case = peaked(torch.float64, distance, peak, tokens=(40,), vocab_size=4999, scale=0.8, softcap=40.0)
    weights, seen = WEIGHTS[20:60], []
    whole, cheap = (
        loss_of(case, options, divergence, weights) for options in (CHUNKED, skipped(below, seen))
    )
    assert torch.equal(whole[0], cheap[0]) and torch.equal(whole[1], cheap[1])
    (actual,) = seen
    truth = in_logits(case, weights, divergence)
    heads, states = (case.head_p, case.head_q), (case.hidden_p, case.hidden_q)
    for side, left_out in enumerate((actual.left_out_p, actual.left_out_q)):
        size = truth[side].abs()
        allowed = below * size.sum(-1)
        assert (left_out <= allowed * (1 + 1e-9)).all()
        most = size.sort(-1).values.cumsum(-1)
        most = torch.where(most <= allowed[:, None], most, 0.0).amax(-1)
        assert left_out.sum() >= 0.3 * most.sum() > 0
        longest = heads[side].weight.norm(dim=-1).max()
        in_hidden, in_weight, in_bias = (
            b - a for a, b in zip(*(x[2][3 * side : 3 * side + 3] for x in (whole, cheap)), strict=True)
        )
        assert (in_hidden.norm(dim=-1) <= left_out * longest * (1 + 1e-6) + 1e-15).all()
        assert in_weight.norm() <= (left_out * states[side].norm(dim=-1)).sum() * (1 + 1e-6)
        assert in_hidden.abs().max() > 0 and in_weight.abs().max() > 0 and (in_bias == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_peaked_gradient_takes_few_multiplications(dtype, monkeypatch):
    """Far fewer multiplications, and the same direction of the gradient."""
    products, original = [], skipping.product

    def counted(a, b):
        products.append(a.numel())
        return original(a, b)

    monkeypatch.setattr(skipping, "product", counted)
    case, seen = peaked(dtype, 0.1, 8.0), []
    whole, cheap = loss_of(case, CHUNKED), loss_of(case, skipped(1e-3, seen))
    share = sum(products) / (2 * 2 * 150 * 3001)
    assert 0 < share < 0.4
    assert seen[0].multiplied == pytest.approx(share)
    for a, b in zip(whole[2], cheap[2], strict=True):
        assert a.dtype == b.dtype == dtype
        assert relative_rms(b, a.double()) < (2e-3 if dtype == torch.float32 else 8e-3)


def test_a_flat_gradient_is_multiplied_completely():
    case, seen = head_case(torch.float32, 0.1, tokens=(150,), vocab_size=3001), []
    case.hidden_p.requires_grad_()
    linear_kl_loss(*case.models, weights=WEIGHTS.float(), options=skipped(0.01, seen))
    assert seen[0].multiplied == 1.0 and seen[0].left_out_q is None
    assert seen[0].left_out_p.min() > 0


def multiplied(logits, below):
    """The share of entries that a loss multiplies, with these logits under p and flatter ones under q."""
    vocab_size, seen = logits.shape[1], []
    weight = torch.eye(vocab_size).requires_grad_()
    other = Head(torch.eye(vocab_size))
    weights = torch.ones(len(logits))
    loss = linear_kl_loss(
        logits, Head(weight), 0.5 * logits, other, weights=weights, options=skipped(below, seen)
    ).loss
    (actual,) = torch.autograd.grad(loss, weight)
    assert actual.abs().sum() > 0
    return seen[0].multiplied


def test_tokens_that_keep_similarly_many_columns_share_a_product():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4 * skipping.GROUP, 400, generator=random)
    flat = torch.arange(len(logits)) % 4 == 0
    logits[flat] *= 0.5
    logits[~flat, :10] += 20.0
    assert 0.2 < multiplied(logits, 1e-3) < 0.3


def test_everything_is_multiplied_where_gathering_would_be_slower():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 400, generator=random)
    for vocab_size, share in ((360, 1.0), (200, 1.0), (120, 0.3)):
        logits[:, vocab_size:] = -30.0
        assert multiplied(logits, 1e-9) == share


@pytest.mark.parametrize("plan", ["loss", "recomputed", "objective", "frozen heads", "operation"])
@pytest.mark.parametrize("buffer_bytes", [2**27, 700_000, 1], ids=["whole", "chunks", "one by one"])
def test_every_plan_skips_the_same_entries(buffer_bytes, plan):
    """The skipped entries depend on the token only, not on chunks or plans."""
    case = peaked(torch.float64, 0.1, 4.0, tokens=(23,), vocab_size=501)
    weights, seen = WEIGHTS[60:83], []
    right = loss_of(case, skipped(0.02, seen), weights=weights)[2]
    options = skipped(0.02, buffer_bytes=buffer_bytes)
    tensors, of = leaves_of(case)
    hp, wp, bp, hq, wq, bq = tensors
    if plan == "loss":
        actual = loss_of(case, options, weights=weights)[2]
    elif plan == "recomputed":
        actual = torch.autograd.grad((of(options)(*tensors) * weights).sum(), tensors)
    elif plan == "objective":
        loss, _ = linear_objective(
            hp,
            Head(wp, bp),
            case.tokens,
            hq,
            Head(wq, bq),
            lambda t, rows: weights[rows] * t.kl,
            options=options,
        )
        actual = torch.autograd.grad(loss, tensors)
    elif plan == "frozen heads":
        tensors, right = (hp, hq), (right[0], right[3])
        heads = Head(wp.detach(), bp.detach()), Head(wq.detach(), bq.detach())
        values = linear_kl(hp, heads[0], hq, heads[1], options=options)
        actual = torch.autograd.grad((values * weights).sum(), tensors)
    else:
        arguments = packing.pack((hp, Head(wp, bp)), (hq, Head(wq, bq)), 1.0, options)
        actual = ops.linear_divergence_gradient(*arguments, "kl", weights, [True] * 6)[2]
    for a, b in zip(right, actual, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)


def test_which_calls_report():
    case, seen = peaked(torch.float64, 0.1, 4.0, tokens=(2, 3), vocab_size=101), []
    options = skipped(0.05, seen)
    token_statistics(*case.models, case.tokens, options=options)
    values = linear_kl(*case.models, options=options)
    assert not seen and torch.equal(values, case.kl(CHUNKED))
    case.head_q.weight.requires_grad_()
    values = linear_kl(*case.models, options=options)
    assert not seen, "nothing has been left out of a value"
    values.sum().backward()
    assert seen[0].left_out_p is None and seen[0].left_out_q.shape == (6,)
    linear_kl_loss(*case.swapped().models, weights=torch.ones(2, 3).double(), options=options)
    assert seen[1].left_out_q is None and seen[1].left_out_p.shape == (6,)
    from kleash.linear import linear_divergence

    linear_divergence(*case.models, divergence="reverse_kl", options=options).sum().backward()
    assert seen[2].left_out_p is None and seen[2].left_out_q.min() > 0


def test_tokens_of_weight_0_and_of_nan_skip_nothing():
    case, seen = peaked(torch.float32, 0.1, 4.0, tokens=(6,), vocab_size=301), []
    case.hidden_p[1] = torch.nan
    case.hidden_q[4] = torch.nan
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 1.0])
    _, per_token, actual = loss_of(case, skipped(0.05, seen), weights=weights)
    left_out = seen[0].left_out_p
    assert left_out[1] == 0 and left_out[4] == 0 and left_out[[0, 2, 3, 5]].min() > 0
    assert per_token[4].isnan() and actual[0][4].isnan().all() and (actual[0][1] == 0).all()
    assert actual[0][[0, 2, 3, 5]].isfinite().all()


def test_a_gradient_of_zero_is_not_multiplied():
    case, seen = peaked(torch.float32, 0.1, 1.0, tokens=(5,), vocab_size=101), []
    hidden = case.hidden_p.clone().requires_grad_()
    options = skipped(0.05, seen)
    linear_kl_loss(
        hidden, case.head_p, case.hidden_p, case.head_p, weights=torch.ones(5), options=options
    ).loss.backward()
    assert (hidden.grad == 0).all() and seen[0].multiplied == 0.0 and (seen[0].left_out_p == 0).all()


def test_logits_without_a_weight_get_their_complete_gradient():
    z, seen = torch.randn(2, 4, 50), []
    zp = (5 * z[0]).requires_grad_()
    linear_kl_loss(
        zp, Head(None), z[1], Head(None), weights=torch.ones(4), options=skipped(0.1, seen)
    ).loss.backward()
    assert (zp.grad != 0).all()
    assert seen[0].left_out_p is None and seen[0].left_out_q is None and seen[0].multiplied == 1.0


def test_a_weight_trained_in_both_models():
    case = peaked(torch.float64, 0.3, 4.0, tokens=(40,), vocab_size=301)
    other, seen = case.hidden_q[:, :13], []
    grads = []
    for options in (REFERENCE, skipped(1e-4, seen)):
        weight = case.head_p.weight.clone().requires_grad_()
        loss = linear_kl_loss(
            case.hidden_p, Head(weight), other, Head(weight), weights=WEIGHTS[:40], options=options
        ).loss
        grads.append(torch.autograd.grad(loss, weight)[0])
    bound = seen[0].left_out_p @ case.hidden_p.norm(dim=-1) + seen[0].left_out_q @ other.norm(dim=-1)
    assert 0 < (grads[1] - grads[0]).norm() <= bound


@pytest.mark.parametrize("fast", [True, False])
def test_a_bfloat16_gradient(fast, monkeypatch):
    monkeypatch.setattr("kleash.linear.impl.project._cpu_is_fast_at_bfloat16", lambda: fast)
    case = peaked(torch.bfloat16, 0.3, 4.0)
    exact, actual = loss_of(in_float64(case), CHUNKED)[2], loss_of(case, skipped(1e-3))[2]
    for right, ours in zip(exact, actual, strict=True):
        assert relative_rms(ours, right) < (6e-3 if fast else 3e-3)


@pytest.mark.parametrize("vocab_size", [1, 5, 2047, 10_000])
@pytest.mark.parametrize("below", [1e-9, 0.3, 0.999])
def test_the_skipped_sum_is_within_the_bound_for_all_rows(vocab_size, below):
    random = torch.Generator().manual_seed(vocab_size)
    normal = torch.randn(12, vocab_size, generator=random, dtype=torch.float64)
    rows = torch.exp(3 * normal) * normal.sign()
    rows[0], rows[1], rows[2] = 0.0, 1.0, 1e-300
    rows[3, 1:] = 1e-12
    rows[4, 0], rows[5, 0] = torch.nan, torch.inf
    rows[6, ::5] = 0.0
    rows[7, ::16] = 1e9
    before = rows.clone()
    mask, left = keep_mask(rows, below, torch.float64)
    small = mask == 0
    assert torch.equal(rows.nan_to_num(), before.nan_to_num())
    total = rows.abs().sum(-1)
    finite = total.isfinite()
    assert finite.sum() == 10 and not small[~finite].any() and (left[~finite] == 0).all()
    assert (left <= below * total)[finite].all()
    torch.testing.assert_close(left[finite], torch.where(small, rows.abs(), 0.0).sum(-1)[finite])
    largest_out = torch.where(small, rows.abs(), 0.0).amax(-1)
    least_kept = torch.where(small, torch.inf, rows.abs()).amin(-1)
    assert (largest_out <= least_kept)[finite].all()
    assert small[0].sum() == small[1].sum() == 0


def test_a_report_inside_a_compiled_caller_raises():
    case = head_case(torch.float32, tokens=(2,), vocab_size=5)
    with pytest.raises(CannotRunError, match=r"options\.report cannot be called inside torch\.compile"):
        packing.pack(case.models[:2], case.models[2:], 1.0, skipped(0.1, []))
