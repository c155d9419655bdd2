"""The gradient of the chunked KL, against finite differences and against autograd of the reference."""

from dataclasses import replace

import pytest
import torch
from linear_cases import PLAIN, REFERENCE, head_case, in_float64, leaves_of, relative_rms

from kleash.linear import Head, LinearOptions, linear_kl

NAMES = ("hidden_p", "weight_p", "bias_p", "hidden_q", "weight_q", "bias_q")
OPTIONS = pytest.mark.parametrize(
    "options", [LinearOptions(compile=False), LinearOptions(buffer_bytes=700)], ids=["whole", "chunks"]
)


@OPTIONS
@pytest.mark.parametrize(
    "traits", [{}, {"scale": 0.4}, {"softcap": 1.5, "scale": 2.0}, {"temperature": 0.7}], ids=str
)
def test_gradcheck(options, traits):
    """With hidden states of 3 and 4 dimensions, since gradcheck calls the function twice for each number."""
    case = head_case(torch.float64, 1.0, tokens=(1, 2), vocab_size=5, bias=True, **traits)
    case.hidden_p, case.head_p = narrowed(case.hidden_p, case.head_p, 3)
    case.hidden_q, case.head_q = narrowed(case.hidden_q, case.head_q, 4)
    tensors, of = leaves_of(case)
    if options.buffer_bytes is not None:  # a chunk for each of the two tokens, however few dimensions
        options = replace(options, buffer_bytes=1)
    assert torch.autograd.gradcheck(of(options), tensors)


def narrowed(hidden, head, dims):
    """Hidden states and head restricted to the first dimensions."""
    return hidden[..., :dims].contiguous(), replace(head, weight=head.weight[:, :dims].contiguous())


@OPTIONS
@pytest.mark.parametrize("distance", [2.0, 0.001], ids=["far", "near"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_error_of_gradients_is_that_of_float32_logits(options, dtype, distance):
    case = head_case(dtype, distance, bias=True, softcap=4.0, tokens=(21,))
    weight = torch.linspace(-1, 2, 21)

    def gradients(of_case, choice):
        tensors, of = leaves_of(of_case)
        return torch.autograd.grad((of(choice)(*tensors) * weight).sum(), tensors)

    exact, plain = gradients(in_float64(case), REFERENCE), gradients(case, PLAIN)
    actual, budget = gradients(case, options), 2.0 if dtype == torch.bfloat16 else 1.5
    for name, right, cheap, ours in zip(NAMES, exact, plain, actual, strict=True):
        assert ours.dtype == dtype
        assert right.abs().max() > 0
        assert relative_rms(ours, right) <= budget * relative_rms(cheap, right) + 1e-6, name


def test_logits_given_as_hidden_states_get_their_gradient():
    z = torch.randn(2, 6, 9, dtype=torch.float64).unbind()
    a, b = (x.clone().requires_grad_() for x in z)
    head = Head(None, softcap=2.0, scale=0.5)
    assert torch.autograd.gradcheck(lambda a, b: linear_kl(a, head, b, head, temperature=1.5), (a, b))


def test_tokens_of_probability_0_have_a_gradient_of_0():
    case = head_case(torch.float64, tokens=(4,), vocab_size=15, bias=True)
    forbidden = torch.zeros(15, dtype=torch.float64)
    forbidden[12:] = -torch.inf
    grads = []
    for options in (REFERENCE, LinearOptions(compile=False)):
        weight = case.head_p.weight.clone().requires_grad_()
        hidden = case.hidden_q.clone().requires_grad_()
        kl = linear_kl(
            case.hidden_p, Head(weight, case.head_p.bias + forbidden),
            hidden, Head(case.head_q.weight, case.head_q.bias + forbidden), options=options,
        )  # fmt: skip
        grads.append(torch.autograd.grad(kl.sum(), (weight, hidden)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    assert (grads[1][0][12:] == 0).all() and grads[1][0][:12].abs().min() > 0


def test_a_model_against_itself_has_a_gradient_of_zero():
    case = head_case(torch.float32)
    hidden = case.hidden_p.requires_grad_()
    with torch.inference_mode():  # as a reference often runs
        reference = hidden.clone()
    linear_kl(hidden, case.head_p, reference, case.head_p).sum().backward()
    assert (hidden.grad == 0).all()


def test_statistics_are_detached():
    case = head_case(torch.float32, tokens=(3,))
    case.hidden_p.requires_grad_()
    assert not any(x.requires_grad for x in case.statistics())
    assert not any(x.requires_grad for x in case.statistics(REFERENCE))
    with torch.no_grad():
        assert not case.kl().requires_grad


def test_a_weight_changed_in_place_before_the_backward_pass_raises():
    case = head_case(torch.float64, tokens=(3,))
    case.hidden_p.requires_grad_()
    kl = case.kl().sum()
    case.head_q.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kl.backward()
