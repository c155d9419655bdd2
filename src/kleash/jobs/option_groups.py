"""Options that several jobs share, and the checks of their values.

A job is a frozen dataclass composed of these groups. The command line is made from its fields: the help of an option is
the string under its field, and a job that gives an option another default repeats the field alone.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from operator import index
from pathlib import PurePath
from types import NoneType
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, get_args, get_origin

from kleash.errors import OptionError
from kleash.jobs.reading import ReadOptions, check_read_options
from kleash.registry import look_up

JobT = TypeVar("JobT")

SHIPPED_POLICY = "shipped:policy"
SHIPPED_REFERENCE = "shipped:reference"
SHIPPED_PROMPTS = "shipped:prompts"
SHIPPED_TEXT = "shipped:text"

TYPE_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    tuple: "a tuple of texts",
}
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
ENGINES = ("local", "ray")
RANK_MAPS = ("fsdp", "tensor")
"""Device maps that divide a model over processes."""
OUTPUT_OPTIONS = frozenset({"out", "resume", "at_most", "direction", "quiet", "json", "format", "report_to"})
"""Options that change where a result goes, or what is done with it, and not what it is."""
DEALING_OPTIONS = frozenset({"engine", "address", "workers", "resources_per_worker"})
"""Options that change which process does which part of the work, and not the result."""
REQUEST_OPTIONS = frozenset({"endpoint_concurrency", "endpoint_timeout", "endpoint_retries"})
"""Options of how an inference server is asked, which change no number."""
POSITIONAL = ("target", "folder", "folders", "rollouts")
OPTION_HEADINGS: Mapping[str, str] = {
    "essentials": "policy candidates reference teacher prompts text responses pairs reward steps rounding out",
    "what is read": "limit split dataset_config prompt_column response_column text_column chat_template "
    "until_relative_error prompts_per_step pairs_per_step eval_prompts",
    "KL and beta": "kl kl_place kl_scope divergence mix tail beta controller target_nats target_per horizon beta_min "
    "beta_max early_stop_nats",
    "sampling": "samples_per_prompt max_new_tokens temperature top_p top_k min_p seed",
    "text that is read": "window stride max_tokens",
    "updates": "learning_rate lora_rank epochs minibatches clip_range max_gradient_norm gamma gae_lambda whiten "
    "vf_coef clip_range_value ent_coef",
    "attribution of the KL": "attribute attribute_tokens",
    "precision, device and memory": "dtype device device_map batch_tokens reference_cache teacher_cache",
    "hidden states of an engine": "from_hidden_states layers",
    "endpoints": "policy_model reference_model top_logprobs endpoint_concurrency endpoint_timeout "
    "endpoint_retries",
    "loading": "tokenizer revision_policy revision_reference trust_remote_code",
    "workers of a Ray cluster": "engine address workers resources_per_worker",
    "running and output": "resume checkpoint_every on_hacking report_to metric_names at_most direction json "
    "format picture quiet",
}
"""Headings of the help and the fields under each, in order. A field that is missing stands under "options"."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options of every job that loads a model."""

    device: str = "auto"
    """cpu, cuda, cuda:1, mps …; auto is the first GPU if there is one."""
    out: str | None = None
    """Folder for the results; kleash-runs/<date-time> if not given."""
    quiet: bool = False
    """Print nothing but errors."""
    json: bool = False
    """Print the result as JSON instead of a summary."""

    def __post_init__(self) -> None:
        """Check types and values.

        Raises:
            OptionError: naming the option, its value and what it may be.
        """
        check_option_types(self)

    def _at_least_1(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{flag(name)} must be at least 1; it is {value}")

    def _at_most(self, most: float | int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value > most:
                raise OptionError(f"{flag(name)} must be at most {most:,g}; it is {value}".replace(",", " "))

    def _above_0(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise OptionError(f"{flag(name)} must be a number above 0; it is {value}")

    def _one_of(self, name: str, words: Sequence[str]) -> None:
        require_word(flag(name), getattr(self, name), words)


@dataclass(frozen=True, kw_only=True)
class SeedOption(Job):
    """The seed of a job that draws."""

    seed: int = 0
    """Seed of every random draw."""

    def __post_init__(self) -> None:
        """Check types and values; raises OptionError."""
        super().__post_init__()
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"--seed must be a whole number from 0 to 2^63 - 1; it is {self.seed}")


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(Job):
    """How models are loaded and run."""

    dtype: str = "auto"
    """float32, bfloat16, float16 or float64; auto is float32 on a CPU, elsewhere that of the checkpoint."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model. It can do anything that you can do."""
    batch_tokens: int = 4096
    """Tokens that go through a model at once, padding counted."""

    def __post_init__(self) -> None:
        """Check types and values; raises OptionError."""
        super().__post_init__()
        self._at_least_1("batch_tokens")
        self._one_of("dtype", DTYPES)


@dataclass(frozen=True, kw_only=True)
class ScoringOptions(LoadingOptions, ReadOptions):
    """What is read, for jobs that score sequences without training."""

    reference: str = SHIPPED_REFERENCE
    """The model that policies are compared with, the q of KL(p ‖ q): a folder, a hub id, a PEFT adapter's
    folder, or a GGUF file (also as owner/name:file.gguf of the hub); for "measure" also the address of an inference
    server."""
    revision_reference: str | None = None
    """Branch, tag or commit of the reference on the hub."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer that reads the source where a model is a GGUF file or behind a server; that of
    the other model if not given. Both must have the same tokens."""
    text: str | None = None
    """Source: JSONL, a JSON array, CSV, Parquet or Arrow with "text", or plain text with a blank line between
    documents, perhaps compressed (.gz, .zst); a data set's folder or user/name on the hub; - is standard input. The
    models read it."""
    responses: str | None = None
    """Source with prompts and responses that were already generated, in any of these formats but plain text."""
    device_map: str | None = None
    """Spread a model over several devices as transformers does: auto, balanced, sequential. For "measure" with
    torchrun also over its processes: fsdp (each stores a part of every weight) or tensor (each computes a part of
    every layer)."""
    window: int | None = None
    """Tokens that a model reads at once, for --text; 2048, or what the models can read, if not given."""
    stride: int | None = None
    """Tokens from one window to the next, for --text; less than the window gives each token more context."""

    def __post_init__(self) -> None:
        """Check types and values; raises OptionError."""
        super().__post_init__()
        self._at_least_1("window", "stride")
        require_folder_or_hub_id("--tokenizer", self.tokenizer)
        check_read_options(self)
        if self.stride is not None and self.stride > (self.window or self.stride):
            raise OptionError(
                f"--stride {self.stride} would leave tokens out between windows of {self.window}"
            )


@dataclass(frozen=True, kw_only=True)
class EndpointOptions(Job):
    """How a model behind an inference server is asked."""

    policy_model: str | None = None
    """Name of the policy on its server; if not given, the only model that the server lists."""
    reference_model: str | None = None
    """Name of the reference on its server; if not given, the only model that the server lists."""
    top_logprobs: int = 20
    """Likeliest tokens that the server lists at each position. More of them make the bounds tighter; a server may
    allow 20 at most."""
    endpoint_concurrency: int = 8
    """Requests that are sent to the server at once."""
    endpoint_timeout: float = 60.0
    """Seconds to wait for a server's connection, and for the next bytes of its answer."""
    endpoint_retries: int = 5
    """Times that a request is sent again after a passing fault, with growing pauses."""

    def __post_init__(self) -> None:
        """Check types and values; raises OptionError."""
        super().__post_init__()
        self._at_least_1("top_logprobs", "endpoint_concurrency")
        self._at_most(256, "endpoint_concurrency")
        self._above_0("endpoint_timeout")
        if self.endpoint_retries < 0:
            raise OptionError(f"--endpoint-retries must be at least 0; it is {self.endpoint_retries}")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Job):
    """Which workers score the shards of a run."""

    engine: str = "local"
    """local scores in this process, or in those that torchrun started; ray in the workers of a Ray cluster."""
    address: str | None = None
    """The Ray cluster: host:port, ray://host:port, or auto for the one on this machine. If not given, that of
    RAY_ADDRESS, or else one that is started here for this run."""
    workers: int | None = None
    """Workers on the Ray cluster, each with both models; as many as it has room for if not given."""
    resources_per_worker: str | None = None
    """What a worker reserves on its node of the Ray cluster, such as gpu=1 or cpu=8,memory=64e9; gpu=1 if not given
    and there are GPUs, otherwise cpu=1."""

    def __post_init__(self) -> None:
        """Check types and values; raises OptionError."""
        super().__post_init__()
        self._one_of("engine", ENGINES)
        self._at_least_1("workers")
        if self.engine != "ray":
            for name in changed_options(self, ("address", "workers", "resources_per_worker")):
                raise OptionError(f"{flag(name)} is for --engine ray; add that, or leave {flag(name)} out")
        if self.resources_per_worker is not None:
            parse_resources(self.resources_per_worker)


def parse_resources(text: str) -> dict[str, float]:
    """The amounts of ``--resources-per-worker`` by the names of resources: {"cpu": 4.0, "gpu": 1.0}.

    Raises:
        OptionError: if it is not of the form name=number,name=number.
    """
    amounts: dict[str, float] = {}
    for entry in text.split(","):
        name, _, number = (part.strip() for part in entry.partition("="))
        try:
            amounts[name.lower() if name.lower() in ("cpu", "gpu") else name] = float(number)
        except ValueError as error:
            raise OptionError(
                f"--resources-per-worker takes amounts such as gpu=1 or cpu=4,memory=16e9; it is {text!r}"
            ) from error
    return amounts


def is_endpoint(name: str) -> bool:
    """Whether a model is named by the address of an inference server."""
    return name.lower().startswith(("http://", "https://"))


def shown_endpoint(address: str) -> str:
    """A server's address for an error, with an ellipsis in place of what may hold a password or a key."""
    has_more = any(character in address for character in "@?#")
    return f"{address.partition('//')[0]}//…" if has_more else address


def require_folder_or_hub_id(name: str, value: str | None) -> None:
    """Check that an option that names a tokenizer is not an address.

    Raises:
        OptionError: if it is; the error does not show what may hold a password.
    """
    if value is not None and "://" in value:
        raise OptionError(
            f"{name} {shown_endpoint(value)} is an address; give the tokenizer's folder, or its name on the hub "
            "(owner/name)"
        )


def is_gguf(name: str) -> bool:
    """Whether a model is named by a GGUF file."""
    return name.lower().endswith(".gguf")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SeedOption):
    """How responses are generated."""

    samples_per_prompt: int = 1
    """Responses drawn for each prompt."""
    max_new_tokens: int = 256
    """Tokens after which a response is cut off."""
    temperature: float = 1.0
    """Divides the logits of both models, where responses are drawn and where they are scored."""

    def __post_init__(self) -> None:
        """Check types and values; raises OptionError."""
        super().__post_init__()
        self._at_least_1("samples_per_prompt", "max_new_tokens")


