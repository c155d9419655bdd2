"""Rules by adapter_config.json: which PEFT adapters cannot be measured, and which cannot share their base."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
PROMPT_KINDS = frozenset(
    {
        *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE"),
        "ADAPTION_PROMPT",
    }
)
CUSTOM_FORWARD_KINDS = frozenset({"XLORA", "POLY", "SHADOW", "LILY"})
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
        reason="adds virtual tokens to the prompt",
        advice="kleash measures adapters that change weights",
        changes_base=False,
        applies=lambda settings: peft_type(settings) in PROMPT_KINDS,
    ),
    AdapterRule(
        treatment="refused",
        reason="needs a forward pass of PEFT, or lets later tokens change earlier ones",
        advice="kleash measures adapters that change the weights of a causal model",
        changes_base=False,
        applies=lambda settings: peft_type(settings) in CUSTOM_FORWARD_KINDS,
    ),
    AdapterRule(
        treatment="refused",
        reason="is of a kind that kleash was not tested with",
        advice="merge it into its base and give that folder",
        changes_base=False,
        applies=lambda settings: peft_type(settings) not in TESTED_KINDS,
    ),
    AdapterRule(
        treatment="refused",
        reason="changes weights only after some tokens or by a router, and needs a forward pass of PEFT",
        advice="kleash measures adapters that change weights",
        changes_base=False,
        applies=lambda settings: (
            settings.get("alora_invocation_tokens") is not None or settings.get("arrow_config") is not None
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
        reason="takes its initial matrices out of the weights of its base",
        applies=lambda settings: initialisation(settings).startswith(REPRODUCIBLE_INITS),
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


def is_plain_lora(settings: AdapterSettings) -> bool:
    """Whether an adapter consists of low-rank matrices beside linear layers, of which one base can have several."""
    return peft_type(settings) == "LORA" and not any(settings.get(name) for name in NON_PLAIN_SETTINGS)
