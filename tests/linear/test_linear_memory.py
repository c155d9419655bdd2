"""No tensor of [tokens, vocab] is allocated; measured in separate processes."""

import subprocess
import sys

import pytest
import torch
from linear_cases import head_case, peak

from kleash.linear import LinearOptions, linear_kl, linear_kl_loss, linear_objective, token_statistics

PEAK = """
import resource, sys, torch
from kleash.divergences import DIVERGENCES
from kleash.linear import Head, LinearOptions, linear_divergence_loss, linear_kl, linear_objective, token_statistics

torch.manual_seed(0)
what, tokens, words = sys.argv[1], int(sys.argv[2]), 20_000
def hidden(count): return torch.randn(count, 8).requires_grad_(what != "statistics")
p, q, ids = hidden(tokens), hidden(tokens), torch.randint(words, (tokens,))
head_p, head_q = (Head(torch.randn(words, 8).requires_grad_(what == "recomputed")) for _ in "pq")
options = LinearOptions(buffer_bytes=16 * 2**20, compile=False, impl="chunked")

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
        if what in ("gradient", "recomputed"):
            kl.sum().backward()

run(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def extra_megabytes(what: str, tokens: int) -> float:
    """Peak resident memory of a call beyond that of its inputs and libraries."""
    command = [sys.executable, "-c", PEAK, what, str(tokens)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize(
    "what", ["statistics", "gradient", "recomputed", "kl", "total_variation", "objective"]
)
def test_memory_is_that_of_the_buffer_and_not_of_the_logits(what):
    tokens, logits = 1040, 1040 * 20_000 * 4 / 2**20
    assert extra_megabytes(what, tokens) < 16 + 12 < logits / 2


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
