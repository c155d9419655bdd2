"""The job of ``kleash measure``."""

import os.path
from collections.abc import Iterator
from dataclasses import dataclass, fields

from kleash.jobs.option_groups import (
    DEALING_OPTIONS,
    OUTPUT_OPTIONS,
    RANK_MAPS,
    REQUEST_OPTIONS,
    SHIPPED_POLICY,
    SHIPPED_PROMPTS,
    EndpointOptions,
    Sampling,
    ScoringOptions,
    WorkerOptions,
    is_endpoint,
    is_gguf,
    shown_endpoint,
)
from kleash.jobs.options import Count, Refusal, Share, changed_options, flag
from kleash.jobs.output_options import DIRECTIONS, GateOptions, MeasurementFormatOption, TrackerOption
from kleash.jobs.reading import SourceKind

DRAWING = ("samples_per_prompt", "max_new_tokens", "top_p", "top_k", "min_p", "seed")
WINDOWS = ("window", "stride")
WITHOUT_EFFECT = {
    "prompts": (*WINDOWS, "response_column", "text_column"),
    "text": (*DRAWING, "prompt_column", "response_column"),
    "responses": (*DRAWING, *WINDOWS, "text_column"),
}
"""For each source, the options that do nothing there."""


@dataclass(frozen=True, kw_only=True)
class MeasureJob(
    MeasurementFormatOption,
    TrackerOption,
    GateOptions,
    Sampling,
    ScoringOptions,
    EndpointOptions,
    WorkerOptions,
):
    """Measure how far one language model has drifted from another, and write a report.

    Without arguments: the small pair that ships with kleash, half a minute on an idle core.

    >>> kleash.MeasureJob(policy="tuned/", reference="base/", prompts="prompts.jsonl").headline
    'kl_policy_reference'
    """

    policy: str = SHIPPED_POLICY
    """The model that was trained, merged or quantised, the p of KL(p ‖ q): a folder, a hub id, a PEFT adapter's
    folder, a GGUF file (also as owner/name:file.gguf of the hub), or the address of an inference server
    (http://host:port/v1)."""
    revision_policy: str | None = None
    """Branch, tag or commit of the policy on the hub."""
    prompts: str | None = None
    """Source: JSONL, a JSON array, CSV, Parquet or Arrow with "prompt" or "messages", or plain text, a prompt a line,
    perhaps compressed (.gz, .zst); a data set's folder or user/name on the hub; - is standard input. The policy answers
    them."""
    limit: Count | None = None
    """Read only so many prompts, documents or responses."""
    until_relative_error: Share | None = None
    """Stop once the standard error of the headline's KL is below this share of it, and never before 64 clusters."""
    reference_cache: str | None = None
    """Folder of the reference's hidden states: as "kleash cache" made it, and then the reference is not loaded;
    or else filled by this run for later ones. Or a file of llama.cpp's base logits, which is the reference and has the
    text: KL is then bounded, as 16 bits a log-probability allow."""
    show_reference: bool = False
    """In the report, show the policy's response to the prompts with the largest KL beside one that the reference draws
    to them, which is not measured."""
    resume: bool = False
    """Go on with an interrupted run in --out. A run that other processes work on is joined without it."""

    def __post_init__(self) -> None:
        """Make a file of base logits the text as well, which is in it; then check types and values.

        Raises:
            OptionError: naming the option, its value and what it may be.
        """
        if self.text is None and _is_file(self.reference_cache):
            object.__setattr__(self, "text", self.reference_cache)
        super().__post_init__()

    def _refusals(self) -> Iterator[Refusal]:
        sources = [name for name in ("prompts", "text", "responses") if getattr(self, name) is not None]
        for name in sources if _is_file(self.reference_cache) else ():
            yield Refusal(
                (name, getattr(self, name)) != ("text", self.reference_cache),
                f"--reference-cache {self.reference_cache} is a file, and so one of base logits, which has its text in "
                f"it; leave --{name} out, or give the folder of kleash cache",
            )
        yield from (
            Refusal(
                len(sources) > 1,
                f"give one of --prompts, --text and --responses (whose records have their prompts), not "
                f"{' and '.join(map(flag, sources))}",
            ),
            Refusal(
                not sources and self.policy != SHIPPED_POLICY,
                "say what the models should read: --prompts, --text or --responses"
                + (f"; {self.reference_cache} is no file with a text in it" if self.reference_cache else ""),
            ),
            Refusal(
                self.temperature == 0 and self.samples_per_prompt > 1,
                f"at --temperature 0 all {self.samples_per_prompt} samples of a prompt would be the same; draw one",
            ),
        )
        yield from self._refusals_of_servers()
        for is_set, reason in (
            (self.temperature != 1, f"--temperature is {self.temperature:g}, and base logits are of 1"),
            (self.engine != "local", f"--engine {self.engine} has workers, and base logits are read here"),
            (self.device_map in RANK_MAPS, f"--device-map {self.device_map} divides the policy's head"),
            (self.until_relative_error, "--until-relative-error needs the exact KL, which base logits bound"),
        ):
            yield Refusal(
                self.has_base_logits and is_set,
                f"{reason}; leave it out where --reference-cache is a file of base logits",
            )
        for is_set, reason in (
            (self.source[0] != "prompts", f"--{self.source[0]} asks for none"),
            (self.engine != "local", f"with --engine {self.engine} it is in the workers"),
            (self.device_map in RANK_MAPS, f"--device-map {self.device_map} divides it over processes"),
            (self.reference_cache is not None, "--reference-cache stands for it"),
        ):
            yield Refusal(
                self.show_reference and is_set,
                f"--show-reference has the reference answer --prompts, and {reason}; leave it out",
            )

    def _refusals_of_servers(self) -> Iterator[Refusal]:
        """The combinations that are refused since a model is behind a server, or is not though an option says so."""
        for named in ("policy", "reference"):
            yield Refusal(
                getattr(self, f"{named}_model") is not None and not is_endpoint(getattr(self, named)),
                f"--{named}-model is a model's name on a server, and --{named} {getattr(self, named)} is no server; "
                f"name a model by --{named}",
            )
        role = self.endpoint_role
        if role is None:
            return
        yield from (
            Refusal(
                is_endpoint(self.policy) and is_endpoint(self.reference),
                "--policy and --reference are both behind servers, and a bound needs one whole distribution; load one "
                "of them here",
            ),
            Refusal(
                self.source[0] == "prompts",
                f"--{role} {shown_endpoint(getattr(self, role))} is a server, which scores given tokens: draw "
                "responses with its own client first, keep their token ids, and give them with --responses; or give "
                "--text",
            ),
            Refusal(
                self.temperature != 1,
                f"--temperature is {self.temperature:g}, and servers give log-probabilities of prompts at 1; leave it "
                "out",
            ),
            Refusal(
                self.engine != "local",
                f"--{role} is a server, which --endpoint-concurrency requests reach at once from one process; leave "
                f"--engine {self.engine} out",
            ),
            Refusal(
                self.reference_cache is not None,
                "--reference-cache holds a loaded reference's hidden states; leave it out where "
                f"--{role} is a server",
            ),
            Refusal(
                self.until_relative_error is not None,
                "--until-relative-error needs the exact KL, of which a server allows bounds; leave it out where "
                f"--{role} is a server",
            ),
        )

    @property
    def has_base_logits(self) -> bool:
        """Whether ``reference_cache`` is a file of base logits, and so the source as well."""
        return self.reference_cache is not None and self.text == self.reference_cache

    @property
    def endpoint_role(self) -> str | None:
        """The role whose model is behind an inference server, "policy" or "reference"; None if both are loaded."""
        return next((role for role in ("policy", "reference") if is_endpoint(getattr(self, role))), None)

    @property
    def source(self) -> tuple[SourceKind, str]:
        """The kind of the source, "prompts", "text" or "responses", and its path."""
        for kind in ("text", "responses"):
            path = getattr(self, kind)
            if path is not None:
                return kind, path
        return "prompts", self.prompts if self.prompts is not None else SHIPPED_PROMPTS

    @property
    def headline(self) -> str:
        """The name in ``STATISTICS`` of the KL that is the headline of the measurement.

        On text, where a quantised or merged model is compared with the original, it averages over the reference's next
        tokens, as the KLD of llama.cpp; on responses, over those of the policy, as the KL that training penalises.
        """
        return DIRECTIONS["reference-policy" if self.source[0] == "text" else "policy-reference"]

    def without_effect(self) -> tuple[str, ...]:
        """A sentence for each option that is set and does nothing in this job."""
        kind, _ = self.source
        # Without a source option, the prompts are the shipped ones, and no option is to be named.
        there = f"with --{kind}" if getattr(self, kind) is not None else f"with {kind}"
        unused = changed_options(self, WITHOUT_EFFECT[kind])
        if self.has_base_logits:
            there = "with a file of base logits"
            unused += changed_options(self, (*WINDOWS, "reference"))
        has_no_server = self.endpoint_role is None
        models = (
            ("policy", self.policy, self.revision_policy),
            ("reference", self.reference, self.revision_reference),
        )
        of_servers = changed_options(self, [option.name for option in fields(EndpointOptions)])
        sentences = (
            *((True, f"{flag(name)} does nothing {there}") for name in unused),
            (
                self.temperature == 0 and kind == "text",
                f"--temperature 0 decodes greedily, and {there} nothing is decoded",
            ),
            (
                self.chat_template == "apply" and kind == "text",
                "--chat-template apply does nothing with --text, which is not asked of a model",
            ),
            *(
                (
                    revision is not None and (name.startswith("shipped:") or is_endpoint(name)),
                    f"--revision-{role} does nothing for {name}",
                )
                for role, name, revision in models
            ),
            *((has_no_server, f"{flag(name)} does nothing without a server") for name in of_servers),
            (
                has_no_server
                and self.tokenizer is not None
                and not (is_gguf(self.policy) or is_gguf(self.reference)),
                "--tokenizer does nothing without a GGUF file or a server",
            ),
        )
        return tuple(sentence for applies, sentence in sentences if applies)

    @property
    def truncates(self) -> bool:
        """Whether the policy's draws leave out part of its distribution."""
        return self.top_k is not None or self.min_p is not None or (self.top_p is not None and self.top_p < 1)

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """The fields that decide the result: two runs that agree in them can be one."""
        left_out = OUTPUT_OPTIONS | DEALING_OPTIONS | REQUEST_OPTIONS
        if self.endpoint_role is None:
            left_out |= {option.name for option in fields(EndpointOptions)}
            if not self.tokenizer:
                left_out |= {"tokenizer"}
        return {
            option.name: getattr(self, option.name) for option in fields(self) if option.name not in left_out
        }


def _is_file(name: object) -> bool:
    """Whether there is a file of this name; no name is too long to ask, and no user unknown."""
    return name is not None and os.path.isfile(os.path.expanduser(str(name)))  # noqa: PTH111, PTH113
