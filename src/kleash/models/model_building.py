"""Building a ``Model`` from a loaded network: its head, vocabulary, end tokens and context length."""

from dataclasses import replace
from typing import Any

import torch

from kleash.errors import KleashError, ModelError
from kleash.linear import Head
from kleash.models.compat import find_backbone, summarise_error
from kleash.models.heads import ExtractedHead, extract_head
from kleash.models.pair import Model
from kleash.models.shard_storage import ShardStorage
from kleash.models.tokenizers import PROBES, token_count

HEAD_PROBE_TOKENS = 24
"""Number of tokens on which a network's head is tried."""


def build_model(
    network: Any,
    tokenizer: Any,
    *,
    role: str,
    path: str,
    revision: str | None,
    fingerprint: str,
    parameters: int,
    adapters: Any,
    adapter: str | None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Model, str | None]:
    """Make a ``Model`` of a loaded network: find its head, and check it against the tokenizer.

    Args:
        network: a transformers causal language model in evaluation mode, without PEFT's wrapper.
        tokenizer: of the model.
        role: "policy" or "reference".
        path: the model's name in errors and records.
        revision: commit of a hub id; None for a folder or a network in memory.
        fingerprint: hash of the checkpoint's files; "" for a network in memory.
        parameters: number of parameters of the network and the adapter.
        adapters: the PEFT model around the network; None without adapters.
        adapter: name of the adapter in ``adapters``; None for the base.
        device_map: the device map that the network was loaded with.
        trust_remote_code: whether the checkpoint's own code may run.

    Returns:
        The model, and a note if no head reproduces the network's logits.

    Raises:
        ModelError: if the network is not causal, cannot be run, or has fewer embeddings than the tokenizer has tokens.
    """
    model = Model(
        role=role,
        path=path,
        revision=revision,
        dtype=network.dtype,
        device=network.get_input_embeddings().weight.device,
        parameters=parameters,
        vocab_size=0,
        context_length=read_context_length(network),
        eos_token_ids=read_eos_token_ids(network, tokenizer),
        head=Head(weight=None),
        fingerprint=fingerprint,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        tokenizer=tokenizer,
        network=network,
        backbone=find_backbone(network),
        adapters=adapters,
        adapter=adapter,
    )
    check_vocab_size(model, len(network.get_input_embeddings().weight), "embeddings")
    extracted = _extract_head(model)
    model = replace(
        model,
        head=extracted.head,
        vocab_size=extracted.vocab_size,
        max_padded_length=extracted.max_padded_length,
    )
    return model, extracted.note


def with_storage(model: Model, storage: ShardStorage | None) -> Model:
    """The model of a view of a sharded network.

    Raises:
        ModelError: if only its logits are available, for which the head would be gathered.
    """
    if storage is None:
        return model
    if model.head.weight is None:
        raise ModelError(
            f"the {model.role} ({type(model.network).__name__}) is sharded and does not come apart into hidden states "
            "and a head, which is not supported"
        )
    return replace(model, dtype=storage.param_dtype or model.dtype, storage=storage)


def _extract_head(model: Model) -> ExtractedHead:
    """``extract_head`` of a model's network on a few tokens, with the model's adapter active."""
    token_ids = model.tokenizer(" ".join(PROBES), add_special_tokens=False, verbose=False)["input_ids"]
    probe = token_ids[:HEAD_PROBE_TOKENS]
    with model.activate_adapter():
        ids = torch.tensor([probe, probe[::-1]], device=model.device)
        try:
            return extract_head(model.network, model.backbone, ids, f"the {model.role}")
        except KleashError:
            raise
        except Exception as error:  # the exception type depends on the configuration
            raise ModelError(
                f"the {model.role} {model.path} cannot be run on a few tokens: {summarise_error(error)}"
            ) from error


def check_vocab_size(model: Model, rows: int, what: str) -> None:
    """Check that the tokenizer of a model has at most ``rows`` tokens.

    Args:
        model: whose tokenizer is checked.
        rows: number of embeddings or logits.
        what: "embeddings" or "logits", for the error.

    Raises:
        ModelError: if it has more.
    """
    tokens = token_count(model.tokenizer)
    if rows < tokens:
        raise ModelError(
            f"the {model.role} {model.path} has {rows} {what} for a tokenizer of {tokens} tokens; use the "
            "tokenizer it was trained with"
        )


def read_eos_token_ids(network: Any, tokenizer: Any) -> tuple[int, ...]:
    """The end tokens of a network: from its generation config, its config, or the tokenizer.

    Raises:
        ModelError: if one of them is not a token id of the network.
    """
    generation_config = getattr(network, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    for config in (network.config.get_text_config(decoder=True), network.config):
        if eos is None:
            eos = getattr(config, "eos_token_id", None)
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return ()
    rows = len(network.get_input_embeddings().weight)
    token_ids = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < rows:
            raise ModelError(
                f"{getattr(network, 'name_or_path', '') or 'the model'} names the end token {str(token_id)[:40]!r}, "
                f"which is no token id from 0 to {rows - 1}; correct eos_token_id in generation_config.json or "
                "config.json"
            )
    return token_ids


NO_LIMIT = -1
"""``max_position_embeddings`` of networks that read texts of any length, such as XLNet."""


def read_context_length(network: Any) -> int | None:
    """The context length of a network's configuration; None if there is no limit.

    Raises:
        ModelError: if ``max_position_embeddings`` is not a number of tokens.
    """
    length = getattr(network.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if length == NO_LIMIT:
        return None
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ModelError(
            f"{getattr(network, 'name_or_path', '') or 'the model'} has the max_position_embeddings "
            f"{str(length)[:40]!r}; correct config.json"
        )
    return length
