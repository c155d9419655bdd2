"""Options that several jobs share.

A job is a frozen dataclass composed of these groups. The command line is made from its fields: the help of an option is
the string under its field, and a job that gives an option another default repeats the field alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, fields
from typing import Annotated, Any

from kleash.errors import OptionError
from kleash.jobs.options import (
    Allowed,
    Count,
    CountOrZero,
    JsonOption,
    NotNegative,
    Options,
    Positive,
    Refusal,
    changed_options,
    flag,
    one_of,
)
from kleash.jobs.reading import ReadOptions

SHIPPED_POLICY = "shipped:policy"
SHIPPED_REFERENCE = "shipped:reference"
SHIPPED_PROMPTS = "shipped:prompts"
SHIPPED_TEXT = "shipped:text"

RANK_MAPS = ("fsdp", "tensor")
"""Device maps that divide a model over processes."""
OUTPUT_OPTIONS = frozenset({"out", "resume", "quiet", "json", "format", "report_to", "show_reference"})
"""Options that change where a result goes and how it is printed, and not what it is; a gate is kept with a run."""
DEALING_OPTIONS = frozenset({"engine", "address", "workers", "resources_per_worker"})
"""Options that change which process does which part of the work, and not the result."""
REQUEST_OPTIONS = frozenset({"endpoint_concurrency", "endpoint_timeout", "endpoint_retries"})
"""Options of how an inference server is asked, which change no number."""
Probability = Annotated[float, Allowed("above 0 and at most 1", lambda x: 0 < x <= 1)]
POSITIONAL = ("target", "folder", "folders", "rollouts")
OPTION_HEADINGS: Mapping[str, str] = {
    "essentials": "policy candidates reference teacher prompts text responses teacher_cache pairs reward divergence "
    "steps limit max_new_tokens beta controller target_nats rounding at_most out resume",
    "what is read": "split dataset_config prompt_column response_column text_column chat_template "
    "until_relative_error prompts_per_step pairs_per_step eval_prompts eval_reward eval_pairs",
    "KL and beta": "kl kl_place kl_scope mix tail target_per horizon beta_min beta_max early_stop_nats",
    "sampling": "samples_per_prompt temperature top_p top_k min_p seed",
    "text that is read": "window stride max_tokens",
    "updates": "learning_rate lora_rank epochs minibatches clip_range max_gradient_norm gamma gae_lambda whiten "
    "vf_coef clip_range_value ent_coef",
    "attribution of the KL": "attribute attribute_tokens",
    "precision, device and memory": "dtype device device_map batch_tokens reference_cache",
    "hidden states of an engine": "from_hidden_states layers",
    "endpoints": "policy_model reference_model top_logprobs endpoint_concurrency endpoint_timeout "
    "endpoint_retries",
    "loading": "tokenizer revision_policy revision_reference trust_remote_code",
    "workers of a Ray cluster": "engine address workers resources_per_worker",
    "running and output": "checkpoint_every on_hacking report_to metric_names direction show_reference json format "
    "picture quiet",
}
"""Headings of the help and the fields under each, in order. A field that is missing stands under "options"."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions(JsonOption):
    """Where results go, and what is printed."""

    out: str | None = None
    """Folder for the results; kleash-runs/<date-time> if not given."""
    quiet: bool = False
    """Print nothing but errors."""


@dataclass(frozen=True, kw_only=True)
class SeedOption(Options):
    """The seed of a job that draws."""

    seed: Annotated[int, Allowed("a whole number from 0 to 2^63 - 1", lambda n: 0 <= n < 2**63)] = 0
    """Seed of every random draw."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    """Where a model runs, and whether its own code may."""

    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto is the first GPU of CUDA or ROCm if there is one."""
    dtype: Annotated[str, one_of(("auto", "float32", "bfloat16", "float16", "float64"))] = "auto"
    """float32, bfloat16, float16 or float64; auto is float32 on a CPU, elsewhere that of the checkpoint."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model. It can do anything that you can do."""


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(DeviceOptions):
    """How models are loaded and run."""

    batch_tokens: Count = 4096
    """Tokens that go through a model at once, padding counted."""


@dataclass(frozen=True, kw_only=True)
class Loading(DeviceOptions):
    """How policy and reference are loaded, alike."""

    device_map: str | None = None
    """Spread a model over several devices as transformers does: auto, balanced, sequential. For "measure" with
    torchrun also over its processes: fsdp (each stores a part of every weight) or tensor (each computes a part of
    every layer)."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer that reads the source where a model is a GGUF file or behind a server; that of
    the other model if not given. Both must have the same tokens."""


