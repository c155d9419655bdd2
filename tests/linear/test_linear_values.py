"""Every implementation means the same number, and it is the one of the long way."""

import math

import pytest
import torch
from linear_cases import (
    CHUNKED,
    EVERY,
    REFERENCE,
    TINY,
    TRAITS,
    Case,
    head_case,
    in_float64,
    relative_rms,
    statistics_the_long_way,
)

from kleash.linear import Head, LinearOptions, TokenStatistics, linear_kl, log_probabilities, token_statistics


@EVERY
@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS.keys())
def test_statistics_are_those_of_the_long_way(options, traits):
    case = head_case(torch.float64, apart=1.0, tokens=(3, 13), words=601, **traits)
    found, expected = case.statistics(options), statistics_the_long_way(case)
    for name, numbers, right in zip(TokenStatistics._fields, found, expected, strict=True):
        torch.testing.assert_close(numbers, right, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(case.kl(options), expected.kl_pq, rtol=1e-9, atol=1e-12)


@EVERY
@pytest.mark.parametrize("apart", [2.0, 0.05, 0.002], ids=["far", "near", "nearer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_implementation_means_the_same(options, dtype, apart):
    case = head_case(dtype, apart)
    exact = in_float64(case).statistics(REFERENCE)
    plain, found = case.statistics(REFERENCE), case.statistics(options)
    assert exact.kl_pq.median() > 1e-6, "so small a divergence would hide a wrong sign"
    for name, right, cheap, ours in zip(TokenStatistics._fields, exact, plain, found, strict=True):
        if right.is_floating_point():
            assert ours.dtype == torch.float32
            budget = 1.5 * relative_rms(cheap, right) + 2e-7
            assert relative_rms(ours, right) <= budget, name
        else:
            assert torch.equal(ours, right), name
    assert relative_rms(case.kl(options), exact.kl_pq) <= 1.5 * relative_rms(plain.kl_pq, exact.kl_pq) + 2e-7


@pytest.mark.parametrize("field", ["kl_pq", "kl_qp", "jensen_shannon", "total_variation"])
@pytest.mark.parametrize("apart", [0.03, 0.001])
def test_float32_is_right_to_a_thousandth_down_to_a_millionth_of_a_nat(apart, field):
    case = head_case(torch.float32, apart, words=3001, tokens=(64,))
    exact = getattr(in_float64(case).statistics(CHUNKED), field)
    found = getattr(case.statistics(CHUNKED), field).double()
    assert (apart > 0.01) or exact.min() < 1e-5 or field == "total_variation"
    assert ((found - exact).abs() / exact).max() < 1e-3


@EVERY
def test_the_first_model_is_the_one_averaged_over(options):
    case = head_case(torch.float64)
    there, back = case.statistics(options), case.swapped().statistics(options)
    assert (there.kl_pq - there.kl_qp).abs().min() > 1e-3
    torch.testing.assert_close(there.kl_pq, back.kl_qp)
    torch.testing.assert_close(there.entropy_p, back.entropy_q)
    certain, torn = torch.tensor([[30.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    logits = Head(None)
    torch.testing.assert_close(
        linear_kl(certain, logits, torn, logits, options=options), torch.tensor([math.log(2)])
    )


def test_numbers_do_not_depend_on_where_chunks_end():
    case = head_case(torch.float64, tokens=(53,), words=70)
    whole = case.kl(CHUNKED)
    for bytes_ in (1, 2_000, 5_003, 9_001, 20_000, 33_333):
        torch.testing.assert_close(case.kl(LinearOptions(buffer_bytes=bytes_)), whole, rtol=1e-12, atol=0)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_against_itself_is_exactly_zero(options, dtype):
    case = head_case(dtype, bias=True, softcap=3.0)
    p, head = case.hidden_p, case.head_p
    copy = Head(head.weight.clone(), head.bias.clone(), softcap=3.0)
    for other, its_head in ((p, head), (p.clone(), copy)):
        found = token_statistics(p, head, other, its_head, case.tokens, options=options)
        for numbers in (found.kl_pq, found.kl_qp, found.jensen_shannon, found.total_variation):
            assert torch.equal(numbers, torch.zeros(37))
        assert torch.equal(linear_kl(p, head, other, its_head, options=options), torch.zeros(37))


@EVERY
def test_nothing_is_ever_negative(options):
    for apart in (1e-3, 1e-5, 1e-6, 1e-7, 3e-8):
        case = head_case(torch.float32, apart, tokens=(40 if options is TINY else 200,))  # each token a chunk
        found = case.statistics(options)
        for name in ("kl_pq", "kl_qp", "jensen_shannon", "total_variation", "entropy_p"):
            assert getattr(found, name).min() >= 0, (name, apart)


@EVERY
def test_a_row_that_overlaps_nowhere_is_infinite_and_harms_no_other(options):
    never = -torch.inf
    zp = torch.tensor([[0.0, 1.0, never, never], [1.0, 2.0, never, 0.5], [0.0, 1.0, 2.0, 3.0]])
    zq = torch.tensor([[never, never, 0.0, 1.0], [2.0, 1.0, never, 0.5], [0.0, 1.0, 2.0, 2.5]])
    case = Case(zp, Head(None), zq, Head(None), torch.tensor([0, 1, 3]))
    found, expected = case.statistics(options), statistics_the_long_way(case)
    assert found.kl_pq[0] == found.kl_qp[0] == torch.inf
    assert found.token_logq[0] == -torch.inf
    torch.testing.assert_close(found.jensen_shannon[0].item(), math.log(2))
    assert found.total_variation[0] == 1
    for numbers, right in zip(found, expected, strict=True):
        torch.testing.assert_close(numbers, right.to(numbers.dtype), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(case.kl(options), expected.kl_pq.float())


@EVERY
def test_words_that_a_bias_forbids_on_both_sides_do_not_count(options):
    case = head_case(torch.float64, tokens=(5,), words=40, bias=True)
    forbidden = torch.zeros(40, dtype=torch.float64)
    forbidden[31:] = -torch.inf
    case.head_p = Head(case.head_p.weight, case.head_p.bias + forbidden)
    case.head_q = Head(case.head_q.weight, case.head_q.bias + forbidden)
    case.tokens %= 31
    found, expected = case.statistics(options), statistics_the_long_way(case)
    for numbers, right in zip(found, expected, strict=True):
        torch.testing.assert_close(numbers, right, rtol=1e-9, atol=1e-12)


@EVERY
def test_nan_stays_with_its_token(options):
    case = head_case(torch.float32, tokens=(9,))
    whole = case.statistics(options)
    case.hidden_q[4, 2] = torch.nan
    spoilt, others = case.statistics(options), torch.arange(9) != 4
    for name in ("kl_pq", "kl_qp", "jensen_shannon", "total_variation", "token_logq", "entropy_q"):
        assert getattr(spoilt, name)[4].isnan(), name
    for before, after in zip(whole, spoilt, strict=True):
        torch.testing.assert_close(after[others], before[others])
    assert torch.equal(case.kl(options).isnan(), ~others)


@EVERY
def test_far_apart_does_not_overflow(options):
    zp, zq = torch.tensor([[0.0, 500.0, -300.0]]), torch.tensor([[400.0, -600.0, 0.0]])
    case = Case(zp, Head(None), zq, Head(None), torch.tensor([0]))
    found = case.statistics(options)
    torch.testing.assert_close(found.kl_pq, torch.tensor([1000.0]))
    torch.testing.assert_close(found.kl_qp, torch.tensor([500.0]))
    torch.testing.assert_close(found.jensen_shannon, torch.tensor([math.log(2)]))
    assert found.total_variation == 1 and found.rank_q == 0


@EVERY
def test_a_large_common_offset_does_not_matter(options):
    case = head_case(torch.float32, apart=0.05, tokens=(11,))
    zp, zq = (
        log_probabilities(h, head) for h, head in ((case.hidden_p, case.head_p), (case.hidden_q, case.head_q))
    )
    shifted = linear_kl(zp + 32.0, Head(None), zq - 64.0, Head(None), options=options)
    torch.testing.assert_close(shifted, case.kl(options), rtol=3e-3, atol=0)


@EVERY
def test_logits_may_be_given_instead_of_hidden_states(options):
    case = head_case(torch.float64, softcap=4.0)
    zp, zq = case.hidden_p @ case.head_p.weight.T, case.hidden_q @ case.head_q.weight.T
    head = Head(None, softcap=4.0)
    found = token_statistics(zp, head, zq, head, case.tokens, options=options)
    torch.testing.assert_close(found.kl_qp, case.statistics(CHUNKED).kl_qp)
    mixed = linear_kl(zp, head, case.hidden_q, case.head_q, options=options)
    torch.testing.assert_close(mixed, case.kl(CHUNKED))


@EVERY
def test_no_token_at_all(options):
    case = head_case(torch.bfloat16, tokens=(0, 5))
    assert case.kl(options).shape == (0, 5)
    found = case.statistics(options)
    assert {x.shape for x in found} == {(0, 5)}
    assert found.kl_pq.dtype == torch.float32 and found.top1_p.dtype == found.rank_q.dtype == torch.int64


@EVERY
@pytest.mark.parametrize("traits", [{"softcap": 2.0}, {"scale": 0.5}, {"bias": torch.arange(101.0)}], ids=str)
def test_one_weight_in_two_heads_is_not_one_model(options, traits):
    case = head_case(torch.float32)
    found = linear_kl(
        case.hidden_p, case.head_p, case.hidden_p, Head(case.head_p.weight, **traits), options=options
    )
    case.hidden_q, case.head_q = case.hidden_p, Head(case.head_p.weight, **traits)
    torch.testing.assert_close(found, statistics_the_long_way(case).kl_pq.float(), rtol=1e-4, atol=1e-5)
    assert found.median() > 1e-3
