"""Rows of heads that are no tokens: probability, and the KL with and without them, by enumeration in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr
from scoring_cases import random_sequences
from tiny_models import double_logits, save_tiny

from kleash.linear import Head, token_statistics
from kleash.models import load_pair, pair_models, score
from kleash.models.heads import truncate_head
from kleash.models.padding_rows import PaddingRows, padding_columns
from kleash.models.scoring import STATISTICS

TOKENS, GAPS = 20, {4, 11}
"""The highest token id plus one, and ids below it that are no tokens."""


def made_head(rows: int, seed: int, **more: object) -> Head:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (torch.randn(size, generator=generator) for size in ((rows, 6), (rows,)))
    return Head(weight, bias, **more)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("gaps", [set(), GAPS], ids=["no gaps", "gaps"])
@pytest.mark.parametrize(
    ("rows_p", "rows_q"), [(24, 24), (20, 20), (24, 20), (20, 24), (22, 27)], ids=lambda rows: str(rows)
)
def test_probabilities_and_kls_are_those_of_the_whole_heads(rows_p, rows_q, gaps, temperature):
    heads = (made_head(rows_p, 1, scale=0.7), made_head(rows_q, 2, softcap=5.0))
    hidden = [torch.randn(37, 6, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)]
    rows = [
        PaddingRows.of(head, set(range(n)) - set(range(TOKENS)) | gaps)
        for head, n in zip(heads, (rows_p, rows_q), strict=True)
    ]
    measured = rows_p if rows_p == rows_q else TOKENS
    p, q = (truncate_head(head, measured) for head in heads)
    inputs = (hidden[0], p, hidden[1], q)
    tokens = torch.arange(37) % measured
    statistics = token_statistics(*inputs, tokens, temperature=temperature)
    columns = {name: getattr(statistics, field).numpy() for name, field in STATISTICS.items()}
    found = padding_columns((rows[0], rows[1]), inputs, columns, tokens, temperature)

    width = max(rows_p, rows_q)
    logps = []
    for states, head in zip(hidden, heads, strict=True):
        assert head.weight is not None and head.bias is not None
        y = head.scale * (states.double() @ head.weight.double().T + head.bias.double())
        z = y if head.softcap is None else head.softcap * torch.tanh(y / head.softcap)
        logits = np.full((37, width), -np.inf)
        logits[:, : len(head.weight)] = z.numpy() / temperature
        logps.append(log_softmax(logits, axis=-1))
    is_token = np.array([row < TOKENS and row not in gaps for row in range(width)])
    for role, logp in zip(("policy", "reference"), logps, strict=True):
        expected = np.exp(logp[:, ~is_token]).sum(-1)
        np.testing.assert_allclose(found[f"padding_probability_{role}"], expected, rtol=1e-5, atol=1e-6)
    for name, (a, b) in {"kl_policy_reference": logps, "kl_reference_policy": logps[::-1]}.items():
        over_rows = rel_entr(np.exp(a), np.exp(b)).sum(-1)
        restricted = [np.exp(log_softmax(x[:, is_token], axis=-1)) for x in (a, b)]
        np.testing.assert_allclose(found[f"{name}_over_rows"], over_rows, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            found[f"{name}_over_tokens"], rel_entr(*restricted).sum(-1), rtol=1e-4, atol=2e-6
        )
    np.testing.assert_array_equal(found["is_padding"], ~is_token[tokens.numpy()])


def test_the_kl_over_tokens_is_accurate_where_hardly_any_probability_is_on_tokens():
    """Two heads that differ in rows of no tokens alone, which have nearly all of the probability."""
    p = made_head(24, 1)
    assert p.weight is not None and p.bias is not None
    bias = p.bias.clone()
    bias[TOKENS:] += 8
    hidden = torch.randn(9, 6, generator=torch.Generator().manual_seed(3)) / 4
    inputs = (hidden, Head(p.weight, bias), hidden, p)
    rows = [PaddingRows.of(head, set(range(TOKENS, 24))) for head in (inputs[1], inputs[3])]
    tokens = torch.arange(9)
    statistics = token_statistics(*inputs, tokens)
    columns = {name: getattr(statistics, field).numpy() for name, field in STATISTICS.items()}
    found = padding_columns((rows[0], rows[1]), inputs, columns, tokens, 1.0)
    assert found["padding_probability_policy"].min() > 0.99 and columns["kl_policy_reference"].min() > 0.5
    for name in ("kl_policy_reference", "kl_reference_policy"):
        np.testing.assert_allclose(found[f"{name}_over_tokens"], 0, atol=1e-6)


def test_a_network_that_gives_logits_alone_has_the_numbers_of_its_head(pair):
    sequences = random_sequences()
    expected = score(pair, sequences)

    def without_head(model):
        return replace(model, head=Head(weight=None))

    alone = pair_models(without_head(pair.policy), without_head(pair.reference), ())
    found = score(alone, sequences)
    for name in ("padding_probability_policy", "kl_policy_reference_over_tokens"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_logits_that_are_cut_off_are_unknown(pair, tmp_path):
    narrow = load_pair(*[str(save_tiny(tmp_path / "narrow", vocab_size=305))] * 2).reference
    cut = pair_models(replace(pair.policy, head=Head(weight=None)), narrow, ())
    found = score(cut, random_sequences())
    assert np.isnan(found["padding_probability_policy"]).all()
    assert np.isfinite(found["padding_probability_reference"]).all()
    assert np.isfinite(found["kl_policy_reference_over_tokens"]).all()


def test_a_pair_without_such_rows_has_no_such_columns(tmp_path):
    folder = str(save_tiny(tmp_path / "exact", vocab_size=300))
    pair = load_pair(folder, folder)
    assert pair.policy.padding is None and pair.vocabulary == "the whole vocabulary"
    assert "is_padding" not in score(pair, random_sequences())


def test_two_folders_have_the_numbers_of_their_logits(folders):
    paths = folders("gemma2")
    pair = load_pair(*map(str, paths))
    (one,) = random_sequences(((4, 9),), vocabulary=320)
    found = score(pair, [one])
    logits = [double_logits(path, [*one.prompt_ids, *one.response_ids]).numpy()[3:-1] for path in paths]
    p, q = (np.exp(log_softmax(z, axis=-1)) for z in logits)
    np.testing.assert_allclose(found["padding_probability_policy"], p[:, 300:].sum(-1), rtol=1e-4)
    np.testing.assert_allclose(found["padding_probability_reference"], q[:, 300:].sum(-1), rtol=1e-4)
    np.testing.assert_array_equal(found["kl_policy_reference_over_rows"], found["kl_policy_reference"])
    np.testing.assert_array_equal(found["is_padding"], [token >= 300 for token in one.response_ids])
