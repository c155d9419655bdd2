"""Options that the jobs of ``kleash train`` share."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from kleash.errors import OptionError
from kleash.jobs.option_groups import (
    OUTPUT_OPTIONS,
    SHIPPED_PROMPTS,
    SHIPPED_REFERENCE,
    GenerationOptions,
    LoadingOptions,
    SeedOption,
    changed_options,
    flag,
)
from kleash.jobs.output_options import require_trackers_known
from kleash.jobs.reading import PromptOptions, SourceKind, check_read_options
from kleash.kl_rules import CONTRACTS, VALUES, command_line, default_scope, refusal, term_spec
from kleash.store.codec import encode

KL_ESTIMATORS = ("exact", "k1", "k2", "k3")
CONTROLLERS = ("fixed", "ziegler", "pid", "dual")
TARGETS_PER = ("sequence", "token")
HACKING_RESPONSES = ("warn", "stop", "halve-lr", "tighten")
METRIC_NAMES = ("kleash", "verl", "trl")
SHIPPED_REWARD = "kleash.training.example_rewards:heroine"
"""What the shipped policy is rewarded for when nothing else is asked: easy to hack."""

LARGEST_TEMPERATURE = 1e4
"""Beyond it, or below its inverse, logits overflow or differ by nothing."""

CONTINUATION_OPTIONS = frozenset({*OUTPUT_OPTIONS, "steps", "checkpoint_every", "metric_names"})
"""Fields that a resumed run may change: where it goes, how long it is, how it is shown."""


@dataclass(frozen=True, kw_only=True)
class TrainJob(SeedOption, LoadingOptions):
    """The options of every training algorithm."""

    algorithm: ClassVar[str]
    """What it is called on the command line."""

    policy: str = SHIPPED_REFERENCE
    """The model that training starts from: a folder or a hub id; for grpo, rloo and dpo also the folder of a PEFT
    adapter, which is trained further."""
    reference: str | None = None
    """The model that it is kept near; the policy as it starts, if not given."""
    limit: int | None = None
    """Read only so many prompts or pairs."""
    steps: int = 100
    """Steps in all: fresh data, and its updates. A finished run goes on with more of them and --resume."""
    learning_rate: float = 1e-5
    """Of AdamW."""
    lora_rank: int = 0
    """Rank of the LoRA adapter that is trained; 0 trains every weight."""
    set: tuple[str, ...] = ()
    """Fields of the configuration of TRL's trainer, by its names, as FIELD=VALUE: loss_type=dr_grpo; and of PEFT's
    LoraConfig, as lora.FIELD=VALUE: lora.lora_alpha=16. Lists and objects are JSON. ppo takes only the latter."""
    checkpoint_every: int = 10
    """Steps from one checkpoint to the next; the last step has one too."""
    on_hacking: str = "warn"
    """What happens on a reward hacking alert: warn, stop, halve-lr (the learning rate), or tighten (double beta)."""
    report_to: tuple[str, ...] = ()
    """Where the metrics go besides steps.jsonl: tensorboard, wandb, trackio, mlflow."""
    metric_names: str = "kleash"
    """How trackers see them spelt: kleash, verl or trl. steps.jsonl always has kleash's names."""
    resume: bool = False
    """Go on with an interrupted run in --out from its last checkpoint."""

    def __post_init__(self) -> None:
        """Check types and values.

        Raises:
            OptionError: naming the option, its value and what it may be.
        """
        super().__post_init__()
        self._at_least_1("limit", "steps", "checkpoint_every")
        self._above_0("learning_rate")
        self._one_of("on_hacking", HACKING_RESPONSES)
        self._one_of("metric_names", METRIC_NAMES)
        require_trackers_known(self.report_to)
        if self.lora_rank < 0:
            raise OptionError(
                f"--lora-rank must be 0, which trains every weight, or more; it is {self.lora_rank}"
            )

    @property
    def reference_name(self) -> str:
        """The model that the policy is kept near."""
        return self.policy if self.reference is None else self.reference

    def without_effect(self) -> tuple[str, ...]:
        """A sentence for each option that is set and does nothing in this job."""
        if self.report_to or self.metric_names == "kleash":
            return ()
        return ("--metric-names does nothing without --report-to",)

    def settings(self) -> dict[str, object]:
        """The fields that decide the result, ready for JSON: two runs that agree in them can be one."""
        names = [field.name for field in fields(self) if field.name not in CONTINUATION_OPTIONS]
        return {"algorithm": self.algorithm, **{name: encode(getattr(self, name)) for name in names}}


@dataclass(frozen=True, kw_only=True)
class OnlineJob(TrainJob, GenerationOptions, PromptOptions):
    """The options of algorithms in which the policy learns from its own responses to prompts."""

    prompts: str | None = None
    """JSONL, a JSON array, CSV, Parquet or Arrow with "prompt" or "messages", or plain text, a prompt a line, perhaps
    compressed (.gz, .zst); a data set's folder or user/name on the hub; - is standard input."""
    prompts_per_step: int = 16
    """Prompts answered in a step, by all processes together."""
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        """Check types and values; raises OptionError."""
        super().__post_init__()
        self._at_least_1("prompts_per_step")
        check_read_options(self)
        self._above_0("temperature")
        self._at_most(LARGEST_TEMPERATURE, "temperature")
        if self.temperature < 1 / LARGEST_TEMPERATURE:
            raise OptionError(
                f"--temperature must be at least {1 / LARGEST_TEMPERATURE:g}; it is {self.temperature}"
            )
        if self.given_source is None and self.policy != SHIPPED_REFERENCE:
            raise OptionError(f"say what {self.policy} should answer: --prompts")

    @property
    def given_source(self) -> str | None:
        """Where the prompts lie, if it was said."""
        return self.prompts

    @property
    def source(self) -> str:
        """Where the prompts lie."""
        return SHIPPED_PROMPTS if self.given_source is None else self.given_source

    @property
    def source_kind(self) -> SourceKind:
        """What lies there."""
        return "prompts"


