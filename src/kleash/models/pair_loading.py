"""Loading policy and reference, extracting their heads, and checking that they can be compared."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from kleash.errors import CannotRunError, KleashError, ModelError, OptionError
from kleash.linear import Head
from kleash.models.adapters.shared_base import LoadedNetwork
from kleash.models.cache.stored_reference import StoredReference
from kleash.models.checkpoints.resolution import Checkpoint, find_checkpoint
from kleash.models.compat import summarise_error, suppress_library_output
from kleash.models.heads import ExtractedHead, extract_head, truncate_head
from kleash.models.network_loading import load_networks
from kleash.models.pair import Model, Pair
from kleash.models.tokenizers import PROBES, compare_tokenizers, load_tokenizer, token_count
from kleash.store.checksums import UNCHECKED

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways of transformers to spread a model; any other map is the name of a device."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Options of loading that policy and reference share."""

    dtype: str = "auto"
    """"auto" is float32 on a CPU and the checkpoint's own on an accelerator; or "float32", "bfloat16",
    "float16", "float64"."""
    device: str = "auto"
    """"auto" is the first GPU, or else the CPU."""
    device_map: str | None = None
    """How transformers spreads a model over devices; then ``device`` stays "auto"."""
    trust_remote_code: bool = False
    """Let the checkpoint bring Python code and run it."""


# More arguments than elsewhere: they are the job's options of the same names.
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
) -> Pair:
    """Load policy and reference, and check that they can be compared.

    An adapter's folder means the adapter over its base. PairReaders that share a base, or are the same, share its
    weights in memory. Heads with more rows than there are tokens are left as they are where both have the
    same number, and are otherwise cut to the tokens.

    Args:
        policy: folder, hub id, adapter's folder, or "shipped:policy".
        reference: likewise.
        revision_policy: branch, tag or commit, for a hub id.
        revision_reference: likewise.
        dtype: "auto" is float32 on a CPU and the checkpoint's own on an accelerator; or "float32",
            "bfloat16", "float16", "float64".
        device: "auto" is the first GPU, or else the CPU.
        device_map: how transformers spreads a model over devices; then ``device`` stays "auto".
        trust_remote_code: let the checkpoint bring Python code and run it.

    Raises:
        ModelError: if one cannot be loaded, or the two do not put probability on the same tokens.
        OptionError: if dtype or device mean nothing.
        CannotRunError: if the device is not there.
    """
    how = Loading(dtype=dtype, device=device, device_map=device_map, trust_remote_code=trust_remote_code)
    sides = {
        "policy": find_checkpoint(policy, revision_policy),
        "reference": find_checkpoint(reference, revision_reference),
    }
    with suppress_library_output():
        tokenizers = {role: load_tokenizer(side, role, trust_remote_code) for role, side in sides.items()}
        notes = [*compare_tokenizers(tokenizers["policy"], tokenizers["reference"]), *_adapters_taken(sides)]
        models, said = load_models(sides, tokenizers, how)
    return pair_models(models["policy"], models["reference"], tuple(dict.fromkeys([*notes, *said])))


def load_models(
    sides: dict[str, Checkpoint], tokenizers: dict[str, Any], loading: Loading
) -> tuple[dict[str, Model], list[str]]:
    """The models of these sides, and what is to be said about them."""
    place = resolve_device(loading.device, loading.device_map)
    loaded, sharing = load_networks(
        sides,
        dtype=resolve_dtype(loading.dtype, place),
        device=place,
        device_map=loading.device_map,
        trust_remote_code=loading.trust_remote_code,
    )
    models: dict[str, Model] = {}
    notes = list(sharing)
    for role, side in sides.items():
        model, said = _model(role, side, tokenizers[role], loaded[role])
        models[role] = replace(
            model, device_map=loading.device_map, trust_remote_code=loading.trust_remote_code
        )
        notes += said
    return models, notes


