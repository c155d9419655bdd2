"""The head of a causal language model: found by trying what its configuration may mean, and checked on a probe."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.errors import ModelError
from kleash.linear import Head
from kleash.linear.api import stored_logits
from kleash.models.compat import effective_weight_and_bias
from kleash.precision import at_least_float32

TENSOR_DIMENSION = "tp"
"""Name of the mesh dimension over which transformers splits a layer between ranks that have the same tokens."""
TOLERANCE_ULPS = 4
"""Units in the last place of the largest logit by which two logits may differ."""

BLOCK_BYTES = 2**26
"""Rows of a head that are converted at once."""

MASK_BELOW = -1e4
"""Logits up to this one are masks of tokens that a network never gives, and not numbers that are rounded."""

ROUNDING, ROUNDING_HALF = 1e-3, 5e-2
"""Largest relative difference between two ways to run a network that is rounding, in float32 and below."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExtractedHead:
    """The head of a network, and how many tokens it gives a logit for."""

    head: Head
    """Maps final hidden states into logits; ``Head(weight=None)`` if only the network's logits are available."""
    vocab_size: int
    """Logits per position."""
    note: str | None
    """A note for the user if no head reproduces the network's logits."""
    max_padded_length: int | None = None
    """Longest batch in which padding changes no number; None for no limit."""


@torch.no_grad()  # DTensors take no inference mode
def extract_head(
    network: Any, backbone: Any, probe: Int[Tensor, "batch time"], subject: str
) -> ExtractedHead:
    """Find the head that maps the backbone's hidden states to the network's logits.

    The configuration states how logits are scaled and capped, but the same key has different meanings in different
    architectures ("logits_scaling" divides in one and multiplies in another). So each candidate is tried on a probe,
    the most common first; the first whose logits agree with the network's within rounding (``logit_discrepancy``) is
    returned. If none agrees, the network's logits are used directly.

    Args:
        network: a transformers causal language model with the adapter to be measured active.
        backbone: its submodule that returns ``last_hidden_state``.
        probe: token ids, without padding.
        subject: "the policy", for errors and notes.

    Raises:
        ModelError: if later tokens change the logits of earlier ones, so that the model is not causal.
    """
    other_probe = probe.clone()
    other_probe[:, -1] = probe[:, 0]
    both = torch.cat([probe, other_probe])
    network_logits, after = network(input_ids=both, use_cache=False).logits.chunk(2)
    _check_causal(network, network_logits, after, subject)
    max_padded_length = find_max_padded_length(network, probe, network_logits)
    vocab_size = network_logits.shape[-1]
    head = Head(weight=None)
    plain_head = _plain_head(network, vocab_size)
    if plain_head is not None and backbone is not network:
        # with a device map, the network alone returns its output to the device of its input
        states = backbone(input_ids=both, use_cache=False).last_hidden_state
        hidden = states[: len(probe)].to(network_logits.device)
        agreeing = (
            each
            for each in candidate_heads(network.config, plain_head)
            if logit_discrepancy(network_logits, hidden, each) <= 1
        )
        head = next(agreeing, head)
    note = (
        f"{subject} ({type(network).__name__}) does not come apart into hidden states and a head that gives its "
        "own logits, so it is measured through its logits, which is slower and rounds them as the model does"
    )
    return ExtractedHead(
        head=head,
        vocab_size=vocab_size,
        note=note if head.weight is None else None,
        max_padded_length=max_padded_length,
    )


def find_max_padded_length(
    network: Any, probe: Int[Tensor, "batch time"], network_logits: Float[Tensor, "batch time vocab"]
) -> int | None:
    """The longest batch in which padding on the right changes no number; None for no limit.

    It is 0 for a network whose logits of the first tokens depend on how many follow. It is the original context length
    for rotary embeddings whose frequencies depend on the longest sequence of a batch ("longrope", "dynamic").
    """
    time = probe.shape[1] // 2 + 1
    alone = network(input_ids=probe[:1, :time], use_cache=False).logits
    difference, max_logit = _largest_difference(network_logits[:1, :time], alone)
    if difference > rounding_tolerance(alone.dtype) * max_logit:
        return 0
    text_config = network.config.get_text_config(decoder=True)
    settings = (
        getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    )
    for rope in (settings, *(part for part in settings.values() if isinstance(part, dict))):
        if rope.get("rope_type", rope.get("type")) in ("longrope", "dynamic"):
            length = rope.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", text_config.max_position_embeddings
            )
            return length if isinstance(length, int) else 0
    return None


