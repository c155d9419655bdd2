"""Distillation by TRL's trainer: a policy learns from a teacher's distributions, on its own or on given responses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from kleash.divergences import (
    DIVERGENCES,
    Divergence,
    jensen_shannon_record,
    skew_kl_record,
)
from kleash.divergences.functions import cross_entropy_of_rows
from kleash.extras import import_extra, require_attributes
from kleash.integrations.trl.forward_capture import prepare_frozen, whole_rows
from kleash.jobs import DistillJob
from kleash.linear import (
    Head,
    linear_divergence_loss,
    linear_objective,
    log_probabilities,
    token_statistics,
)
from kleash.losses import top_k_distillation_loss
from kleash.models import (
    Prompt,
    StoredReference,
    TokenizerMismatchError,
    TokenSequence,
    read_prompts,
    read_responses,
)
from kleash.models.live_models import current_head
from kleash.sources.responses import LISTS, check_lists
from kleash.store import TrainingResult
from kleash.store.metrics import with_errors
from kleash.training.library_fields import trl_config
from kleash.training.networks import Networks, load_networks
from kleash.training.response_metrics import gather_object
from kleash.training.run_log import RunLog
from kleash.training.with_trl.online import TokenPromptsMixin, in_step_order, longest_row, prompt_rows
from kleash.training.with_trl.runs import PROMPT_COLUMN, run_trainer, shared_arguments, suppress_output
from kleash.uncertainty.ratios import mean_per_token

LISTED_LOGITS = 2**25
"""Logits of the policy that exist together where the teacher's are lists: 128 MiB in float32."""
NO_END = (
    "none of the responses ends with an end token, so that the policy does not learn where to stop; a text gets one "
    'with "finish_reason": "stop" in its record'
)
"""The note about responses that were cut off, or that are texts."""
Side: TypeAlias = tuple[Float[Tensor, "tokens dim"], Head]
"""Final hidden states at the positions that predict some tokens, and the head for them."""
Losses: TypeAlias = tuple[Float[Tensor, ""], Float[Tensor, " tokens"], Float[Tensor, " tokens"]]
"""A loss, the divergence of each token that it is made of, and the policy's entropy there; the last two detached."""


def divergence_of(job: DistillJob) -> Divergence:
    """The divergence of a job, D(teacher || policy)."""
    mix = (0.5 if job.divergence == "jensen_shannon" else 0.1) if job.mix is None else job.mix
    return {
        **DIVERGENCES,
        "policy_teacher": DIVERGENCES["reverse_kl"],
        "teacher_policy": DIVERGENCES["kl"],
        "jensen_shannon": jensen_shannon_record(mix),
        "skew_kl": skew_kl_record(mix),
        "skew_reverse_kl": skew_kl_record(mix).swapped,
    }[job.divergence]


def loss_of_states(
    policy: Side, teacher: Side, weight: Float[Tensor, ""], record: Divergence, temperature: float
) -> Losses:
    """``weight`` times the sum of D(teacher || policy), from hidden states and heads of both.

    The entropy comes from the same pass over the vocabulary for KL(policy || teacher); with another divergence it takes
    one more product of the policy's head.
    """
    tokens = torch.zeros(len(policy[0]), dtype=torch.int64, device=policy[0].device)  # any: none is read
    if record == DIVERGENCES["reverse_kl"]:
        loss, terms = linear_objective(
            *policy, tokens, *teacher, lambda terms, _: weight * terms.kl, temperature=temperature
        )
        return loss, terms.kl, terms.entropy
    loss, per_token = linear_divergence_loss(
        *teacher, *policy, weights=weight.expand(len(tokens)), divergence=record, temperature=temperature
    )
    return loss, per_token, token_statistics(*policy, *policy, tokens, temperature=temperature).entropy_p


