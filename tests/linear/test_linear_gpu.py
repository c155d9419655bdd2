"""The linear functions on a GPU, compiled and not, against float64 on a CPU."""

import pytest
import torch
from compiling import OF_TORCH_ITSELF
from linear_cases import Case, head_case, in_float64, relative_rms

from kleash.linear import Head, LinearOptions, TokenStatistics, linear_kl_loss, linear_objective

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(*OF_TORCH_ITSELF),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        LinearOptions(compile=False),
        LinearOptions(compile=True),
        LinearOptions(buffer_bytes=2**20, compile=True),
    ],
    ids=["eager", "compiled", "small"],
)


def on_gpu(case: Case) -> Case:
    """The case with its tensors on the GPU."""

    def moved(head):
        bias = None if head.bias is None else head.bias.cuda()
        return Head(head.weight.cuda(), bias, scale=head.scale, softcap=head.softcap)

    return Case(
        case.hidden_p.cuda(), moved(case.head_p), case.hidden_q.cuda(), moved(case.head_q), case.tokens.cuda()
    )


@OPTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("distance", [2.0, 0.01], ids=["far", "near"])
def test_statistics_equal_those_of_a_cpu_in_float64(options, dtype, distance):
    case = head_case(dtype, distance, tokens=(300,), vocab_size=5003, bias=True, softcap=20.0)
    exact, actual = in_float64(case).statistics(), on_gpu(case).statistics(options)
    for name, right, ours in zip(TokenStatistics._fields, exact, actual, strict=True):
        if right.is_floating_point():
            assert relative_rms(ours.cpu(), right) < 1e-4, name
        else:
            assert (ours.cpu() == right).float().mean() > 0.99, name


@OPTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_and_gradients_equal_those_of_a_cpu_in_float64(options, dtype):
    case = head_case(dtype, 0.3, tokens=(300,), vocab_size=5003)
    results = []
    for each in (in_float64(case), on_gpu(case)):
        leaves = each.hidden_p.requires_grad_(), each.head_p.weight.requires_grad_()
        weights = torch.linspace(-1, 2, 300, dtype=torch.float64, device=each.hidden_p.device)
        loss, per_token = linear_kl_loss(*each.models, weights=weights, options=options)

        def objective(terms, rows, weights=weights):
            return weights[rows] * (terms.kl - terms.token_logp - 0.3 * terms.entropy)

        other, _ = linear_objective(
            *each.models[:2], each.tokens, *each.models[2:], objective, options=options
        )
        gradients = [x for y in (loss, other) for x in torch.autograd.grad(y, leaves)]
        results.append([x.detach().cpu() for x in (per_token, other, *gradients)])
    for right, ours in zip(*results, strict=True):
        assert relative_rms(ours, right) < (1e-4 if dtype == torch.float32 else 1e-2)
