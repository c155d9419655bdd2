"""Row functions compiled by torch agree with the eager ones."""

import torch
from compiling import compiles
from linear_cases import head_case, in_float64, relative_rms
from torch._dynamo import config
from torch._dynamo.utils import counters

from kleash.linear import LinearOptions, TokenStatistics, linear_kl_loss, linear_objective
from kleash.linear.compiled_rows import compiled, kl_gradient_rows
from kleash.linear.vocab_shards import VocabShards

COMPILED = LinearOptions(compile=True, buffer_bytes=2**20)
EAGER = LinearOptions(compile=False, buffer_bytes=2**20)


@compiles
def test_compiled_and_eager_agree(compiler, unhooked):
    for distance in (2.0, 0.01):
        case = head_case(torch.float32, distance, tokens=(67,), vocab_size=1009, bias=True, softcap=20.0)
        exact = in_float64(case).statistics(EAGER)
        eager, actual = case.statistics(EAGER), case.statistics(COMPILED)
        for name, right, plain, ours in zip(TokenStatistics._fields, exact, eager, actual, strict=True):
            if right.is_floating_point():
                assert relative_rms(ours, right) <= 1.5 * relative_rms(plain, right) + 1e-6, name
            else:
                assert torch.equal(ours, right), name
    spoilt = head_case(torch.float32, tokens=(67,), vocab_size=1009)
    spoilt.hidden_p[1] = torch.nan
    before, after = spoilt.statistics(EAGER), spoilt.statistics(COMPILED)
    assert after.kl_pq[1].isnan() and after.kl_pq[torch.arange(67) != 1].isfinite().all()
    torch.testing.assert_close(after.kl_pq, before.kl_pq, rtol=1e-5, atol=0, equal_nan=True)


@compiles
def test_the_compiled_kl_is_exactly_zero_for_a_model_against_itself(compiler, unhooked):
    case = head_case(torch.float32, tokens=(67,), vocab_size=1009)
    case.hidden_q, case.head_q = case.hidden_p.clone(), case.head_p
    assert torch.equal(case.kl(COMPILED), torch.zeros(67))


@compiles
@config.patch(recompile_limit=1)
def test_on_a_gpu_the_rows_of_a_vocabulary_are_compiled_once(compiler, unhooked):
    """And once more for what needs another gradient, also where torch's own limit is reached."""
    rows, alone = compiled(kl_gradient_rows, "cuda"), VocabShards(None, [101], torch.device("cpu"))
    before = counters["stats"]["unique_graphs"]
    for count in (64, 33, 7, 128):
        z, weight = torch.randn(count, 101), torch.ones(count, 1).double()
        kl, in_p, in_q = rows(z, z.flip(-1), weight, alone, needs=(True, count == 128))
        logp, logq = z.log_softmax(-1), z.flip(-1).log_softmax(-1)
        torch.testing.assert_close(kl[:, 0].float(), (logp.exp() * (logp - logq)).sum(-1), rtol=1e-5, atol=0)
        assert in_p.sum(-1).abs().max() < 1e-5
    torch.testing.assert_close(in_q, logq.exp() - logp.exp(), rtol=1e-4, atol=1e-7)
    assert counters["stats"]["unique_graphs"] == before + 2


@compiles
def test_compiled_and_eager_losses_agree(compiler, unhooked):
    weights = torch.linspace(-1, 2.2, 259)

    def objective(terms, rows):
        return weights[rows] * (terms.kl - terms.token_logp - 0.3 * terms.entropy)

    for distance in (2.0, 0.01):
        case = head_case(torch.float32, distance, tokens=(259,), vocab_size=1009, bias=True)
        wide = in_float64(case)
        results = []
        for each, options in ((wide, EAGER), (case, EAGER), (case, COMPILED)):
            each.hidden_p.requires_grad_()
            loss, per_token = linear_kl_loss(*each.models, weights=weights, options=options)
            other, terms = linear_objective(
                *each.models[:2], each.tokens, *each.models[2:], objective, options=options
            )
            gradients = (torch.autograd.grad(x, each.hidden_p)[0] for x in (loss, other))
            results.append((per_token, *terms, *gradients))
        for number, (right, plain, ours) in enumerate(zip(*results, strict=True)):
            assert relative_rms(ours, right) <= 1.5 * relative_rms(plain, right) + 1e-6, number
