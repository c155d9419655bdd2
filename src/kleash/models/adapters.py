"""PEFT adapters: which can be measured or share their base, how they are attached, and checks of them.

Rules by adapter_config.json come first; then the logits of a probe decide.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.compat import has_adapter_on_one_embedding
from kleash.models.filling import loading
from kleash.precision import bitwise_equal

MAX_SHOWN_NAMES = 4

PROBE_TOKENS = 64
"""Number of the probe's tokens that are spread over the vocabulary; a row of the probe holds twice as many."""

MAX_REQUIRED_TOKENS = 512
"""Largest number of tokens with trained embeddings in the probe."""

AdapterSettings = Mapping[str, Any]
"""The content of adapter_config.json."""

TESTED_KINDS = frozenset(
    {
        *("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "VERA", "FOURIERFT", "LN_TUNING", "HRA"),
        *("VBLORA", "MISS", "BONE", "RANDLORA", "TRAINABLE_TOKENS", "C3A", "WAVEFT", "OSF", "DELORA"),
        *("GRALORA", "HIRA", "UNILORA", "TINYLORA", "PSOFT", "PVERA", "FROD", "BEFT", "ADAMSS", "GLORA"),
        *("PEANUT", "SHIRA", "ROAD", "SUPERTUNING"),
    }
)
"""Values of ``peft_type`` that change weights. Adapters of each were compared with their merged model: the common ones
in the tests, the rest once by hand."""
IRREPRODUCIBLE_INITS = ("pissa_niter", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` that change the base by random draws or data that the adapter does not store."""
REPRODUCIBLE_INITS = ("pissa", "olora")
"""Values of ``init_lora_weights`` that change the base as a function of its weights, the same at each loading."""


@dataclass(frozen=True, kw_only=True)
class AdapterRule:
    """A condition on an adapter's settings and the treatment of adapters that meet it."""

    treatment: str
    """"separate": the base is loaded once more for the other model; "refused": the adapter is not measured."""
    reason: str
    """Completes "the adapter …" in notes and errors."""
    advice: str = ""
    """What the user can do about a refusal."""
    changes_base: bool = True
    """Whether the base with the adapter disabled differs from the base without it."""
    applies: Callable[[AdapterSettings], bool]
    """The condition."""


def initialisation(settings: AdapterSettings) -> str:
    """The initialisation of a LoRA in lower case; "" for PEFT's defaults."""
    value = settings.get("init_lora_weights")
    return value.lower() if isinstance(value, str) else ""


def peft_type(settings: AdapterSettings) -> str:
    """The ``peft_type`` in capitals."""
    kind = settings.get("peft_type")
    return str(getattr(kind, "value", kind)).upper()


RULES: tuple[AdapterRule, ...] = (
    AdapterRule(
        treatment="refused",
        reason="is of a kind that needs a forward pass of PEFT, or that kleash was not tested with",
        advice="merge it into its base if it changes weights alone, and give that folder",
        changes_base=False,
        applies=lambda settings: peft_type(settings) not in TESTED_KINDS,
    ),
    AdapterRule(
        treatment="refused",
        reason="changes weights only after some tokens, by a router or at random, and needs a forward pass of PEFT",
        advice="kleash measures adapters that change weights",
        changes_base=False,
        applies=lambda settings: (
            settings.get("alora_invocation_tokens") is not None
            or settings.get("arrow_config") is not None
            or bool(settings.get("sample_at_inference"))
        ),
    ),
    AdapterRule(
        treatment="refused",
        reason="was trained over a base that its initialisation had changed by random draws or by data, which the "
        "adapter does not hold",
        advice="save it as a plain LoRA, with save_pretrained(…, path_initial_model_for_weight_conversion=…), or merge "
        "it into the base that it was trained over and give that folder",
        applies=lambda settings: initialisation(settings).startswith(IRREPRODUCIBLE_INITS),
    ),
    AdapterRule(
        treatment="separate",
        reason="takes a part out of the weights of its base when it is made",
        applies=lambda settings: (
            initialisation(settings).startswith(REPRODUCIBLE_INITS) or settings.get("kasa_config") is not None
        ),
    ),
    AdapterRule(
        treatment="separate",
        reason="repeats layers of its base",
        applies=lambda settings: bool(settings.get("layer_replication")),
    ),
    AdapterRule(
        treatment="separate",
        reason="has trained biases, which replace those of its base",
        applies=lambda settings: settings.get("bias") not in (None, "none", False),
    ),
)
"""The first rule that applies is used. Without one, an adapter shares its base if the base proves to be unchanged."""

NON_PLAIN_SETTINGS = (
    *("modules_to_save", "trainable_token_indices", "target_parameters", "ensure_weight_tying", "use_qalora"),
    *("velora_config", "kasa_config", "monteclora_config", "use_bdlora"),
)
"""Settings of a LoRA that exclude two adapters on one base."""


def find_rule(settings: AdapterSettings) -> AdapterRule | None:
    """The rule that applies to an adapter; None if it may share its base."""
    return next((rule for rule in RULES if rule.applies(settings)), None)


def check_adapter(checkpoint: Checkpoint) -> None:
    """Check that no rule refuses the adapter of a checkpoint.

    Raises:
        ModelError: if one does.
    """
    rule = find_rule(checkpoint.adapter_settings)
    if rule is not None and rule.treatment == "refused":
        kind = peft_type(checkpoint.adapter_settings)[:40]
        raise ModelError(f"{checkpoint.adapter_subject} ({kind}) {rule.reason}; {rule.advice}")


def reason_not_to_share(adapters: Sequence[Checkpoint]) -> str | None:
    """Why the settings of adapters rule out one base for them; None if they do not."""
    for checkpoint in adapters:
        rule = find_rule(checkpoint.adapter_settings)
        if rule is not None:
            return f"the adapter {checkpoint.name} {rule.reason}"
        # low-rank matrices beside linear layers
        is_plain_lora = peft_type(checkpoint.adapter_settings) == "LORA" and not any(
            map(checkpoint.adapter_settings.get, NON_PLAIN_SETTINGS)
        )
        if len(adapters) > 1 and not is_plain_lora:
            return f"the adapter {checkpoint.name} is no plain LoRA, of which a base can carry several"
    return None


def describe_unknown_settings(checkpoint: Checkpoint) -> tuple[str, ...]:
    """A note on the settings of an adapter that the installed PEFT does not know and leaves out.

    A newer PEFT wrote them, and may compute the adapter otherwise.
    """
    peft, settings = import_extra("peft", "models"), checkpoint.adapter_settings
    known = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft_type(settings)].__dataclass_fields__
    unknown = sorted(name[:60] for name, value in settings.items() if name not in known and value)
    note = (
        f"{checkpoint.adapter_subject} has settings that PEFT {peft.__version__} does not know and "
        f"leaves out: {', '.join(unknown[:MAX_SHOWN_NAMES])}; with a newer PEFT it may be another model"
    )
    return (note,) if unknown else ()


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


def attach_adapter(
    network: Any, wrapper: Any, checkpoint: Checkpoint, *, name: str | None = None, is_trainable: bool = False
) -> Any:
    """Attach an adapter to a network, and activate it.

    Args:
        network: the base.
        wrapper: the PEFT model around the base; None before the first adapter.
        checkpoint: of the adapter.
        name: PEFT's name of the adapter; None for its role.
        is_trainable: whether the first adapter of a network is trained.

    Returns:
        The PEFT model around the base, in evaluation mode.

    Raises:
        ModelError: if its tensors do not fit the base.
        ChangedInputError: if it was written to since it was found.
    """
    peft = import_extra("peft", "models")
    name = checkpoint.role if name is None else name
    with loading(checkpoint.adapter_subject, action=f"put on {checkpoint.base}"):
        if wrapper is None:
            wrapper = peft.PeftModel.from_pretrained(
                network, str(checkpoint.adapter), adapter_name=name, is_trainable=is_trainable
            )
        else:
            wrapper.load_adapter(str(checkpoint.adapter), adapter_name=name)
            wrapper.set_adapter(name)
        _check_fits(wrapper, checkpoint, name)
    return wrapper.eval()


def _check_fits(wrapper: Any, checkpoint: Checkpoint, name: str) -> None:
    """Check that the tensors of the adapter's file are exactly those of the attached adapter."""
    peft = import_extra("peft", "models")
    stored_names = set(checkpoint.adapter_tensors)
    accepted_names, required_names = (
        set(peft.get_peft_model_state_dict(wrapper, adapter_name=name, save_embedding_layers=embeddings))
        for embeddings in (True, False)
    )
    unexpected_names = sorted(stored_names - accepted_names)
    missing_names = sorted(required_names - stored_names)
    if unexpected_names or missing_names:
        raise ModelError(
            f"{checkpoint.adapter_subject} does not fit {checkpoint.base}: {len(unexpected_names)} of its "
            f"{len(stored_names)} tensors have no place there and {len(missing_names)} places no tensor, such as "
            f"{' and '.join(unexpected_names[:1] + missing_names[:1])}; give it the base it was trained on, and "
            "settings and names as PEFT saved them"
        )


def make_probe(network: Any, tokens: tuple[int, ...] = ()) -> Int[Tensor, "rows time"]:
    """Token ids for a forward pass: ``tokens`` and others spread over the vocabulary, within the context length."""
    embedding = network.get_input_embeddings().weight
    vocab_size = len(embedding)
    step = max(1, round(vocab_size * 0.382))  # the golden ratio spreads consecutive ids
    required_ids = [token for token in dict.fromkeys(tokens) if 0 <= token < vocab_size]
    spread_ids = [(17 + index * step) % vocab_size for index in range(PROBE_TOKENS)]
    ids = [*required_ids[:MAX_REQUIRED_TOKENS], *spread_ids]
    context = getattr(network.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = min(
        len(ids), 2 * PROBE_TOKENS, context if isinstance(context, int) and context > 0 else len(ids)
    )
    rows = -(-len(ids) // length)
    return torch.tensor([(ids * 2)[: rows * length]], device=embedding.device).view(rows, length)


@torch.inference_mode()
def probe_logits(network: Any, probe: Int[Tensor, "rows time"]) -> Tensor:
    """The network's logits for the probe, with its adapters enabled or disabled as they are."""
    return network(input_ids=probe, use_cache=False).logits


def check_acts_by_weights(
    wrapper: Any, network: Any, checkpoint: Checkpoint, probe: Int[Tensor, "rows time"], *, tied: bool
) -> None:
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
    with loading(subject, action=f"run on {checkpoint.base}"):
        inner_logits, outer_logits = probe_logits(network, probe), probe_logits(wrapper, probe)
    if not bitwise_equal(inner_logits, outer_logits):
        raise ModelError(
            f"{subject} gives other logits through PEFT's forward pass than through the network's, so it does not act "
            "through weights alone; merge it into its base and give that folder"
        )


def trained_token_ids(checkpoints: Iterable[Checkpoint]) -> tuple[int, ...]:
    """Token ids whose embeddings the adapters train individually."""
    values = [
        checkpoint.adapter_settings.get(name) or []
        for checkpoint in checkpoints
        for name in ("trainable_token_indices", "token_indices")
    ]
    lists = (part for value in values for part in (value.values() if isinstance(value, dict) else [value]))
    return tuple(token for part in lists for token in part if type(token) is int)
