"""Building a ``Model`` from a loaded network: its head, vocabulary, end tokens, context length and stored weights."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from kleash.checkpoints.files import read_json
from kleash.checkpoints.quantised.packed_modules import PackedModule
from kleash.checkpoints.resolution import GENERATION_CONFIG, Checkpoint
from kleash.errors import ModelError
from kleash.linear import Head
from kleash.models.compat import find_backbone
from kleash.models.filling import loading
from kleash.models.heads import ExtractedHead, extract_head
from kleash.models.pair import Model
from kleash.models.shared_base import LoadedNetwork
from kleash.models.tokenizers import PROBES, token_count
from kleash.models.transformers_formats import is_packed
from kleash.registry import grouped
from kleash.store.measurement import StoredWeights

HEAD_PROBE_TOKENS = 24
"""Number of tokens on which a network's head is tried."""
PACKED_NAMES = ("qweight", "weight_packed", "blocks", "_weight_qdata")
"""Names of tensors that hold packed weights, where "weight" does not."""
SCALE_NAMES = ("scales", "weight_scale", "weight_scale_inv", "absmax", "SCB", "_scale", "_shift", "scale")
"""Names of tensors that stand beside quantised weights."""
DENSE_TYPES = ("F64", "F32", "F16", "BF16")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def build_model(
    loaded: LoadedNetwork, tokenizer: Any, *, role: str, path: str, fingerprint: str = "", **known: Any
) -> Model:
    """Make a ``Model`` of a loaded network: find its head, and check it against the tokenizer.

    Args:
        loaded: a transformers causal language model in evaluation mode.
        tokenizer: of the model.
        role: "policy" or "reference".
        path: the model's name in errors and records.
        fingerprint: hash of the checkpoint's files; "" for a network in memory.
        known: further fields of the model, which its checkpoint and the options of loading say.

    Returns:
        The model, with notes: those of loading, on end tokens that do not exist, if no head reproduces the network's
        logits, and of the caller's autocast.

    Raises:
        ModelError: if the network is not causal, cannot be run, or has fewer embeddings or logits than the tokenizer
            has tokens; if it is sharded and only its logits are available, for which the head would be gathered.
    """
    network, storage = loaded.network, loaded.storage
    eos_token_ids, eos_notes = read_eos_token_ids(network, tokenizer)
    model = Model(
        role=role,
        path=path,
        dtype=(None if storage is None else storage.param_dtype) or network.dtype,
        device=network.get_input_embeddings().weight.device,
        parameters=loaded.parameters,
        vocab_size=0,
        context_length=read_context_length(network.config),
        eos_token_ids=eos_token_ids,
        generation_settings=read_generation_settings(network, with_file=bool(fingerprint)),
        head=Head(weight=None),
        fingerprint=fingerprint,
        tokenizer=tokenizer,
        network=network,
        backbone=find_backbone(network),
        adapters=loaded.adapters,
        adapter=loaded.adapter,
        storage=storage,
        **known,
    )
    check_vocab_size(
        f"the {role} {path}", tokenizer, len(network.get_input_embeddings().weight), "embeddings"
    )
    extracted = _extract_head(model)
    if storage is not None and extracted.head.weight is None:
        raise ModelError(
            f"the {role} ({type(network).__name__}) is sharded and does not come apart into hidden states and a head, "
            "which is not supported"
        )
    autocast_note = (
        f"torch.autocast is on, so that the {role} computes in {torch.get_autocast_dtype(model.device.type)}; measure "
        "outside of it for the dtype of the weights"
        if torch.amp.is_autocast_available(model.device.type) and torch.is_autocast_enabled(model.device.type)
        else ""
    )
    model = replace(
        model,
        head=extracted.head,
        vocab_size=extracted.vocab_size,
        max_padded_length=extracted.max_padded_length,
        notes=(*loaded.notes, *eos_notes, *filter(None, (extracted.note, autocast_note))),
    )
    check_vocab_size(f"the {role} {path}", tokenizer, model.vocab_size, "logits")
    return model


