"""Every implementation returns the same values, and they equal numpy's in float64."""

import math

import pytest
import torch
from linear_cases import (
    CHUNKED,
    CHUNKS,
    EVERY,
    PLAIN,
    REFERENCE,
    TRAITS,
    Case,
    head_case,
    in_float64,
    relative_rms,
    statistics_by_numpy,
)

from kleash.linear import Head, TokenStatistics, linear_kl, token_statistics


@EVERY
@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS.keys())
def test_statistics_equal_numpy_in_float64(options, traits):
    case = head_case(torch.float64, distance=1.0, tokens=(3, 13), vocab_size=601, **traits)
    actual, expected = case.statistics(options), statistics_by_numpy(case)
    for name, numbers, right in zip(TokenStatistics._fields, actual, expected, strict=True):
        torch.testing.assert_close(numbers, right, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(case.kl(options), expected.kl_pq, rtol=1e-9, atol=1e-12)


@CHUNKS
@pytest.mark.parametrize("distance", [2.0, 0.002], ids=["far", "near"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_error_is_that_of_float32_logits(options, dtype, distance):
    case = head_case(dtype, distance, tokens=(19,))
    exact = in_float64(case).statistics(REFERENCE)
    plain, actual = case.statistics(PLAIN), case.statistics(options)
    assert exact.kl_pq.median() > 1e-6, "so small a divergence would hide a wrong sign"
    for name, right, cheap, ours in zip(TokenStatistics._fields, exact, plain, actual, strict=True):
        if right.is_floating_point():
            assert ours.dtype == torch.float32
            budget = 1.5 * relative_rms(cheap, right) + 2e-7
            assert relative_rms(ours, right) <= budget, name
        else:
            assert torch.equal(ours, right), name
    assert relative_rms(case.kl(options), exact.kl_pq) <= 1.5 * relative_rms(plain.kl_pq, exact.kl_pq) + 2e-7


@pytest.mark.parametrize("field", ["kl_pq", "kl_qp", "jensen_shannon", "total_variation"])
@pytest.mark.parametrize("distance", [0.03, 0.001])
def test_float32_has_three_digits_at_a_kl_of_a_millionth_of_a_nat(distance, field):
    case = head_case(torch.float32, distance, vocab_size=3001, tokens=(64,))
    exact = getattr(in_float64(case).statistics(CHUNKED), field)
    actual = getattr(case.statistics(CHUNKED), field).double()
    assert (distance > 0.01) or exact.min() < 1e-5 or field == "total_variation"
    assert ((actual - exact).abs() / exact).max() < 1e-3


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_against_itself_is_exactly_zero(options, dtype):
    case = head_case(dtype, bias=True, softcap=3.0)
    p, head = case.hidden_p, case.head_p
    copy = Head(head.weight.clone(), head.bias.clone(), softcap=3.0)
    for other, its_head in ((p, head), (p.clone(), copy)):
        actual = token_statistics(p, head, other, its_head, case.tokens, options=options)
        for numbers in (actual.kl_pq, actual.kl_qp, actual.jensen_shannon, actual.total_variation):
            assert torch.equal(numbers, torch.zeros(37))
        assert torch.equal(linear_kl(p, head, other, its_head, options=options), torch.zeros(37))


@EVERY
def test_no_statistic_is_negative(options):
    for distance in (1e-3, 1e-5, 1e-6, 1e-7, 3e-8):
        case = head_case(torch.float32, distance, tokens=(200,))
        actual = case.statistics(options)
        for name in ("kl_pq", "kl_qp", "jensen_shannon", "total_variation", "entropy_p"):
            assert getattr(actual, name).min() >= 0, (name, distance)


@EVERY
def test_a_row_without_overlap_is_infinite_and_does_not_affect_others(options):
    never = -torch.inf
    zp = torch.tensor([[0.0, 1.0, never, never], [1.0, 2.0, never, 0.5], [0.0, -744.4, never, -20.0]])
    zq = torch.tensor([[never, never, 0.0, 1.0], [2.0, 1.0, never, 0.5], [0.0, never, never, -19.0]])
    case = Case(zp, Head(None), zq, Head(None), torch.tensor([0, 1, 3]))  # the smallest number is exp(-744.4)
    actual, expected = case.statistics(options), statistics_by_numpy(case)
    assert actual.kl_pq[0] == actual.kl_qp[0] == torch.inf
    assert actual.token_logq[0] == -torch.inf
    torch.testing.assert_close(actual.jensen_shannon[0].item(), math.log(2))
    assert actual.total_variation[0] == 1
    for numbers, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(numbers, right.to(numbers.dtype), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(case.kl(options), expected.kl_pq.float())


@EVERY
def test_far_distributions_do_not_overflow(options):
    zp, zq = torch.tensor([[0.0, 500.0, -300.0]]), torch.tensor([[400.0, -600.0, 0.0]])
    case = Case(zp, Head(None), zq, Head(None), torch.tensor([0]))
    actual = case.statistics(options)
    assert (actual.total_variation, actual.rank_q) == (1, 0)
    for name, value in (("kl_pq", 1000.0), ("kl_qp", 500.0), ("jensen_shannon", math.log(2))):
        torch.testing.assert_close(getattr(actual, name), torch.tensor([value]))


@EVERY
def test_logits_in_place_of_hidden_states(options):
    case = head_case(torch.float64, softcap=4.0)
    zp, zq = case.hidden_p @ case.head_p.weight.T, case.hidden_q @ case.head_q.weight.T
    head = Head(None, softcap=4.0)
    actual = token_statistics(zp, head, zq, head, case.tokens, options=options)
    torch.testing.assert_close(actual.kl_qp, case.statistics(CHUNKED).kl_qp)
    mixed = linear_kl(zp, head, case.hidden_q, case.head_q, options=options)
    torch.testing.assert_close(mixed, case.kl(CHUNKED))


@EVERY
@pytest.mark.parametrize("traits", [{"softcap": 2.0}, {"scale": 0.5}, {"bias": torch.arange(101.0)}], ids=str)
def test_one_weight_in_two_different_heads(options, traits):
    case = head_case(torch.float32)
    case.hidden_q, case.head_q = case.hidden_p, Head(case.head_p.weight, **traits)
    actual = case.kl(options)
    torch.testing.assert_close(actual, statistics_by_numpy(case).kl_pq.float(), rtol=1e-4, atol=1e-5)
    assert actual.median() > 1e-3
