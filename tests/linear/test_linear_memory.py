"""Nothing of size [tokens, vocab] is ever held; measured in processes of their own."""

import subprocess
import sys

import pytest

PEAK = """
import resource, sys, torch
from kleash.divergences import DIVERGENCES
from kleash.linear import Head, LinearOptions, linear_divergence_loss, linear_kl, linear_objective, token_statistics

torch.manual_seed(0)
what, tokens, words = sys.argv[1], int(sys.argv[2]), 20_000
def hidden(count): return torch.randn(count, 8).requires_grad_(what != "statistics")
p, q, ids = hidden(tokens), hidden(tokens), torch.randint(words, (tokens,))
head_p, head_q = (Head(torch.randn(words, 8).requires_grad_(what == "recomputed")) for _ in "pq")
skip_below = 0.05 if what == "skipping" else 0.0
options = LinearOptions(buffer_bytes=16 * 2**20, compile="never", impl="chunked", skip_below=skip_below)
if skip_below:
    p, q = (20 * x.detach() * torch.linspace(1, 2, tokens)[:, None] for x in (p, q))
    p.requires_grad_()

def run(count):
    if what == "statistics":
        token_statistics(p[:count], head_p, q[:count], head_q, ids[:count], options=options)
    elif what in DIVERGENCES:
        weights = torch.ones(count)
        linear_divergence_loss(
            p[:count], head_p, q[:count], head_q, weights=weights, divergence=what, options=options
        ).loss.backward()
    elif what == "objective":
        def objective(terms, rows): return terms.kl - terms.token_logp - terms.entropy
        loss, _ = linear_objective(p[:count], head_p, ids[:count], q[:count], head_q, objective, options=options)
        loss.backward()
    else:
        kl = linear_kl(p[:count], head_p, q[:count], head_q, options=options)
        if what in ("gradient", "recomputed", "skipping"):
            kl.sum().backward()

run(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def extra_megabytes(what: str, tokens: int) -> float:
    """Peak resident memory of a call beyond what its inputs and libraries took."""
    command = [sys.executable, "-c", PEAK, what, str(tokens)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize(
    "what", ["statistics", "gradient", "recomputed", "skipping", "kl", "total_variation", "objective"]
)
def test_memory_is_the_budget_and_not_the_logits(what):
    tokens, logits = 1040, 1040 * 20_000 * 4 / 2**20
    assert extra_megabytes(what, tokens) < 16 + 12 < logits / 2