def _extract_head(model: Model) -> ExtractedHead:
    """``extract_head`` of a model's network on a few tokens, with the model's adapter active."""
    tokens = model.tokenizer(" ".join(PROBES), add_special_tokens=False, verbose=False)
    probe = tokens["input_ids"][:HEAD_PROBE_TOKENS]
    ids = torch.tensor([probe, probe[::-1]], device=model.device)
    with (
        model.activate_adapter(),
        loading(
            f"the {model.role} {model.path}",
            "; packed weights may run in one dtype only: give --dtype bfloat16"
            if is_packed(model.network)
            else "",
            "run on a few tokens",
        ),
    ):
        return extract_head(model.network, model.backbone, ids, f"the {model.role}")


def check_vocab_size(subject: str, tokenizer: Any, rows: int, what: str) -> None:
    """Check that the tokenizer of a model needs at most ``rows`` rows.

    Args:
        subject: the model, for the error.
        tokenizer: of the model.
        rows: number of embeddings or logits.
        what: "embeddings" or "logits", for the error.

    Raises:
        ModelError: if it needs more.
    """
    tokens = token_count(tokenizer, rows)
    if rows < tokens:
        raise ModelError(
            f"{subject} has {rows} {what} for a tokenizer of {tokens} tokens, and none for "
            f"{tokenizer.convert_ids_to_tokens(rows)!r}; use the tokenizer it was trained with"
        )


