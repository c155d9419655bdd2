"""Two models that can be compared, loaded, taken apart and checked."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from kleash.errors import CannotRunError, KleashError, ModelError, OptionError
from kleash.linear import Head
from kleash.models.adapters.shared_base import Loaded
from kleash.models.cache.stored_reference import StoredReference
from kleash.models.checkpoints.resolution import Checkpoint, find_checkpoint
from kleash.models.compat import first_line, quiet
from kleash.models.heads import Anatomy, cut, take_apart
from kleash.models.network_loading import load_network
from kleash.models.pair import Model, Pair
from kleash.models.tokenizers import PROBES, compare_tokenizers, load_tokenizer, token_count
from kleash.records.checksums import UNCHECKED

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
    """How models are loaded: the options of a job that are the same for both sides."""

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
    """Load two models, take them apart, and see that they can be compared.

    An adapter's folder means the adapter over its base. Sides that share a base, or are the same, share its
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
    with quiet():
        tokenizers = {role: load_tokenizer(side, role, trust_remote_code) for role, side in sides.items()}
        notes = [*compare_tokenizers(tokenizers["policy"], tokenizers["reference"]), *_adapters_taken(sides)]
        models, said = load_models(sides, tokenizers, how)
    return fit_together(models["policy"], models["reference"], tuple(dict.fromkeys([*notes, *said])))


def load_models(
    sides: dict[str, Checkpoint], tokenizers: dict[str, Any], how: Loading
) -> tuple[dict[str, Model], list[str]]:
    """The models of these sides, and what is to be said about them."""
    place = place_of(how.device, how.device_map)
    loaded, sharing = load_network(
        sides,
        dtype=dtype_of(how.dtype, place),
        device=place,
        device_map=how.device_map,
        trust_remote_code=how.trust_remote_code,
    )
    models: dict[str, Model] = {}
    notes = list(sharing)
    for role, side in sides.items():
        model, said = _model(role, side, tokenizers[role], loaded[role])
        models[role] = replace(model, device_map=how.device_map, trusted=how.trust_remote_code)
        notes += said
    return models, notes


def _model(role: str, side: Checkpoint, tokenizer: Any, loaded: Loaded) -> tuple[Model, list[str]]:
    """One side, and what is to be said about it."""
    network, adapters = loaded.network, loaded.adapters
    model = Model(
        role=role,
        path=side.name,
        revision=side.revision,
        dtype=network.dtype,
        device=network.get_input_embeddings().weight.device,
        parameters=loaded.parameters,
        vocabulary=0,
        context=context_of(network),
        ends=ends_of(network, tokenizer),
        head=Head(weight=None),
        fingerprint=side.fingerprint(),
        tokenizer=tokenizer,
        network=network,
        body=network.base_model,
        adapters=adapters,
        adapter=loaded.adapter,
    )
    check_rows(model, len(network.get_input_embeddings().weight), "embeddings")
    anatomy = anatomy_of(model)
    said = [*loaded.notes, *([anatomy.note] if anatomy.note else [])]
    return replace(model, head=anatomy.head, vocabulary=anatomy.rows), said


def anatomy_of(model: Model) -> Anatomy:
    """What the network of ``model`` comes apart into, tried on a few tokens."""
    probe = model.tokenizer(" ".join(PROBES), add_special_tokens=False, verbose=False)["input_ids"][:24]
    with model.switched():
        ids = torch.tensor([probe, probe[::-1]], device=model.device)
        try:
            return take_apart(model.network, model.body, ids, f"the {model.role}")
        except KleashError:
            raise
        except Exception as error:  # settings decide what goes wrong, and where
            raise ModelError(
                f"the {model.role} {model.path} cannot be run on a few tokens: {first_line(error)}"
            ) from error


def fit_together(policy: Model, reference: Model, notes: tuple[str, ...]) -> Pair:
    """See to it that both sides put probability on the same tokens."""
    tokens = token_count(policy.tokenizer)
    for model in (policy, reference):
        check_rows(model, model.vocabulary, "logits")
    if policy.vocabulary != reference.vocabulary:
        rows = f"the heads have {policy.vocabulary} (policy) and {reference.vocabulary} (reference) rows"
        notes += (f"{rows} for {tokens} tokens; both are cut to the tokens and normalised over them",)
        policy, reference = _cut(policy, tokens), _cut(reference, tokens)
    elif policy.vocabulary > tokens:
        padding = policy.vocabulary - tokens
        notes += (
            f"both heads have {policy.vocabulary} rows for {tokens} tokens; the {padding} others are kept",
        )
    warnings = ()
    if policy.dtype != reference.dtype:
        warnings = (f"the policy ran in {policy.dtype} and the reference in {reference.dtype}; give --dtype",)
    return Pair(
        policy=policy, reference=reference, tokenizer=policy.tokenizer, notes=notes, warnings=warnings
    )


