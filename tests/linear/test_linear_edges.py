"""Edge cases of every function and implementation: NaN, no overlap, no token, one token, odd shapes, all dtypes."""

import pytest
import torch
from linear_cases import EVERY, PLAIN, REFERENCE, SMALL, Case, chosen, head_case, in_float64, relative_rms

from kleash.divergences import DIVERGENCES
from kleash.errors import ShapeError, VocabularyMismatchError
from kleash.linear import (
    Head,
    linear_divergence,
    linear_divergence_loss,
    linear_kl,
    linear_objective,
    token_statistics,
)


def weights_of(case):
    shape = case.tokens.shape
    weights = torch.linspace(0.3, 1.7, case.tokens.numel()).bfloat16()  # a number of every dtype
    return weights.reshape(shape).to(case.hidden_p.dtype)


def every_term(case):
    weights = weights_of(case).reshape(-1)

    def objective(terms, rows):
        return weights[rows] * (terms.kl - terms.token_logp - 0.3 * terms.entropy + 0.2 * terms.token_logq)

    return objective


def loss_of(case, options, **more):
    return linear_divergence_loss(*case.models, weights=weights_of(case), options=options, **more)


def objective_of(case, options):
    return linear_objective(
        *case.models[:2], case.tokens, *case.models[2:], every_term(case), options=options
    )


DOORS = {
    "linear_kl": lambda case, options: linear_kl(*case.models, options=options),
    "linear_kl_loss": lambda case, options: loss_of(case, options).per_token,
    "linear_objective": lambda case, options: objective_of(case, options)[1].kl,
    "token_statistics": lambda case, options: (
        token_statistics(*case.models, case.tokens, options=options).kl_pq
    ),
    **{
        name: lambda case, options, name=name: linear_divergence(
            *case.models, divergence=name, options=options
        )
        for name in DIVERGENCES
        if name != "kl"
    },
}
THROUGH = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS.keys())


@THROUGH
@EVERY
def test_nan_affects_only_its_token(options, door):
    case = head_case(torch.float32, tokens=(7,), vocab_size=67, bias=True)
    whole = door(case, options)
    case.hidden_q[4, 2] = torch.nan
    case.hidden_p[2, 1] = torch.inf
    spoilt, unaffected = door(case, options), torch.tensor([0, 1, 3, 5, 6])
    assert spoilt[4].isnan() and not spoilt[2].isfinite()
    torch.testing.assert_close(spoilt[unaffected], whole[unaffected])
    assert whole.min() > 0


GRADIENTS = {
    "values": lambda case, options: (linear_kl(*case.models, options=options) * weights_of(case)).sum(),
    "loss": lambda case, options: loss_of(case, options).loss,
    "objective": lambda case, options: objective_of(case, options)[0],
    "jensen_shannon": lambda case, options: loss_of(case, options, divergence="jensen_shannon").loss,
}
LEARNING = pytest.mark.parametrize("loss", GRADIENTS.values(), ids=GRADIENTS.keys())


def with_leaves(case, weights_too=True) -> tuple[Case, list[torch.Tensor]]:
    """The case with its tensors as leaves, and the leaves."""
    hidden = [x.detach().clone().requires_grad_() for x in (case.hidden_p, case.hidden_q)]
    heads, tensors = [], list(hidden)
    for head in (case.head_p, case.head_q):
        pair = [None if x is None else x.detach().clone() for x in (head.weight, head.bias)]
        tensors += [x.requires_grad_() for x in pair if x is not None and weights_too]
        heads.append(Head(*pair, scale=head.scale, softcap=head.softcap))
    return Case(hidden[0], heads[0], hidden[1], heads[1], case.tokens, case.temperature), tensors


@LEARNING
@EVERY
def test_a_nan_or_infinite_token_does_not_affect_the_gradients_of_others(options, loss):
    case = head_case(torch.float32, 1.0, tokens=(6,), vocab_size=29)
    grads = []
    for spoilt in (False, True):
        if spoilt:
            case.hidden_q[1] = torch.nan
            case.hidden_p[4] = 1e30 * torch.sign(case.hidden_p[4])
        each, tensors = with_leaves(case, weights_too=False)
        grads.append(torch.autograd.grad(loss(each, options), tensors))
    unaffected = torch.tensor([0, 2, 3, 5])
    for whole, actual in zip(*grads, strict=True):
        torch.testing.assert_close(actual[unaffected], whole[unaffected], rtol=1e-4, atol=1e-6)
        assert whole.abs().amax(-1).min() > 0
    assert grads[1][1][1].isnan().all()


@THROUGH
@EVERY
@pytest.mark.parametrize("tokens", [(2, 0), (1,)], ids=str)
def test_no_token_and_one(tokens, options, door):
    case = head_case(torch.bfloat16, tokens=tokens, vocab_size=31)
    actual = door(case, options)
    assert actual.shape == tokens and actual.dtype == torch.float32
    assert (actual > 0).all()


@LEARNING
@EVERY
@pytest.mark.parametrize("tokens", [(0,), (1, 1)], ids=str)
def test_the_gradient_of_no_token_and_of_one(tokens, options, loss):
    case, tensors = with_leaves(head_case(torch.float64, 1.0, tokens=tokens, vocab_size=31, bias=True))
    total = loss(case, options)
    actual = torch.autograd.grad(total, tensors)
    assert total.shape == ()
    for tensor, gradient in zip(tensors, actual, strict=True):
        assert gradient.shape == tensor.shape and gradient.isfinite().all()
        assert bool(gradient.abs().sum() > 0) is (0 not in tokens)


@LEARNING
@pytest.mark.parametrize("vocab_size", [1, 2, 127])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_odd_shapes_and_all_dtypes(dtype, vocab_size, loss):
    """Three axes of tokens, and vocabularies below and above the length of a vector register."""
    case = head_case(dtype, 0.5, tokens=(2, 1, 5), vocab_size=vocab_size, bias=True, softcap=20.0)
    actual = []
    for each, options in ((in_float64(case), REFERENCE), (case, PLAIN), (case, SMALL)):
        each, tensors = with_leaves(each)
        models, given = chosen(each.models, options)
        total = loss(Case(*models, each.tokens, each.temperature), given)
        actual.append((total.detach(), *torch.autograd.grad(total, tensors)))
    for number, (right, plain, ours) in enumerate(zip(*actual, strict=True)):
        assert ours.shape == right.shape
        assert number == 0 or ours.dtype == dtype
        if vocab_size == 1:
            assert ours.abs().max() <= (1e-5 if loss is GRADIENTS["objective"] else 0.0)
            continue
        slack = {torch.float64: 1e-12, torch.float32: 3e-6}.get(dtype, 2.0 ** (-6 if number else -18))
        assert relative_rms(ours, right) <= 2 * relative_rms(plain, right) + slack, number


H, W = torch.randn(5, 4), torch.randn(9, 4)


@THROUGH
def test_every_public_function_checks_its_arguments(door, unhooked):
    ids = torch.zeros(5, dtype=torch.long)
    with pytest.raises(VocabularyMismatchError, match="covers 9 tokens and the other 7"):
        door(Case(H, Head(W), H, Head(W[:7]), ids), None)
    with pytest.raises(ShapeError, match="hidden states of q have 3 dimensions and its head 4"):
        door(Case(H, Head(W), H[:, :3], Head(W), ids), None)