def read_eos_token_ids(network: Any, tokenizer: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The end tokens of a network: from its generation config, its config, or the tokenizer.

    Returns:
        Their ids, and notes on ids that the network has no embedding of, so that they never occur, and on an end token
        of the tokenizer that is not among them.

    Raises:
        ModelError: if one of them is not an integer.
    """
    text_config = network.config.get_text_config(decoder=True)
    owners = (getattr(network, "generation_config", None), text_config, network.config, tokenizer)
    stated = (getattr(owner, "eos_token_id", None) for owner in owners)
    eos: Any = next((each for each in stated if each is not None), ())
    rows = len(network.get_input_embeddings().weight)
    token_ids = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    subject = getattr(network, "name_or_path", "") or "the model"
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ModelError(
                f"{subject} names the end token {str(token_id)[:40]!r}, which is no token id; correct eos_token_id in "
                "generation_config.json or config.json"
            )
    outside = [token_id for token_id in token_ids if not 0 <= token_id < rows]
    named = f"{'s' if len(outside) > 1 else ''} {', '.join(str(token_id)[:40] for token_id in outside[:3])}"
    tokenizer_end = getattr(tokenizer, "eos_token_id", None)
    notes = (
        (
            bool(outside),
            f"{subject} names the end token{named}, and has the token ids 0 to {rows - 1}: no response ends with it",
        ),
        (
            tokenizer_end not in (None, *token_ids),
            (
                f"{subject} names the end tokens {list(token_ids)[:3]}, and its tokenizer {tokenizer_end}: responses "
                "end with the former in kleash measure and transformers, with either in TRL and vLLM; set eos_token_id "
                "in generation_config.json as meant"
            ),
        ),
    )
    return (
        tuple(token_id for token_id in token_ids if token_id not in outside),
        tuple(note for applies, note in notes if applies),
    )


GENERATION_SETTINGS = re.compile(
    "penalty|temperature|^top_|^min_|typical|cutoff|no_repeat|bad_words|suppress|^forced?_|bias|guidance|watermark|beam|"
    "dola|healing|stop_strings|exponential|constraints|mirostat|xtc|dry_"
)
"""Names of settings of a generation configuration that change which tokens are drawn, also those of other engines."""
NEUTRAL_AT_1 = re.compile("temperature|^top_[ph]|typical|(repetition|length)_penalty|beam|guidance")
"""Names of those that change nothing if they are 1; all but a temperature change nothing if they are 0."""


def read_generation_settings(network: Any, *, with_file: bool) -> Mapping[str, float | None]:
    """The settings of a network's generation configuration that change which tokens are drawn.

    Args:
        network: of transformers.
        with_file: whether to read the configuration's file, too: transformers leaves out what other engines read, such
            as presence_penalty. A network in memory may have been loaded long ago.

    Returns:
        The value of each setting that is not neutral; None for one that is no number.
    """
    config = getattr(network, "generation_config", None)
    settings: dict[str, Any] = {} if config is None else config.to_diff_dict()
    file = Path(str(getattr(network, "name_or_path", "") or "")) / GENERATION_CONFIG
    if with_file and file.is_file():
        settings |= read_json(file)

    def is_neutral(name: str, value: Any) -> bool:
        if name == "top_k" and isinstance(value, int):
            return value <= 0
        return (not value and name != "temperature") or (value == 1 and NEUTRAL_AT_1.search(name) is not None)

    return {
        name: value if isinstance(value, int | float) and not isinstance(value, bool) else None
        for name, value in settings.items()
        if GENERATION_SETTINGS.search(name) and value is not None and not is_neutral(name, value)
    }


NO_LIMIT = -1
"""``max_position_embeddings`` of networks that read texts of any length, such as XLNet."""


def read_context_length(config: Any) -> int | None:
    """The context length of a configuration of transformers; None if there is no limit.

    Raises:
        ModelError: if ``max_position_embeddings`` is not a number of tokens.
    """
    length = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if length == NO_LIMIT:
        return None
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ModelError(
            f"{config.name_or_path or 'the model'} has the max_position_embeddings "
            f"{str(length)[:40]!r}; correct config.json"
        )
    return length


def describe_weights(checkpoint: Checkpoint, loaded: LoadedNetwork) -> StoredWeights:
    """How the weights of a network and of the adapter over it are stored.

    Args:
        checkpoint: with the adapter, if any.
        loaded: its network.
    """
    tensors = checkpoint.all_tensors
    elements = sum(tensor.elements for tensor in tensors)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    if checkpoint.gguf:
        matrices = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1]
        modules = {tensor.name.rpartition(".")[0]: tensor.kind for tensor in matrices}
    else:
        modules = _types_of_modules(checkpoint, loaded.packed)
        if any(kind not in DENSE_TYPES for kind in modules.values()):
            # packed weights and their scales are other numbers than the network's
            elements = loaded.parameters
    return StoredWeights(
        bytes=num_bytes,
        bits_per_weight=8 * num_bytes / elements if elements else 0.0,
        modules=_by_layers(modules),
    )


def _types_of_modules(checkpoint: Checkpoint, packed: Sequence[PackedModule]) -> dict[str, str]:
    """The type of the weights of each module with a matrix: "BF16", "gptq int4, groups of 128", "mxfp4 (U8)"."""
    tensors, method = checkpoint.tensors, checkpoint.quant_method or "quantised"
    packed_parts = {part for module in packed for part in module.parts}
    kinds = {module.name: module.kind for module in packed}
    for tensor in tensors.values():
        module, _, part = tensor.name.rpartition(".")
        is_weight = part in ("weight", *PACKED_NAMES) or part.endswith(("_blocks", "_proj"))
        if len(tensor.shape) > 1 and tensor.name not in packed_parts and is_weight:
            is_quantised = tensor.kind not in DENSE_TYPES or any(
                f"{module}.{scale}" in tensors for scale in SCALE_NAMES
            )
            name = module if part == "weight" else tensor.name
            kinds[name] = f"{method} ({tensor.kind})" if is_quantised else tensor.kind
    return kinds


def _by_layers(modules: Mapping[str, str]) -> dict[str, str]:
    """Modules by type, those that differ in the number of a layer together: "blk.0-27.attn_q" → "Q4_K"."""
    layers = grouped(
        ((NUMBER.sub("*", module), kind), NUMBER.findall(module)[:1]) for module, kind in modules.items()
    )
    names: dict[str, str] = {}
    for (pattern, kind), numbers in layers.items():
        distinct = {int(number) for first in numbers for number in first}
        runs = [
            [number for _, number in run]
            for _, run in groupby(enumerate(sorted(distinct)), key=lambda place: place[1] - place[0])
        ]
        ranges = (str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        names[pattern.replace("*", ",".join(ranges), 1)] = kind
    return names
