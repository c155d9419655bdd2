"""No tensor of [tokens, vocab] is allocated."""

import subprocess
import sys

import pytest
import torch
from linear_cases import head_case, peak

from kleash.linear import (
    LinearOptions,
    linear_divergence_loss,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    token_statistics,
)


def sum_of_terms(terms, rows):
    return terms.kl - terms.entropy


@pytest.mark.parametrize("what", ["statistics", "gradient", "recomputed", "total_variation", "objective"])
def test_memory_is_that_of_the_buffer_and_not_of_the_logits(what, unhooked):
    tokens, words, budget = 384, 20_000, 16 * 2**20
    case = head_case(torch.float32, vocab_size=words, tokens=(tokens,))
    case.hidden_p.requires_grad_(what != "statistics")
    case.head_p.weight.requires_grad_(what == "recomputed")
    options = LinearOptions(buffer_bytes=budget, compile=False)
    models, weights = case.models, torch.ones(tokens)

    def call():
        if what == "statistics":
            token_statistics(*models, case.tokens, options=options)
        elif what == "total_variation":
            linear_divergence_loss(*models, weights=weights, divergence=what, options=options).loss.backward()
        elif what == "objective":
            arguments = *models[:2], case.tokens, *models[2:]
            loss, _ = linear_objective(*arguments, sum_of_terms, options=options)
            loss.backward()
        else:
            linear_kl(*models, options=options).sum().backward()

    assert peak(call) < budget + 12 * 2**20 < tokens * words * 4


FAULTS = """
import resource, torch
from kleash.linear import Head, LinearOptions, token_statistics

hidden, ids = torch.randn(64, 8), torch.arange(64)
heads = [Head(torch.randn(20_000, 8)) for _ in "pq"]

def run():
    token_statistics(hidden, heads[0], hidden, heads[1], ids, options=LinearOptions(compile=False))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

counts = [run() for _ in range(5)]
print(min(after - before for before, after in zip(counts, counts[1:])))
"""


def test_memory_of_rows_is_not_fetched_again_for_each_block():
    """A page is 4 KiB, and a float64 tensor of the call would have 2 500 of them, in every call.

    A single call may have some thousand, where the heap grows around what was left in it.
    """
    run = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True)
    assert int(run.stdout) < 1_000


@pytest.mark.parametrize("what", ["values", "loss", "objective", "statistics"])
def test_fallback_rows_take_little_memory_beyond_the_buffer(what, unhooked):
    """With a bias of -inf, all rows go to the fallback, which needs many buffers of a row's size."""
    case = head_case(torch.float32, vocab_size=4096, tokens=(130,), bias=True)
    case.head_p.bias[3] = case.head_q.bias[3] = -torch.inf
    case.hidden_p.requires_grad_()
    tokens, budget = case.tokens % 3, 4 * 2**20
    arguments = case.hidden_p, case.head_p, tokens, case.hidden_q, case.head_q
    options = LinearOptions(buffer_bytes=budget, compile=False)
    weights = torch.ones(130)
    ways = {
        "values": lambda: linear_kl(*case.models, options=options).sum().backward(),
        "loss": lambda: linear_kl_loss(*case.models, weights=weights, options=options).loss.backward(),
        "objective": lambda: linear_objective(*arguments, sum_of_terms, options=options)[0].backward(),
        "statistics": lambda: token_statistics(*case.models, tokens, options=options),
    }
    assert peak(ways[what]) < budget + 12 * 2**20
