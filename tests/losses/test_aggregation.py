"""Aggregation whose parts add up to the whole: micro-batches, two real processes, and what is logged."""

import json

import pytest
import torch
import torch.multiprocessing as mp
from uneven_batch import data, of_rank, per_token, policy

from kleash.errors import OptionError, UnknownNameError
from kleash.losses import AGGREGATIONS, aggregate, count_of
from kleash.masking import Mean

VALUES = torch.tensor([[1.0, 2.0, torch.nan], [4.0, torch.inf, torch.nan], [torch.nan] * 3])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
WAYS = {"token_mean": {}, "sequence_sum": {}, "sequence_mean": {}, "constant": {"length": 7}}
every_way = pytest.mark.parametrize(("how", "options"), WAYS.items())


@pytest.mark.parametrize(
    ("how", "options", "total", "count"),
    [
        ("token_mean", {}, 7, 3),
        ("sequence_sum", {}, 7, 2),
        ("sequence_mean", {}, 5.5, 2),
        ("constant", {"length": 10}, 7, 20),
    ],
)
def test_the_four_aggregations_of_a_small_example(how, options, total, count):
    mean = aggregate(VALUES, MASK, how, **options)
    assert (mean.total.item(), mean.count.item()) == (total, count)
    assert mean.value.item() == pytest.approx(total / count)
    assert mean.value == aggregate(VALUES[:2], MASK[:2], how, **options).value, "an empty row has no effect"
    assert count_of(MASK.bool(), how, **options).item() == count
    assert list(AGGREGATIONS) == list(WAYS)
    assert aggregate(VALUES, MASK).value == aggregate(VALUES, MASK, "token_mean").value


@every_way
def test_an_empty_batch_is_nan_with_zero_gradient(how, options):
    values = VALUES.clone().requires_grad_()
    mean = aggregate(values, torch.zeros_like(MASK), how, **options)
    assert mean.value.isnan()
    mean.value.backward()
    assert values.grad is not None and (values.grad == 0).all()
    part = mean.share(count_of(MASK, how, **options))
    assert part.item() == 0, "an empty part of a batch that is not empty"


@every_way
def test_the_gradient_stays_within_the_mask(how, options):
    values = VALUES.clone().requires_grad_()
    aggregate(values, MASK, how, **options).value.backward()
    assert values.grad is not None and ((values.grad != 0) == MASK.bool()).all()


def whole(how, options):
    model, (features, logq, mask) = policy(), data()
    loss = aggregate(per_token(model, features, logq, mask), mask, how, **options).value
    loss.backward()
    return loss.item(), model.weight.grad


@every_way
@pytest.mark.parametrize("cuts", [[3, 4], [1, 2, 4], [4, 1, 1, 1]])
def test_shares_of_uneven_micro_batches_add_up_to_the_batch(how, options, cuts):
    """Also one of them empty: row 3 has no token."""
    model, parts = policy(), [part.split(cuts) for part in data()]
    count = sum(count_of(mask, how, **options) for mask in parts[2])
    logged = None
    for features, logq, mask in zip(*parts, strict=True):
        mean = aggregate(per_token(model, features, logq, mask), mask, how, **options)
        mean.share(count).backward()
        logged = mean.detached if logged is None else logged + mean.detached
    value, slope = whole(how, options)
    assert isinstance(logged, Mean) and logged.value.item() == pytest.approx(value, rel=1e-12)
    assert logged.across_ranks() == logged and not mean.across_ranks().total.requires_grad, "of one process"
    torch.testing.assert_close(model.weight.grad, slope)


def test_shares_of_two_processes_add_up_to_the_batch(tmp_path):
    mp.spawn(of_rank, args=(2, WAYS, tmp_path), nprocs=2)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for how, options in WAYS.items():
            value, slope = whole(how, options)
            logged, gradient, own = found[how]
            assert logged == pytest.approx(value, rel=1e-12)
            torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), slope)
            assert own < count_of(data()[2], how, **options), "the count of this rank alone stays its own"


def test_invalid_aggregation_arguments_are_errors(unhooked):
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(UnknownNameError, match=r"no aggregation is called 'seq_mean'.*did you mean"):
        aggregate(x, mask, "seq_mean")
    for length in (None, 0):
        with pytest.raises(OptionError, match=f"length is {length}; give the number of tokens"):
            aggregate(x, mask, "constant", length=length)
    with pytest.raises(OptionError, match="length is 5, which 'token_mean' does not use"):
        aggregate(x, mask, length=5)