def _model(role: str, side: Checkpoint, tokenizer: Any, loaded: LoadedNetwork) -> tuple[Model, list[str]]:
    """One side, and what is to be said about it."""
    network, adapters = loaded.network, loaded.adapters
    model = Model(
        role=role,
        path=side.name,
        revision=side.revision,
        dtype=network.dtype,
        device=network.get_input_embeddings().weight.device,
        parameters=loaded.parameters,
        vocab_size=0,
        context_length=read_context_length(network),
        eos_token_ids=read_eos_token_ids(network, tokenizer),
        head=Head(weight=None),
        fingerprint=side.fingerprint(),
        tokenizer=tokenizer,
        network=network,
        backbone=network.base_model,
        adapters=adapters,
        adapter=loaded.adapter,
    )
    check_vocab_size(model, len(network.get_input_embeddings().weight), "embeddings")
    anatomy = extract_model_head(model)
    said = [*loaded.notes, *([anatomy.note] if anatomy.note else [])]
    return replace(model, head=anatomy.head, vocab_size=anatomy.vocab_size), said


def extract_model_head(model: Model) -> ExtractedHead:
    """What the network of ``model`` comes apart into, tried on a few tokens."""
    probe = model.tokenizer(" ".join(PROBES), add_special_tokens=False, verbose=False)["input_ids"][:24]
    with model.activate_adapter():
        ids = torch.tensor([probe, probe[::-1]], device=model.device)
        try:
            return extract_head(model.network, model.backbone, ids, f"the {model.role}")
        except KleashError:
            raise
        except Exception as error:  # settings decide what goes wrong, and where
            raise ModelError(
                f"the {model.role} {model.path} cannot be run on a few tokens: {summarise_error(error)}"
            ) from error


def pair_models(policy: Model, reference: Model, notes: tuple[str, ...]) -> Pair:
    """Make a pair of two models; heads of different sizes are truncated to the tokenizer's tokens."""
    tokens = token_count(policy.tokenizer)
    for model in (policy, reference):
        check_vocab_size(model, model.vocab_size, "logits")
    if policy.vocab_size != reference.vocab_size:
        rows = f"the heads have {policy.vocab_size} (policy) and {reference.vocab_size} (reference) rows"
        notes += (f"{rows} for {tokens} tokens; both are cut to the tokens and normalised over them",)
        policy, reference = _cut(policy, tokens), _cut(reference, tokens)
    elif policy.vocab_size > tokens:
        padding = policy.vocab_size - tokens
        notes += (
            f"both heads have {policy.vocab_size} rows for {tokens} tokens; the {padding} others are kept",
        )
    warnings = ()
    if policy.dtype != reference.dtype:
        warnings = (f"the policy ran in {policy.dtype} and the reference in {reference.dtype}; give --dtype",)
    return Pair(
        policy=policy, reference=reference, tokenizer=policy.tokenizer, notes=notes, warnings=warnings
    )


def check_vocab_size(model: Model, rows: int, what: str) -> None:
    """Check that the tokenizer has at most ``rows`` tokens.

    Raises:
        ModelError: if not.
    """
    tokens = token_count(model.tokenizer)
    if rows < tokens:
        raise ModelError(
            f"the {model.role} {model.path} has {rows} {what} for a tokenizer of {tokens} tokens; use the "
            "tokenizer it was trained with"
        )


def _cut(model: Model, tokens: int) -> Model:
    return replace(model, head=truncate_head(model.head, tokens), vocab_size=tokens)


def _adapters_taken(sides: dict[str, Checkpoint]) -> list[str]:
    """In words, which sides are adapters over which bases."""
    return [
        f"the {role} is the adapter {side.name} over {side.base}"
        for role, side in sides.items()
        if side.adapter is not None
    ]


