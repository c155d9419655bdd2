"""Bounds from listed tokens hold the exact divergences, whichever model is behind the server."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kleash.engines.base import round_outwards
from kleash.engines.endpoints.divergence_bounds import divergence_bounds
from kleash.engines.endpoints.listed_logprobs import (
    AnswerError,
    ListedLogprobs,
    check_totals,
    require_float32,
)
from kleash.linear import Head

VOCABULARY, TOKENS = 40, 300
LOGITS = Head(None)


def case(top):
    """The server's and the local model's logits, scored tokens, and the server's answer."""
    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(TOKENS, VOCABULARY, generator=generator)
    logits *= torch.rand(TOKENS, 1, generator=generator)
    served = torch.log_softmax(logits, -1)
    noise = torch.randn(TOKENS, VOCABULARY, generator=generator) * torch.rand(TOKENS, 1, generator=generator)
    local_logits = logits + 2 * noise
    tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    rows = [
        {each: float(row[each]) for each in dict.fromkeys([token, *row.topk(top).indices.tolist()])}
        for row, token in zip(served, tokens.tolist(), strict=True)
    ]
    answer = ListedLogprobs.of(tokens.tolist(), rows, top=top, vocab_size=VOCABULARY)
    return logits, local_logits, tokens, answer


def bounds_of(local_logits, answer, role="policy"):
    """The columns, computed in chunks of 7 positions."""
    buffer_bytes = 16 * 4 * VOCABULARY * 7
    return divergence_bounds(local_logits, LOGITS, answer, endpoint_role=role, buffer_bytes=buffer_bytes)


def exact(first_logits, second_logits):
    """The divergences by their definitions, in float64."""
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (first_logits, second_logits))
    m = torch.logaddexp(p, q) - math.log(2)
    return {
        "kl_policy_reference": (p.exp() * (p - q)).sum(-1).numpy(),
        "kl_reference_policy": (q.exp() * (q - p)).sum(-1).numpy(),
        "jensen_shannon": ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)).numpy() / 2,
        "total_variation": (p.exp() - q.exp()).abs().sum(-1).numpy() / 2,
    }


@pytest.mark.parametrize("role", ["policy", "reference"])
@pytest.mark.parametrize("top", [1, 20, 39, 40])
def test_the_bounds_hold_the_exact_values(top, role):
    served_logits, local_logits, _, answer = case(top)
    columns = bounds_of(local_logits, answer, role)
    logits = (served_logits, local_logits)
    truth = exact(*logits) if role == "policy" else exact(*reversed(logits))
    endless = "kl_reference_policy" if role == "policy" else "kl_policy_reference"
    for name, value in truth.items():
        lower, upper = columns[f"{name}_lower"], columns[f"{name}_upper"]
        assert (lower <= value).all() and (value <= upper).all(), name
        assert (round_outwards(f"{name}_lower", lower) <= lower).all()
        assert (round_outwards(f"{name}_upper", upper) >= upper).all()
        is_whole = np.isfinite(upper)
        if name == endless and top < VOCABULARY - 1:
            assert not is_whole.any()
        else:
            assert is_whole[columns["listed_probability"] < 1 - 1e-6].all() or name == endless
    if top == VOCABULARY:
        for name in truth:
            assert (columns[f"{name}_upper"] - columns[f"{name}_lower"]).max() < 1e-3


@pytest.mark.parametrize(("role", "local"), [("policy", "reference"), ("reference", "policy")])
def test_the_probability_of_rows_that_are_no_tokens_is_what_the_server_lists_of_it(role, local):
    served_logits, local_logits, tokens, answer = case(5)
    is_padding = torch.arange(VOCABULARY) % 3 == 0
    columns = divergence_bounds(
        local_logits, LOGITS, answer, endpoint_role=role, buffer_bytes=1 << 20, is_padding=is_padding
    )
    served, of_local = (logits.double().softmax(-1).numpy() for logits in (served_logits, local_logits))
    is_known = np.zeros((TOKENS, VOCABULARY), dtype=bool)
    np.put_along_axis(is_known, np.argsort(-served, axis=-1)[:, :5], True, axis=-1)
    is_known[np.arange(TOKENS), tokens.numpy()] = True
    expected = (served * is_known)[:, is_padding.numpy()].sum(-1)
    np.testing.assert_allclose(columns[f"padding_probability_{role}"], expected, rtol=1e-5)
    expected = of_local[:, is_padding.numpy()].sum(-1)
    np.testing.assert_allclose(columns[f"padding_probability_{local}"], expected, rtol=1e-5)
    np.testing.assert_array_equal(columns["is_padding"], tokens.numpy() % 3 == 0)


ROUNDED = {
    "bfloat16": lambda logp: torch.from_numpy(logp).bfloat16().double().numpy(),
    "float16": lambda logp: torch.from_numpy(logp).half().double().numpy(),
    "3 decimals": lambda logp: logp.round(3),
    "4 decimals": lambda logp: logp.round(4).astype(np.float32).astype(np.float64),
}


@pytest.mark.parametrize("written", ROUNDED)
def test_rounded_log_probabilities_are_refused(written):
    """The bounds of float32 would be wrong: they have no room for the coarser rounding."""
    *_, answer = case(20)
    require_float32(answer)
    names = ("token_logp", "listed_logp", "unlisted_most")
    rounded = replace(answer, **{name: ROUNDED[written](getattr(answer, name)) for name in names})
    with pytest.raises(AnswerError, match=f"rounded to {written}"):
        require_float32(rounded)


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_listed_terms_are_those_of_the_likeliest_tokens_alone(role):
    served_logits, local_logits, tokens, answer = case(5)
    columns = bounds_of(local_logits, answer, role)
    served, local = (torch.log_softmax(logits, -1) for logits in (served_logits, local_logits))
    ids, (p, q) = served.topk(5).indices, (served, local) if role == "policy" else (local, served)
    terms = (p.exp() * (p - q)).gather(-1, ids).sum(-1)
    np.testing.assert_allclose(columns["kl_of_listed"], terms.numpy(), atol=1e-5)
    np.testing.assert_allclose(columns["listed_probability"], served.gather(-1, ids).exp().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(columns["token_is_listed"], (ids == tokens[:, None]).any(-1).numpy())


def test_probabilities_that_sum_to_more_than_one_have_no_bounds():
    _, local_logits, _, answer = case(5)
    answer.listed_logp[3] = -0.1
    columns = bounds_of(local_logits, answer)
    assert np.isnan(columns["kl_policy_reference_lower"][3])
    assert not np.isnan(columns["kl_policy_reference_lower"][:3]).any()


def test_decimal_logarithms_are_no_distribution():
    *_, answer = case(20)
    names = ("token_logp", "listed_logp", "unlisted_most")
    other = replace(answer, **{name: getattr(answer, name) / math.log(10) for name in names})
    with pytest.raises(AnswerError, match=r"sum to at least 1[0-9.]+ at scored token"):
        check_totals(other, VOCABULARY)
