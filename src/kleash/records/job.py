"""What is asked of a measurement: the command line is made from this record, and it is what is kept."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from kleash.errors import OptionError
from kleash.records.option_types import check_option_types

SHIPPED_POLICY = "shipped:policy"
SHIPPED_REFERENCE = "shipped:reference"
SHIPPED_PROMPTS = "shipped:prompts"

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
HOW_IT_IS_SHOWN = frozenset({"out", "resume", "quiet", "json"})
"""Fields that change where a result goes and not what it is."""
DRAWING = ("samples_per_prompt", "max_new_tokens", "top_p", "top_k", "min_p", "seed")
WINDOWS = ("window", "stride")
WITHOUT_EFFECT = {"prompts": WINDOWS, "text": DRAWING, "responses": (*DRAWING, *WINDOWS)}
"""For each source, the options that do nothing there."""


@dataclass(frozen=True, kw_only=True)
class MeasureJob:
    """Measure how far one language model has drifted from another, and write a report.

    Without arguments: the small pair that ships with kleash.
    """

    policy: str = SHIPPED_POLICY
    """The model that has moved, the p of KL(p || q): a folder, a hub id, or a PEFT adapter's folder."""
    reference: str = SHIPPED_REFERENCE
    """The model it is compared with, the q of KL(p || q)."""
    revision_policy: str | None = None
    """Branch, tag or commit of the policy on the hub."""
    revision_reference: str | None = None
    """Branch, tag or commit of the reference on the hub."""
    prompts: str | None = None
    """Source: JSONL, a JSON array, CSV or Parquet with "prompt" or "messages", or plain text, a prompt a line; - is
    standard input. The policy answers them."""
    text: str | None = None
    """Source: JSONL, a JSON array, CSV or Parquet with "text", or plain text with a blank line between documents; - is
    standard input. Both models read it."""
    responses: str | None = None
    """Source: JSONL, a JSON array, CSV or Parquet with prompts and responses that were already generated; - is
    standard input."""
    samples_per_prompt: int = 1
    """Responses drawn for each prompt."""
    max_new_tokens: int = 256
    """Tokens after which a response is cut off."""
    temperature: float = 1.0
    """Divides the logits of both models. At 0 the policy decodes greedily and both are scored at 1."""
    top_p: float | None = None
    """Draw only from the likeliest tokens that together hold this probability."""
    top_k: int | None = None
    """Draw only from so many of the likeliest tokens."""
    min_p: float | None = None
    """Draw only from tokens at least this fraction as likely as the likeliest."""
    seed: int = 0
    """Decides every draw, together with the prompt, the sample and the position."""
    dtype: str = "auto"
    """float32, bfloat16, float16 or float64; auto is float32 on a CPU, elsewhere that of the checkpoint."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps …; auto is the first GPU if there is one."""
    device_map: str | None = None
    """Spread the models over several devices as transformers does: auto, balanced, sequential."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model. It can do anything that you can do."""
    batch_tokens: int = 4096
    """Tokens in a batch, padding counted."""
    window: int | None = None
    """Tokens that a model reads at once, for --text; 2048, or what the models can read, if not given."""
    stride: int | None = None
    """Tokens from one window to the next, for --text; less than the window gives each token more context."""
    limit: int | None = None
    """Read only so many prompts, documents or responses."""
    until_relative_error: float | None = None
    """Stop once the standard error of KL(policy || reference) is below this share of it, and never before
    64 clusters."""
    reference_cache: str | None = None
    """Folder of the reference's hidden states: as "kleash cache" made it, and then the reference is not loaded;
    or else filled by this run for later ones."""
    out: str | None = None
    """Folder for the results; kleash-runs/<date-time> if not given."""
    resume: bool = False
    """Go on with an interrupted run in --out."""
    quiet: bool = False
    """Print nothing but errors."""
    json: bool = False
    """Print the measurement as JSON instead of a summary."""

    def __post_init__(self) -> None:
        """Refuse what means nothing.

        Raises:
            OptionError: naming the option, what it was and what it may be.
        """
        check_option_types(self)
        self._check_sources()
        for name in (
            "samples_per_prompt",
            "max_new_tokens",
            "batch_tokens",
            "limit",
            "window",
            "stride",
            "top_k",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{_option(name)} must be at least 1; it is {value}")
        if self.stride is not None and self.stride > (self.window or self.stride):
            raise OptionError(
                f"--stride {self.stride} would leave tokens out between windows of {self.window}"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise OptionError(f"--temperature must be 0 or more; it is {self.temperature}")
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise OptionError(
                f"at --temperature 0 all {self.samples_per_prompt} samples of a prompt would be the same; draw one"
            )
        if self.dtype not in DTYPES:
            raise OptionError(f"--dtype must be one of {', '.join(DTYPES)}; it is {self.dtype!r}")
        self._check_fractions()

    def _check_sources(self) -> None:
        sources = [name for name in ("prompts", "text", "responses") if getattr(self, name) is not None]
        if len(sources) > 1:
            raise OptionError(
                f"give one of --prompts, --text and --responses, not {' and '.join(map(_option, sources))}"
            )
        if not sources and self.policy != SHIPPED_POLICY:
            raise OptionError("say what the models should read: --prompts, --text or --responses")

    def _check_fractions(self) -> None:
        if self.until_relative_error is not None and not 0 < self.until_relative_error < 1:
            raise OptionError(
                f"--until-relative-error must lie between 0 and 1; it is {self.until_relative_error}"
            )
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise OptionError(f"{_option(name)} must be above 0 and at most 1; it is {value}")
        if not (0 <= self.seed < 2**63):
            raise OptionError(f"--seed must be a whole number from 0 to 2^63 - 1; it is {self.seed}")

    @property
    def source(self) -> tuple[str, str]:
        """Which source, "prompts", "text" or "responses", and where it lies."""
        for kind in ("text", "responses"):
            path = getattr(self, kind)
            if path is not None:
                return kind, path
        return "prompts", self.prompts if self.prompts is not None else SHIPPED_PROMPTS

    def without_effect(self) -> tuple[str, ...]:
        """A sentence for each option that is set and does nothing in this job."""
        kind, _ = self.source
        there = f"with --{kind}" if getattr(self, kind) is not None else f"with {kind}"
        sentences = [f"{_option(name)} does nothing {there}" for name in changed(self, WITHOUT_EFFECT[kind])]
        if self.temperature == 0 and kind != "prompts":
            sentences.append(f"--temperature 0 decodes greedily, and {there} nothing is decoded")
        for role in ("policy", "reference"):
            if getattr(self, f"revision_{role}") is not None and getattr(self, role).startswith("shipped:"):
                sentences.append(f"--revision-{role} does nothing for {getattr(self, role)}")
        return tuple(sentences)

    @property
    def truncates(self) -> bool:
        """Whether the policy's draws leave out part of its distribution."""
        return self.top_k is not None or self.min_p is not None or (self.top_p is not None and self.top_p < 1)

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """The fields that decide the result: two runs that agree in them can be one."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in HOW_IT_IS_SHOWN
        }


def changed(job: Any, names: Iterable[str]) -> list[str]:
    """Those of a job's fields that do not have their default."""
    defaults = {field.name: field.default for field in fields(job)}
    return [name for name in names if getattr(job, name) != defaults[name]]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
