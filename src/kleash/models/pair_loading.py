"""Loading policy and reference, and checking that they can be compared."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

import torch

from kleash.checkpoints.resolution import Checkpoint, find_checkpoint
from kleash.errors import CannotRunError, OptionError, summarise_error
from kleash.extras import suppress_library_output
from kleash.jobs.option_groups import Loading
from kleash.models.cache.stored_reference import StoredReference
from kleash.models.compat import without_zero3_loading
from kleash.models.filling import LOADING_LOCK
from kleash.models.heads import truncate_head
from kleash.models.model_building import build_model, describe_weights
from kleash.models.network_loading import PARALLEL_MAPS, load_networks
from kleash.models.padding_rows import PaddingRows
from kleash.models.pair import Model, Pair
from kleash.models.tokenizers import load_tokenizers, token_count
from kleash.models.weight_groups import have_equal_weights

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", *PARALLEL_MAPS)
"""Device maps of transformers and those over ranks; any other value of ``device_map`` is the name of a device."""


# The arguments are the options of the same names of a measurement.
def load_pair(
    policy: str,
    reference: str,
    *,
    revision_policy: str | None = None,
    revision_reference: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> Pair:
    """Load policy and reference, and check that they can be compared.

    An adapter's folder stands for the adapter over its base. Two models with one base share its weights in memory if
    the adapters allow it. Heads with more rows than there are tokens stay as they are if both have the same number of
    rows; otherwise both are truncated to the tokens.

    Args:
        policy: folder, hub id, adapter's folder, GGUF file, or "shipped:policy".
        reference: folder, hub id, adapter's folder, GGUF file, or "shipped:reference".
        revision_policy: branch, tag or commit of a hub id.
        revision_reference: branch, tag or commit of a hub id.
        dtype: "float32", "bfloat16", "float16" or "float64"; "auto" is float32 on a CPU and the checkpoint's dtype on
            an accelerator.
        device: "auto" is the first GPU, or else the CPU.
        device_map: how transformers spreads a model over devices; then ``device`` stays "auto".
        trust_remote_code: whether Python code of the checkpoints may run.
        tokenizer: folder or hub id of the tokenizer that reads text for GGUF files; None for the other model's.

    Raises:
        ModelError: if a model cannot be loaded, or the two do not put probability on the same tokens.
        OptionError: if dtype or device is unknown.
        CannotRunError: if the device is not available.
    """
    loading = Loading(
        dtype=dtype,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        tokenizer=tokenizer,
    )
    checkpoints = {
        "policy": find_checkpoint(policy, revision_policy, "policy"),
        "reference": find_checkpoint(reference, revision_reference, "reference"),
    }
    return load_checkpoints(checkpoints, loading)


def load_checkpoints(checkpoints: Mapping[str, Checkpoint], loading: Loading) -> Pair:
    """Load the models of checkpoints as a pair; a single one is both policy and reference.

    Args:
        checkpoints: by role.
        loading: how they are loaded, such as a job.

    Raises:
        ModelError, OptionError, CannotRunError: as ``load_pair``.
    """
    models, notes = _load_models(checkpoints, loading)
    if len(models) == 2:
        return pair_models(models["policy"], models["reference"], notes)
    ((role, model),) = models.items()
    return _with_kept_rows(
        Pair(policy=model, reference=model, tokenizer=model.tokenizer, notes=(*notes, *model.notes)),
        f"the {role}'s head has",
    )


def _load_models(
    checkpoints: Mapping[str, Checkpoint], loading: Loading, stored_tokenizer: Any = None
) -> tuple[dict[str, Model], list[str]]:
    """Load the model of each role, with its tokenizer; also return notes on them together.

    Args:
        checkpoints: by role.
        loading: how they are loaded.
        stored_tokenizer: of a reference that is not loaded, with which the tokenizers are compared.
    """
    device = resolve_device(loading.device, loading.device_map)
    dtype = resolve_dtype(loading.dtype, device)
    with LOADING_LOCK, suppress_library_output(), without_zero3_loading():
        tokenizers, tokenizer_notes = load_tokenizers(
            checkpoints, loading.trust_remote_code, loading.tokenizer, stored_reference=stored_tokenizer
        )
        networks, sharing_notes = load_networks(
            checkpoints,
            dtype=dtype,
            device=device,
            device_map=loading.device_map,
            trust_remote_code=loading.trust_remote_code,
        )
        models = {
            role: build_model(
                networks[role],
                tokenizers[role],
                role=role,
                path=checkpoint.name,
                revision=checkpoint.revision,
                fingerprint=checkpoint.fingerprint(),
                checkpoint=checkpoint,
                weights=describe_weights(checkpoint, networks[role]),
                base=None if checkpoint.adapter is None else checkpoint.base,
                device_map=loading.device_map,
                trust_remote_code=loading.trust_remote_code,
            )
            for role, checkpoint in checkpoints.items()
        }
    adapter_notes = [
        f"the {checkpoint.role} is the adapter {checkpoint.name} over {checkpoint.base}"
        for checkpoint in checkpoints.values()
        if checkpoint.adapter is not None
    ]
    return models, [*tokenizer_notes, *adapter_notes, *sharing_notes]


def pair_models(policy: Model, reference: Model, notes: Iterable[str]) -> Pair:
    """Make a pair of two models; heads of different sizes are truncated to the tokenizer's tokens.

    Args:
        policy: the one.
        reference: the other.
        notes: on both together, beside those of each.
    """
    doubts = (
        (
            policy.dtype != reference.dtype,
            f"the policy ran in {policy.dtype} and the reference in {reference.dtype}; use one (--dtype)",
        ),
        (
            policy.is_in_memory and policy.is_same_as(reference),
            "both models are one network in memory, which training or PEFT may have changed; load the reference anew",
        ),
    )
    warnings = tuple(doubt for is_raised, doubt in doubts if is_raised)
    pair = Pair(
        policy=policy,
        reference=reference,
        tokenizer=policy.tokenizer,
        notes=tuple(dict.fromkeys((*notes, *policy.notes, *reference.notes))),
        warnings=warnings,
        has_equal_weights=have_equal_weights(policy, reference),
    )
    if policy.vocab_size == reference.vocab_size:
        return _with_kept_rows(pair, "both heads have")
    tokens = token_count(policy.tokenizer, min(policy.vocab_size, reference.vocab_size))
    rows = f"the heads have {policy.vocab_size} (policy) and {reference.vocab_size} (reference) rows"
    pair = _with_padding(pair, set(policy.tokenizer.get_vocab().values()))
    policy, reference = (
        replace(model, head=truncate_head(model.head, tokens), vocab_size=tokens)
        for model in (pair.policy, pair.reference)
    )
    return replace(
        pair,
        policy=policy,
        reference=reference,
        notes=(
            *pair.notes,
            f"{rows} for {tokens} tokens; both are cut to the tokens and normalised over them",
        ),
        vocabulary=f"the {tokens} tokens, to which both heads are cut",
    )


def _with_kept_rows(pair: Pair, subject: str) -> Pair:
    """The pair of heads of one size, with a note on rows that are no tokens if there are any."""
    tokens = set(pair.tokenizer.get_vocab().values()).intersection(range(pair.vocab_size))
    count = pair.vocab_size - len(tokens)
    if not count:
        return pair
    note = f"{subject} {pair.vocab_size} rows for {len(tokens)} tokens"
    if pair.policy is not pair.reference:
        note += f"; the {count} others are kept"
    pair = _with_padding(pair, tokens)
    return replace(
        pair,
        notes=(*pair.notes, note),
        vocabulary=f"all {pair.vocab_size} rows of the heads, of which {count} are no tokens",
    )


def _with_padding(pair: Pair, tokens: Set[int]) -> Pair:
    """The pair, whose models know the rows of their heads that are no tokens; noted where they cannot."""
    policy, reference = (
        replace(model, padding=PaddingRows.of(model.head, set(range(model.vocab_size)) - tokens))
        for model in (pair.policy, pair.reference)
    )
    notes = pair.notes
    if policy.padding is None or reference.padding is None:
        notes = (
            *notes,
            "several ranks store a head: the probability of its rows that are no tokens is not computed",
        )
    reference = policy if pair.policy is pair.reference else reference
    return replace(pair, policy=policy, reference=reference, notes=notes)


def resolve_device(device: str, device_map: str | None) -> torch.device:
    """The device that the options ``--device`` and ``--device-map`` name.

    Raises:
        OptionError: if both are given.
        CannotRunError: if the device is unknown or not available.
    """
    if device_map is not None and device != "auto":
        raise OptionError(f"--device {device} and --device-map {device_map} cannot both be given; choose one")
    if device_map is not None and device_map not in DEVICE_MAPS:
        return resolve_device(device_map, None)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.ones(2, device=resolved, dtype=torch.float64).sum().item()
    except Exception as error:  # the exception type depends on the backend
        raise CannotRunError(f"device {device} cannot be used here: {summarise_error(error)}") from error
    return resolved


def resolve_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The dtype of ``--dtype``; for "auto", float32 on a CPU and "auto" (the checkpoint's dtype) elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return DTYPES[name]


def load_reference(name: str, revision: str | None, loading: Loading, *, role: str = "reference") -> Pair:
    """Load one model as both policy and reference, for reading a source with it.

    Args:
        name: folder, hub id, adapter's folder or GGUF file.
        revision: branch, tag or commit of a hub id.
        loading: how it is loaded, such as a job.
        role: what it is called in notes and errors.

    Raises:
        ModelError, OptionError, CannotRunError: as ``load_pair``.
    """
    return load_checkpoints({role: find_checkpoint(name, revision, role)}, loading)


def load_beside(
    stored: StoredReference,
    policy: str,
    reference: str | None,
    *,
    revision_policy: str | None = None,
    revision_reference: str | None = None,
    loading: Loading,
) -> Pair:
    """Load a policy and pair it with a reference that is read from its cache: a given one, or whichever it is (None).

    Raises:
        ModelError: if the cache is of another reference, or the two do not put probability on the same tokens.
        OptionError, CannotRunError: as ``load_pair``.
    """
    if reference is not None:
        dtype = resolve_dtype(loading.dtype, resolve_device(loading.device, loading.device_map))
        stored.check_reference(reference, revision_reference, str(dtype).removeprefix("torch."))
    checkpoint = find_checkpoint(policy, revision_policy, "policy")
    with suppress_library_output():
        stored_tokenizer = stored.tokenizer(loading.trust_remote_code)
    models, notes = _load_models({"policy": checkpoint}, loading, stored_tokenizer)
    return pair_models(
        models["policy"],
        stored.as_model(models["policy"].device, stored_tokenizer),
        (
            *notes,
            f"the reference {stored.label.reference.path} is read from {stored.folder} and not loaded",
            *stored.contents.notes,
        ),
    )
