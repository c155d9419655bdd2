"""Which PEFT adapters can share the weights of their base with another model, and which cannot be measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]
"""The content of adapter_config.json."""

TESTED_KINDS = frozenset(
    {
        *(
            "LORA",
            "ADALORA",
            "LOHA",
            "LOKR",
            "IA3",
            "OFT",
            "BOFT",
            "VERA",
            "FOURIERFT",
            "LN_TUNING",
            "HRA",
            "VBLORA",
        ),
        *(
            "MISS",
            "BONE",
            "RANDLORA",
            "TRAINABLE_TOKENS",
            "C3A",
            "WAVEFT",
            "OSF",
            "DELORA",
            "GRALORA",
            "HIRA",
        ),
        *(
            "UNILORA",
            "TINYLORA",
            "PSOFT",
            "PVERA",
            "FROD",
            "BEFT",
            "ADAMSS",
            "GLORA",
            "PEANUT",
            "SHIRA",
            "ROAD",
        ),
        "SUPERTUNING",
    }
)
"""Kinds of adapters (``peft_type``) that change weights, each compared with its merged model: the common ones in the
tests, the others once by hand."""
PROMPT_KINDS = frozenset(
    {
        *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE"),
        "ADAPTION_PROMPT",
    }
)
OWN_FORWARD_KINDS = frozenset({"XLORA", "POLY", "SHADOW", "LILY"})
LOST_BASES = ("pissa_niter", "corda", "loftq", "lora_ga")
"""Initialisations of LoRA that change the base by random draws or by data, which the adapter does not hold."""
REPEATABLE_BASES = ("pissa", "olora")
"""Initialisations of LoRA that change the base by its weights alone, in the same way at each loading."""


@dataclass(frozen=True, kw_only=True)
class AdapterRule:
    """What is done with adapters whose settings have something in common."""

    settings: str
    """Which settings, for the documentation."""
    treatment: str
    """"separate": the base is loaded once more for the other model; "refused": the adapter is not measured."""
    reason: str
    """Completes "the adapter …" in notes and errors."""
    advice: str = ""
    """What to do where it is refused."""
    changes_base: bool = True
    """Whether the base with the adapter switched off is another model than it was."""
    applies: Callable[[Settings], bool]


def initialisation(settings: Settings) -> str:
    """How a LoRA's weights were initialised; "" for PEFT's defaults."""
    named = settings.get("init_lora_weights")
    return named.lower() if isinstance(named, str) else ""


def kind_of(settings: Settings) -> str:
    """The ``peft_type`` in capitals."""
    kind = settings.get("peft_type")
    return str(getattr(kind, "value", kind)).upper()


RULES: tuple[AdapterRule, ...] = (
    AdapterRule(
        settings="`peft_type` of prompt and prefix tuning: "
        + ", ".join(f"`{kind}`" for kind in sorted(PROMPT_KINDS)),
        treatment="refused",
        reason="adds tokens of its own to the prompt",
        advice="kleash measures adapters that change weights",
        changes_base=False,
        applies=lambda settings: kind_of(settings) in PROMPT_KINDS,
    ),
    AdapterRule(
        settings="`peft_type` " + ", ".join(f"`{kind}`" for kind in sorted(OWN_FORWARD_KINDS)),
        treatment="refused",
        reason="acts through a forward pass of PEFT's own, or lets later tokens change earlier ones",
        advice="kleash measures adapters that change the weights of a causal model",
        changes_base=False,
        applies=lambda settings: kind_of(settings) in OWN_FORWARD_KINDS,
    ),
    AdapterRule(
        settings="any `peft_type` that is not named on this page",
        treatment="refused",
        reason="is of a kind that kleash was not tested with",
        advice="merge it into its base and give that folder",
        changes_base=False,
        applies=lambda settings: kind_of(settings) not in TESTED_KINDS,
    ),
    AdapterRule(
        settings="`alora_invocation_tokens`, `arrow_config`",
        treatment="refused",
        reason="changes weights only after some tokens or by router, through a forward pass of PEFT's own",
        advice="kleash measures adapters that change weights",
        changes_base=False,
        applies=lambda settings: (
            settings.get("alora_invocation_tokens") is not None or settings.get("arrow_config") is not None
        ),
    ),
    AdapterRule(
        settings="`init_lora_weights` "
        + ", ".join(f"`{name}`" for name in (*LOST_BASES[1:], "pissa_niter_…")),
        treatment="refused",
        reason="was trained over a base that its initialisation had changed by random draws or by data, which the "
        "adapter does not hold",
        advice="save it as a plain LoRA, with save_pretrained(…, path_initial_model_for_weight_conversion=…), or merge "
        "it into the base that it was trained over and give that folder",
        applies=lambda settings: initialisation(settings).startswith(LOST_BASES),
    ),
    AdapterRule(
        settings="`init_lora_weights` " + ", ".join(f"`{name}`" for name in REPEATABLE_BASES),
        treatment="separate",
        reason="takes its initial matrices out of the weights of its base",
        applies=lambda settings: initialisation(settings).startswith(REPEATABLE_BASES),
    ),
    AdapterRule(
        settings="`layer_replication`",
        treatment="separate",
        reason="repeats layers of its base",
        applies=lambda settings: bool(settings.get("layer_replication")),
    ),
    AdapterRule(
        settings="a trained `bias`: `all` or `lora_only` and the like",
        treatment="separate",
        reason="has trained biases, which replace those of its base",
        applies=lambda settings: settings.get("bias") not in (None, "none", False),
    ),
)
"""The first that applies counts; an adapter to which none applies shares its base where the proof succeeds."""

BEYOND_LOW_RANK = (
    *("modules_to_save", "trainable_token_indices", "target_parameters", "ensure_weight_tying", "use_qalora"),
    *("velora_config", "kasa_config", "monteclora_config", "use_bdlora"),
)
"""Settings with which two LoRA adapters are not put on one base; nor are adapters of any other kind."""


def rule_of(settings: Settings) -> AdapterRule | None:
    """The rule that applies to an adapter; None if it may share its base."""
    return next((rule for rule in RULES if rule.applies(settings)), None)


def is_plain(settings: Settings) -> bool:
    """Whether an adapter is low-rank matrices beside linear layers, of which a base can carry several."""
    return kind_of(settings) == "LORA" and not any(settings.get(name) for name in BEYOND_LOW_RANK)
