"""Options that the jobs of ``kleash train`` share."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

from kleash.jobs.option_groups import (
    OUTPUT_OPTIONS,
    SHIPPED_PROMPTS,
    SHIPPED_REFERENCE,
    GenerationOptions,
    LoadingOptions,
    OutputOptions,
    SeedOption,
)
from kleash.jobs.options import (
    Allowed,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Refusal,
    changed_options,
    flag,
    one_of,
)
from kleash.jobs.output_options import Tracker
from kleash.jobs.reading import PromptOptions, SourceKind
from kleash.kl_rules import CONTRACTS, VALUES, default_scope, refusal, spell_option, term_spec
from kleash.store.codec import encode

Scope = Annotated[str, one_of(VALUES["scope"])]
Temperature = Annotated[Positive, Allowed("from 0.0001 to 10 000", lambda x: 1e-4 <= x <= 1e4)]
"""Beyond these, logits overflow or differ by nothing."""
SHIPPED_REWARD = "kleash.training.example_rewards:heroine"
"""What the shipped policy is rewarded for when nothing else is asked: easy to hack."""

CONTINUATION_OPTIONS = frozenset({*OUTPUT_OPTIONS, "checkpoint_every", "metric_names"})
"""Fields that a resumed run may change, beside ``steps``: where it goes, how it is shown."""


@dataclass(frozen=True, kw_only=True)
class TrainJob(SeedOption, LoadingOptions, OutputOptions):
    """The options of every training algorithm."""

    algorithm: ClassVar[str]
    """What it is called on the command line."""

    policy: str = SHIPPED_REFERENCE
    """The model that training starts from: a folder or a hub id; for grpo, rloo and dpo also the folder of a PEFT
    adapter, which is trained further."""
    reference: str | None = None
    """The model that it is kept near; the policy as it starts, if not given. distill has none."""
    limit: Count | None = None
    """Read only so many prompts or pairs."""
    steps: Count = 100
    """Steps in all: fresh data, and its updates. A finished run goes on with more of them and --resume."""
    learning_rate: Positive = 1e-5
    """Of AdamW."""
    lora_rank: CountOrZero = 0
    """Rank of the LoRA adapter that is trained; 0 trains every weight."""
    set: tuple[str, ...] = ()
    """Fields of the configuration of TRL's trainer, by its names, as FIELD=VALUE: loss_type=dr_grpo; and of PEFT's
    LoraConfig, as lora.FIELD=VALUE: lora.lora_alpha=16. Lists and objects are JSON. ppo takes only the latter."""
    checkpoint_every: Count = 10
    """Steps from one checkpoint to the next; the last step has one too."""
    on_hacking: Annotated[str, one_of(("warn", "stop", "halve-lr", "tighten"))] = "warn"
    """What happens on a reward hacking alert: warn, stop, halve-lr (the learning rate), or tighten (double beta)."""
    report_to: tuple[Tracker, ...] = ()
    """Where the metrics go besides steps.jsonl: tensorboard, wandb, trackio, mlflow."""
    metric_names: Annotated[str, one_of(("kleash", "verl", "trl"))] = "kleash"
    """How trackers see them spelt: kleash, verl or trl. steps.jsonl always has kleash's names."""
    resume: bool = False
    """Go on with an interrupted run in --out from its last checkpoint."""

    @property
    def reference_name(self) -> str:
        """The model that the policy is kept near."""
        return self.policy if self.reference is None else self.reference

    @property
    def source_kind(self) -> SourceKind:
        """What is read, and the option that says where it lies."""
        return "prompts"

    @property
    def source(self) -> str:
        """Where what is read lies."""
        source = getattr(self, self.source_kind)
        return SHIPPED_PROMPTS if source is None else source

    def without_effect(self) -> tuple[str, ...]:
        """A sentence for each option that is set and does nothing in this job."""
        has_effect = self.report_to or self.metric_names == "kleash"
        return () if has_effect else ("--metric-names does nothing without --report-to",)

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
    prompts_per_step: Count = 16
    """Prompts answered in a step, by all processes together."""
    max_new_tokens: Count = 64
    temperature: Temperature = 1.0

    def _refusals(self) -> Iterable[Refusal]:
        return (
            Refusal(
                getattr(self, self.source_kind) is None and self.policy != SHIPPED_REFERENCE,
                f"say what {self.policy} should answer: --prompts",
            ),
        )

    @property
    def responses_per_step(self) -> int:
        """Responses that the policy draws in a step, in all processes together."""
        return self.prompts_per_step * self.samples_per_prompt


