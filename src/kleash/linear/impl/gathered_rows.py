"""Heads whose rows are stored on several ranks: products with blocks of gathered rows, and their gradients."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.head_storage import HeadStorage
from kleash.linear.impl.base import (
    Gradients,
    HeadInputs,
    HeadPair,
    Needed,
    TokenIndex,
    gradient_dtype,
    per_tensor,
)
from kleash.precision import at_least_float32

BLOCK_SHARE = 32
"""A block of gathered rows takes at most this part of ``buffer_bytes``. gloo holds about eight copies of a block."""


def model_as_logits(model: HeadInputs, chunk_bytes: int) -> HeadInputs:
    """The model with ``hidden W^T`` over the whole vocabulary as its hidden states, without a gradient.

    Either the hidden states go to the ranks with the rows, and the products back; or blocks of rows are gathered.

    Args:
        model: this rank's tokens and rows.
        chunk_bytes: memory, of which a block of gathered rows takes at most a 32nd part.
    """
    storage, weight, hidden = model.storage, model.head.weight, model.hidden.to(model.dtype)
    assert storage is not None and weight is not None, "the head is stored on several ranks"
    head = replace(model.head, weight=None, bias=whole_bias(model))
    counts, dim = storage.all_gather_numbers(len(hidden))[0], hidden.shape[-1]
    if max(counts) == 0:
        product = hidden.new_zeros((0, storage.vocab_size))
    elif sum(counts) * dim + max(counts) * storage.vocab_size < storage.vocab_size * dim:
        columns = storage.gather_tokens(hidden, counts) @ weight.to(model.dtype).T
        product = storage.exchange_columns(columns, counts)
    else:
        product = hidden.new_empty((len(hidden), storage.vocab_size))
        row = storage.world_size * dim * model.dtype.itemsize
        for block in storage.gather_blocks(weight, max(1, chunk_bytes // BLOCK_SHARE // row)):
            for columns, rows in block:
                product[:, columns] = hidden @ rows.to(model.dtype).T
    return replace(model, hidden=product, head=head, storage=None)


class CallGradients:
    """The gradients of the six tensors of a call, summed over its rounds in at least float32.

    A tensor that both models share has one sum, which is rounded once: the two parts nearly cancel where the models
    nearly agree.
    """

    def __init__(self, pair: HeadPair, needed: Needed) -> None:
        """``pair``: the whole call's; ``needed``: the gradients that are returned."""
        self.tensors, self.needed = list(pair.tensors), list(needed)
        self.sums: list[Tensor | None] = [None] * len(self.tensors)
        self.first_places = [
            next(n for n, other in enumerate(self.tensors) if other is tensor) for tensor in self.tensors
        ]

    def add(self, place: int, index: TokenIndex, gradient: Tensor) -> None:
        """Add a gradient to some entries of the sum of the tensor at one of the six places."""
        total = self.sum_at(place)
        if gradient is total:  # to which a backend has added it
            return
        if isinstance(index, slice):
            total[index].add_(gradient)
        else:
            total[index] = total[index] + gradient.to(total.dtype)

    def sum_at(self, place: int) -> Tensor:
        """The sum of the tensor at one of the six places, which starts at 0."""
        place = self.first_places[place]
        tensor, total = self.tensors[place], self.sums[place]
        assert tensor is not None
        if total is None:
            dtype = torch.promote_types(gradient_dtype(tensor), torch.float32)
            total = self.sums[place] = torch.zeros_like(tensor, dtype=dtype)
        return total

    @property
    def gradients(self) -> Gradients:
        """The sums in the ``gradient_dtype`` of their tensors, 0 for what no token has changed; a shared one once."""
        return per_tensor(map(self._gradient, range(len(self.tensors))))

    def _gradient(self, place: int) -> Tensor | None:
        tensor, total = self.tensors[place], self.sums[place]
        if tensor is None or not self.needed[place] or self.first_places[place] != place:
            return None
        if total is None:
            return torch.zeros_like(tensor, dtype=gradient_dtype(tensor))
        return total.to(gradient_dtype(tensor))


class _Product(NamedTuple):
    """``hidden W^T`` of one model, or the gradient with respect to it."""

    model: HeadInputs
    values: Float[Tensor, "tokens vocab"]
    place: int
    """The place of the hidden states among the six tensors; weight and bias follow."""


