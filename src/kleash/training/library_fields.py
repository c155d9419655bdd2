"""Fields of TRL's and PEFT's configurations that a job sets by name: ``--set FIELD=VALUE``."""

import json
import re
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kleash.errors import KleashError, OptionError, summarise_error
from kleash.extras import hub_errors, import_extra
from kleash.jobs import TrainJob
from kleash.jobs.options import TYPE_NAMES, flag
from kleash.registry import look_up

CONFIGURATIONS: Mapping[str, str] = MappingProxyType(
    {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "dpo": "DPOConfig", "distill": "DistillationConfig"}
)
"""Algorithm -> the configuration class of TRL's trainer."""
LIBRARIES = {
    "trl": "TRL",
    "peft": "PEFT",
    "transformers": "transformers",
    "accelerate": "Accelerate",
    "huggingface_hub": "huggingface_hub",
}
"""Package that has the fields, or reads them -> its name."""
LORA = "lora."
"""Prefix of the fields of PEFT's LoraConfig."""
OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "output_dir": ("out",),
        "per_device_train_batch_size": ("batch_tokens",),
        "gradient_accumulation_steps": ("batch_tokens",),
        "auto_find_batch_size": ("batch_tokens",),
        "generation_batch_size": ("prompts_per_step",),
        "steps_per_generation": ("prompts_per_step",),
        "max_steps": ("steps",),
        "num_train_epochs": ("steps",),
        "num_iterations": ("epochs",),
        "save_steps": ("checkpoint_every",),
        "save_strategy": ("checkpoint_every",),
        "learning_rate": ("learning_rate",),
        "seed": ("seed",),
        "shuffle_dataset": ("seed",),
        "bf16": ("dtype",),
        "fp16": ("dtype",),
        "use_cpu": ("device",),
        "model_init_kwargs": ("dtype",),
        "trust_remote_code": ("trust_remote_code",),
        "report_to": ("report_to",),
        "run_name": ("out",),
        "disable_tqdm": ("quiet",),
        "resume_from_checkpoint": ("resume",),
        "beta": ("beta", "divergence"),
        "temperature": ("temperature",),
        "num_generations": ("samples_per_prompt",),
        "max_completion_length": ("max_new_tokens",),
        "max_length": ("max_tokens",),
        "reward_weights": ("reward",),
        "use_bias_correction_kl": ("kl",),
        "teacher_model_name_or_path": ("teacher",),
        "teacher_model_revision": ("teacher",),
        "teacher_model_init_kwargs": ("teacher",),
        "lora.r": ("lora_rank",),
    }
)
"""Field -> the job's options that it would contradict; the first that a job has is to be used instead."""
_LOGS = "a step of the run log is one log of the trainer"
_RESUMED = "a run that is resumed would differ from one that was not interrupted"
_TRUNCATED = "the responses would not be samples of the policy, whose KL is estimated from them"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "sync_ref_model=True": "it moves the reference, to which the KL is measured and held; for one that moves, take "
        "kleash.integrations.trl in a program of your own",
        "use_liger_kernel=True": "it replaces layers of the policy and not of the reference, so that two equal models "
        "would have a KL above 0",
        "logging_steps": _LOGS,
        "logging_strategy": _LOGS,
        "logging_first_step=True": _LOGS,
        **dict.fromkeys(
            ("project", "trackio_space_id"),
            "kleash opens the trackers of --report-to itself: their project is kleash, their run called as --out, "
            "unless WANDB_PROJECT, WANDB_NAME or MLFLOW_EXPERIMENT_NAME says otherwise",
        ),
        "label_smoothing_factor": "no loss of TRL's trainers reads it; dpo has label_smoothing",
        "logging_nan_inf_filter=True": "a loss that is NaN would be written as 0",
        "remove_unused_columns": "rewards read the columns of the prompts",
        "chat_template_kwargs": "the prompts have a column of this name, an object, which kleash measure reads too",
        "save_only_model=True": _RESUMED,
        "ignore_data_skip=True": _RESUMED,
        "neftune_noise_alpha": "with noise, the policy that is trained is not the one that is measured",
        "disable_dropout=False": "with dropout, the policy that is trained is not the one that is measured",
        "lora.lora_dropout": "with dropout, the policy that is trained is not the one that generated",
        "lora.monteclora_config": "with its draws, the policy that is trained is not the one that is measured",
        "lora.inference_mode=True": "the adapter would not be trained",
        "lora.init_lora_weights=eva": "PEFT takes its directions from data in a call of its own, without which it is "
        "a plain LoRA",
        "lora.task_type": "a policy is a causal language model",
    }
)
"""Field, or field=value, -> why it cannot be set."""
REFUSED_WITH: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "kl_place": {
            **dict.fromkeys(
                ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"), _TRUNCATED
            ),
            "vllm_structured_outputs_regex": _TRUNCATED,
        },
        "prompts_per_step": {
            "train_sampling_strategy": "every epoch of the prompts has an order of its own, which follows from --seed"
        },
    }
)
"""Option -> field -> why it cannot be set in a job with that option: the first is of those whose KL is estimated from
the responses of the policy."""


READERS: Mapping[type, Callable[[str], Any]] = MappingProxyType(
    {
        NoneType: {"None": None}.__getitem__,
        bool: lambda text: {"true": True, "false": False}[text.lower()],
        int: int,
        float: float,
        list: json.loads,
        tuple: json.loads,
        dict: json.loads,
    }
)
"""Type of a field -> the function that reads its value from text, in the order in which they are tried."""
JSON_NAMES = {list: 'a list as JSON, such as ["a"]', tuple: "a list as JSON", dict: "an object as JSON"}


