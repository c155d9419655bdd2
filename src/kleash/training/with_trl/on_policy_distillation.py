"""On-policy distillation by TRL's trainer: the policy generates, and learns from the teacher's distributions."""

from pathlib import Path
from typing import Any

from kleash.extras import import_extra
from kleash.jobs import DistillJob
from kleash.models import read_prompts
from kleash.store import TrainingResult
from kleash.training.library_fields import trl_config
from kleash.training.networks import load_networks
from kleash.training.response_metrics import gather_object
from kleash.training.run_log import RunLog
from kleash.training.with_trl.online import data_set
from kleash.training.with_trl.runs import run_trainer, shared_arguments, silent_trainer
from kleash.training.with_trl.step_logger import TRL_METRICS, StepLogger, StepMeasurement

BETAS = {"policy_teacher": 1.0, "teacher_policy": 0.0, "jensen_shannon": 0.5}
"""Divergence of a job -> TRL's ``beta``, which interpolates between the two directions of KL."""


class EntropyMixin:
    """Mixin before TRL's trainer: entropy as a mean over tokens, where TRL logs a mean of micro-batch means."""

    accelerator: Any
    model: Any
    _entropy_sums: tuple[float, float] = (0.0, 0.0)
    """Sum of the entropies in nats, and number of tokens, since the last step."""

    def _compute_loss(self, *arguments: Any, **named: Any) -> Any:
        parent: Any = super()
        loss, nats, tokens = parent._compute_loss(*arguments, **named)
        if self.model.training:
            total, count = self._entropy_sums
            self._entropy_sums = (total + float(nats), count + float(tokens))
        return loss, nats, tokens

    def pop_entropy(self) -> StepMeasurement:
        """The mean entropy over the tokens of all processes since the last call. A collective."""
        local, self._entropy_sums = self._entropy_sums, (0.0, 0.0)
        parts = gather_object([local])
        nats, tokens = (sum(column) for column in zip(*parts, strict=True))
        return StepMeasurement(metrics={"policy/entropy": nats / tokens})


@silent_trainer
def train_distill(job: DistillJob, run_log: RunLog | None = None) -> TrainingResult:
    """Train a policy to imitate a teacher, by TRL's on-policy distillation.

    TRL computes the divergences exactly, over the whole vocabulary, without holding all logits (``kleash audit`` tests
    them). The divergence per token is logged for each step.

    Args:
        job: the training job; ``out`` is set.
        run_log: records the steps, on rank 0. Without it there, ``kleash.training.train(job)`` is called.

    Raises:
        SourceError, ModelError, OptionError: if an input or an option of the job is invalid.
        NonFiniteError: if a loss is NaN or infinite.
        CannotRunError, MissingExtraError: if an option is unsupported here or a dependency is missing.
    """
    trl = import_extra("trl", "trl")
    import kleash.integrations.trl.compat  # noqa: F401 (checks the installed TRL)

    networks = load_networks(job, job.teacher_name, device=job.device, role="teacher")
    prompts = read_prompts(job.source, networks.pair, limit=job.limit, reading=job)
    longest = max(len(prompt.token_ids) for prompt in prompts) + job.max_new_tokens
    rows = job.prompts_per_step * job.samples_per_prompt
    arguments = shared_arguments(job, rows=rows, row_tokens=longest)
    Path(str(job.out)).mkdir(parents=True, exist_ok=True)
    trainer_class: Any = type("EntropyDistillationTrainer", (EntropyMixin, trl.DistillationTrainer), {})
    trainer = trainer_class(
        model=networks.policy,
        teacher_model=networks.frozen,
        args=trl_config(
            job,
            **arguments,
            shuffle_dataset=False,
            beta=BETAS[job.divergence],
            temperature=job.temperature,
            max_completion_length=job.max_new_tokens,
        ),
        train_dataset=data_set(prompts, job, networks, copies=job.samples_per_prompt),
        processing_class=networks.pair.tokenizer,
        peft_config=networks.lora,
    )
    step_logger = StepLogger(
        job,
        run_log,
        metric_names={**TRL_METRICS, "loss": "teacher/divergence"},
        pop_measurement=trainer.pop_entropy,
        notes=networks.pair.notes,
    )
    step_logger.attach(trainer)
    return run_trainer(trainer, step_logger, job, networks.dtypes)
