"""Networks whose weights FSDP2 or ZeRO-3 stores on several ranks: how they are sharded, and a view that runs alone.

FSDP and ZeRO-3 gather the output embedding whole in every forward pass. The view gathers one weight at a time, for as
long as its module runs; of the input embedding only the rows of the tokens, and of the output embedding nothing: logits
are computed where its rows are (``kleash.linear``). The network itself, which a trainer goes on using, is not touched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kleash.errors import CannotRunError, KleashError, ModelError
from kleash.extras import import_extra
from kleash.linear import Head
from kleash.linear.api import stored_logits
from kleash.linear.vocab_shards import all_gather_numbers, gather_tokens, reduce_scatter_single
from kleash.linear.zero3 import is_zero3, unsupported_storage, zero3_as_dtensor
from kleash.models.compat import copy_without_sharding, fsdp_param_dtypes


@dataclass(frozen=True, eq=False)
class ShardStorage:
    """The ranks that store the weights of a network between them."""

    group: Any
    """Process group of the ranks."""
    param_dtype: torch.dtype | None
    """The dtype in which the weights are gathered, by FSDP's mixed precision; None for their own."""
    device: torch.device

    def cast(self, weight: Any) -> Any:
        """A weight, detached and in the dtype in which it is gathered."""
        with torch.inference_mode(False), torch.no_grad():
            weight = weight.detach()
            is_cast = self.param_dtype is not None and weight.is_floating_point()
            return weight.to(self.param_dtype) if is_cast else weight

    @contextmanager
    def raising_together(self) -> Iterator[None]:
        """Context of checks of which all ranks raise an error if one does, so that none waits for it. A collective.

        Raises:
            KleashError: that of this rank, if it has one.
            CannotRunError: if another rank has one.
        """
        error: KleashError | None = None
        try:
            yield
        except KleashError as raised:
            error = raised
        errors = all_gather_numbers(self.group, self.device, [int(error is not None)])[0]
        if error is not None:
            raise error
        if any(errors):
            rank = torch.distributed.get_process_group_ranks(self.group)[errors.index(1)]
            raise CannotRunError(
                f"rank {rank} of those that store the model refuses its arguments; its own error message says why"
            )


class MeanGradient(torch.autograd.Function):
    """A stored weight whose gradient is the mean over the ranks, as with FSDP, and not the sum."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, ranks: int) -> Tensor:  # pyrefly: ignore[bad-override]
        """The tensor itself."""
        context.ranks = ranks
        return tensor.detach()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        """The mean over the ranks."""
        return gradient / context.ranks, None


def reshard(network: Any) -> list[Any]:
    """Free the weights that FSDP2 has gathered, so that this rank has its shards; returns the sharded modules."""
    kind = import_extra("torch.distributed.fsdp", "models").FSDPModule
    modules = [module for module in network.modules() if isinstance(module, kind)]
    for module in modules:
        module.reshard()
    return modules


def shard_storage(network: Any, subject: str) -> ShardStorage | None:
    """How FSDP2 or ZeRO-3 stores a network's weights; None if they are whole on this process.

    Weights that FSDP2 has gathered are freed first, so that all ranks have their shards.

    Args:
        network: a transformers or PEFT model.
        subject: "the policy", for errors.

    Raises:
        ModelError: if they are sharded in another way. The reason does not depend on the rank.
    """
    zero3 = {name: x for name, x in network.named_parameters() if is_zero3(x)}
    if zero3:
        return _zero3_storage(zero3, subject)
    modules = reshard(network)
    weights = {name: x for name, x in network.named_parameters() if hasattr(x, "device_mesh")}
    if not weights:
        return None
    if not modules:
        raise ModelError(
            f"{subject} has weights that are DTensors without FSDP, such as {next(iter(weights))}; tensor parallelism "
            "of a live network is not supported, and fully_shard is"
        )
    meshes = {id(x.device_mesh): x.device_mesh for x in weights.values()}
    mesh, *more_meshes = meshes.values()
    if mesh.ndim != 1 or any(other.mesh.tolist() != mesh.mesh.tolist() for other in more_meshes):
        sizes = sorted({tuple(other.mesh.shape) for other in (mesh, *more_meshes)})
        raise ModelError(
            f"{subject} is sharded over device meshes of the shapes {sizes}; kleash takes one mesh of one dimension, "
            "without replicas (HSDP) or tensor parallelism"
        )
    moved = [name for name, x in weights.items() if x.to_local().device.type != mesh.device_type]
    if moved:
        raise ModelError(
            f"{subject} has weights that are offloaded to the CPU, such as {moved[0]}; leave out the offload policy"
        )
    dtypes = fsdp_param_dtypes(modules)
    if len(dtypes) > 1:
        raise ModelError(
            f"{subject} computes in {' and '.join(sorted(map(str, dtypes)))} by the mixed precision of its modules; "
            "give all of them one param_dtype"
        )
    for name, layer in (
        ("input", network.get_input_embeddings()),
        ("output", network.get_output_embeddings()),
    ):
        weight: Any = getattr(layer, "weight", None)
        if hasattr(weight, "device_mesh") and not weight.placements[0].is_shard(0):
            raise ModelError(
                f"the {name} embedding of {subject} is stored as {tuple(weight.placements)}; shard it by rows, Shard(0)"
            )
    if mesh.size() == 1:
        return None
    device = torch.device(next(iter(weights.values())).device)
    return ShardStorage(mesh.get_group(), dtypes.pop() if dtypes else None, device)


def _zero3_storage(weights: dict[str, Any], subject: str) -> ShardStorage:
    """How ZeRO-3 stores these weights.

    Raises:
        ModelError: if they cannot be read there. The reason does not depend on the rank.
    """
    for name, weight in weights.items():
        reason = unsupported_storage(weight)
        if reason is not None:
            raise ModelError(f"the weight {name} of {subject}, which ZeRO-3 stores, {reason}")
    weight = next(iter(weights.values()))
    return ShardStorage(weight.ds_process_group, None, torch.device(weight.device))


def view_of_shards(network: Any, storage: ShardStorage) -> Any:
    """A copy of a network's modules that shares its weights, and gathers them one module at a time.

    Args:
        network: a transformers or PEFT model.
        storage: of its weights.
    """
    view = copy_without_sharding(network)
    _zero3_as_dtensors(view)
    base = view.get_base_model() if hasattr(view, "get_base_model") else view
    rows_only = {id(base.get_input_embeddings()): _FetchedRows, id(base.get_output_embeddings()): _StoredHead}
    for module in view.modules():
        names = [name for name, x in module.named_parameters(recurse=False) if hasattr(x, "device_mesh")]
        if names:
            rows_only.get(id(module), _GatheredWeights)(module, names, storage)
    return view


def _zero3_as_dtensors(view: Any) -> None:
    """Put DTensors in the place of the parameters that ZeRO-3 stores, one for a parameter that occurs twice."""
    replaced: dict[int, Any] = {}
    for module in view.modules():
        for name, parameter in module._parameters.items():
            if is_zero3(parameter) and id(parameter) not in replaced:
                rows: Any = zero3_as_dtensor(parameter, requires_grad=False)
                if not parameter.ds_shape:  # a parameter without dimensions, whose DTensor has one row
                    rows = rows.full_tensor().view(())
                replaced[id(parameter)] = torch.nn.Parameter(rows, requires_grad=False)
            module._parameters[name] = replaced.get(id(parameter), parameter)


class _GatheredWeights:
    """Gathers a module's own weights for as long as the module runs."""

    def __init__(self, module: Any, names: Sequence[str], storage: ShardStorage) -> None:
        """``names``: of the parameters that are stored on several ranks."""
        self.names, self.storage = names, storage
        self.shards: dict[str, Any] = {}
        module.register_forward_pre_hook(self.gather, with_kwargs=True)
        module.register_forward_hook(self.free, always_call=True)

    def gather(self, module: Any, args: Any, kwargs: Any) -> None:
        """Put whole weights in the place of the shards."""
        for name in self.names:
            shard = self.shards[name] = module._parameters[name]
            with torch.inference_mode(False), torch.no_grad():
                whole = self.storage.cast(shard).full_tensor()
                module._parameters[name] = torch.nn.Parameter(whole, requires_grad=False)

    def free(self, module: Any, args: Any, output: Any) -> None:
        """Put the shards back."""
        module._parameters.update(self.shards)
        self.shards.clear()