@dataclass(frozen=True, kw_only=True)
class ScoringOptions(Loading, LoadingOptions, OutputOptions, ReadOptions):
    """What is read, for jobs that score sequences without training."""

    reference: str = SHIPPED_REFERENCE
    """The model that policies are compared with, the q of KL(p ‖ q): a folder, a hub id, a PEFT adapter's
    folder, or a GGUF file (also as owner/name:file.gguf of the hub); for "measure" also the address of an inference
    server."""
    revision_reference: str | None = None
    """Branch, tag or commit of the reference on the hub."""
    text: str | None = None
    """Source: JSONL, a JSON array, CSV, Parquet or Arrow with "text", or plain text with a blank line between
    documents, perhaps compressed (.gz, .zst); a data set's folder or user/name on the hub; - is standard input. The
    models read it."""
    responses: str | None = None
    """Source with prompts and responses that were already generated, in any of these formats but plain text."""
    window: Count | None = None
    """Tokens that a model reads at once, for --text; 2048, or what the models can read, if not given."""
    stride: Count | None = None
    """Tokens from one window to the next, for --text; less than the window gives each token more context."""

    def _refusals(self) -> Iterable[Refusal]:
        tokenizer = self.tokenizer or ""
        return (
            Refusal(
                "://" in tokenizer,
                f"--tokenizer {shown_endpoint(tokenizer)} is an address; give the tokenizer's folder, or its name on "
                "the hub (owner/name)",
            ),
            Refusal(
                self.stride is not None and self.stride > (self.window or self.stride),
                f"--stride {self.stride} would leave tokens out between windows of {self.window}",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class EndpointOptions(Options):
    """How a model behind an inference server is asked."""

    policy_model: str | None = None
    """Name of the policy on its server; if not given, the only model that the server lists."""
    reference_model: str | None = None
    """Name of the reference on its server; if not given, the only model that the server lists."""
    top_logprobs: Count = 20
    """Likeliest tokens that the server lists at each position. More of them make the bounds tighter; a server may
    allow 20 at most."""
    endpoint_concurrency: Annotated[Count, Allowed("at most 256", lambda n: n <= 256)] = 8
    """Requests that are sent to the server at once."""
    endpoint_timeout: Positive = 60.0
    """Seconds to wait for a server's connection, and for the next bytes of its answer."""
    endpoint_retries: CountOrZero = 5
    """Times that a request is sent again after a passing fault, with growing pauses."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """Which workers score the shards of a run."""

    engine: Annotated[str, one_of(("local", "ray"))] = "local"
    """local scores in this process, or in those that torchrun started; ray in the workers of a Ray cluster."""
    address: str | None = None
    """The Ray cluster: host:port, ray://host:port, or auto for the one on this machine. If not given, that of
    RAY_ADDRESS, or else one that is started here for this run."""
    workers: Count | None = None
    """Workers on the Ray cluster, each with both models; as many as it has room for if not given."""
    resources_per_worker: str | None = None
    """What a worker reserves on its node of the Ray cluster, such as gpu=1 or cpu=8,memory=64e9; gpu=1 if not given
    and there are GPUs, otherwise cpu=1."""

    def _refusals(self) -> Iterator[Refusal]:
        for name in changed_options(self, ("address", "workers", "resources_per_worker")):
            yield Refusal(
                self.engine != "ray",
                f"{flag(name)} is for --engine ray; add that, or leave {flag(name)} out",
            )
        if self.resources_per_worker is not None:
            parse_resources(self.resources_per_worker)  # raises an error of its own

    def reserved(self, *, has_gpus: bool) -> dict[str, float]:
        """What a worker reserves on its node, by Ray's names: as asked for, or a CPU, and a GPU if there are any."""
        amounts = parse_resources(self.resources_per_worker) if self.resources_per_worker is not None else {}
        cpu = amounts.pop("cpu", 1.0)
        gpu = amounts.pop("gpu", float(has_gpus and self.resources_per_worker is None))
        return {name: x for name, x in {"CPU": cpu, "GPU": gpu, **amounts}.items() if x > 0}


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
    has_more = "//" in address and any(character in address for character in "@?#")
    return f"{address.partition('//')[0]}//…" if has_more else address


def is_gguf(name: str) -> bool:
    """Whether a model is named by a GGUF file."""
    return name.lower().endswith(".gguf")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SeedOption):
    """How responses are generated."""

    samples_per_prompt: Count = 1
    """Responses drawn for each prompt."""
    max_new_tokens: Count = 256
    """Tokens after which a response is cut off."""
    temperature: float = 1.0
    """Divides the logits of both models, where responses are drawn and where they are scored."""


@dataclass(frozen=True, kw_only=True)
class Sampling(GenerationOptions):
    """How responses are drawn."""

    temperature: NotNegative = 1.0
    """Divides the logits of both models. At 0 the policy decodes greedily and both are scored at 1."""
    top_p: Probability | None = None
    """Draw only from the likeliest tokens that together hold this probability."""
    top_k: Count | None = None
    """Draw only from so many of the likeliest tokens."""
    min_p: Probability | None = None
    """Draw only from tokens at least this fraction as likely as the likeliest."""


def in_order_of_help(job: type) -> list["Field[Any]"]:
    """The fields of a job in the order of its help, which is also that of the commands in reports."""
    names = [*POSITIONAL, *(name for names in OPTION_HEADINGS.values() for name in names.split())]
    places = {name: place for place, name in enumerate(names)}
    return sorted(fields(job), key=lambda field: places.get(field.name, len(places)))
