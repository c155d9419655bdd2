"""A measurement or sweep from Python: its options as keywords, and sources and models that are in memory."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, TypeAlias, TypeVar

import torch

from kleash.errors import OptionError
from kleash.jobs import MeasureJob, SweepJob
from kleash.jobs.option_groups import SHIPPED_POLICY, SHIPPED_REFERENCE
from kleash.jobs.options import job_of
from kleash.jobs.output_options import DIRECTION_OF_SWEEPS
from kleash.jobs.reading import SourceKind
from kleash.launch_environment import require_one_process
from kleash.measuring.live_pair import live_pair, load_beside_live
from kleash.measuring.progress import ProgressReporter
from kleash.models import Model, Pair, at_rest
from kleash.models.live_models import checked_language_model
from kleash.models.tokenizers import load_named_tokenizer
from kleash.sources.in_memory import naming_entries, write_source
from kleash.store.job_folder import SOURCE

JobT = TypeVar("JobT", MeasureJob, SweepJob)
Source: TypeAlias = str | PurePath | Iterable[Any] | Sized
"""The name of a source, or data that ``records_in_memory`` reads; a table of Arrow has a length only."""

KINDS: tuple[SourceKind, ...] = ("prompts", "text", "responses")
ROLES = ("policy", "reference")
OF_FILES = ("resume", "engine", "device", "device_map", "dtype", "reference_cache")
"""Options that a run has no use for if one of its models is in memory."""


# Many parameters, since they are the fields of a job, in the order of its help; all but two by keyword.
def measure_parameters(
    job: MeasureJob | None = None,
    reporter: ProgressReporter | None = None,
    *,
    policy: str | PurePath | torch.nn.Module = SHIPPED_POLICY,
    reference: str | PurePath | torch.nn.Module | None = SHIPPED_REFERENCE,
    prompts: Source | None = None,
    text: Source | None = None,
    responses: Source | None = None,
    limit: int | None = None,
    max_new_tokens: int = 256,
    at_most: float | None = None,
    out: str | PurePath | None = None,
    resume: bool = False,
    split: str | None = None,
    dataset_config: str | None = None,
    prompt_column: str | None = None,
    response_column: str | None = None,
    text_column: str | None = None,
    chat_template: str | None = None,
    until_relative_error: float | None = None,
    samples_per_prompt: int = 1,
    temperature: float = 1.0,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int = 0,
    window: int | None = None,
    stride: int | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: str | None = None,
    batch_tokens: int = 4096,
    reference_cache: str | PurePath | None = None,
    policy_model: str | None = None,
    reference_model: str | None = None,
    top_logprobs: int = 20,
    endpoint_concurrency: int = 8,
    endpoint_timeout: float = 60.0,
    endpoint_retries: int = 5,
    tokenizer: Any = None,
    revision_policy: str | None = None,
    revision_reference: str | None = None,
    trust_remote_code: bool = False,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    resources_per_worker: str | None = None,
    report_to: list[str] | tuple[str, ...] = (),
    direction: str | None = None,
    show_reference: bool = False,
    json: bool = False,
    format: str | None = None,
    quiet: bool = False,
) -> None:
    """The parameters of ``measure``: the fields of ``MeasureJob``, with what may be in memory."""


def sweep_parameters(
    job: SweepJob | None = None,
    reporter: ProgressReporter | None = None,
    *,
    candidates: list[str] | list[Path] | tuple[str | PurePath, ...] = (),
    reference: str | PurePath = SHIPPED_REFERENCE,
    text: Source | None = None,
    responses: Source | None = None,
    limit: int | None = None,
    at_most: float | None = None,
    out: str | PurePath | None = None,
    resume: bool = False,
    split: str | None = None,
    dataset_config: str | None = None,
    prompt_column: str | None = None,
    response_column: str | None = None,
    text_column: str | None = None,
    chat_template: str | None = None,
    temperature: float = 1.0,
    window: int | None = None,
    stride: int | None = None,
    attribute: list[str] | tuple[str, ...] = (),
    attribute_tokens: int = 20_000,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: str | None = None,
    batch_tokens: int = 4096,
    tokenizer: str | PurePath | None = None,
    revision_reference: str | None = None,
    trust_remote_code: bool = False,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    resources_per_worker: str | None = None,
    report_to: list[str] | tuple[str, ...] = (),
    direction: str = DIRECTION_OF_SWEEPS,
    json: bool = False,
    format: str | None = None,
    quiet: bool = False,
) -> None:
    """The parameters of ``sweep``: the fields of ``SweepJob``, with what may be in memory."""


@contextmanager
def job_of_keywords(
    kind: type[JobT], job: JobT | None, options: Mapping[str, Any], default_out: Callable[[], str]
) -> Generator[JobT]:
    """Context with the job that was given, or that of the options; a source in memory is written into its folder.

    It is taken away, and the folder, if the job has left nothing else there.

    Args:
        kind: of the job.
        job: the job; None for one of the options.
        options: fields of the job; its source may be data that ``records_in_memory`` reads.
        default_out: makes the name of a folder.

    Raises:
        OptionError: if both or neither is given, or the job is of another kind.
        UnknownNameError, OptionError: as ``job_of``.
        SourceError, RunFolderError: as ``write_source``.
    """
    if job is not None and (options or not isinstance(job, kind)):
        raise OptionError(
            f"give a {kind.__name__} alone, or its options by keyword (text=…, out=…); these are "
            f"{', '.join([type(job).__name__, *options])}"
        )
    sources: dict[SourceKind, Any] = {
        name: options[name] for name in KINDS if not _is_name(options.get(name))
    }
    if sources:
        out = str(options["out"] if options.get("out") is not None else default_out())
        options = {**options, **{name: str(Path(out) / SOURCE) for name in sources}, "out": out}
    made = job if job is not None else job_of(kind, options)
    folder = Path(str(made.out)).expanduser()
    is_new = [write_source(data, name, folder) for name, data in sources.items()]
    try:
        with naming_entries(folder / SOURCE, " ".join(sources)):
            yield made
    finally:
        if any(is_new) and [path.name for path in folder.iterdir()] == [SOURCE]:
            (folder / SOURCE).unlink()
            folder.rmdir()


@contextmanager
def pair_in_memory(options: Mapping[str, Any]) -> Generator[tuple[dict[str, Any], Pair | None]]:
    """Context with the pair of options of which a model is in memory, at rest, and the options with its name.

    Args:
        options: those of ``measure``: ``policy`` and ``reference`` are names or networks, ``tokenizer`` is the one of
            the networks. A network of PEFT without a reference is compared with its base.

    Returns:
        The options with names alone, and the pair; the options as they are, and None, if both models are names.

    Raises:
        OptionError: if an option is for models in files, or the tokenizer or the reference is missing.
        ModelError: if a network cannot be measured, or the two cannot be compared.
        RankError: if a launcher started several processes.
    """
    networks = {
        role: checked_language_model(options[role], role) for role in ROLES if not _is_name(options.get(role))
    }
    if not networks:
        yield dict(options), None
        return
    require_one_process("a measurement of a model in memory")
    for name in OF_FILES:
        if options.get(name) not in (None, False, "auto", "local"):
            raise OptionError(
                f"{name} is for models that are loaded from files; leave it out, one is in memory"
            )
    tokenizer = options.get("tokenizer")
    if isinstance(tokenizer, str | PurePath):
        tokenizer = load_named_tokenizer(str(tokenizer), trust_remote_code=False)
    if not hasattr(tokenizer, "get_vocab"):
        tokenizer = getattr(tokenizer, "tokenizer", None)  # of a processor
    if tokenizer is None:
        raise OptionError(
            "a model in memory needs its tokenizer: give tokenizer=…, an object or a name; it is of type "
            f"{type(options.get('tokenizer')).__name__}"
        )
    (other,) = [role for role in ROLES if role not in networks] or [None]
    name = options.get(str(other)) or (SHIPPED_POLICY if other == "policy" else None)

    def load(live: Model) -> Pair:
        trusted = options.get("trust_remote_code", False)
        return load_beside_live(live, str(other), str(name), options.get(f"revision_{other}"), trusted)

    with at_rest(*networks.values()):
        pair = live_pair(networks, tokenizer, None if name is None else load)
        names = {role: getattr(pair, role).path for role in ROLES}
        yield {option: value for option, value in options.items() if option != "tokenizer"} | names, pair


def _is_name(value: Any) -> bool:
    """Whether an option names a file, a folder or something on the hub, or is not given."""
    return value is None or isinstance(value, str | PurePath)
