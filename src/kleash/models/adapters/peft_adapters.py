"""Attaching PEFT adapters to a base network, and checks of adapters on disk and in memory."""

import re
from collections.abc import Iterable
from typing import Any, TypeGuard

from kleash.checkpoints.files import iterate_settings
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError, summarise_error
from kleash.extras import import_extra
from kleash.models.adapters.network_state import bitwise_equal, make_probe, probe_logits
from kleash.models.adapters.rules import find_rule, peft_type
from kleash.models.compat import has_adapter_on_one_embedding
from kleash.sandbox.process import check_patterns

MAX_SHOWN_NAMES = 4
RANK_SETTINGS = re.compile(r"(^|_)r$|rank|layer_replication")
"""Names of settings that are ranks, or numbers of layers."""
MAX_SMALL_RANK = 512
"""Largest rank or number of a layer that is accepted for any adapter, since it takes little memory."""


def check_adapter(checkpoint: Checkpoint) -> None:
    """Check that the adapter of a checkpoint can be measured.

    Raises:
        ModelError: if a rule refuses it, or its settings describe tensors larger than its files.
    """
    rule = find_rule(checkpoint.adapter_settings)
    if rule is not None and rule.treatment == "refused":
        kind = peft_type(checkpoint.adapter_settings)[:40]
        raise ModelError(f"{checkpoint.adapter_subject} ({kind}) {rule.reason}; {rule.advice}")
    shapes = [tensor.shape for tensor in checkpoint.adapter_tensors.values()]
    largest = max((MAX_SMALL_RANK, *(size for shape in shapes for size in shape)))
    for name, value in iterate_settings(checkpoint.adapter_settings):
        if (
            RANK_SETTINGS.search(name.lower())
            and isinstance(value, int | float)
            and not abs(value) <= largest
        ):
            raise ModelError(
                f"{checkpoint.adapter_subject} has {name} {value:.6g} in its adapter_config.json, and no tensor of it "
                "is as large; correct adapter_config.json, or fetch the adapter again"
            )


def describe_unknown_settings(checkpoint: Checkpoint) -> tuple[str, ...]:
    """A note on the settings of an adapter that the installed PEFT does not know and leaves out.

    A newer PEFT wrote them, and may compute the adapter otherwise.
    """
    peft, settings = import_extra("peft", "models"), checkpoint.adapter_settings
    known = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft_type(settings)].__dataclass_fields__
    unknown = sorted(str(name)[:60] for name, value in settings.items() if name not in known and value)
    if not unknown:
        return ()
    note = (
        f"{checkpoint.adapter_subject} has settings that PEFT {peft.__version__} does not know and "
        f"leaves out: {', '.join(unknown[:MAX_SHOWN_NAMES])}; with a newer PEFT it may be another model"
    )
    return (note,)


def require_unchanged_base(wrapper: Any, role: str, *, instead: str) -> None:
    """Check that a PEFT model in memory, with its adapters disabled, computes what the base did without them.

    Args:
        wrapper: the PEFT model.
        role: the role that the base would have, for errors.
        instead: advice for the error.

    Raises:
        ModelError: if an adapter changed the base when it was attached, or if parameters of the base are trained.
    """
    for name, config in wrapper.peft_config.items():
        rule = find_rule(config.to_dict())
        if rule is not None and rule.changes_base:
            raise ModelError(
                f"the {role} would be the base with its adapters switched off, but the adapter {name!r} {rule.reason}; "
                f"{instead}"
            )
    trainable = trainable_base_parameters(wrapper)
    if trainable:
        raise ModelError(
            f"the {role} would be the base with its adapters switched off, but {len(trainable)} tensors of it are "
            f"trained, such as {trainable[0]}; freeze them, or {instead}"
        )


def trainable_base_parameters(wrapper: Any) -> list[str]:
    """Names of the trainable parameters of a PEFT model that belong to none of its adapters."""
    adapters = set(wrapper.peft_config)  # the path of an adapter's parameter contains the adapter's name
    return [
        path
        for path, parameter in wrapper.named_parameters()
        if parameter.requires_grad and adapters.isdisjoint(path.split("."))
    ]


