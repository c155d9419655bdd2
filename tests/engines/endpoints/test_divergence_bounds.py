"""Bounds from listed tokens hold the exact divergences, whichever model is behind the server."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kleash.engines.endpoints.answer_precision import LogprobPrecision, check_totals, find_precision
from kleash.engines.endpoints.divergence_bounds import divergence_bounds
from kleash.engines.endpoints.listed_logprobs import AnswerError, ListedLogprobs, position_from_ids
from kleash.linear import Head

VOCABULARY, TOKENS = 40, 300
FLOAT32 = LogprobPrecision()
LOGITS = Head(None)


WRITTEN: dict[str, Callable[[float], float]] = {
    "float32": lambda logp: logp,
    "bfloat16": lambda logp: float(torch.tensor(logp).bfloat16()),
    "float16": lambda logp: float(torch.tensor(logp).half()),
    "3 decimals": lambda logp: round(logp, 3),
    "4 decimals": lambda logp: float(np.float32(round(logp, 4))),
}
"""How a server may write a log-probability."""


def case(
    top: int, seed: int = 0, written: str = "float32"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ListedLogprobs]:
    """The server's and the local model's logits, scored tokens, and the server's answer."""
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(TOKENS, VOCABULARY, generator=generator) * torch.rand(TOKENS, 1, generator=generator) * 8
    )
    served = torch.log_softmax(logits, -1)
    noise = torch.randn(TOKENS, VOCABULARY, generator=generator) * torch.rand(TOKENS, 1, generator=generator)
    local_logits = logits + 2 * noise
    tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    positions = []
    for row, token in zip(served, tokens.tolist(), strict=True):
        ids = dict.fromkeys([token, *row.topk(top).indices.tolist()])
        entries = {each: WRITTEN[written](float(row[each])) for each in ids}
        positions.append(position_from_ids(entries, token, top, VOCABULARY))
    return logits, local_logits, tokens, ListedLogprobs.of(positions)


def exact(first_logits: torch.Tensor, second_logits: torch.Tensor) -> dict[str, np.ndarray]:
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
@pytest.mark.parametrize("top", [1, 5, 20, 39, 40])
def test_the_bounds_hold_the_exact_values(top: int, role: str) -> None:
    served_logits, local_logits, tokens, answer = case(top)
    columns = divergence_bounds(
        local_logits,
        LOGITS,
        answer,
        tokens,
        endpoint_role=role,
        precision=FLOAT32,
        buffer_bytes=16 * 4 * VOCABULARY * 7,
    )
    logits = (served_logits, local_logits)
    truth = exact(*logits) if role == "policy" else exact(*reversed(logits))
    endless = "kl_reference_policy" if role == "policy" else "kl_policy_reference"
    for name, value in truth.items():
        lower, upper = columns[f"{name}_lower"], columns[f"{name}_upper"]
        assert (lower <= value).all() and (value <= upper).all(), name
        is_whole = np.isfinite(upper)
        if name == endless and top < VOCABULARY - 1:
            assert not is_whole.any()
        else:
            assert is_whole[columns["listed_probability"] < 1 - 1e-6].all() or name == endless
    if top == VOCABULARY:
        for name in truth:
            assert (columns[f"{name}_upper"] - columns[f"{name}_lower"]).max() < 1e-3


@pytest.mark.parametrize("written", WRITTEN)
def test_the_bounds_hold_where_a_server_rounds(written: str) -> None:
    for top in (2, 20, 39, 40):
        served_logits, local_logits, tokens, answer = case(top, written=written)
        precision = find_precision(answer)
        assert precision.name == written
        check_totals(answer, tokens.numpy(), VOCABULARY, precision)
        columns = divergence_bounds(
            local_logits,
            LOGITS,
            answer,
            tokens,
            endpoint_role="policy",
            precision=precision,
            buffer_bytes=2**20,
        )
        for name, value in exact(served_logits, local_logits).items():
            assert (columns[f"{name}_lower"] <= value).all() and (value <= columns[f"{name}_upper"]).all(), (
                top,
                name,
            )


def test_numbers_that_are_no_distribution_are_named() -> None:
    _, _, tokens, answer = case(20)
    for factor, added, sentence in (
        (1, -30, "sum to at most [0-9.e-]+ at scored token 0"),  # logits below 0
        (1 / math.log(10), 0, "sum to at least 1[0-9.]+ at scored token"),  # decimal logarithms
        (1, 0.1, "sum to at least 1[0-9.]+ at scored token"),
    ):
        names = ("token_logp", "listed_logp", "unlisted_most")
        other = replace(answer, **{name: factor * getattr(answer, name) + added for name in names})
        with pytest.raises(AnswerError, match=sentence):
            check_totals(other, tokens.numpy(), VOCABULARY, FLOAT32)


def test_more_tokens_give_tighter_bounds() -> None:
    widths = []
    for top in (1, 5, 20):
        _, local_logits, tokens, answer = case(top)
        columns = divergence_bounds(
            local_logits,
            LOGITS,
            answer,
            tokens,
            endpoint_role="policy",
            precision=FLOAT32,
            buffer_bytes=2**20,
        )
        widths.append(columns["kl_policy_reference_upper"] - columns["kl_policy_reference_lower"])
    assert (widths[0] >= widths[1] - 1e-5).all() and (widths[1] >= widths[2] - 1e-5).all()


def test_listed_terms_are_those_of_the_likeliest_tokens_alone() -> None:
    served_logits, local_logits, tokens, answer = case(5)
    columns = divergence_bounds(
        local_logits, LOGITS, answer, tokens, endpoint_role="policy", precision=FLOAT32, buffer_bytes=2**20
    )
    served, local = (torch.log_softmax(logits, -1) for logits in (served_logits, local_logits))
    ids = served.topk(5).indices
    terms = (served.exp() * (served - local)).gather(-1, ids).sum(-1)
    np.testing.assert_allclose(columns["kl_of_listed"], terms.numpy(), atol=1e-5)
    np.testing.assert_array_equal(columns["token_is_listed"], (ids == tokens[:, None]).any(-1).numpy())


def test_probabilities_that_sum_to_more_than_one_have_no_bounds() -> None:
    _, local_logits, tokens, answer = case(5)
    answer.listed_logp[3] = -0.1
    columns = divergence_bounds(
        local_logits, LOGITS, answer, tokens, endpoint_role="policy", precision=FLOAT32, buffer_bytes=2**20
    )
    assert np.isnan(columns["kl_policy_reference_lower"][3])
    assert not np.isnan(columns["kl_policy_reference_lower"][:3]).any()
