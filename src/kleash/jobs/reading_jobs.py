"""The jobs that read finished work: ``report``, ``compare``, ``mismatch``, ``doctor`` and ``audit``."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kleash.jobs.option_groups import LoadingOptions
from kleash.jobs.options import Allowed, Count, Limit, Options, Refusal, one_of
from kleash.jobs.output_options import (
    PICTURES,
    Direction,
    FormatOption,
    GateOptions,
    MeasurementFormatOption,
    TrackerOption,
)

Picture = Annotated[
    Path,
    Allowed(f"a file that ends in {' or '.join(PICTURES)}", lambda path: path.suffix.lower() in PICTURES),
]

Page = Annotated[Path, Allowed("a file that ends in .html", lambda path: path.suffix.lower() == ".html")]


@dataclass(frozen=True, kw_only=True)
class ReportJob(MeasurementFormatOption, TrackerOption, GateOptions):
    """Write the report of a run or the page of a sweep again from its files, or print the result in a format."""

    folder: Path
    """The folder of a run or of a sweep, as in --out of "kleash measure", "kleash train" or "kleash sweep"."""
    at_most: Limit | None = None
    """A limit in nats for the KL per token: of a measurement as in "kleash measure --at-most", of a sweep as in
    "kleash sweep --at-most"."""
    picture: Picture | None = None
    """Also draw a measurement or a sweep into this file, which ends in .png or .svg."""


@dataclass(frozen=True, kw_only=True)
class CompareJob(FormatOption, GateOptions):
    """Compare runs on the same prompts: differences from the first run with intervals, as a table and a page."""

    folders: tuple[Path, ...]
    """Two or more folders of finished runs; each is compared with the first."""
    out: Page = Path("comparison.html")
    """File of the page."""
    at_most: Limit | None = None
    """A limit in nats for the KL per token of every run but the first. Exit code 0 if no run is above the limit, 1 if
    any is, otherwise 3, as in "kleash measure --at-most"."""
    direction: Direction | None = None
    """The KL that --at-most limits: policy-reference averages over the policy's next tokens, reference-policy over the
    reference's. If not given, that of the first run's headline."""


@dataclass(frozen=True, kw_only=True)
class MismatchJob(FormatOption):
    """Measure the mismatch between a trainer's log-probabilities and those of the engine that drew the tokens.

    A file has a record for each response, with "prompt_token_ids", "response_token_ids", "trainer_logprobs" and
    "engine_logprobs", and perhaps "response_mask"; names of verl, TRL, prime-rl and OpenRLHF are understood.
    """

    rollouts: tuple[str, ...]
    """Files of rollouts, such as one for each rank, or folders of them: JSONL, a JSON array or Parquet; - is standard
    input."""
    names: Annotated[str, one_of(("verl",))] | None = None
    """Print the metrics under the names and definitions of a framework instead: verl."""
    at_most: Limit | None = None
    """A limit in nats for KL(engine ‖ trainer) per token. Exit code 0 if the upper end of its interval is not above
    the limit, 1 if the lower end is, otherwise 3, and how many more tokens may decide. Never 0 below 30 prompts."""


@dataclass(frozen=True, kw_only=True)
class DoctorJob(FormatOption, LoadingOptions):
    """Name the likely causes of a mismatch between a trainer's log-probabilities and the engine's, with a next test.

    The files are those of "kleash mismatch", perhaps with "reference_logprobs". With --policy and --reference the
    tokens are scored again under each cause, to see whether the differences vanish; without them some causes look
    alike, and the output says which.
    """

    rollouts: tuple[str, ...]
    """Files of rollouts, such as one for each rank, or folders of them: JSONL, a JSON array or Parquet; - is standard
    input."""
    policy: str | None = None
    """The model that both sides should have run: a folder, a hub id, or a PEFT adapter's folder."""
    reference: str | None = None
    """The reference of the training run."""
    revision_policy: str | None = None
    """Branch, tag or commit of the policy on the hub."""
    revision_reference: str | None = None
    """Branch, tag or commit of the reference on the hub."""
    rounding: Annotated[str, one_of(("float32", "float16", "bfloat16"))] = "bfloat16"
    """The coarser dtype of the trainer's and the engine's networks: float32, float16 or bfloat16. Differences that its
    rounding explains are healthy."""
    limit: Count | None = None
    """Read only so many rollouts, of several files in turn; a few hundred are enough."""
    device_map: str | None = None
    """Spread a model over several devices as transformers does: auto, balanced, sequential."""

    def _refusals(self) -> Iterable[Refusal]:
        has_models = self.policy is not None
        return (
            Refusal(
                has_models != (self.reference is not None),
                "give both models, --policy and --reference, or none",
            ),
            *(
                Refusal(
                    getattr(self, f"revision_{role}") is not None and not has_models,
                    f"--revision-{role} needs --{role}",
                )
                for role in ("policy", "reference")
            ),
        )


@dataclass(frozen=True, kw_only=True)
class AuditJob(Options):
    """Test what a KL function estimates and what it differentiates, by exact enumeration.

    Without arguments, kleash's functions are audited.
    """

    target: str = "kleash"
    """package.module:function or folder/file.py:function; or kleash, liger, openrlhf, trl or verl for all known KL
    functions of that package; or one case of these, such as "verl:low_var_kl". With --source FILE:function,
    FILE:Class.method or FOLDER:function in it; or miles, nemo-rl, open-instruct, prime-rl, skyrl, slime or
    torchtune."""
    source: str | None = None
    """A checkout, whose dependencies need not be installed: of the function's file, only what the function needs is
    run. Its commit is recorded."""
    trust_source: bool = False
    """Run the code in --source without asking; needed where there is no terminal to ask."""
    convention: str | None = None
    """How package.module:function or FILE:function is called and what it returns: "loss", "reward", "logits" ...,
    or the call itself, "f(logits_p, logits_q, labels) -> mean kl"; without it, an error explains the most common
    conventions and lists all."""
    set: tuple[str, ...] = ()
    """Keyword arguments to call it with."""
    out: Page = Path("audit.html")
    """File of the page."""
    json: bool = False
    """Print the audits as JSON instead of the verdicts."""
    fail_on: tuple[str, ...] = ()
    """Exit with 1 if there is a finding of one of these kinds or severities: "wrong" (trains on or reports something
    else in ordinary use), "fragile" (only at extremes), "note", or "fault" for wrong and fragile."""
    quiet: bool = False
    """Print only failures."""

    def _refusals(self) -> Iterable[Refusal]:
        return (
            Refusal(
                self.trust_source and self.source is None,
                "--trust-source needs --source, the folder of a checkout",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class EnvJob(Options):
    """Print the versions and the machine that a report of a bug should name; no file is read."""