def rounding_tolerance(dtype: torch.dtype) -> float:
    """The largest relative difference between two ways to run a network of this dtype that is rounding."""
    return ROUNDING if dtype in (torch.float32, torch.float64) else ROUNDING_HALF


def _largest_difference(before: Tensor, after: Tensor) -> tuple[float, float]:
    """The largest difference of logits that are finite in both, and the largest of these in ``before`` but masks."""
    finite = before.isfinite() & after.isfinite()
    difference = torch.where(finite, before - after, 0).abs().amax()
    return float(difference), float(torch.where(finite, _without_masks(before), 0).abs().amax())


def _without_masks(logits: Tensor) -> Tensor:
    """Logits with 0 for those that are not finite, or that mask a token (Chameleon's for the tokens of images)."""
    return torch.where(logits.isfinite() & (logits > MASK_BELOW), logits, 0)


def logit_discrepancy(
    network_logits: Float[Tensor, "*tokens vocab"], hidden: Float[Tensor, "*tokens dim"], head: Head
) -> float:
    """The largest difference between the network's logits and the head's, as a multiple of the rounding tolerance.

        tolerance = 4 ulp(max_v |z_v|) + sqrt(dim) u (|hidden| |W|ᵀ)_v |scale|

    The first term is four units in the last place of the row's largest logit, in the network's dtype; logits up to
    ``MASK_BELOW`` do not count. The second is
    the rounding of a dot product of ``dim`` terms under a change of summation order, in the accumulator's precision
    (u is float32's, or float64's for a float64 network). Equal infinities and NaN in both agree.

    Returns:
        At most 1 if the logits agree; inf if NaN or infinities meet numbers, or the sizes do not fit.
    """
    if head.weight is None or head.weight.shape[-1] != hidden.shape[-1]:
        return torch.inf
    logits = head_logits(hidden, head)
    equal = (network_logits == logits.to(network_logits.dtype)) | (network_logits.isnan() & logits.isnan())
    # Ranks that share a head take the products below together.
    if equal.all() and not hasattr(head.weight, "device_mesh"):
        return 0.0
    rounding = _head_magnitudes(at_least_float32(hidden).abs(), head)
    rounding *= hidden.shape[-1] ** 0.5 * torch.finfo(at_least_float32(hidden).dtype).eps * abs(head.scale)
    max_logit = _without_masks(network_logits).abs().amax(-1, keepdim=True)
    tolerance = TOLERANCE_ULPS * max_logit.to(logits.dtype) * torch.finfo(network_logits.dtype).eps + rounding
    excess = torch.where(equal, 0, (network_logits - logits).abs() / tolerance)
    return float(torch.where(excess.isnan(), torch.inf, excess).max())


def head_logits(hidden: Float[Tensor, "*tokens dim"], head: Head) -> Float[Tensor, "*tokens vocab"]:
    """All logits of a few tokens at once, in at least float32, without a temperature."""
    if head.weight is None:
        return at_least_float32(hidden)
    if hasattr(head.weight, "device_mesh"):
        return stored_logits(hidden, head)
    dtype = torch.promote_types(at_least_float32(hidden).dtype, head.weight.dtype)
    return head.logits_of_product(_multiply(hidden.to(dtype), head.weight, absolute=False))


def _head_magnitudes(hidden: Float[Tensor, "*tokens dim"], head: Head) -> Float[Tensor, "*tokens vocab"]:
    """``hidden |W|^T``, in at least float32."""
    assert head.weight is not None, "the head is a matrix"
    if hasattr(head.weight, "device_mesh"):
        weight = at_least_float32(head.weight).abs()
        return stored_logits(hidden, Head(weight, vocabulary_group=head.vocabulary_group))
    dtype = torch.promote_types(hidden.dtype, head.weight.dtype)
    return _multiply(hidden.to(dtype), head.weight, absolute=True)


