"""Precision, likeliest tokens, ranks and log-probabilities."""

import pytest
import torch
from linear_cases import CHUNKED, EVERY, REFERENCE, TRAITS, head_case, in_float64, logp_by_numpy

from kleash.errors import OptionError
from kleash.linear import Head, log_probabilities, token_statistics
from kleash.linear.api import token_statistics_and_top


@EVERY
def test_ties_go_to_the_first_and_do_not_lower_the_rank(options):
    z = torch.zeros(2, 1030)
    z[0, [300, 700, 1029]] = 2.0
    z[1, 1028:] = 1.0
    actual = token_statistics(z, Head(None), z, Head(None), torch.tensor([700, 5]), options=options)
    assert actual.top1_p.tolist() == [300, 1028] == actual.top1_q.tolist()
    assert actual.rank_q.tolist() == [0, 2]
    torch.testing.assert_close(actual.top1_probability_q, z.softmax(-1).amax(-1))


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 512, 777, 1024, 1500])
def test_the_likeliest_token_is_found_at_every_position(vocab_size):
    z = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    z[torch.arange(64), torch.arange(64) % vocab_size] += 3
    tokens = torch.zeros(64, dtype=torch.int32)
    actual = token_statistics(z, Head(None), -z, Head(None), tokens, options=CHUNKED)
    assert torch.equal(actual.top1_p, z.argmax(-1))
    assert torch.equal(actual.top1_q, z.argmin(-1))
    assert torch.equal(actual.rank_q, (-z > -z[:, :1]).sum(-1))


@EVERY
@pytest.mark.parametrize(
    ("vocab_size", "traits", "tokens"), [(701, "softcap", 37), (4, "scale", 37), (2999, "temperature", 5)]
)
def test_the_likeliest_tokens_come_with_the_statistics(options, vocab_size, traits, tokens):
    """The statistics equal ``token_statistics``; the five likeliest tokens and probabilities equal float64's."""
    case = head_case(vocab_size=vocab_size, tokens=(tokens,), **TRAITS[traits])
    chosen = {"temperature": case.temperature, "options": options}
    actual = token_statistics_and_top(*case.models, case.tokens, top=5, **chosen)
    plain = case.statistics(options)
    assert all(torch.equal(*pair) for pair in zip(actual.statistics, plain, strict=True))
    wide = in_float64(case)
    sides = ((wide.hidden_p, wide.head_p, actual.top_p), (wide.hidden_q, wide.head_q, actual.top_q))
    for hidden, head, top in sides:
        probs = torch.from_numpy(logp_by_numpy(hidden, head, case.temperature)).exp()
        likeliest = probs.topk(min(5, vocab_size), -1).values
        for values in (top.probability.double(), probs.gather(-1, top.token_ids)):
            torch.testing.assert_close(values, likeliest, rtol=2e-5, atol=1e-12)
        assert all(len(set(ids)) == min(5, vocab_size) for ids in top.token_ids.tolist())


def test_the_likeliest_tokens_at_every_position_and_with_ties():
    z = torch.zeros(3, 3001)
    z[0, [0, 255, 256, 2999, 3000]] = torch.tensor([1.0, 5.0, 4.0, 3.0, 2.0])
    z[1, 700:706] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    tokens = torch.zeros(3, dtype=torch.long)
    top = token_statistics_and_top(z, Head(None), z, Head(None), tokens, top=5, options=CHUNKED).top_q
    assert top.token_ids[:2].tolist() == [[255, 256, 2999, 3000, 0], [705, 704, 703, 702, 701]]
    assert len(set(top.token_ids[2].tolist())) == 5
    torch.testing.assert_close(top.probability[2], torch.full((5,), 1 / 3001))
    shaped = token_statistics_and_top(z[:, None], Head(None), z[:, None], Head(None), tokens[:, None], top=2)
    assert shaped.top_p.probability.shape == (3, 1, 2)
    with pytest.raises(OptionError, match="top is 0; give a finite number, at least 1"):
        token_statistics_and_top(z, Head(None), z, Head(None), tokens, top=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_log_probabilities_equal_numpy_in_float64(dtype):
    case = head_case(dtype, tokens=(2, 3), vocab_size=5001, bias=True, softcap=9.0, temperature=1.3)
    actual = log_probabilities(case.hidden_q, case.head_q, temperature=1.3)
    expected = torch.as_tensor(logp_by_numpy(case.hidden_q, case.head_q, 1.3))
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-7, atol=1e-6)
    assert log_probabilities(case.hidden_q[:, :0], case.head_q).shape == (2, 0, 5001), "of no token"


def test_one_float64_tensor_makes_the_result_float64():
    case = head_case(torch.bfloat16)
    case.hidden_q = case.hidden_q.double()
    actual = case.kl(CHUNKED)
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, in_float64(case).kl(REFERENCE), rtol=1e-12, atol=0)
