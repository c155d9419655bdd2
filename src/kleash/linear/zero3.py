"""Parameters that DeepSpeed's ZeRO-3 stores on several ranks, as DTensors of which each rank has some rows.

ZeRO-3 flattens a parameter and gives each rank an equal number of its elements; the parameter itself is empty. Where a
rank's elements are its rows, the DTensor is a view of them. Elsewhere the few elements that lie on a neighbour are
exchanged, into a copy of the rank's part. The parameter is never on one rank as a whole.

DeepSpeed is not imported. Read are the attributes that it sets on a parameter: ``ds_id``, ``ds_tensor`` (this rank's
elements), ``ds_shape``, ``ds_numel``, ``ds_process_group``, and ``ds_quant_scale`` of ``ds_tensor``.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor

from kleash.autodiff import apply
from kleash.errors import CannotRunError

dist: Any = torch.distributed
Interval = tuple[int, int]


def is_zero3(tensor: Any) -> bool:
    """Whether a tensor is a parameter that ZeRO-3 stores on the ranks of a process group."""
    return hasattr(tensor, "ds_id") and getattr(tensor, "ds_tensor", None) is not None


def zero3_as_dtensor(parameter: Tensor, *, requires_grad: bool = True) -> Tensor:
    """A parameter of ZeRO-3 as a DTensor with placement ``Shard(0)``, as FSDP2 has it; all ranks call this.

    A parameter without dimensions is one with a single element.

    Its gradient is added to the one that the same backward pass computes of the parameter, before ZeRO-3 takes the mean
    over the ranks. So the network must have used the parameter in a forward pass that the loss depends on, too.

    Args:
        parameter: of ``deepspeed.initialize`` or ``deepspeed.zero.Init``, whether or not ZeRO-3 has gathered it.
        requires_grad: whether the parameter gets a gradient, if it requires one.

    Raises:
        CannotRunError: if the parameter is offloaded, quantised, or stored on some of the processes only.
    """
    reason = unsupported_storage(parameter)
    if reason is not None:
        raise CannotRunError(f"a parameter of ZeRO-3 {reason}")
    flat = _FlatStorage(parameter)
    if requires_grad and parameter.requires_grad and torch.is_grad_enabled():
        return apply(_Rows, parameter, flat)
    return flat.dtensor()


def unsupported_storage(parameter: Any) -> str | None:
    """Why a parameter's rows cannot be read where ZeRO-3 stores them, as the end of a sentence; None if they can."""
    stored = parameter.ds_tensor
    ranks, processes = dist.get_world_size(parameter.ds_process_group), dist.get_world_size()
    if stored.device.type != parameter.device.type or stored.numel() * ranks < parameter.ds_numel:
        return "is offloaded to the CPU or a disk; leave offload_param out of the configuration"
    if hasattr(stored, "ds_quant_scale"):
        return "is quantised; leave zero_quantized_weights and zero_quantized_nontrainable_weights out"
    if ranks != processes:
        return f"is stored on {ranks} of {processes} processes; kleash takes one group of all of them"
    return None


class _FlatStorage:
    """How the elements of a parameter lie on the ranks, and how its rows would."""

    def __init__(self, parameter: Any) -> None:
        self.elements, self.group = parameter.ds_tensor.detach(), parameter.ds_process_group
        self.shape, numel = torch.Size(parameter.ds_shape or (1,)), int(parameter.ds_numel)
        self.rank: int = dist.get_rank(self.group)
        ranks: int = dist.get_world_size(self.group)
        rows = -(-self.shape[0] // ranks)  # as torch.chunk divides
        self.stored = _intervals(self.elements.numel(), numel, ranks)
        self.in_rows = _intervals(rows * self.shape[1:].numel(), numel, ranks)

    def dtensor(self) -> Tensor:
        """The rows as a DTensor, without a gradient."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(self.group, self.elements.device.type)
        first, end = self.stored[self.rank]
        local = self.exchanged(self.elements[: end - first], self.stored, self.in_rows)
        return DTensor.from_local(
            local.view(-1, *self.shape[1:]),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=self.shape,
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def exchanged(self, local: Tensor, source: Sequence[Interval], target: Sequence[Interval]) -> Tensor:
        """The elements of this rank's interval of ``target``; each rank has those of its interval of ``source``."""
        if list(source) == list(target):
            return local
        sent = [_overlap(source[self.rank], interval) for interval in target]
        received = [_overlap(interval, target[self.rank]) for interval in source]
        elements = local.new_empty(sum(received))
        dist.all_to_all_single(elements, local.contiguous(), received, sent, group=self.group)
        return elements

    def add_to_own_gradient(self, parameter: Tensor, rows: Tensor) -> None:
        """Add a gradient of this rank's rows to the gradient of the parameter in the backward pass that is running.

        Each rank adds what it stores of the sum over the ranks, so that ZeRO-3's mean over the ranks is that of this
        sum.
        """
        elements = self.exchanged(rows.flatten(), self.in_rows, self.stored)
        first, end = self.stored[self.rank]

        def add(gradient: Tensor | None) -> Tensor:
            handle.remove()
            if gradient is None:
                raise CannotRunError(
                    "the loss depends on a parameter of ZeRO-3 only through zero3_as_dtensor, and ZeRO-3 reduces its "
                    "gradient in a backward pass through the module that has it; let the loss depend on the module's "
                    "output, too"
                )
            gradient = gradient.contiguous()  # which this backward pass has made, and nothing else reads
            gradient.view(-1)[first:end] += elements.to(gradient.dtype)
            return gradient

        handle: Any = cast("Any", parameter).register_hook(add)


class _Rows(torch.autograd.Function):
    """``zero3_as_dtensor`` with a gradient."""

    @staticmethod
    def forward(context: Any, parameter: Tensor, storage: _FlatStorage) -> Tensor:  # pyrefly: ignore[bad-override]
        """The rows."""
        context.parameter, context.storage = parameter, storage
        return storage.dtensor()

    @staticmethod
    def backward(context: Any, gradient: Any) -> tuple[None, None]:  # pyrefly: ignore[bad-override]
        """Nothing: the gradient is added where that of the parameter's own module arrives."""
        context.storage.add_to_own_gradient(context.parameter, gradient.to_local())
        return None, None


def _intervals(size: int, numel: int, ranks: int) -> list[Interval]:
    """The elements of each rank, as first and end, where each has ``size`` of them and the last ones what is left."""
    return [(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(ranks)]


def _overlap(first: Interval, second: Interval) -> int:
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))