@dataclass(frozen=True, kw_only=True)
class RewardJob(OnlineJob):
    """The options of algorithms that maximise a reward with a KL penalty to the reference."""

    reward_credit: ClassVar[str] = "response"
    """The tokens that a KL in the reward is credited to, as in ``kl_rules.TermSpec``."""

    reward: tuple[str, ...] = ()
    """What is rewarded: package.module:function, called with prompts and responses (lists of texts) and
    returning a number for each; or the folder of a sequence-classification model; several are added, "0.5*…"
    with a weight."""
    kl: Annotated[str, one_of(("exact", "k1", "k2", "k3"))] = "exact"
    """How KL(policy ‖ reference) is taken: exact, from whole distributions; or from the sampled tokens by k1,
    k2 or k3."""
    kl_place: Annotated[str, one_of(VALUES["place"])] = "loss"
    """loss: differentiated. reward: taken from the reward."""
    kl_scope: Scope | None = None
    """token: the KL of each token. sequence: the KL between responses, in which the KL of later tokens is credited to
    a token too. If not given: token in a loss, sequence in a reward."""
    beta: NotNegative = 0.05
    """What one nat of KL costs, in the unit of the reward (in grpo, of its standard deviation in a group); where a
    controller begins. 0 is no KL penalty."""
    controller: Annotated[str, one_of(("fixed", "ziegler", "pid", "dual"))] = "fixed"
    """What moves beta: fixed (nothing), ziegler, pid, or dual."""
    target_nats: Positive | None = None
    """The KL in nats that a controller steers to, per sequence (per token with --target-per token); with a fixed beta,
    the hacking monitor compares with it."""
    target_per: Annotated[str, one_of(("sequence", "token"))] = "sequence"
    """Whether the target is per sequence or per token."""
    horizon: Count | None = None
    """Of the controller ziegler, in sequences: its rule is then the published one to the last digit (10000 is the
    published horizon); if not given, a faster rule with four steps' sequences, on the KL filtered by its error."""
    beta_min: Positive = 1e-4
    """No controller goes below."""
    beta_max: Positive = 10.0
    """No controller goes above."""

    def _refusals(self) -> Iterable[Refusal]:
        term = term_spec(
            self.kl,
            CONTRACTS.get(self.kl),
            place=self.kl_place,
            scope=self.kl_scope,
            credit=self.reward_credit,
        )
        reason, steers = refusal(term, spell_option), self.controller != "fixed"
        return (
            Refusal(reason, str(reason)),
            Refusal(
                self.horizon is not None and self.controller != "ziegler",
                f"--horizon belongs to --controller ziegler, and the controller is {self.controller}; leave it out",
            ),
            Refusal(
                self.on_hacking == "tighten"
                and (self.beta == 0 or (not steers and self.beta >= self.beta_max)),
                f"--on-hacking tighten doubles beta up to --beta-max {self.beta_max:g}, and --beta is {self.beta:g}; "
                "give one between 0 and that, or another response",
            ),
            Refusal(
                steers and self.target_nats is None,
                f"the controller {self.controller} steers to a target; give --target-nats",
            ),
            Refusal(
                steers and not self.beta_min <= self.beta <= self.beta_max,
                f"--beta {self.beta} does not lie between --beta-min {self.beta_min} and --beta-max {self.beta_max}, "
                f"and the controller {self.controller} begins with it; give one that does",
            ),
            Refusal(
                not self.reward and self.policy != SHIPPED_REFERENCE,
                f"say what {self.policy} is rewarded for: --reward package.module:function or a folder",
            ),
        )

    def settings(self) -> dict[str, object]:
        """The settings of ``TrainJob``, with the scope that an unset ``kl_scope`` stands for."""
        scope = default_scope(self.kl_place) if self.kl_scope is None else self.kl_scope
        return {**super().settings(), "kl_scope": scope}

    def without_effect(self) -> tuple[str, ...]:
        """A sentence for each option that is set and does nothing in this job."""
        unused_bounds = ("beta_min", "beta_max") if self.on_hacking != "tighten" else ("beta_min",)
        sentences = (
            (self.beta == 0, "--beta 0 is no KL penalty: the KL is logged and not trained"),
            *(
                (
                    self.controller == "fixed",
                    f"{flag(name)} does nothing with a fixed beta; --controller moves it",
                )
                for name in changed_options(self, unused_bounds)
            ),
            (
                self.target_nats is None and self.target_per != "sequence",
                "--target-per does nothing without --target-nats",
            ),
            (
                self.target_nats is not None and self.controller == "fixed",
                "--target-nats moves no beta without --controller pid: alerts alone compare the KL with it",
            ),
        )
        return (*super().without_effect(), *(sentence for applies, sentence in sentences if applies))

    @property
    def rewards(self) -> tuple[str, ...]:
        """What is rewarded."""
        return self.reward or (SHIPPED_REWARD,)
