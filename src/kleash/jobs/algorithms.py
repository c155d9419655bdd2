"""The jobs of ``kleash train``: one for each way of training."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from kleash.jobs.option_groups import SHIPPED_POLICY, SHIPPED_REFERENCE
from kleash.jobs.options import (
    Allowed,
    Count,
    NotNegative,
    Positive,
    Refusal,
    Share,
    changed_options,
    flag,
    one_of,
)
from kleash.jobs.reading import DatasetOptions, SourceKind
from kleash.jobs.train import OnlineJob, RewardJob, Scope, TrainJob

Discount = Annotated[float, Allowed("from 0 to 1", lambda x: 0 <= x <= 1)]
Group = Annotated[Count, Allowed("at least 2, to compare the answers to one prompt", lambda n: n >= 2)]
MIXTURE_DIVERGENCES = ("jensen_shannon", "skew_kl", "skew_reverse_kl")
"""The divergences of distillation that have a parameter, ``mix``."""
DISTILLATION_DIVERGENCES = (
    *("policy_teacher", "teacher_policy", "kl", "reverse_kl", "jeffreys", "chi_squared", "total_variation"),
    *("hellinger", *MIXTURE_DIVERGENCES),
)


@dataclass(frozen=True, kw_only=True)
class PPOJob(RewardJob):
    """Train by PPO: the policy answers, is rewarded, and is kept near the reference.

    Without arguments: the model and the prompts that ship with kleash, and a reward that is easily hacked.
    """

    algorithm: ClassVar[str] = "ppo"
    reward_credit: ClassVar[str] = "later_tokens"

    kl_scope: Scope | None = "sequence"
    """token: the KL of each token. sequence: the KL between responses, in which the KL of later tokens is credited to
    a token too."""
    epochs: Count = 2
    """Times that a step's responses are learned from."""
    minibatches: Count = 2
    """Parts that the responses are learned from in; each part is one update."""
    gamma: Discount = 1.0
    """Of the reward, per token: gamma."""
    gae_lambda: Discount = 1.0
    """Lambda of GAE. Below 1 a score reaches 1 / (1 - lambda) tokens back, and further only through the critic."""
    clip_range: Positive = 0.2
    """A token's probability ratio gains nothing beyond 1 - clip_range and 1 + clip_range."""
    vf_coef: NotNegative = 0.1
    """Of the value loss."""
    clip_range_value: Positive | None = 0.2
    """A new value gains nothing further than so much from the old one; None for no such bound."""
    ent_coef: NotNegative = 0.0
    """Of the entropy's bonus."""
    whiten: bool = True
    """Bring the advantages of a step to mean 0 and standard deviation 1; with --no-whiten they stay as they are."""
    max_gradient_norm: Positive = 1.0
    """Longer gradients, of the policy or of the critic, are scaled down to it."""
    early_stop_nats: Positive | None = None
    """A step's updates end once KL(before ‖ now) per token is above it."""

    def _refusals(self) -> Iterable[Refusal]:
        return (
            Refusal(
                self.minibatches > self.responses_per_step,
                f"--minibatches {self.minibatches} cannot be made of {self.responses_per_step} responses; draw more, "
                "or take fewer",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class GroupJob(RewardJob):
    """The options of algorithms that compare the responses to one prompt with each other."""

    samples_per_prompt: Group = 8
    """Responses drawn for each prompt: the group that is compared, at least 2."""
    epochs: Count = 1
    """Times that a step's responses are learned from."""
    eval_prompts: str | None = None
    """Prompts that are held out, in any format of --prompts: every --checkpoint-every steps, and where --set eval_steps
    says so, the policy answers them, is rewarded and its KL measured."""
    eval_reward: tuple[str, ...] = ()
    """What the answers to --eval-prompts are rewarded for, as --reward says it; the same as in training, if not
    given."""

    def _refusals(self) -> Iterable[Refusal]:
        return (
            Refusal(
                bool(self.eval_reward) and self.eval_prompts is None,
                "--eval-reward is of the answers to held-out prompts; give them: --eval-prompts",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class GRPOJob(GroupJob):
    """Train by GRPO (TRL's): the answers to one prompt are compared with each other.

    Without arguments: the model and the prompts that ship with kleash, and a reward that is easily hacked.
    """

    algorithm: ClassVar[str] = "grpo"


@dataclass(frozen=True, kw_only=True)
class RLOOJob(GroupJob):
    """Train by RLOO (TRL's): each answer is compared with the others to the same prompt.

    Without arguments: the model and the prompts that ship with kleash, and a reward that is easily hacked.
    """

    algorithm: ClassVar[str] = "rloo"

    samples_per_prompt: Group = 4
    """Responses drawn for each prompt: the group that is compared, at least 2."""
    kl_scope: Scope | None = "sequence"
    """token: the KL of each token. sequence: the KL between responses, in which the KL of later tokens is credited to
    a token too."""


@dataclass(frozen=True, kw_only=True)
class DPOJob(TrainJob, DatasetOptions):
    """Train by DPO (TRL's): from pairs of a chosen and a rejected answer."""

    algorithm: ClassVar[str] = "dpo"

    pairs: str | None = None
    """JSONL, a JSON array, CSV, Parquet or Arrow with "prompt", "chosen" and "rejected": texts, or lists of messages; a
    data set's folder or user/name on the hub; - is standard input. Without "prompt" it is what the two answers begin
    with alike."""
    eval_pairs: str | None = None
    """Pairs that are held out, in any format of --pairs: every --checkpoint-every steps, and where --set eval_steps
    says so, loss, accuracy and margin on them are logged, and the checkpoint with the smallest loss is kept."""
    beta: Positive = 0.1
    """The leash of DPO: the reward of a nat of log-probability against the reference. A larger one keeps the policy
    closer."""
    pairs_per_step: Count = 16
    """Pairs learned from in a step, by all processes together."""
    max_tokens: Count = 1024
    """Longer pairs, and those longer than the models read, are cut off; if the prompt alone is as long, left out."""

    def _refusals(self) -> Iterable[Refusal]:
        return (
            Refusal(
                self.pairs is None,
                "say what is preferred to what: --pairs, JSONL with prompt, chosen and rejected",
            ),
            tightening(self),
        )

    @property
    def source_kind(self) -> SourceKind:
        """What is read, and the option that says where it lies."""
        return "pairs"


@dataclass(frozen=True, kw_only=True)
class DistillJob(OnlineJob):
    """Train a policy to say what a teacher would, by the teacher's distributions over whole vocabularies.

    On its own responses to --prompts, with a --teacher in memory; or on the responses of a file, --responses, with a
    --teacher in memory, with its hidden states of them (--teacher-cache), or with the lists of its likeliest tokens
    that the file has. Without arguments: the two models that ship with kleash.
    """

    algorithm: ClassVar[str] = "distill"

    teacher: str | None = None
    """The model to learn from: a folder or a hub id, with the policy's tokenizer."""
    responses: str | None = None
    """Learn from given responses instead of the policy's own: JSONL, a JSON array, CSV, Parquet or Arrow with prompt
    and response, as of kleash measure. Without a teacher, each record has "teacher_ids" and "teacher_logprobs": for
    each token of the response, k tokens and the teacher's log-probabilities of them at --temperature."""
    response_column: str | None = None
    """Column with the responses, for --responses; if not given, the first usual name that is there."""
    teacher_cache: str | None = None
    """Folder of kleash cache with the teacher's hidden states of --responses; the teacher is not loaded."""
    divergence: Annotated[str, one_of(DISTILLATION_DIVERGENCES)] = "policy_teacher"
    """What is made small at each token: reverse_kl or policy_teacher, KL(policy ‖ teacher), which settles on a mode;
    kl or teacher_policy, KL(teacher ‖ policy), which covers them all; jensen_shannon; skew_kl, KL(teacher ‖ mix ·
    teacher + (1 - mix) · policy); skew_reverse_kl, KL(policy ‖ mix · policy + (1 - mix) · teacher); or jeffreys,
    chi_squared, total_variation, hellinger, from the teacher to the policy."""
    mix: Share | None = None
    """Share of the first distribution in the mixture: of the teacher in jensen_shannon (0.5 if not given) and skew_kl
    (0.1), of the policy in skew_reverse_kl (0.1)."""
    tail: Annotated[str, one_of(("bucket", "sampled"))] = "bucket"
    """Tokens that the teacher's lists leave out: bucket, one token with all their probability, a lower bound; or
    sampled, unbiased, for responses that the teacher drew, with its "logprobs" of their tokens."""

    def _refusals(self) -> Iterable[Refusal]:
        draws, has_cache = self.responses is None, self.teacher_cache is not None
        of_draws = changed_options(self, ("prompts", "samples_per_prompt", "max_new_tokens"))
        return (
            Refusal(
                self.reference is not None,
                "distill keeps the policy near no --reference; the model that it learns from is --teacher",
            ),
            Refusal(
                self.tail == "sampled" and self.divergence == "hellinger",
                "--tail sampled cannot estimate hellinger, the root of a mean; take another, or --tail bucket",
            ),
            Refusal(
                self.teacher is not None and has_cache,
                "--teacher-cache stands for the teacher, which is not loaded; leave --teacher out",
            ),
            Refusal(
                draws and has_cache,
                "--teacher-cache holds hidden states of responses that were given, and the policy draws new ones; give "
                "those as --responses, or a --teacher",
            ),
            Refusal(
                draws and self.teacher is None and self.policy != SHIPPED_REFERENCE,
                f"say which model {self.policy} learns from: --teacher",
            ),
            *(
                Refusal(
                    not draws,
                    f"{flag(name)} is for responses that the policy draws, and --responses are given; leave it out",
                )
                for name in of_draws
            ),
            Refusal(
                self.tail == "sampled" and not self.reads_lists,
                "--tail sampled is for lists of the teacher's likeliest tokens; its distributions are whole here",
            ),
            tightening(self),
        )

    @property
    def source_kind(self) -> SourceKind:
        """What is read, and the option that says where it lies."""
        return "prompts" if self.responses is None else "responses"

    @property
    def reads_lists(self) -> bool:
        """Whether the source has lists of the teacher's likeliest tokens in place of a teacher."""
        return self.responses is not None and self.teacher is None and self.teacher_cache is None

    @property
    def teacher_name(self) -> str | None:
        """The model to learn from that is loaded; None if there is none."""
        is_loaded = self.teacher_cache is None and not self.reads_lists
        return SHIPPED_POLICY if is_loaded and self.teacher is None else self.teacher

    def without_effect(self) -> tuple[str, ...]:
        """A sentence for each option that is set and does nothing in this job."""
        sentences = super().without_effect()
        if self.mix is None or self.divergence in MIXTURE_DIVERGENCES:
            return sentences
        return (*sentences, f"--mix does nothing with --divergence {self.divergence}, which has no mixture")


def tightening(job: TrainJob) -> Refusal:
    """The refusal of ``--on-hacking tighten`` for an algorithm that has no beta during training."""
    return Refusal(
        job.on_hacking == "tighten",
        f"{job.algorithm} has no beta that could be tightened during training; take another --on-hacking",
    )


ALGORITHMS: Mapping[str, type[TrainJob]] = {
    job.algorithm: job for job in (PPOJob, GRPOJob, RLOOJob, DPOJob, DistillJob)
}
"""Word after ``kleash train`` -> its job."""
