"""Distillation by TRL's trainer: the policy answers, and learns from the teacher's distributions."""

from pathlib import Path
from typing import Any

from kleash.extras import import_extra
from kleash.jobs import DistillJob
from kleash.models import read_prompts
from kleash.store import TrainingResult
from kleash.training.process_group import ProcessGroup
from kleash.training.run_log import RunLog
from kleash.training.with_trl.arguments import shared_arguments
from kleash.training.with_trl.networks import load_networks
from kleash.training.with_trl.online import data_set
from kleash.training.with_trl.runs import as_run, run
from kleash.training.with_trl.step_logger import SPELT, Generated, StepLogger

BETAS = {"policy_teacher": 1.0, "teacher_policy": 0.0, "jensen_shannon": 0.5}
"""What TRL calls the divergences, as a number between the two directions of KL."""


class Counting:
    """In front of TRL's trainer: entropy by sum and count, where TRL logs a mean of micro-batches' means."""

    accelerator: Any
    model: Any
    _counted: tuple[float, float] = (0.0, 0.0)

    def _compute_loss(self, *arguments: Any, **named: Any) -> Any:
        parent: Any = super()
        loss, nats, tokens = parent._compute_loss(*arguments, **named)
        if self.model.training:
            self._counted = (self._counted[0] + float(nats), self._counted[1] + float(tokens))
        return loss, nats, tokens

    def take_counted(self) -> Generated:
        """The entropy of the tokens of all processes since it was last asked for. A collective."""
        local, self._counted = self._counted, (0.0, 0.0)
        ranks = ProcessGroup(self.accelerator.process_index, self.accelerator.num_processes)
        total = ranks.sum_over_ranks({"nats": local[0], "tokens": local[1]})
        return Generated(metrics={"policy/entropy": total["nats"] / total["tokens"]})


@as_run
def train_distill(job: DistillJob, run_log: RunLog | None = None) -> TrainingResult:
    """Train a policy to say what a teacher would, by TRL's on-policy distillation.

    Its divergences are exact, over the whole vocabulary, and never hold all logits at once; ``kleash audit``
    has looked at them. The step's divergence per token is in the run_log.

    Args:
        job: what to train, and how; ``out`` is given.
        run_log: keeps the steps, on the first process. Left out there, this is ``kleash.training.train(job)``.

    Raises:
        SourceError, ModelError, OptionError: if an input or an option of the job is invalid.
        NonFiniteError: if a loss is NaN or infinite.
        CannotRunError, MissingExtraError: if an option is unsupported here or a dependency is missing.
    """
    trl = import_extra("trl", "trl")
    import kleash.integrations.trl.compat  # noqa: F401 (checks the installed TRL)

    networks = load_networks(job, job.teacher_name, role="teacher")
    prompts = read_prompts(job.source, networks.pair, limit=job.limit)
    longest = max(len(prompt.token_ids) for prompt in prompts) + job.max_new_tokens
    rows = job.prompts_per_step * job.samples_per_prompt
    arguments = shared_arguments(job, rows=rows, row_tokens=longest)
    Path(str(job.out)).mkdir(parents=True, exist_ok=True)
    kind: Any = type("CountingDistillationTrainer", (Counting, trl.DistillationTrainer), {})
    trainer = kind(
        model=networks.policy,
        teacher_model=networks.other,
        args=trl.DistillationConfig(
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
    spelt = {**SPELT, "loss": "teacher/divergence"}
    step_logger = StepLogger(
        job, run_log, spelt=spelt, generated=trainer.take_counted, notes=networks.pair.notes
    )
    step_logger.attach(trainer)
    return run(trainer, step_logger, job, networks.dtypes)
