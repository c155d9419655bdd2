"""Generation settings of TRL under which responses are not samples of the policy that is trained."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kleash.errors import OptionError
from kleash.losses import KLTerm

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "top_p": (None, 1, 1.0),
        "top_k": (None, 0, -1),
        "min_p": (None, 0, 0.0),
        "repetition_penalty": (None, 1, 1.0),
        "do_sample": (None, True),
        "typical_p": (None, 1, 1.0),
        "top_h": (None,),
        "epsilon_cutoff": (None, 0, 0.0),
        "eta_cutoff": (None, 0, 0.0),
        "encoder_repetition_penalty": (None, 1, 1.0),
        "presence_penalty": (None, 0, 0.0),
        "frequency_penalty": (None, 0, 0.0),
        "no_repeat_ngram_size": (None, 0),
        "encoder_no_repeat_ngram_size": (None, 0),
        "bad_words_ids": (None, []),
        "bad_words": (None, []),
        "suppress_tokens": (None, []),
        "begin_suppress_tokens": (None, []),
        "allowed_token_ids": (None,),
        "logit_bias": (None, {}),
        "logits_processors": (None, []),
        "sequence_bias": (None,),
        "forced_bos_token_id": (None,),
        "forced_eos_token_id": (None,),
        "exponential_decay_length_penalty": (None,),
        "guidance_scale": (None, 1, 1.0),
        "watermarking_config": (None,),
        "penalty_alpha": (None, 0, 0.0),
        "num_beams": (None, 1),
        "min_length": (None, 0),
        "min_new_tokens": (None, 0),
        "min_tokens": (None, 0),
        "structured_outputs": (None,),
        "guided_decoding": (None,),
        "vllm_structured_outputs_regex": (None,),
    }
)
"""Setting -> the values with which responses are samples of the policy."""
TRL_SETTINGS = ("top_p", "top_k", "min_p", "repetition_penalty", "vllm_structured_outputs_regex")


def require_policy_samples(term: KLTerm, trainer: Any) -> None:
    """Check that a KL which is estimated from samples gets samples of the policy.

    The exact KL of scope "token" may be used with any samples: it is a sum over the vocabulary.

    Args:
        term: the KL term of the trainer.
        trainer: TRL's trainer, after its ``__init__``.

    Raises:
        OptionError: naming a setting that changes the distribution of the samples.
    """
    if trainer.beta == 0 or (term.estimator == "exact" and term.scope == "token"):
        return
    what = (
        "the KL after each token"
        if term.estimator == "exact"
        else f"the KL that {term.estimator} estimates from them"
    )
    for name, value in _changed_settings(trainer).items():
        raise OptionError(
            f"{name} is {value!r}, so tokens are drawn from another distribution than the policy's, and "
            f"{what} is no longer that of the policy; leave {name} out, or take kl='exact' with "
            "kl_scope='token'"
        )


def _changed_settings(trainer: Any) -> dict[str, Any]:
    """The settings that change the distribution of the samples: what an error calls each, and its value."""
    args = trainer.args
    neutral = {**NEUTRAL, "temperature": (args.temperature,)}
    generation_kwargs = args.generation_kwargs if isinstance(args.generation_kwargs, Mapping) else {}
    settings = {name: (name, getattr(args, name, None)) for name in TRL_SETTINGS}
    settings |= {f"generation_kwargs[{name!r}]": (name, value) for name, value in generation_kwargs.items()}
    if not args.use_vllm:
        checkpoint = getattr(trainer.accelerator.unwrap_model(trainer.model), "generation_config", None)
        settings |= {
            f"the checkpoint's generation_config.{name}": (name, getattr(checkpoint, name, None))
            for name in NEUTRAL
            if name not in (*TRL_SETTINGS, "do_sample", *generation_kwargs)  # which TRL sets itself
        }
    return {
        title: value
        for title, (name, value) in settings.items()
        if name in neutral and value not in neutral[name]
    }