def products_of(pair: HeadPair, block: int) -> list[Tensor]:
    """``hidden W^T`` of both models: one tensor where both have the same; each block of rows is gathered once."""
    products: list[_Product] = []
    for model in [pair.p] if pair.has_shared_product else [pair.p, pair.q]:
        hidden = model.hidden.to(model.dtype)
        is_logits = model.head.weight is None
        values = hidden if is_logits else hidden.new_empty((len(hidden), storage_of(pair).vocab_size))
        products.append(_Product(replace(model, hidden=hidden), values, 3 * len(products)))
    for group in _by_weight(products):
        for parts in _row_blocks(group[0].model, block):
            for columns, rows in parts:
                widened = rows.to(pair.p.dtype)
                for product in group:
                    product.values[:, columns] = product.model.hidden @ widened.T
    values = [product.values for product in products]
    return values * 2 if len(values) == 1 else values


def add_product_gradients(
    sums: CallGradients, gradients: Gradients, pair: HeadPair, index: TokenIndex, block: int, needed: Needed
) -> None:
    """Add the gradients of hidden states and heads that follow from those of the products."""
    products: list[_Product] = []
    for place, model, of_model in ((0, pair.p, gradients.p), (3, pair.q, gradients.q)):
        if of_model.bias is not None:
            _add_bias(sums, place + 2, model, of_model.bias)
        if of_model.hidden is None:
            continue
        if model.head.weight is None:
            sums.add(place, index, of_model.hidden)
        else:
            products.append(_Product(model, of_model.hidden.to(model.dtype), place))
    flags = list(needed)
    for group in _by_weight(products):
        _add_gradients_of_weight(sums, group, index, block, flags)


def _add_gradients_of_weight(
    sums: CallGradients, group: Sequence[_Product], index: TokenIndex, block: int, needed: Sequence[bool]
) -> None:
    """Add the gradients of one weight, and of all hidden states that it multiplies."""
    model, place = group[0].model, group[0].place
    of_hidden = [torch.zeros_like(product.model.hidden, dtype=model.dtype) for product in group]
    trains_weight = any(needed[product.place + 1] for product in group)
    for number, parts in enumerate(_row_blocks(model, block)):
        of_weight: list[tuple[slice, Tensor]] = []
        for columns, rows in parts:
            widened = rows.to(model.dtype)
            of_rows = torch.zeros_like(widened)
            for total, product in zip(of_hidden, group, strict=True):
                gradient = product.values[:, columns]
                if needed[product.place]:
                    total += gradient @ widened
                if needed[product.place + 1]:
                    of_rows += gradient.T @ product.model.hidden.to(model.dtype)
            of_weight.append((columns, of_rows))
        if trains_weight:
            if model.storage is not None:
                of_weight = [model.storage.reduce_block(of_weight, number * block, block)]
            for rows_of_rank, of_rows in of_weight:
                sums.add(place + 1, rows_of_rank, of_rows)
    for total, product in zip(of_hidden, group, strict=True):
        if needed[product.place]:
            sums.add(product.place, index, total)


def _add_bias(sums: CallGradients, place: int, model: HeadInputs, gradient: Tensor) -> None:
    """Add the gradient of a bias over the whole vocabulary: this rank's rows of the sum over the ranks, if stored."""
    if model.storage is None:
        sums.add(place, slice(None), gradient)
    else:
        whole = model.storage.all_reduce_sum(at_least_float32(gradient).clone())
        sums.add(place, slice(None), whole[model.storage.local_rows])


def _by_weight(products: Iterable[_Product]) -> list[list[_Product]]:
    """The products grouped by their weight, whose rows are then gathered once; without those of given logits."""
    groups: dict[int, list[_Product]] = {}
    for product in products:
        if product.model.head.weight is not None:
            groups.setdefault(id(product.model.head.weight), []).append(product)
    return list(groups.values())


def _row_blocks(model: HeadInputs, block: int) -> Iterator[list[tuple[slice, Tensor]]]:
    """The rows of a head in blocks: gathered if they are stored on several ranks."""
    weight = model.head.weight
    assert weight is not None, "logits have no rows"
    if model.storage is not None:
        yield from model.storage.gather_blocks(weight, block)
        return
    for start in range(0, len(weight), block):
        rows = weight[start : start + block]
        yield [(slice(start, start + len(rows)), rows)]


def whole_bias(model: HeadInputs) -> Tensor | None:
    """The bias of all rows, gathered if they are stored on several ranks; None if there is none."""
    bias = model.head.bias
    if bias is None or model.storage is None:
        return bias
    return model.storage.gather_tokens(bias.detach(), model.storage.rows)


def storage_of(pair: HeadPair) -> HeadStorage:
    """The ranks that store the rows of the pair's heads."""
    storage = pair.storage
    assert storage is not None, "no head is stored on several ranks"
    return storage