def check_rows(model: Model, rows: int, what: str) -> None:
    """See that every token of the tokenizer has one of so many rows.

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
    return replace(model, head=cut(model.head, tokens), vocabulary=tokens)


def _adapters_taken(sides: dict[str, Checkpoint]) -> list[str]:
    """In words, which sides are adapters over which bases."""
    return [
        f"the {role} is the adapter {side.name} over {side.base}"
        for role, side in sides.items()
        if side.adapter is not None
    ]


def ends_of(network: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens at which a response ends.

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


def context_of(network: Any) -> int | None:
    """The most tokens that a network says it can read at once; None if nothing limits it.

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


def place_of(device: str, device_map: str | None) -> torch.device:
    """Where models go.

    Raises:
        OptionError: if both are given, or the map means nothing.
        CannotRunError: if the device is not there, or computes nothing.
    """
    if device_map is not None and device != "auto":
        raise OptionError(f"--device {device} and --device-map {device_map} cannot both be given; choose one")
    if device_map is not None and device_map not in DEVICE_MAPS:
        return place_of(device_map, None)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.ones(2, device=place).sum().item()
    except Exception as error:  # each backend has its own
        raise CannotRunError(f"device {device} cannot be used here: {first_line(error)}") from error
    return place


def dtype_of(name: str, place: torch.device) -> torch.dtype | str:
    """The dtype called ``name``; "auto" where the checkpoint decides.

    Raises:
        OptionError: if there is none.
    """
    if name == "auto":
        return torch.float32 if place.type == "cpu" else "auto"
    if name not in DTYPES:
        raise OptionError(f"no dtype is called {name!r}; there are auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load_reference(name: str, revision: str | None, how: Loading) -> Pair:
    """A model as both sides of a pair: what is needed to read a source for it alone.

    Raises:
        ModelError, OptionError, CannotRunError: as ``load_pair``.
    """
    side = find_checkpoint(name, revision)
    with quiet():
        tokenizer = load_tokenizer(side, "reference", how.trust_remote_code)
        models, said = load_models({"reference": side}, {"reference": tokenizer}, how)
    taken = (f"the reference is the adapter {side.name} over {side.base}",) if side.adapter else ()
    model = models["reference"]
    check_rows(model, model.vocabulary, "logits")
    return Pair(policy=model, reference=model, tokenizer=tokenizer, notes=(*taken, *said))


def load_beside(
    stored: StoredReference,
    policy: str,
    reference: str,
    *,
    revision_policy: str | None,
    revision_reference: str | None,
    how: Loading,
) -> Pair:
    """Load a policy beside a reference that is read from its cache.

    Raises:
        ModelError: if the cache is another reference's, or the two do not put probability on the same tokens.
        OptionError, CannotRunError: as ``load_pair``.
    """
    kind = dtype_of(how.dtype, place_of(how.device, how.device_map))
    stored.check(reference, revision_reference, str(kind).removeprefix("torch."))
    side = find_checkpoint(policy, revision_policy)
    with quiet():
        ours = load_tokenizer(side, "policy", how.trust_remote_code)
        theirs = stored.tokenizer(how.trust_remote_code)
        notes = compare_tokenizers(ours, theirs)
        models, said = load_models({"policy": side}, {"policy": ours}, how)
    taken = [f"the policy is the adapter {side.name} over {side.base}"] if side.adapter else []
    taken.append(f"the reference {stored.label.reference.path} is read from {stored.folder} and not loaded")
    model = stored.model(models["policy"].device, theirs)
    pair = fit_together(models["policy"], model, (*notes, *taken, *said, *stored.contents.notes))
    if stored.checksums.exists:
        return pair
    return replace(pair, warnings=(*pair.warnings, f"{stored.folder}: {UNCHECKED}"))
