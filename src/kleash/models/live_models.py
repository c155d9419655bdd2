"""Measuring a network that is in memory, such as a trainer's, without changing its training state."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kleash.errors import ModelError
from kleash.linear import Head
from kleash.models.adapters.peft_adapters import require_unchanged_base, trained_base_tensors
from kleash.models.adapters.rules import find_rule
from kleash.models.compat import loaded_from
from kleash.models.pair import Model
from kleash.models.pair_loading import (
    DTYPES,
    check_vocab_size,
    extract_model_head,
    read_context_length,
    read_eos_token_ids,
)

ACTIVE_ADAPTER = "the one in use"
"""Stands for the adapter that is active in the PEFT model."""


def live_model(
    network: Any,
    tokenizer: Any,
    *,
    role: str = "policy",
    adapter: str | None = ACTIVE_ADAPTER,
    name: str | None = None,
) -> Model:
    """Wrap a transformers or PEFT model in memory as a ``Model`` for a ``Pair``.

    Nothing is copied: it is measured with the weights that it has at that moment. An adapter on the
    output embedding is the exception, which is merged when this is called; so call it anew for each
    measurement. The network must be in evaluation mode (``at_rest``), since dropout would be measured too.

    Args:
        network: not wrapped for distribution (``accelerator.unwrap_model``).
        tokenizer: its own.
        role: "policy" or "reference", for errors.
        adapter: of a PEFT model, the name of the adapter that counts; None for its base, all adapters off.
        name: what it is called in errors and records; the name it was loaded by, if not given.

    Raises:
        ModelError: if it is no causal language model of text, is in training mode, or is sharded over processes; if
            an adapter has changed the base that is asked for, or acts through a forward pass of its own.
    """
    adapters = network if hasattr(network, "get_base_model") else None
    inner = network if adapters is None else adapters.get_base_model()
    chosen = _adapter(adapters, adapter, role)
    _check_at_rest(inner, role)
    if adapters is not None:
        _check_adapters(adapters, chosen, role)
    model = Model(
        role=role,
        path=name or loaded_from(inner) or type(inner).__name__,
        revision=None,
        dtype=inner.dtype,
        device=inner.get_input_embeddings().weight.device,
        parameters=sum(p.numel() for p in inner.parameters()),
        vocab_size=0,
        context_length=read_context_length(inner),
        eos_token_ids=read_eos_token_ids(inner, tokenizer),
        head=Head(weight=None),
        fingerprint="",
        tokenizer=tokenizer,
        network=inner,
        backbone=inner.base_model,
        adapters=adapters,
        adapter=chosen,
    )
    check_vocab_size(model, len(inner.get_input_embeddings().weight), "embeddings")
    anatomy = extract_model_head(model)
    return replace(model, head=anatomy.head, vocab_size=anatomy.vocab_size)


@contextmanager
def at_rest(*networks: Any) -> Iterator[None]:
    """Context with the networks in evaluation mode; on exit the state of training is restored.

    Put back are the mode of every module by itself (some may have been frozen into evaluation on purpose), which
    adapter is active and which parameters are trained, and the random states of Python, NumPy, and PyTorch on
    the CPU and on the devices of the networks: a training that was looked at goes on bit for bit as one
    that was not.
    """
    modes = [(module, module.training) for network in networks for module in network.modules()]
    trained = [(p, p.requires_grad) for network in networks for p in network.parameters()]
    active = [(n, n.active_adapter) for n in networks if isinstance(getattr(n, "active_adapter", None), str)]
    devices = {p.device for network in networks for p in network.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (what others draw from)
    with torch.random.fork_rng(devices=sorted(device.index or 0 for device in devices)):
        try:
            for network in networks:
                network.eval()
            yield
        finally:
            for network, adapter in active:
                if network.active_adapter != adapter:
                    network.set_adapter(adapter)
            for module, training in modes:
                module.training = training
            for parameter, requires_grad in trained:
                parameter.requires_grad_(requires_grad)
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _adapter(adapters: Any, adapter: str | None, role: str) -> str | None:
    """The name of the adapter to measure; None for the base."""
    if adapters is None:
        if adapter not in (ACTIVE_ADAPTER, None):
            raise ModelError(f"the {role} has no adapter {adapter!r}: it is no PEFT model")
        return None
    if adapter != ACTIVE_ADAPTER:
        return adapter
    active = adapters.active_adapter
    if not isinstance(active, str):
        raise ModelError(
            f"the {role} has {len(active)} adapters at work at once; name the one to be measured"
        )
    return active


def _check_adapters(adapters: Any, chosen: str | None, role: str) -> None:
    """Check that a base is unchanged by its adapters, and that a chosen adapter acts by weights alone."""
    instead = "name a reference that is loaded by itself"
    if chosen is None:
        require_unchanged_base(adapters, role, instead=instead)
        return
    rule = find_rule(adapters.peft_config[chosen].to_dict())
    if rule is not None and rule.treatment == "refused" and not rule.changes_base:
        raise ModelError(f"the adapter {chosen!r} of the {role} {rule.reason}; {rule.advice}")
    trained = trained_base_tensors(adapters)
    if trained and chosen != adapters.active_adapter:
        raise ModelError(
            f"the {role} would be the adapter {chosen!r} beside one that is trained, but {len(trained)} tensors under "
            f"both are trained too, such as {trained[0]}; freeze them, or {instead}"
        )


def _check_at_rest(network: Any, role: str) -> None:
    if network.training:
        raise ModelError(
            f"the {role} is in training mode, so that dropout would be measured; put it at_rest first"
        )
    embedding = network.get_input_embeddings().weight
    whole = embedding.dim() == 2 and embedding.numel() > 0 and not hasattr(embedding, "device_mesh")
    if not whole or hasattr(embedding, "ds_id"):
        raise ModelError(
            f"the weights of the {role} are sharded over processes, of which each holds a part; a live network is "
            "measured where every process holds it whole (one process, or DistributedDataParallel)"
        )
    if network.dtype not in DTYPES.values():
        raise ModelError(f"the {role} has weights in {network.dtype}; kleash runs {', '.join(DTYPES)}")
