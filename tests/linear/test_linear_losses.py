"""Losses whose gradient is computed in the forward pass."""

import pytest
import torch
from linear_cases import CHUNKED, EVERY, REFERENCE, head_case, in_float64, leaves_of, relative_rms

from kleash.divergences import kl
from kleash.errors import CannotRunError
from kleash.linear import Head, LinearOptions, linear_kl, linear_kl_loss, linear_objective
from kleash.linear.gradient_sums import GradientSums


@EVERY
def test_tokens_of_weight_0_are_not_read(options):
    case = head_case(torch.float32, tokens=(3, 4), bias=True)
    weights = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 1.0, -1.0], [0.5, 1.0, 0.0, 0.0]])
    dirty = head_case(torch.float32, tokens=(3, 4), bias=True)
    dirty.hidden_p[weights == 0] = torch.nan
    dirty.hidden_q[weights == 0] = torch.inf
    results = []
    for each in (case, dirty):
        tensors, of = leaves_of(each, weights=weights)
        loss, per_token = of(options)(*tensors)
        assert (per_token[weights == 0] == 0).all() and per_token[weights != 0].min() > 0
        results.append((loss.detach(), per_token, *torch.autograd.grad(loss, tensors)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert (results[0][2][weights == 0] == 0).all() and results[0][2].abs().sum() > 0


def test_chunks_of_unmasked_tokens_are_full(monkeypatch):
    """A mask with few unmasked tokens takes few products."""
    case = head_case(torch.float32, tokens=(40,), vocab_size=50)
    weights = (torch.arange(40) % 8 == 0).float()
    seen, original = [], GradientSums.add

    def watched(sums, chunk, *rest):
        seen.append(chunk.tokens)
        return original(sums, chunk, *rest)

    case.head_p.weight.requires_grad_()
    monkeypatch.setattr(GradientSums, "add", watched)
    linear_kl_loss(*case.models, weights=weights, options=CHUNKED)
    assert seen == [5]


def test_all_weights_may_be_0():
    case = head_case(torch.float32, tokens=(4,))
    case.hidden_p.fill_(torch.nan).requires_grad_()
    loss, per_token = linear_kl_loss(*case.models, weights=torch.zeros(4))
    loss.backward()
    assert loss == 0 and (per_token == 0).all() and (case.hidden_p.grad == 0).all()


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_raises(retain):
    case = head_case(torch.float32, tokens=(3,))
    case.hidden_p.requires_grad_()
    loss = linear_kl_loss(*case.models, weights=torch.ones(3)).loss
    loss.backward(retain_graph=retain)
    with pytest.raises(CannotRunError, match="a backward pass has used it; compute the loss again"):
        loss.backward()


def test_only_what_requires_a_gradient_gets_one_and_values_are_detached():
    case = head_case(torch.float64, tokens=(5,), bias=True)
    case.head_p.bias.requires_grad_()
    case.hidden_q.requires_grad_()
    loss, per_token = linear_kl_loss(*case.models, weights=torch.ones(5, dtype=torch.float64))
    assert loss.requires_grad and not per_token.requires_grad
    (2.5 * loss).backward()
    tensors, of = leaves_of(case)
    right = torch.autograd.grad(2.5 * of(REFERENCE)(*tensors).sum(), tensors)
    torch.testing.assert_close(case.head_p.bias.grad, right[2])
    torch.testing.assert_close(case.hidden_q.grad, right[3])
    assert case.hidden_p.grad is None and case.head_p.weight.grad is None and case.head_q.weight.grad is None


def test_without_gradients_the_loss_is_only_a_value():
    case = head_case(torch.float32, tokens=(5,))
    weights = torch.arange(5.0)
    loss = linear_kl_loss(*case.models, weights=weights).loss
    assert not loss.requires_grad
    torch.testing.assert_close(loss, (weights * case.kl()).sum())


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_computed_under_no_grad(off, monkeypatch):
    case, formed = head_case(torch.float32, tokens=(5,)), []
    case.hidden_p.requires_grad_()
    case.head_p.weight.requires_grad_()
    add = GradientSums.add

    def counted(*arguments):
        formed.append(arguments)
        add(*arguments)

    monkeypatch.setattr(GradientSums, "add", counted)

    def both():
        linear_kl_loss(*case.models, weights=torch.ones(5))
        linear_objective(*case.models[:2], case.tokens, *case.models[2:], lambda terms, rows: terms.kl)

    with off():
        both()
    assert formed == []
    both()
    assert len(formed) == 2


@pytest.mark.parametrize(
    ("call", "option", "words"),
    [
        (linear_kl_loss, "weights", "linear_divergence's values"),
        (linear_kl, "temperature", "take the functions"),
    ],
    ids=["weights", "temperature"],
)
def test_weights_and_temperatures_have_no_gradient(call, option, words, unhooked):
    case = head_case(torch.float32, tokens=(5,))
    with pytest.raises(
        CannotRunError, match=f"{option}.* cannot require a gradient; detach it, or .*{words}"
    ):
        call(*case.models, **{option: torch.ones(5, requires_grad=True)})


def test_the_weight_gradient_is_summed_in_float32():
    """Four hundred equal contributions, each too small to move a bfloat16 sum that is already large."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, generator=random).repeat(400, 1).bfloat16()
    weight = torch.randn(7, 3, generator=random).bfloat16().requires_grad_()
    other = Head(torch.randn(7, 3, generator=random).bfloat16())
    options = LinearOptions(buffer_bytes=1)
    ones = torch.ones(400)
    linear_kl_loss(hidden, Head(weight), hidden, other, weights=ones, options=options).loss.backward()
    leaf, one = weight.detach().double().requires_grad_(), hidden[:1].double()
    linear_kl(one, Head(leaf), one, Head(other.weight.double())).sum().backward()
    assert relative_rms(weight.grad, 400 * leaf.grad) < 2**-7


@EVERY
def test_a_temperature_for_each_token(options):
    case = head_case(torch.float64, 1.0, tokens=(2, 3), vocab_size=31, bias=True, softcap=5.0)
    temperature = torch.tensor([[0.5, 1.0, 1.7], [0.9, 3.0, 0.2]], dtype=torch.float64)
    weights = torch.linspace(0.1, 1, 6, dtype=torch.float64).reshape(2, 3)
    case.hidden_p.requires_grad_()
    actual = linear_kl_loss(*case.models, weights=weights, temperature=temperature, options=options)
    (ours,) = torch.autograd.grad(actual.loss, case.hidden_p)
    values = linear_kl(*case.models, temperature=temperature, options=options)
    for row, column in ((0, 0), (0, 2), (1, 1), (1, 2)):
        z = []
        for hidden, head in ((case.hidden_p, case.head_p), (case.hidden_q, case.head_q)):
            raw = hidden[row, column] @ head.weight.T + head.bias
            z.append(5 * torch.tanh(raw / 5) / temperature[row, column])
        alone = kl(z[0].log_softmax(-1), z[1].log_softmax(-1))
        (right,) = torch.autograd.grad(weights[row, column] * alone, case.hidden_p)
        torch.testing.assert_close(actual.per_token[row, column], alone.detach())
        torch.testing.assert_close(values[row, column], alone)
        torch.testing.assert_close(ours[row, column], right[row, column])
    temperature[:, 1] = torch.tensor([-1.0, torch.inf])  # refused as numbers; both gave finite values
    values = linear_kl(*case.models, temperature=temperature, options=options)
    assert values.isnan().tolist() == [[False, True, False]] * 2


@EVERY
@pytest.mark.parametrize("way", ["loss", "objective", "values"])
def test_gradients_of_float16_tensors_survive_loss_scaling(options, way):
    """The gradient of one of thousands of tokens underflows in float16, unless the loss is scaled."""
    case = head_case(torch.float16, 0.02, tokens=(30,), bias=True)
    share, scale = 1e-6, 2.0**22
    actual = []
    for each, choice in ((in_float64(case), REFERENCE), (case, options)):
        hidden = each.hidden_p.clone().requires_grad_()
        weight = each.head_p.weight.clone().requires_grad_(way != "values")
        head = Head(weight, each.head_p.bias)
        weights = torch.full((30,), share, dtype=torch.float64)
        models = hidden, head, each.hidden_q, each.head_q
        if way == "loss":
            loss = linear_kl_loss(*models, weights=weights, options=choice).loss
        elif way == "objective":
            arguments = *models[:2], each.tokens, *models[2:]
            loss, _ = linear_objective(*arguments, lambda t, rows: share * t.kl, options=choice)
        else:
            loss = share * linear_kl(*models, options=choice).sum()
        (loss * scale).backward()
        actual.append([x.grad for x in (hidden, weight) if x.grad is not None])
    for right, ours in zip(*actual, strict=True):
        assert ours.dtype == torch.float16 and relative_rms(ours, right) < 2e-3
