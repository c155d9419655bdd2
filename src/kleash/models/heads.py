"""Taking a causal language model apart into final hidden states and head, and checking that the parts are
it."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.errors import ModelError
from kleash.linear import Head
from kleash.precision import at_least_float32

ULPS = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class Anatomy:
    """What a network came apart into."""

    head: Head
    """The head that turns hidden states into logits; ``Head(weight=None)`` where only the logits can be
    had."""
    rows: int
    """Tokens the network gives a logit for."""
    note: str | None
    """What has to be said aloud about it."""


def take_apart(network: Any, body: Any, probe: Int[Tensor, "batch time"], who: str) -> Anatomy:
    """Find the head that gives, on the body's hidden states of ``probe``, the network's own logits.

    The configuration says how logits are scaled and capped, in words whose meaning differs from architecture
    to architecture ("logits_scaling" divides in one and multiplies in another). So each reading is tried, the
    usual one first, and the first that agrees with the network within rounding (``disagreement``) is taken.
    Where none does, the network's logits are used as they are.

    Args:
        network: a transformers causal language model, its adapter switched as it is to be measured.
        body: what of it gives ``last_hidden_state``.
        probe: token ids, without padding.
        who: "the policy", for errors and notes.

    Raises:
        ModelError: if later tokens change the logits of earlier ones: it is not a causal model.
    """
    with torch.inference_mode():
        own = network(input_ids=probe, use_cache=False).logits
        _check_causal(network, probe, own, who)
        rows = own.shape[-1]
        bare = _plain_head(network, rows)
        if bare is not None and body is not network:
            hidden = body(input_ids=probe, use_cache=False).last_hidden_state
            for head in readings(network.config, bare):
                if disagreement(own, hidden, head) <= 1:
                    return Anatomy(head=head, rows=rows, note=None)
    note = (
        f"{who} ({type(network).__name__}) does not come apart into hidden states and a head that gives its "
        "own logits, so it is measured through its logits, which is slower and rounds them as the model does"
    )
    return Anatomy(head=Head(weight=None), rows=rows, note=note)


def disagreement(
    own: Float[Tensor, "*tokens rows"], hidden: Float[Tensor, "*tokens dim"], head: Head
) -> float:
    """The largest |own logit - logit from ``hidden`` and ``head``|, as a multiple of what rounding explains.

        tolerance = 4 ulp(max_v |z_v|) + sqrt(dim) u (|hidden| |W|ᵀ)_v |scale|

    The first term is four units in the last place of the network's dtype, of the row's largest logit; the
    second what a dot product of ``dim`` terms may move when summed in another order in the accumulator's
    precision (u is float32's, or float64's for a float64 network). Logits that are not finite agree with the
    like.

    Returns:
        At most 1 if they agree; inf where NaN or infinities meet numbers, or the sizes do not fit.
    """
    if head.weight is None or head.weight.shape[-1] != hidden.shape[-1]:
        return torch.inf
    ours = logits(hidden, head)
    dtype = torch.promote_types(at_least_float32(own).dtype, ours.dtype)
    largest = torch.where(own.isfinite(), own, 0).abs().amax(-1, keepdim=True).to(dtype)
    ulp = largest * torch.finfo(own.dtype).eps
    terms = at_least_float32(hidden).abs() @ at_least_float32(head.weight).abs().T.to(hidden.device)
    unit = torch.finfo(at_least_float32(hidden).dtype).eps
    tolerance = ULPS * ulp + hidden.shape[-1] ** 0.5 * unit * terms.to(dtype) * abs(head.scale)
    difference = (own.to(dtype) - ours.to(dtype)).abs()
    same = (own == ours.to(own.dtype)) | (own.isnan() & ours.isnan())
    excess = torch.where(same, 0, difference / tolerance)
    return float(torch.where(excess.isnan(), torch.inf, excess).max())


def logits(hidden: Float[Tensor, "*tokens dim"], head: Head) -> Float[Tensor, "*tokens rows"]:
    """All logits at once, in at least float32: for probes and small questions."""
    if head.weight is None:
        return at_least_float32(hidden)
    wide = torch.promote_types(at_least_float32(hidden).dtype, at_least_float32(head.weight).dtype)
    z = hidden.to(wide) @ head.weight.to(hidden.device, wide).T
    if head.bias is not None:
        z = z + head.bias.to(hidden.device, wide)
    z = z * head.scale
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def cut(head: Head, rows: int) -> Head:
    """``head`` with its first ``rows`` rows only; the distribution is then normalised over these."""
    if head.weight is None:
        return head
    bias = None if head.bias is None else head.bias[:rows]
    return replace(head, weight=head.weight[:rows], bias=bias)


def _plain_head(network: Any, rows: int) -> Head | None:
    """The output embedding as a matrix and a bias, adapters on it included; None if it is no such thing."""
    layer = network.get_output_embeddings()
    if layer is None:
        return None
    weight, bias = _effective(layer)
    plain = (
        isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point() and not weight.is_meta
    )
    if not plain or weight.shape[0] < rows:
        return None
    return cut(Head(weight=weight.detach(), bias=None if bias is None else bias.detach()), rows)


def _effective(layer: Any) -> tuple[Any, Any]:
    """Weight and bias of a linear layer as it acts now, whatever PEFT has wrapped around it.

    An adapter is merged into a copy in at least float32: its own dtype would round it away.
    """
    active = getattr(layer, "active_adapters", ())
    saved = getattr(layer, "modules_to_save", None)
    if saved is not None:
        kept = [saved[name] for name in active if name in saved and not layer.disable_adapters]
        layer = kept[0] if kept else layer.original_module
    elif hasattr(layer, "get_base_layer"):
        if active and not layer.disable_adapters:
            weight = layer.get_base_layer().weight
            layer = deepcopy(layer).to(torch.promote_types(weight.dtype, torch.float32))
            layer.merge(adapter_names=list(active))
        layer = layer.get_base_layer()
    return getattr(layer, "weight", None), getattr(layer, "bias", None)


def readings(config: Any, bare: Head) -> Iterator[Head]:
    """The heads that a configuration may mean, the most usual reading first."""
    text = config.get_text_config(decoder=True)
    caps = [getattr(text, name, None) for name in ("final_logit_softcapping", "logits_soft_cap")]
    scales: list[float] = []
    for name, power in (
        ("logit_scale", 1),
        ("logits_scaling", -1),
        ("logits_scaling", 1),
        ("lm_head_multiplier", 1),
        ("output_multiplier", 1),
    ):
        value = getattr(text, name, None)
        if isinstance(value, int | float) and value not in (0, 1):
            scales.append(float(value) ** power)
    if getattr(text, "dim_model_base", None):
        scales.append(text.dim_model_base / text.hidden_size)
    for cap in [*filter(None, caps), None]:
        for scale in [*scales, 1.0]:
            yield replace(bare, scale=scale, softcap=cap)


def _check_causal(network: Any, probe: Tensor, own: Tensor, who: str) -> None:
    """Change the last token and see that the logits before it stay."""
    other = probe.clone()
    other[:, -1] = probe[:, 0]
    if torch.equal(other, probe):
        return
    before, after = own[:, :-1], network(input_ids=other, use_cache=False).logits[:, :-1]
    moved = torch.where(before.isfinite() & after.isfinite(), before - after, 0).abs().amax()
    largest = torch.where(before.isfinite(), before, 0).abs().amax()
    if moved > 64 * torch.finfo(own.dtype).eps * largest:
        raise ModelError(
            f"{who} ({type(network).__name__}) lets later tokens change the logits of earlier ones, by up to "
            f"{float(moved):.3g}; kleash measures causal language models"
        )