def loss_of_lists(
    policy: Side,
    responses: Sequence[TokenSequence],
    weight: Float[Tensor, ""],
    record: Divergence,
    temperature: float,
    *,
    tail: str = "bucket",
) -> Losses:
    """``weight`` times the sum of D(teacher || policy), from the teacher's lists for the tokens of ``responses``.

    The tokens outside a list are taken for one ("bucket": a lower bound), or the drawn token stands for them
    ("sampled": unbiased). The logits of some tokens exist together, of several responses, whose shorter lists are
    padded; the backward pass computes them again.

    Args:
        policy: its final hidden states, [tokens of all responses, dim], and its head.
        responses: with the teacher's ids and log-probabilities in their columns ``LISTS``.
        weight: of the sum.
        record: the divergence D.
        temperature: divides the policy's logits.
        tail: "bucket" or "sampled".

    Returns:
        The loss; of each token, detached, the divergence and the policy's entropy.
    """
    hidden, head = policy

    def losses(states: Tensor, ids: Tensor, listed: Tensor, *drawn: Tensor) -> tuple[Tensor, Tensor]:
        logp = log_probabilities(states, head, temperature=temperature)
        per_token = top_k_distillation_loss(
            ids,
            listed,
            logp,
            ids[:, 0] >= 0,  # all of them
            divergence=record,
            drawn=(drawn[0], drawn[1]) if drawn else None,
        )
        return per_token, cross_entropy_of_rows(logp.detach(), logp.detach())

    k = max(response.columns[LISTS[0]].shape[1] for response in responses)
    columns = [
        [
            pad(torch.from_numpy(x), (0, k - x.shape[1]), value=end)
            for x in (response.columns[name] for response in responses)
        ]
        for name, end in zip(LISTS, (-1, -torch.inf), strict=True)
    ]
    if tail == "sampled":
        columns += [
            [torch.tensor(response.response_ids) for response in responses],
            [torch.from_numpy(response.logp_sampled) for response in responses],
        ]
    size = max(1, LISTED_LOGITS // head.vocabulary(hidden))
    chunks = zip(
        *(torch.cat(column).to(hidden.device).split(size) for column in ([hidden], *columns)), strict=True
    )
    parts = [checkpoint(losses, *rows, use_reentrant=False) for rows in chunks]
    per_token, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return weight * per_token.sum(), per_token.detach(), entropies


class DistillationMixin(TokenPromptsMixin):
    """Mixin before TRL's trainer, made without a teacher: kleash's divergence from the teacher as its loss."""

    def set_teacher(
        self, job: DistillJob, networks: Networks, items: Sequence[Prompt] | Sequence[TokenSequence]
    ) -> None:
        """Set what is learned from, with the ``items`` of the trainer."""
        self._job, self._pair, self.items, self._record = job, networks.pair, items, divergence_of(job)
        self._measured: list[tuple[str, float, int, float]] = []
        if networks.frozen is not None:
            self.teacher_model = prepare_frozen(self, networks.frozen)

    def _compute_loss(self, student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        """The loss in place of TRL's, with the sum of the entropies and the number of tokens, as TRL's returns them."""
        mask: Bool[Tensor, "batch time"] = inputs["completion_mask"].bool()
        items: list[Any] = [self.items[index] for index in inputs[PROMPT_COLUMN].tolist()]
        policy = (
            self._hidden_states(student, inputs)[mask],
            current_head(student, self._pair.policy.head, requires_grad=True),
        )
        weight = 1 / (mask.sum() if num_items_in_batch is None else num_items_in_batch.to(mask.device))
        options = weight, self._record, self.temperature
        loss, *columns = (
            loss_of_lists(policy, items, *options, tail=self._job.tail)
            if self._job.reads_lists
            else loss_of_states(policy, self._teacher_side(inputs, items, mask), *options)
        )
        lengths = mask.sum(-1).tolist()
        nats, entropies = ([float(x.sum()) for x in column.double().split(lengths)] for column in columns)
        self._measured += zip((item.prompt_hash for item in items), nats, lengths, entropies, strict=True)
        return loss, columns[1].sum(), mask.sum()

    def _hidden_states(self, network: Any, inputs: dict[str, Any]) -> Float[Tensor, "batch time dim"]:
        """The final hidden states at the positions that predict the responses."""
        with self.accelerator.autocast():  # which TRL's pass without the head leaves out
            return self._get_last_hidden_state(network, *whole_rows(inputs))

    def _teacher_side(self, inputs: dict[str, Any], items: list[Any], mask: Tensor) -> Side:
        """The teacher's side, from its cache or its own pass."""
        teacher, network = self._pair.reference, self.teacher_model
        if teacher.stored is not None:
            return teacher.stored.read(items), teacher.head
        whole = self.accelerator.unwrap_model(network)
        with torch.no_grad():
            hidden = self._forward_redirection(network, whole, self._hidden_states, whole, inputs)
        return hidden[mask], current_head(whole, teacher.head, requires_grad=False)

    def pop_metrics(self) -> dict[str, float]:
        """The divergence and the entropy of the policy since the last call, before the update. A collective."""
        local, self._measured = self._measured, []
        hashes, *columns = zip(*gather_object(local), strict=True)
        nats, tokens, entropies = map(np.array, columns)
        divergence = mean_per_token(nats, tokens, np.array(hashes))
        return {
            **with_errors({"teacher/divergence": divergence}),
            "policy/entropy": entropies.sum() / tokens.sum(),
            "response/length": tokens.mean(),
            "response/prompts": float(divergence.clusters),
        }


class GivenResponsesMixin(DistillationMixin):
    """``DistillationMixin`` with given responses in place of those that TRL would generate."""

    def _tokenize_prompts(self, _: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [list(sequence.prompt_ids) for sequence in self._batch], None, {}

    def _generate_single_turn(self, *_: Any) -> list[list[int]]:
        return [list(sequence.response_ids) for sequence in self._batch]

    def log(self, *args: Any, **options: Any) -> None:
        """Log without TRL's share of truncated responses, which takes each without an end token for one."""
        self._metrics["train"].pop("completions/clipped_ratio", None)
        super().log(*args, **options)


def read_given(
    job: DistillJob, networks: Networks, stored: StoredReference | None
) -> tuple[list[TokenSequence], list[str]]:
    """The responses of a job that draws none, and notes about their ends and the teacher's lists.

    Raises:
        SourceError: if they cannot be read, or lists are missing or wrong where there is neither teacher nor cache.
        ModelError: if the teacher's cache lacks some of them.
    """
    responses = list(
        read_responses(job.source, networks.pair, limit=job.limit, reading=job, with_lists=job.reads_lists)
    )
    if stored is not None:
        stored.require_all(responses, f"responses of {job.source}", "make another with kleash cache")
    ends = {*networks.pair.eos_token_ids, *networks.pair.tokenizer.all_special_ids}
    has_end = any(response.response_ids[-1] in ends for response in responses)
    return responses, [
        *(() if has_end else (NO_END,)),
        *check_lists(
            responses if job.reads_lists else (),
            job.source,
            vocab_size=networks.pair.vocab_size,
            drawn_at=job.temperature if job.tail == "sampled" else None,
        ),
    ]


@suppress_output()
def train_distill(job: DistillJob, run_log: RunLog | None) -> TrainingResult:
    """Train a policy to imitate a teacher, by TRL's distillation trainer with kleash's divergences.

    They are exact, over the whole vocabulary, without holding all logits; from top-k lists, lower bounds or unbiased.

    Args:
        job: the training job; ``out`` is set.
        run_log: records the steps; None on ranks other than 0.

    Raises:
        SourceError, ModelError, OptionError: if an input or an option of the job is invalid.
        NonFiniteError: if a loss is NaN or infinite.
        CannotRunError, MissingExtraError: if an option is unsupported here or a dependency is missing.
    """
    require_attributes(
        "trl", {"trl.trainer.distillation_trainer:DistillationTrainer._compute_loss": ("inputs",)}
    )
    stored = None if job.teacher_cache is None else StoredReference(Path(job.teacher_cache).expanduser())
    try:
        networks = load_networks(job, job.teacher_name, device=job.device, role="teacher", stored=stored)
    except TokenizerMismatchError as error:
        raise TokenizerMismatchError(
            f"{error} (the reference is the teacher here); TRL's GOLDTrainer distils between tokenizers"
        ) from error
    if job.responses is None:
        items, notes = read_prompts(job.source, networks.pair, limit=job.limit, reading=job), list[str]()
        rows, mixin = prompt_rows(prompt.text for prompt in items), DistillationMixin
        longest = longest_row(items, job, networks.pair)
    else:
        items, notes = read_given(job, networks, stored)
        rows, mixin = prompt_rows(response.prompt_text for response in items), GivenResponsesMixin
        longest = max(response.num_input_tokens for response in items) + 1
    trainer_class: Any = type(
        "KleashDistillationTrainer", (mixin, import_extra("trl", "trl").DistillationTrainer), {}
    )
    # rows of the head that stand for no token, from which TRL would draw, and which a teacher may lack
    beyond = range(networks.pair.policy.vocab_size, len(networks.policy.get_output_embeddings().weight))
    trainer = trainer_class(
        model=networks.policy,
        args=trl_config(
            job,
            **shared_arguments(job, rows=job.responses_per_step, row_tokens=longest),
            shuffle_dataset=False,
            temperature=job.temperature,
            max_completion_length=job.max_new_tokens,
            **({"generation_kwargs": {"suppress_tokens": [*beyond]}} if beyond else {}),
        ),
        train_dataset=in_step_order(rows, job, copies=job.samples_per_prompt),
        processing_class=networks.pair.tokenizer,
        peft_config=networks.lora,
    )
    trainer.set_teacher(job, networks, items)
    return run_trainer(trainer, job, run_log, networks, notes=notes, pop_metrics=trainer.pop_metrics)