def set_fields(job: TrainJob) -> dict[str, Any]:
    """The fields of TRL's configuration, and ``lora.`` those of PEFT's, that a job sets, with values of their types.

    Raises:
        OptionError: if a field contradicts an option of the job, would break the KL, or has a value of another type.
        UnknownNameError: if the installed library has no such field.
    """
    values: dict[str, Any] = {}
    for entry in job.set:
        name, equals, text = (part.strip() for part in entry.partition("="))
        if not (name and equals):
            raise OptionError(f"--set takes FIELD=VALUE, such as loss_type=dr_grpo; it is {entry!r}")
        if name in values:
            raise OptionError(f"--set {name} is given twice: {values[name]} and {text}")
        configuration = _configuration(job, name)
        hints = get_type_hints(configuration)
        known = {field.name: hints[field.name] for field in fields(configuration) if field.init}
        hint = look_up(known, name.removeprefix(LORA), f"field of {configuration.__name__}")
        reason = _refusal(job, name)
        if reason is None:
            values[name] = _value(name, text, hint)
            reason = REFUSED.get(f"{name}={values[name]}")
        if reason is not None:
            raise OptionError(f"--set {entry}: {reason}")
    return values


def trl_config(job: TrainJob, **arguments: Any) -> Any:
    """TRL's configuration of the job's algorithm: ``arguments``, and in their place what the job sets by name.

    Raises:
        OptionError, UnknownNameError: as ``set_fields``.
    """
    settings = arguments | {
        name: value for name, value in set_fields(job).items() if not name.startswith(LORA)
    }
    if settings["save_total_limit"] == 1 and "metric_for_best_model" in settings:
        # of one, transformers deletes the last at the end if another is the best
        settings["save_total_limit"] = 2
    updates = settings.get("num_iterations", 1)
    if updates > 1 and (settings.get("eval_steps") or 0) % updates:
        raise OptionError(
            f"--set eval_steps counts updates, and a step has {updates} (--epochs); give a multiple"
        )
    return getattr(import_extra("trl", "trl"), CONFIGURATIONS[job.algorithm])(**settings)


@contextmanager
def refused_fields(job: TrainJob) -> Generator[None]:
    """Context in which an error that a library raises about fields that the job sets is one sentence.

    Libraries check a field where they read it: in a configuration, in a trainer, with the first batch. Errors are taken
    for those if the job sets fields, and kleash had called the library that raised.

    Raises:
        OptionError: with the library's error.
    """
    try:
        yield
    except (ValueError, TypeError, ImportError, LookupError, AttributeError, *hub_errors()) as error:
        packages = [
            str(frame.f_globals.get("__name__")).partition(".")[0]
            for frame, _ in traceback.walk_tb(error.__traceback__)
        ]
        called = packages[len(packages) - packages[::-1].index("kleash") :]
        if isinstance(error, KleashError) or not job.set or not LIBRARIES.keys() & called[:1]:
            raise
        raise OptionError(
            f"{[LIBRARIES[package] for package in called if package in LIBRARIES][-1]} refuses the values of --set "
            f"{', '.join(job.set)}: {summarise_error(error)}"
        ) from error


def _configuration(job: TrainJob, name: str) -> Any:
    """The class that has a field: PEFT's LoraConfig, or TRL's configuration of the job's algorithm.

    Raises:
        OptionError: if the job makes no such configuration.
    """
    if name.startswith(LORA):
        if not job.lora_rank:
            raise OptionError(f"--set {name} needs an adapter: give --lora-rank")
        return import_extra("peft", "models").LoraConfig
    if job.algorithm not in CONFIGURATIONS:
        raise OptionError(
            f"--set {name} is a field of TRL, and {job.algorithm} is kleash's own; it takes fields of its LoRA "
            "adapter, lora.FIELD=VALUE"
        )
    return getattr(import_extra("trl", "trl"), CONFIGURATIONS[job.algorithm])


def _refusal(job: TrainJob, name: str) -> str | None:
    """Why a job does not take a field, and what to use instead; None if it does."""
    for option in OPTIONS.get(name, ()):
        if hasattr(job, option):
            return f"{flag(option)} decides this; give that"
    held_out = [option for option in ("eval_prompts", "eval_pairs") if hasattr(job, option)]
    if "eval" in name and not any(getattr(job, option) for option in held_out):
        return "nothing is held out to be evaluated" + "".join(
            f"; give {flag(option)}" for option in held_out
        )
    return REFUSED.get(name) or next(
        (fields[name] for option, fields in REFUSED_WITH.items() if hasattr(job, option) and name in fields),
        None,
    )


def _value(name: str, text: str, hint: Any) -> Any:
    """The value of a field as its type says; the first of several types that takes the text.

    Raises:
        OptionError: if none does.
    """
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds: list[Any] = [dict if is_dataclass(each) else get_origin(each) or each for each in members]
    for kind in filter(kinds.__contains__, READERS):
        with suppress(ValueError, KeyError):
            value = READERS[kind](text)
            if isinstance(value, list if kind is tuple else kind):
                return tuple(value) if kind is tuple else value
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    # pissa_niter_[number of iters]
    if str in kinds or any(fnmatchcase(text, re.sub(r"\[.*]", "[0-9]*", str(word))) for word in words):
        return text
    names = [JSON_NAMES.get(kind, TYPE_NAMES.get(kind, "")) for kind in kinds]
    expected = " or ".join(filter(None, [*dict.fromkeys(names), ", ".join(map(str, words))]))
    raise OptionError(f"--set {name} takes {expected}; it is {text!r}")
