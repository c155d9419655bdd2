"""No tensor of [tokens, vocab] is allocated; measured in forks of one process."""

import subprocess
import sys

import pytest
import torch
from linear_cases import head_case, peak

from kleash.linear import LinearOptions, linear_kl, linear_kl_loss, linear_objective, token_statistics

MEASURE = """
import os, resource, sys, torch
from kleash.divergences import DIVERGENCES
from kleash.linear import Head, LinearOptions, linear_divergence_loss, linear_kl, linear_objective, token_statistics

torch.set_num_threads(1)
torch.manual_seed(0)
tokens, words = 1040, 20_000
def hidden(count, what): return torch.randn(count, 8).requires_grad_(what != "statistics")
options = LinearOptions(buffer_bytes=16 * 2**20, compile=False, impl="chunked")
weights = [torch.randn(words, 8) for _ in "pq"]
ids = torch.randint(words, (tokens,))

def peak(what):
    p, q = hidden(tokens, what), hidden(tokens, what)
    head_p, head_q = (Head(w.requires_grad_(what == "recomputed")) for w in weights)

    def run(count):
        models = p[:count], head_p, q[:count], head_q
        if what == "statistics":
            token_statistics(*models, ids[:count], options=options)
        elif what in DIVERGENCES:
            each = torch.ones(count)
            linear_divergence_loss(*models, weights=each, divergence=what, options=options).loss.backward()
        elif what == "objective":
            def objective(terms, rows): return terms.kl - terms.token_logp - terms.entropy
            linear_objective(*models[:2], ids[:count], *models[2:], objective, options=options)[0].backward()
        else:
            linear_kl(*models, options=options).sum().backward()

    run(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(tokens)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

def faults(what):
    few, heads = torch.randn(64, 8), [Head(w) for w in weights]

    def run():
        token_statistics(few, heads[0], few, heads[1], ids[:64], options=LinearOptions(compile=False))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    counts = [run() for _ in range(5)]
    return min(after - before for before, after in zip(counts, counts[1:]))

for what in sys.argv[1:]:
    if os.fork() == 0:
        print(what, (faults if what == "faults" else peak)(what), flush=True)
        os._exit(0)
    os.wait()
"""
PEAKS = ("statistics", "gradient", "recomputed", "total_variation", "objective")


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    """Megabytes of the largest resident memory beyond that of inputs and libraries, of each call; and page faults."""
    command = [sys.executable, "-c", MEASURE, *PEAKS, "faults"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: float(number) for name, number in map(str.split, printed.splitlines())}


@pytest.mark.parametrize("what", PEAKS)
def test_memory_is_that_of_the_buffer_and_not_of_the_logits(measured, what):
    logits = 1040 * 20_000 * 4 / 2**20
    assert measured[what] < 16 + 12 < logits / 2


def test_memory_of_rows_is_not_fetched_again_for_each_block(measured):
    """A page is 4 KiB, and a float64 tensor of the call would have 2 500 of them, in every call.

    A single call may have some thousand, where the heap grows around what was left in it.
    """
    assert measured["faults"] < 1_000


@pytest.mark.parametrize("what", ["values", "loss", "objective", "statistics"])
def test_fallback_rows_take_little_memory_beyond_the_buffer(what, unhooked):
    """With a bias of -inf, all rows go to the fallback, which needs many buffers of a row's size."""
    case = head_case(torch.float32, vocab_size=4096, tokens=(130,), bias=True)
    case.head_p.bias[3] = case.head_q.bias[3] = -torch.inf
    case.hidden_p.requires_grad_()
    tokens, budget = case.tokens % 3, 4 * 2**20
    arguments = case.hidden_p, case.head_p, tokens, case.hidden_q, case.head_q
    options = LinearOptions(buffer_bytes=budget, compile=False)
    ways = {
        "values": lambda: linear_kl(*case.models, options=options).sum().backward(),
        "loss": lambda: linear_kl_loss(
            *case.models, weights=torch.ones(130), options=options
        ).loss.backward(),
        "objective": lambda: linear_objective(*arguments, lambda t, rows: t.kl - t.entropy, options=options)[
            0
        ].backward(),
        "statistics": lambda: token_statistics(*case.models, tokens, options=options),
    }
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        ways[what]()
    assert peak(seen) < budget + 12 * 2**20
