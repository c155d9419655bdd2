import pytest
import torch

from kleash.losses import aggregate
from kleash.masking import Mean, as_mask, mean_of


def test_integer_masks_become_bool():
    assert as_mask(torch.tensor([[1, 0], [-100, 2]])).tolist() == [[True, False], [False, True]]
    bool_mask = torch.tensor([True, False])
    assert torch.equal(as_mask(bool_mask), bool_mask)
    assert as_mask(torch.tensor([0, 1], dtype=torch.uint8)).dtype == torch.bool


def test_masked_values_affect_neither_the_sum_nor_the_count():
    values = torch.tensor([[1.0, torch.nan, 2.0], [torch.inf, -torch.inf, 6.0]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    mean = mean_of(values, mask)
    assert (mean.total.item(), mean.count.item(), mean.value.item()) == (9, 3, 3)
    assert mean_of(values, mask.bool()).value.item() == 3


def test_half_precision_is_summed_in_float32():
    for dtype in (torch.float16, torch.bfloat16):
        many = torch.full((1, 70_001), 3.0, dtype=dtype)
        for mean in (mean_of(many, many.bool()), aggregate(many, many.bool())):
            assert mean.total.item() == 210_003


def test_the_mean_of_a_nan_inside_the_mask_and_that_over_an_empty_one_are_nan():
    assert mean_of(torch.tensor([1.0, torch.nan]), torch.tensor([True, True])).value.isnan()
    for shape in ((0,), (2, 3)):
        assert mean_of(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)).value.isnan()


def test_adding_means_of_parts_gives_the_mean_of_the_whole():
    values, mask = torch.arange(6.0), torch.tensor([1, 1, 1, 0, 1, 1])
    whole = mean_of(values, mask)
    parts = mean_of(values[:1], mask[:1]) + mean_of(values[1:], mask[1:])
    assert parts.value.item() == whole.value.item() == pytest.approx(2.4)
    assert isinstance(parts, Mean) and parts.count == 5


def test_gradients_flow_inside_the_mask_only():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    mean_of(values, torch.tensor([True, False, True])).value.backward()
    assert values.grad is not None and values.grad.tolist() == [0.5, 0, 0.5]