class _FetchedRows(_GatheredWeights):
    """Fetches the rows of an embedding that a batch reads, from the ranks that store them."""

    def gather(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Put the rows of the batch in the place of the shard, and their numbers in the place of the token ids."""
        module.padding_idx = None  # matters to gradients only, and names a row of the whole embedding
        ids = args[0] if args else kwargs.pop("input")
        shard = self.shards["weight"] = module._parameters["weight"]
        unique, positions = torch.unique(ids, return_inverse=True)
        rows = _fetch_rows(self.storage.cast(shard).to_local(), unique, self.storage)
        module._parameters["weight"] = torch.nn.Parameter(rows, requires_grad=False)
        return (positions, *args[1:]), kwargs


class _StoredHead:
    """Computes logits where the rows of the output embedding are."""

    def __init__(self, module: Any, names: Sequence[str], storage: ShardStorage) -> None:
        """Arguments as of ``_GatheredWeights``."""
        kind: Any = type(module)
        if not isinstance(module, torch.nn.Linear) or kind.forward is not torch.nn.Linear.forward:
            raise ModelError(
                f"the output embedding is a {type(module).__name__} whose rows are stored on several ranks; kleash "
                "takes a plain torch.nn.Linear there, without an adapter"
            )
        for name in names:
            weight = storage.cast(module._parameters[name])
            module._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
        self.head = Head(module.weight, module.bias)
        vars(module)["forward"] = self.logits

    def logits(self, hidden: Tensor) -> Tensor:
        """The product of hidden states and all rows."""
        return stored_logits(hidden, self.head).to(hidden.dtype)


def _fetch_rows(local: Tensor, ids: Int[Tensor, " ids"], storage: ShardStorage) -> Tensor:
    """The rows of an embedding with these numbers. A collective, in which each rank asks for rows of its own.

    Args:
        local: the consecutive rows that this rank stores.
        ids: the rows to return.
        storage: the ranks.
    """
    rows, counts = all_gather_numbers(storage.group, local.device, [len(local), len(ids)])  # of each rank
    first = sum(rows[: torch.distributed.get_rank(storage.group)])
    max_count = max(counts)
    sent = local.new_zeros((len(counts), max_count, local.shape[-1]))
    all_ids: Any = gather_tokens(storage.group, ids, counts)
    for place, needed_ids in zip(sent, all_ids.split(counts), strict=True):
        is_local = (needed_ids >= first) & (needed_ids < first + len(local))
        place[: len(needed_ids)][is_local] = local[needed_ids[is_local] - first]
    received = local.new_empty((max_count, local.shape[-1]))
    reduce_scatter_single(received, sent.flatten(0, 1), storage.group)
    return received[: len(ids)]
