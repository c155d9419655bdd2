"""DPO by TRL's trainer, with the exact drift measured beside its implicit rewards."""

from itertools import islice
from pathlib import Path
from typing import Any

from kleash.errors import SourceError
from kleash.extras import import_extra
from kleash.integrations.trainer import DriftMonitor
from kleash.jobs import DPOJob
from kleash.models import Sampling, source_path
from kleash.models.sources.dataset_formats import parse_preference
from kleash.models.sources.source_files import read_records
from kleash.store import TrainingResult
from kleash.training.run_log import RunLog
from kleash.training.with_trl.arguments import shared_arguments
from kleash.training.with_trl.networks import load_networks
from kleash.training.with_trl.runs import as_run, run
from kleash.training.with_trl.step_logger import Generated, StepLogger

WATCHED_PROMPTS, WATCHED_TOKENS = 32, 32
"""On so many of the pairs' prompts, and so many new tokens each, the drift is measured."""


@as_run
def train_dpo(job: DPOJob, run_log: RunLog | None = None) -> TrainingResult:
    """Train a policy by TRL's DPO, from pairs of a chosen and a rejected answer.

    DPO's own numbers are log-ratios on somebody else's answers, which are no KL. So after every
    ``checkpoint_every`` steps the policy, as it is then, answers some of the prompts itself, and the exact KL to the
    reference stands in the run_log beside them.

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

    rows = read_pairs(str(job.pairs), limit=job.limit)
    networks = load_networks(job, job.reference_name)
    Path(str(job.out)).mkdir(parents=True, exist_ok=True)
    arguments = shared_arguments(job, rows=job.pairs_per_step, row_tokens=2 * job.max_tokens)
    trainer = trl.DPOTrainer(
        model=networks.policy,
        ref_model=networks.other,
        args=trl.DPOConfig(**arguments, beta=job.beta, max_length=job.max_tokens),
        train_dataset=import_extra("datasets", "trl").Dataset.from_list(rows),
        processing_class=networks.pair.tokenizer,
        peft_config=networks.lora,
    )
    prompts: dict[str, Any] = {str(row["prompt"]): row["prompt"] for row in rows}
    monitor = DriftMonitor(
        prompts=list(prompts.values()),
        limit=WATCHED_PROMPTS,
        every=job.checkpoint_every,
        sampling=Sampling(max_new_tokens=WATCHED_TOKENS, seed=job.seed),
        batch_tokens=job.batch_tokens,
    ).attach(trainer)
    step_logger = StepLogger(
        job, run_log, generated=lambda: drift_of_step(monitor), notes=networks.pair.notes
    )
    step_logger.attach(trainer)
    return run(trainer, step_logger, job, networks.dtypes)


def drift_of_step(monitor: DriftMonitor) -> Generated | None:
    """What the monitor measured since it was last asked, by kleash's names."""
    drift, monitor.last = monitor.last, None
    if drift is None:
        return None
    return Generated(
        metrics={
            "kl/exact_per_sequence": drift.per_sequence.value,
            "kl/exact_per_sequence_error": drift.per_sequence.standard_error,
            "kl/exact_per_token": drift.per_token.value,
            "kl/exact_per_token_error": drift.per_token.standard_error,
            "response/length": drift.tokens / drift.sequences,
            "response/prompts": float(drift.per_token.clusters),
        }
    )


def read_pairs(name: str, *, limit: int | None) -> list[dict[str, Any]]:
    """Records with "prompt", "chosen" and "rejected", each a text or a list of messages, all of one kind.

    Without "prompt" it is what the two answers begin with alike.

    Raises:
        SourceError: naming the line, if one of them is missing or of another kind.
    """
    rows: list[dict[str, Any]] = []
    for record in islice(read_records(source_path(name)), limit):
        if record.fields is None:
            raise SourceError(
                f"{record.location}: expected a record with 'prompt', 'chosen' and 'rejected' and found text"
            )
        row = parse_preference(record)._asdict()
        if rows and type(row["prompt"]) is not type(rows[0]["prompt"]):
            raise SourceError(f"{record.location}: texts and lists of messages in one file; part it")
        rows.append(row)
    if not rows:
        raise SourceError(f"{name} holds no pair")
    return rows