def _multiply(hidden: Tensor, weight: Tensor, *, absolute: bool) -> Tensor:
    """``hidden W^T`` or ``hidden |W|^T`` in the dtype of ``hidden``, without another copy of the weight."""
    if not absolute and weight.dtype == hidden.dtype:
        return hidden @ weight.to(hidden.device).T
    rows = max(1, BLOCK_BYTES // (hidden.element_size() * max(1, weight.shape[-1])))
    blocks = (block.to(hidden.device, hidden.dtype) for block in weight.split(rows))
    return torch.cat([hidden @ (block.abs() if absolute else block).T for block in blocks], dim=-1)


def first_rows(tensor: Tensor, rows: int) -> Tensor:
    """The first rows of a weight or bias; of a DTensor, each rank keeps those that it stores."""
    if not hasattr(tensor, "device_mesh"):
        return tensor[:rows]
    if len(tensor) == rows:  # a slice would redistribute the gradient
        return tensor
    from torch.distributed.tensor import DTensor

    stored: Any = tensor
    mesh, placements = stored.device_mesh, stored.placements
    first = -(-len(tensor) // mesh.size()) * mesh.get_local_rank()  # as torch.chunk divides
    local = stored.to_local()[: max(0, rows - first)]
    shape = torch.Size((rows, *tensor.shape[1:]))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=tensor.stride())


def head_on_device(head: Head, hidden: Tensor) -> Head:
    """``head`` on the device of ``hidden``."""
    if head.weight is None or head.weight.device == hidden.device:
        return head
    bias = None if head.bias is None else head.bias.to(hidden.device)
    return replace(head, weight=head.weight.to(hidden.device), bias=bias)


def truncate_head(head: Head, vocab_size: int) -> Head:
    """The head restricted to its first ``vocab_size`` rows; the softmax is then over these tokens."""
    if head.weight is None or len(head.weight) == vocab_size:
        return head
    bias = None if head.bias is None else first_rows(head.bias, vocab_size)
    return replace(head, weight=first_rows(head.weight, vocab_size), bias=bias)


def _plain_head(network: Any, vocab_size: int) -> Head | None:
    """The output embedding as a ``Head`` with adapters merged; None if it is not a dense floating-point matrix.

    Packed weights can have a floating-point dtype, as torchao's class of tensors, which only linear layers multiply.
    """
    weight, bias = effective_weight_and_bias(network.get_output_embeddings())
    is_matrix = (
        (type(weight) in (Tensor, torch.nn.Parameter) or hasattr(weight, "device_mesh"))
        and weight.ndim == 2
        and weight.is_floating_point()
        and not weight.is_meta
    )
    if not is_matrix or weight.shape[0] < vocab_size:
        return None
    mesh: Any = getattr(weight, "device_mesh", None)
    group = mesh if mesh is not None and mesh.mesh_dim_names == (TENSOR_DIMENSION,) else None
    head = Head(weight.detach(), None if bias is None else bias.detach(), vocabulary_group=group)
    return truncate_head(head, vocab_size)


def has_tied_embeddings(network: Any) -> bool:
    """Whether the input and the output embedding of a network share their weight."""
    layers = network.get_input_embeddings(), network.get_output_embeddings()
    weight, head_weight = (getattr(layer, "weight", None) for layer in layers)
    if not isinstance(weight, Tensor) or not isinstance(head_weight, Tensor):
        return False
    return weight is head_weight or (weight.data_ptr() == head_weight.data_ptr() != 0)


def candidate_heads(config: Any, plain_head: Head) -> Iterator[Head]:
    """Iterate over the heads that a configuration may describe, the most common interpretation first.

    Args:
        config: a transformers configuration.
        plain_head: the output embedding, without scale and softcap.
    """
    text_config = config.get_text_config(decoder=True)
    caps = [getattr(text_config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap")]
    powers = (
        ("logit_scale", 1),
        ("logits_scaling", -1),
        ("logits_scaling", 1),
        ("lm_head_multiplier", 1),
        ("output_multiplier", 1),
    )
    stated = ((getattr(text_config, name, None), power) for name, power in powers)
    scales = [float(x) ** power for x, power in stated if isinstance(x, int | float) and x not in (0, 1)]
    if getattr(text_config, "dim_model_base", None):
        scales.append(text_config.dim_model_base / text_config.hidden_size)
    for cap in [*filter(None, caps), None]:
        for scale in [*scales, 1.0]:
            yield replace(plain_head, scale=scale, softcap=cap)


def _check_causal(network: Any, network_logits: Tensor, after: Tensor, subject: str) -> None:
    """Check that another last token (``after``) leaves the logits of earlier positions unchanged.

    Raises:
        ModelError: if it does not.
    """
    difference, max_logit = _largest_difference(network_logits[:, :-1], after[:, :-1])
    if difference > 64 * torch.finfo(network_logits.dtype).eps * max_logit:
        raise ModelError(
            f"{subject} ({type(network).__name__}) lets later tokens change the logits of earlier ones, by up to "
            f"{difference:.3g}; kleash measures causal language models"
        )
