"""Sharded heads and moving tokens, in groups of two and of four processes."""

import json
import re
from dataclasses import replace
from math import nan

import pytest
import rank_checks
import torch
import torch.distributed as dist
import vocabulary_ranks
from documentation import ROOT
from linear_cases import REFERENCE, SMALL, head_case, peak
from torch.distributed.tensor import DeviceMesh, distribute_tensor

from kleash.divergences import DIVERGENCES
from kleash.errors import CannotRunError
from kleash.linear import (
    LinearOptions,
    linear_divergence_loss,
    linear_kl,
    linear_objective,
    token_statistics,
    vocab_shards,
)
from kleash.linear.vocab_shards import VocabShards

PAGE = ROOT / "docs" / "reference" / "devices.md"


@pytest.fixture(scope="module")
def results(tmp_path_factory, command_forks) -> list[dict[str, object]]:
    """The results of each check in each of four processes."""
    folder = tmp_path_factory.mktemp("ranks")
    done = command_forks.run_python([vocabulary_ranks.__file__, str(folder / "store"), str(folder)])
    reported = [folder / f"rank{rank}.json" for rank in range(4)]
    assert all(out.exists() for out in reported), done.stderr[-4000:]
    return [json.loads(out.read_text()) for out in reported]


@pytest.mark.parametrize("name", rank_checks.CHECKS)
def test_in_groups_of_processes(results, name):
    for rank, reported in enumerate(results):
        assert name in reported, f"rank {rank} did not come so far"
        assert not isinstance(reported[name], str), f"rank {rank}: {reported[name]}"


def test_the_page_states_how_much_is_exchanged(results):
    table = results[0]["messages"]["2"]
    assert all(reported["messages"][size] == table for reported in results for size in ("2", "4"))
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    # The page leaves the hidden states' own gradient out: a message of 5 numbers a token here.
    trained = [name for name in table if "gradient" in name or "loss" in name or "objective" in name]
    for name, *numbers in rows:
        dim = 5 if name in trained else 0
        expected = table[name]
        assert [int(x) for x in numbers] == [
            expected["numbers a token"] - dim,
            expected["bytes a token"] - 4 * dim,
            expected["messages a chunk"] - (name in trained),
            expected["messages a call"],
        ], name
    assert [row[0] for row in rows] == list(table)


@pytest.fixture
def alone():
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def split(case, group):
    head_p, head_q = (replace(head, vocabulary_group=group) for head in (case.head_p, case.head_q))
    return case.hidden_p, head_p, case.hidden_q, head_q


@pytest.mark.parametrize(
    "options", [LinearOptions(), SMALL, REFERENCE], ids=["chunked", "small", "reference"]
)
def test_a_group_of_one_rank_equals_no_group(alone, options):
    case = head_case(torch.float64, bias=True, softcap=3.0)
    case.head_p.bias[5] = -torch.inf
    arguments = split(case, alone)
    torch.testing.assert_close(linear_kl(*arguments, options=options), case.kl(REFERENCE))
    statistics = token_statistics(*arguments, case.tokens, options=options)
    torch.testing.assert_close(statistics, case.statistics(REFERENCE))
    weights = torch.linspace(-1, 1, 37, dtype=torch.float64)
    actual = linear_divergence_loss(*arguments, weights=weights, divergence="hellinger", options=options)
    right = linear_divergence_loss(*case.models, weights=weights, divergence="hellinger", options=REFERENCE)
    torch.testing.assert_close(actual, right)

    def objective(terms, rows):
        return terms.kl + weights[rows] * terms.token_logp

    hidden_p, head_p, hidden_q, head_q = arguments
    loss, _ = linear_objective(hidden_p, head_p, case.tokens, hidden_q, head_q, objective, options=options)
    p, head, q, other = case.models
    right, _ = linear_objective(p, head, case.tokens, q, other, objective, options=REFERENCE)
    torch.testing.assert_close(loss, right)
    with pytest.raises(CannotRunError, match="hidden states of p are a DTensor"):
        linear_kl(distribute_tensor(p, DeviceMesh.from_group(alone, "cpu")), head, q, other, options=options)


def test_all_reduce_max_counts_nan_as_inf(alone):
    """Backends treat NaN differently; all ranks have to take the same branch."""
    top, other = VocabShards(alone, [1], torch.device("cpu")).all_reduce_max(
        torch.tensor([torch.nan, 1.0, -torch.inf]), torch.tensor([[2.0], [torch.inf], [torch.nan]])
    )
    assert top.tolist() == [torch.inf, 1.0, -torch.inf]
    assert other.tolist() == [[2.0], [torch.inf], [torch.inf]]


def test_the_plan_reserves_memory_for_the_fallback(alone):
    """With a bias of -inf, all rows go to the fallback; the plan still fits the buffer."""
    case = head_case(torch.float32, vocab_size=4096, tokens=(64,), bias=True)
    case.head_p.bias[3] = case.head_q.bias[3] = -torch.inf
    hidden_p, head_p, hidden_q, head_q = split(case, alone)
    budget = 8 * 2**20
    options = LinearOptions(buffer_bytes=budget, compile=False)
    trained = hidden_p.clone().requires_grad_()

    def objective(terms, rows):
        return terms.kl - terms.entropy + terms.token_logp

    for call in (
        lambda: linear_kl(hidden_p, head_p, hidden_q, head_q, options=options),
        lambda: linear_objective(trained, head_p, case.tokens, hidden_q, head_q, objective, options=options),
    ):
        assert 0.5 * budget < peak(call) < 1.1 * budget


@pytest.mark.parametrize(
    ("factors", "are_refused"),
    [([2.0, 2.0], False), ([2.0, 1.0], True), ([2.0, nan], False), ([nan, 2.0, 1.0], True)],
)
def test_ranks_that_multiply_their_losses_by_different_factors_are_refused(monkeypatch, factors, are_refused):
    """An overflow on one rank makes its factor NaN, which is no reason to stop, whichever rank it is."""
    monkeypatch.setattr(vocab_shards.dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(
        vocab_shards, "all_gather_single", lambda received, *_: received[:, 0].copy_(torch.tensor(factors))
    )
    storage = VocabShards("the ranks", [3] * len(factors), torch.device("cpu"), has_own_tokens=True)
    if are_refused:
        with pytest.raises(CannotRunError, match="multiply this loss by"):
            storage.require_equal_factor(torch.tensor(factors[0]))
    else:
        storage.require_equal_factor(torch.tensor(factors[0]))


def test_every_divergence_has_a_textbook_formula_on_ranks():
    assert set(DIVERGENCES) <= set(rank_checks.TEXTBOOK)
