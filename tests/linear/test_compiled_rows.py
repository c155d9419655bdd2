"""The row functions for torch's compiler, called without it, against sums in float64 over the vocabulary."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, logsumexp, rel_entr

from kleash.linear import TokenTerms
from kleash.linear import compiled_rows as rows
from kleash.linear.rows import StatisticRows, TermRows, ranks_of
from kleash.linear.vocab_shards import VocabShards

ROWS, WORDS = 8, 5003
ALONE = VocabShards(None, [WORDS], torch.device("cpu"))
COEFFICIENTS = TokenTerms(0.7, -0.4, 1.3, 0.2)


@pytest.fixture(params=[1e-4, 1e-2, 0.3, 1.0, 5.0])
def logits(request):
    generator = torch.Generator().manual_seed(0)
    zp = 3 * torch.randn(ROWS, WORDS, generator=generator)
    zq = zp + request.param * torch.randn(ROWS, WORDS, generator=generator)
    return zp, zq + 2.5, torch.arange(ROWS)


def exact(zp, zq):
    return tuple(log_softmax(z.double().numpy(), axis=-1) for z in (zp, zq))


def assert_near(actual, expected, name, tolerance=2e-6):
    error = np.linalg.norm(actual.double().numpy() - expected) / np.linalg.norm(expected)
    assert error <= tolerance, (name, error)


def test_statistics_keep_six_digits_at_every_distance(logits):
    logp, logq = exact(*logits[:2])
    p, q = np.exp(logp), np.exp(logq)
    middle = (p + q) / 2
    expected = {
        "token_logp": logp[range(ROWS), range(ROWS)],
        "token_logq": logq[range(ROWS), range(ROWS)],
        "kl_pq": rel_entr(p, q).sum(-1),
        "kl_qp": rel_entr(q, p).sum(-1),
        "jensen_shannon": (rel_entr(p, middle) + rel_entr(q, middle)).sum(-1) / 2,
        "total_variation": np.abs(p - q).sum(-1) / 2,
        "entropy_p": -(p * logp).sum(-1),
        "entropy_q": -(q * logq).sum(-1),
        "log_sum_p": logsumexp(logits[0].double().numpy(), -1),
        "log_sum_q": logsumexp(logits[1].double().numpy(), -1),
    }
    actual = StatisticRows(*rows.statistics_rows(*logits, ALONE))
    for name, right in expected.items():
        # scipy's sums of near distributions cancel, too: to 1e-16 of 1e-9 nats.
        assert_near(getattr(actual, name)[:, 0], right, name)
    ranks = ranks_of(*logits[1:], ALONE)
    assert (ranks[:, 0].numpy() == (logq > expected["token_logq"][:, None]).sum(-1)).all()


def test_gradients_keep_six_digits_at_every_distance(logits):
    zp, zq, tokens = logits
    logp, logq = exact(zp, zq)
    p, q, u = np.exp(logp), np.exp(logq), logp - logq
    kl = (p * u).sum(-1, keepdims=True)
    weight = torch.linspace(0.5, 2, ROWS, dtype=torch.float64)[:, None]
    value, in_p, in_q = rows.kl_gradient_rows(zp, zq, weight, ALONE, needs=(True, True))
    assert_near(value, kl, "value")
    assert_near(in_p, weight.numpy() * p * (u - kl), "in p")
    assert_near(in_q, weight.numpy() * (q - p), "in q")

    c = COEFFICIENTS
    one_hot = np.eye(WORDS)[:ROWS]
    entropy = -(p * logp).sum(-1, keepdims=True)
    known = TermRows(*rows.term_rows(zp, zq, tokens, ALONE))
    columns = TokenTerms(*(torch.full((ROWS, 1), x, dtype=torch.float64) for x in c))
    _, in_p, in_q = rows.objective_gradient_rows(zp, zq, tokens, known, columns, ALONE, needs=(True, True))
    of_p = c.token_logp * (one_hot - p) + c.kl * p * (u - kl) - c.entropy * p * (logp + entropy)
    assert_near(in_p, of_p, "objective in p")
    assert_near(in_q, c.token_logq * (one_hot - q) + c.kl * (q - p), "objective in q")


@pytest.mark.parametrize("place", range(3))
def test_rows_that_the_sums_cannot_hold_have_a_column_that_is_not_finite(place):
    zp, zq = torch.randn(4, 50), torch.randn(4, 50)
    tokens = torch.zeros(4, dtype=torch.int64)
    zp[0, 3], zq[1, 3], zp[2, 3] = -torch.inf, torch.inf, torch.nan
    zq[3], zp[3] = 200 * zq[3], -200 * zq[3]
    results = (
        rows.kl_gradient_rows(zp, zq, torch.ones(4, 1), ALONE, needs=(False, False))[:1],
        rows.term_rows(zp, zq, tokens, ALONE),
        rows.statistics_rows(zp, zq, tokens, ALONE),
    )
    columns = torch.cat([x.double() for x in results[place]], -1)
    assert not columns.isfinite().all(-1).any()