def in_order_of_help(job: type) -> list["Field[Any]"]:
    """The fields of a job in the order of its help, which is also that of the commands in reports."""
    names = [*POSITIONAL, *(name for names in OPTION_HEADINGS.values() for name in names.split())]
    places = {name: place for place, name in enumerate(names)}
    return sorted(fields(job), key=lambda field: places.get(field.name, len(places)))


def flag(name: str) -> str:
    """The option of a field, as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def require_word(name: str, word: str, words: Sequence[str]) -> None:
    """Check that an option has one of the values it allows.

    Raises:
        OptionError: if not.
    """
    if word not in words:
        raise OptionError(f"{name} must be one of {', '.join(words)}; it is {word!r}")


def require_limit(at_most: Any) -> None:
    """Check the limit of ``--at-most``.

    Raises:
        OptionError: if it is not a number of at least 0, or None.
    """
    is_number = isinstance(at_most, int | float) and not isinstance(at_most, bool)
    if at_most is not None and not (is_number and 0 <= at_most < math.inf):
        raise OptionError(f"--at-most must be a number of nats, at least 0; it is {at_most!r}")


def job_of(kind: type[JobT], options: Mapping[str, Any]) -> JobT:
    """The job of options that were given as keyword arguments.

    Raises:
        UnknownNameError: if there is no option of a name, with the nearest.
        OptionError: if a value is not allowed.
    """
    names = dict.fromkeys(inspect.signature(kind).parameters)
    for name in options:
        look_up(names, name, "option")
    return kind(**options)


def changed_options(job: Any, names: Iterable[str]) -> list[str]:
    """Those of ``names`` whose fields of the job do not have their default."""
    defaults = {field.name: field.default for field in fields(job)}
    return [name for name in names if getattr(job, name) != defaults[name]]


def check_option_types(job: Any) -> None:
    """Give each field of a job the type that its annotation says, or refuse it.

    A ``Path`` becomes the text that it is on the command line and in records, a list a tuple, a NumPy integer an int.

    Raises:
        OptionError: naming the option, what it was and what it may be.
    """
    for field in fields(job):
        value = getattr(job, field.name)
        # In Python 3.10 and later both spellings of a union give their members to get_args.
        union = () if get_origin(field.type) is tuple else get_args(field.type)
        types = tuple(get_origin(kind) or kind for kind in (union or (field.type,)))
        if value is None and NoneType in types:
            continue
        object.__setattr__(job, field.name, _converted(field.name, value, types))


def _converted(name: str, value: Any, types: tuple[Any, ...]) -> Any:
    """``value`` as the first of the types that takes it; NaN and infinity pass, and each job refuses them by itself."""
    option = "--" + name.replace("_", "-")
    for kind in types:
        if kind is tuple and (texts := _texts(value)) is not None:
            return texts
        if kind is str and isinstance(value, str | PurePath):
            return str(value)
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and not isinstance(value, bool) and isinstance(value, SupportsIndex):
            return index(value)
        if kind is float and not isinstance(value, bool | str) and isinstance(value, SupportsFloat):
            return value if isinstance(value, int | float) else float(value)
    expected = " or ".join("None" if kind is NoneType else TYPE_NAMES.get(kind, str(kind)) for kind in types)
    raise OptionError(
        f"{option} must be {expected}; it is {str(value)[:60]!r}, of type {type(value).__name__}"
    )


def _texts(value: Any) -> tuple[str, ...] | None:
    """A list or tuple of texts as a tuple; None of anything else."""
    if type(value) not in (list, tuple) or not all(isinstance(entry, str) for entry in value):
        return None
    return tuple(value)
