"""Shapes of arguments against their annotations: every small case as jaxtyping itself judges it, and the errors."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from jaxtyping import Bool, Float, jaxtyped
from torch import Tensor

from kleash.arguments import first_misfit, validated
from kleash.errors import ShapeError, VocabularyMismatchError

AXES = ["batch", "batch time", "*tokens", "*tokens k", "batch *tokens", "*batch vocab", "batch *tokens k"]
SHAPES = [shape for rank in range(4) for shape in product((1, 2), repeat=rank)]


def fits(first: str, second: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    with jaxtyped("context"):
        return all(
            isinstance(torch.zeros(shape), Float[Tensor, axes])
            for axes, shape in zip((first, second), shapes, strict=True)
        )


@pytest.mark.parametrize("first", AXES)
@pytest.mark.parametrize("second", AXES)
def test_shapes_fit_where_jaxtyping_says_so(first, second):
    for shapes in product(SHAPES, SHAPES):
        sizes: dict[str, object] = {}
        misfits = [
            first_misfit(tuple(axes.split()), shape, sizes)
            for axes, shape in zip((first, second), shapes, strict=True)
        ]
        assert (misfits == [None, None]) is fits(first, second, shapes), shapes


class Columns(NamedTuple):
    values: Float[Tensor, "*tokens"]
    width: int


Columns.__module__ = "kleash.test_argument_shapes"


@validated
def columns_of(
    columns: Columns, mask: Bool[Tensor, "*tokens"], logp: Float[Tensor, "*tokens vocab"] | None = None
) -> None:
    """Takes what is given."""


def test_tensors_within_records_are_compared_too(unhooked):
    columns_of(Columns(torch.zeros(2, 3), 1), torch.ones(2, 3).bool(), torch.zeros(2, 3, 5))
    with pytest.raises(ShapeError, match=r"columns.values \(2, 3\), mask \(2,\)"):
        columns_of(Columns(torch.zeros(2, 3), 1), torch.ones(2).bool())


def test_another_vocabulary_has_an_error_of_its_own(unhooked):
    @validated
    def pair_of(logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]) -> None:
        pass

    with pytest.raises(VocabularyMismatchError, match="logp covers 3 tokens and logq 4"):
        pair_of(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ShapeError, match=r"logq \(1, 3\)"):
        pair_of(torch.zeros(2, 3), torch.zeros(1, 3))