@dataclass(frozen=True, kw_only=True)
class RewardJob(OnlineJob):
    """The options of algorithms that maximise a reward with a KL penalty to the reference."""

    reward_credit: ClassVar[str] = "response"
    """The tokens that a KL in the reward is credited to, as in ``kl_rules.TermSpec``."""

    reward: tuple[str, ...] = ()
    """What is rewarded: package.module:function, called with prompts and responses (lists of texts) and
    returning a number for each; or the folder of a sequence-classification model; several are added, "0.5*…"
    with a weight."""
    kl: str = "exact"
    """How KL(policy ‖ reference) is taken: exact, from whole distributions; or from the sampled tokens by k1,
    k2 or k3."""
    kl_place: str = "loss"
    """loss: differentiated. reward: taken from the reward."""
    kl_scope: str | None = None
    """token: the KL of each token. sequence: the KL between responses, in which the KL of later tokens is credited to
    a token too. If not given: token in a loss, sequence in a reward."""
    beta: float = 0.05
    """What one nat of KL costs, in the unit of the reward; where a controller begins. 0 is no KL penalty."""
    controller: str = "fixed"
    """What moves beta: fixed (nothing), ziegler, pid, or dual."""
    target_nats: float | None = None
    """The KL that a controller steers to; with a fixed beta, the hacking monitor compares with it."""
    target_per: str = "sequence"
    """Whether the target is per sequence or per token."""
    horizon: int | None = None
    """Of the controller ziegler, in sequences: its rule is then the published one to the last digit (10000 is the
    published horizon); if not given, a faster rule with four steps' sequences, on the KL filtered by its error."""
    beta_min: float = 1e-4
    """No controller goes below."""
    beta_max: float = 10.0
    """No controller goes above."""

    def __post_init__(self) -> None:
        """Check types and values; raises OptionError."""
        super().__post_init__()
        for name, words in (
            *(("kl", KL_ESTIMATORS), ("kl_place", VALUES["place"])),
            *(("controller", CONTROLLERS), ("target_per", TARGETS_PER)),
        ):
            self._one_of(name, words)
        if self.kl_scope is not None:
            self._one_of("kl_scope", VALUES["scope"])
        term = term_spec(
            self.kl,
            CONTRACTS.get(self.kl),
            place=self.kl_place,
            scope=self.kl_scope,
            credit=self.reward_credit,
        )
        reason = refusal(term, command_line)
        if reason is not None:
            raise OptionError(reason)
        self._above_0("target_nats", "beta_min", "beta_max")
        self._at_least_1("horizon")
        if self.horizon is not None and self.controller != "ziegler":
            raise OptionError(
                f"--horizon belongs to --controller ziegler, and the controller is {self.controller}; leave it out"
            )
        self._check_beta()
        if not self.reward and self.policy != SHIPPED_REFERENCE:
            raise OptionError(
                f"say what {self.policy} is rewarded for: --reward package.module:function or a folder"
            )

    def settings(self) -> dict[str, object]:
        """The settings of ``TrainJob``, with the scope that an unset ``kl_scope`` stands for."""
        scope = default_scope(self.kl_place) if self.kl_scope is None else self.kl_scope
        return {**super().settings(), "kl_scope": scope}

    def _check_beta(self) -> None:
        if not (math.isfinite(self.beta) and self.beta >= 0):
            raise OptionError(f"--beta must be a number of 0 or more; it is {self.beta}")
        if self.beta == 0 and self.on_hacking == "tighten":
            raise OptionError(
                "--on-hacking tighten doubles beta, and --beta is 0; give a beta, or another response"
            )
        if self.controller == "fixed":
            return
        if self.target_nats is None:
            raise OptionError(f"the controller {self.controller} steers to a target; give --target-nats")
        if not self.beta_min <= self.beta <= self.beta_max:
            raise OptionError(
                f"--beta {self.beta} does not lie between --beta-min {self.beta_min} and --beta-max {self.beta_max}"
            )

    def without_effect(self) -> tuple[str, ...]:
        """A sentence for each option that is set and does nothing in this job."""
        sentences = list(super().without_effect())
        if self.beta == 0:
            sentences.append("--beta 0 is no KL penalty: the KL is logged and not trained")
        if self.controller == "fixed":
            bounds = changed_options(self, ("beta_min", "beta_max"))
            sentences += [
                f"{flag(name)} does nothing with a fixed beta; --controller moves it" for name in bounds
            ]
        if self.target_nats is None and self.target_per != "sequence":
            sentences.append("--target-per does nothing without --target-nats")
        return tuple(sentences)

    @property
    def rewards(self) -> tuple[str, ...]:
        """What is rewarded."""
        return self.reward or (SHIPPED_REWARD,)