def attach_adapter(network: Any, wrapper: Any, checkpoint: Checkpoint) -> Any:
    """Attach an adapter to a network under the name of its role, and activate it.

    Args:
        network: the base.
        wrapper: the PEFT model around the base; None before the first adapter.
        checkpoint: of the adapter.

    Returns:
        The PEFT model around the base.

    Raises:
        ModelError: if a pattern of the adapter does not end, or its tensors do not fit the base.
    """
    peft = import_extra("peft", "models")
    subject, role = checkpoint.adapter_subject, checkpoint.role
    check_patterns(subject, _patterns(checkpoint), (name for name, _ in network.named_modules()))
    try:
        if wrapper is None:
            wrapper = peft.PeftModel.from_pretrained(network, str(checkpoint.adapter), adapter_name=role)
        else:
            wrapper.load_adapter(str(checkpoint.adapter), adapter_name=role)
            wrapper.set_adapter(role)
        _check_fits(wrapper, checkpoint)
    except ModelError:
        raise
    except Exception as error:  # the exception type depends on the settings, down to re.error
        raise ModelError(f"{subject} cannot be put on {checkpoint.base}: {summarise_error(error)}") from error
    return wrapper


def _patterns(checkpoint: Checkpoint) -> list[str]:
    """The regular expressions that PEFT matches module names against."""
    settings = checkpoint.adapter_settings
    candidates: list[Any] = []
    for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
        value = settings.get(name)
        if isinstance(value, list):
            candidates += value
        elif value != "all-linear":
            candidates.append(value)
    for name in ("rank_pattern", "alpha_pattern"):
        table = settings.get(name)
        candidates += table if isinstance(table, dict) else ()
    return [candidate for candidate in candidates if _is_pattern(candidate)]


def _is_pattern(text: Any) -> TypeGuard[str]:
    """Whether a text can take long to match: it holds more than letters, digits, dots and underscores."""
    return isinstance(text, str) and re.fullmatch(r"[\w.]*", text) is None


def _check_fits(wrapper: Any, checkpoint: Checkpoint) -> None:
    """Check that the tensors of the adapter's file are exactly those of the attached adapter."""
    peft = import_extra("peft", "models")
    stored_names = set(checkpoint.adapter_tensors)
    accepted_names, required_names = (
        set(
            peft.get_peft_model_state_dict(
                wrapper, adapter_name=checkpoint.role, save_embedding_layers=embeddings
            )
        )
        for embeddings in (True, False)
    )
    unexpected_names = sorted(stored_names - accepted_names)
    missing_names = sorted(required_names - stored_names)
    if unexpected_names or missing_names:
        raise ModelError(
            f"{checkpoint.adapter_subject} does not fit {checkpoint.base}: {len(unexpected_names)} of its "
            f"{len(stored_names)} tensors have no place there and {len(missing_names)} places no tensor, such as "
            f"{(unexpected_names + missing_names)[0]}; give it the base it was trained on"
        )


def check_acts_by_weights(wrapper: Any, network: Any, checkpoint: Checkpoint, tied: bool) -> None:
    """Check that the base network, run without PEFT's wrapper, applies the adapter in full and deterministically.

    Raises:
        ModelError: if the adapter needs PEFT's own forward pass, is random, or changes one of two tied embeddings.
    """
    subject = checkpoint.adapter_subject
    if tied and has_adapter_on_one_embedding(network.get_input_embeddings(), network.get_output_embeddings()):
        raise ModelError(
            f"{subject} is on an embedding whose tensor is also the other embedding, so that running it and merging it "
            "give two models; leave both embeddings out of the adapter, or merge it and give that folder"
        )
    probe = make_probe(network, trained_token_ids([checkpoint]))
    try:
        inner_logits, outer_logits = probe_logits(network, probe), probe_logits(wrapper, probe)
    except Exception as error:
        raise ModelError(f"{subject} cannot be run on {checkpoint.base}: {summarise_error(error)}") from error
    if not bitwise_equal(inner_logits, outer_logits):
        raise ModelError(
            f"{subject} gives other logits through PEFT's forward pass than through the network's, so it does not act "
            "through weights alone; merge it into its base and give that folder"
        )


def has_tied_embeddings(network: Any) -> bool:
    """Whether input and output embedding are the same tensor."""
    embeddings = network.get_input_embeddings(), network.get_output_embeddings()
    weights = [getattr(layer, "weight", None) for layer in embeddings]
    return weights[0] is not None and weights[0] is weights[1]


def trained_token_ids(checkpoints: Iterable[Checkpoint]) -> tuple[int, ...]:
    """Token ids whose embeddings the adapters train individually."""
    tokens: list[Any] = []
    for checkpoint in checkpoints:
        for name in ("trainable_token_indices", "token_indices"):
            value = checkpoint.adapter_settings.get(name)
            tokens += (
                [token for part in value.values() for token in part]
                if isinstance(value, dict)
                else value or []
            )
    return tuple(token for token in tokens if type(token) is int)
