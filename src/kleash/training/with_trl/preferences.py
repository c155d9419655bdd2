"""DPO by TRL's trainer, with the exact KL to the reference measured during training."""

import json
from contextlib import redirect_stderr
from io import StringIO
from itertools import islice
from typing import Any

from kleash.errors import SourceError
from kleash.extras import import_extra
from kleash.integrations.trainer import DriftMonitor
from kleash.jobs import DPOJob
from kleash.jobs.reading import DatasetOptions
from kleash.launch_environment import launched_world_size
from kleash.models import Pair, Sampling, find_source
from kleash.sources.chat_rendering import render_messages, template_options
from kleash.sources.dataset_formats import parse_preference
from kleash.sources.prompts import tokenise_prompt
from kleash.sources.records import SourceRecord
from kleash.store import TrainingResult
from kleash.training.library_fields import trl_config
from kleash.training.networks import load_networks
from kleash.training.run_log import RunLog
from kleash.training.with_trl.runs import (
    even_batch,
    held_out_arguments,
    run_trainer,
    shared_arguments,
    suppress_output,
)

DRIFT_PROMPTS, DRIFT_TOKENS = 32, 32
"""Number of the pairs' prompts, and of new tokens for each, on which the drift is measured."""


@suppress_output()
def train_dpo(job: DPOJob, run_log: RunLog | None) -> TrainingResult:
    """Train a policy by TRL's DPO, from pairs of a chosen and a rejected response.

    The log ratios that DPO logs are on responses of the data set and estimate no KL. So every ``checkpoint_every``
    steps the current policy generates responses to some of the prompts, and their exact KL to the reference is logged
    too.

    Args:
        job: the training job; ``out`` is set.
        run_log: records the steps; None on ranks other than 0.

    Raises:
        SourceError, ModelError, OptionError: if an input or an option of the job is invalid.
        NonFiniteError: if a loss is NaN or infinite.
        CannotRunError, MissingExtraError: if an option is unsupported here or a dependency is missing.
    """
    import kleash.integrations.trl.compat  # noqa: F401 (checks the installed TRL)

    networks = load_networks(job, job.reference_name, device=job.device)
    rows = read_pairs(str(job.pairs), limit=job.limit, options=job, tokenizer=networks.pair.tokenizer)
    held_out = (
        None
        if job.eval_pairs is None
        else read_pairs(job.eval_pairs, limit=None, options=job, tokenizer=networks.pair.tokenizer)
    )
    max_length = min(job.max_tokens, networks.pair.context_length or job.max_tokens)
    short = short_pairs(rows, str(job.pairs), networks.pair, max_length)
    arguments = shared_arguments(job, rows=job.pairs_per_step, row_tokens=2 * job.max_tokens)
    if held_out is not None:
        evaluated = short_pairs(held_out, str(job.eval_pairs), networks.pair, max_length)
        # TRL's accuracy and margin are means over batches, which are therefore of one size
        batch_size = even_batch(len(evaluated), arguments["per_device_train_batch_size"])
        arguments |= held_out_arguments(job, rows=batch_size, best="eval_loss")
    datasets = import_extra("datasets", "trl")
    with redirect_stderr(StringIO()) as library_output:
        trainer = import_extra("trl", "trl").DPOTrainer(
            model=networks.policy,
            ref_model=networks.frozen,
            args=trl_config(
                job,
                **arguments,
                beta=job.beta,
                # the reference does not change, so that its pass over each pair is made once where pairs are read
                # again; TRL keeps it in a file that only the first process has, since the pairs are in memory
                precompute_ref_log_probs=job.steps * job.pairs_per_step > len(rows)
                and launched_world_size() == 1,
                max_length=max_length,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            eval_dataset=None if held_out is None else datasets.Dataset.from_list(held_out),
            processing_class=networks.pair.tokenizer,
            peft_config=networks.lora,
        )
    # TRL's warnings, and not the progress bar of the reference's passes
    notes = [line for line in library_output.getvalue().splitlines() if line and "log probs for" not in line]
    if len(trainer.train_dataset) < len(rows):
        notes.append(
            f"{len(rows) - len(trainer.train_dataset)} of {len(rows)} pairs are left out: their prompts have "
            f"{max_length} tokens or more"
        )
    questions = [{name: row[name] for name in row if name not in ("chosen", "rejected")} for row in short]
    DriftMonitor(
        prompts=list({str(question): question for question in questions}.values()),
        limit=DRIFT_PROMPTS,
        every=job.checkpoint_every,
        sampling=Sampling(max_new_tokens=DRIFT_TOKENS, seed=job.seed),
        batch_tokens=job.batch_tokens,
    ).attach(trainer)
    return run_trainer(trainer, job, run_log, networks, notes=notes)


def short_pairs(rows: list[dict[str, Any]], source: str, pair: Pair, max_tokens: int) -> list[dict[str, Any]]:
    """The pairs with prompts of fewer than ``max_tokens`` tokens; TRL leaves out the others.

    Raises:
        SourceError: if there are none, of which TRL makes an error of torch's.
    """
    short = [
        row
        for row in rows
        if len(tokenise_prompt(SourceRecord(location=source, fields=row), pair).token_ids) < max_tokens
    ]
    if not short:
        raise SourceError(
            f"{source} holds no pair with a prompt of fewer than {max_tokens} tokens; give shorter ones, or raise "
            "--max-tokens if the models read more"
        )
    return short


def read_pairs(
    name: str, *, limit: int | None, options: DatasetOptions | None = None, tokenizer: Any = None
) -> list[dict[str, Any]]:
    """The records of a file with "prompt", "chosen" and "rejected", all texts or all lists of messages.

    Without "prompt", it is the common beginning of the two responses. The columns "tools", as JSON, and
    "chat_template_kwargs" are kept for messages, to whose chat template, the tokenizer's, TRL gives them.

    Raises:
        SourceError: naming the line, if a field is missing or of the other kind, or there is no chat template for
            messages or it refuses them.
    """
    rows: list[dict[str, Any]] = []
    for record in islice(find_source(name, "pairs", options).records(), limit):
        row = parse_preference(record)._asdict()
        if rows and type(row["prompt"]) is not type(rows[0]["prompt"]):
            raise record.error("texts and lists of messages in one file; split it")
        variables: dict[str, Any] = {}
        if isinstance(row["prompt"], list):
            variables = template_options(record)
            for answer in ("chosen", "rejected"):  # as TRL renders them, which names no line
                render_messages(record, row["prompt"] + row[answer], tokenizer, answer)
        tools = variables.pop("tools", None)
        # Arrow would add the variables of others
        if rows and variables.keys() != rows[0]["chat_template_kwargs"].keys():
            raise record.error(
                "'chat_template_kwargs' has other variables than before; split the file by them"
            )
        rows.append({**row, "tools": tools and json.dumps(tools), "chat_template_kwargs": variables})
    return rows