def read_eos_token_ids(network: Any, tokenizer: Any) -> tuple[int, ...]:
    """The end tokens of a network: from its generation config, its config, or the tokenizer.

    Raises:
        ModelError: if one that is named is no token of the network.
    """
    generation = getattr(network, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    if ends is None:
        ends = network.config.get_text_config(decoder=True).eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return ()
    rows = len(network.get_input_embeddings().weight)
    tokens = tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < rows:
            raise ModelError(
                f"{getattr(network, 'name_or_path', '') or 'the model'} names the end token {str(token)[:40]!r}, which "
                f"is no token id from 0 to {rows - 1}; mend eos_token_id in generation_config.json or config.json"
            )
    return tokens


def read_context_length(network: Any) -> int | None:
    """The context length of a network's configuration; None if there is no limit.

    Raises:
        ModelError: if what it says is no number of tokens.
    """
    context = getattr(network.config, "max_position_embeddings", None)
    if context is not None and (not isinstance(context, int) or isinstance(context, bool) or context < 1):
        raise ModelError(
            f"{getattr(network, 'name_or_path', '') or 'the model'} has the max_position_embeddings "
            f"{str(context)[:40]!r}; mend config.json"
        )
    return context


def resolve_device(device: str, device_map: str | None) -> torch.device:
    """The device of a ``--device`` or ``--device-map`` option.

    Raises:
        OptionError: if both are given, or the map means nothing.
        CannotRunError: if the device is not there, or computes nothing.
    """
    if device_map is not None and device != "auto":
        raise OptionError(f"--device {device} and --device-map {device_map} cannot both be given; choose one")
    if device_map is not None and device_map not in DEVICE_MAPS:
        return resolve_device(device_map, None)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.ones(2, device=place).sum().item()
    except Exception as error:  # each backend has its own
        raise CannotRunError(f"device {device} cannot be used here: {summarise_error(error)}") from error
    return place


def resolve_dtype(name: str, place: torch.device) -> torch.dtype | str:
    """The dtype called ``name``; "auto" for the checkpoint's own.

    Raises:
        OptionError: if there is none.
    """
    if name == "auto":
        return torch.float32 if place.type == "cpu" else "auto"
    if name not in DTYPES:
        raise OptionError(f"no dtype is called {name!r}; there are auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load_reference(name: str, revision: str | None, loading: Loading) -> Pair:
    """Load one model as both policy and reference, for reading a source with it.

    Raises:
        ModelError, OptionError, CannotRunError: as ``load_pair``.
    """
    side = find_checkpoint(name, revision)
    with suppress_library_output():
        tokenizer = load_tokenizer(side, "reference", loading.trust_remote_code)
        models, said = load_models({"reference": side}, {"reference": tokenizer}, loading)
    taken = (f"the reference is the adapter {side.name} over {side.base}",) if side.adapter else ()
    model = models["reference"]
    check_vocab_size(model, model.vocab_size, "logits")
    return Pair(policy=model, reference=model, tokenizer=tokenizer, notes=(*taken, *said))


def load_beside(
    stored: StoredReference,
    policy: str,
    reference: str,
    *,
    revision_policy: str | None,
    revision_reference: str | None,
    loading: Loading,
) -> Pair:
    """Load a policy and pair it with a reference that is read from its cache.

    Raises:
        ModelError: if the cache is another reference's, or the two do not put probability on the same tokens.
        OptionError, CannotRunError: as ``load_pair``.
    """
    kind = resolve_dtype(loading.dtype, resolve_device(loading.device, loading.device_map))
    stored.check_reference(reference, revision_reference, str(kind).removeprefix("torch."))
    side = find_checkpoint(policy, revision_policy)
    with suppress_library_output():
        ours = load_tokenizer(side, "policy", loading.trust_remote_code)
        theirs = stored.tokenizer(loading.trust_remote_code)
        notes = compare_tokenizers(ours, theirs)
        models, said = load_models({"policy": side}, {"policy": ours}, loading)
    taken = [f"the policy is the adapter {side.name} over {side.base}"] if side.adapter else []
    taken.append(f"the reference {stored.label.reference.path} is read from {stored.folder} and not loaded")
    model = stored.as_model(models["policy"].device, theirs)
    pair = pair_models(models["policy"], model, (*notes, *taken, *said, *stored.contents.notes))
    if stored.checksums.exists:
        return pair
    return replace(pair, warnings=(*pair.warnings, f"{stored.folder}: {UNCHECKED}"))
