"""``--dry-run``: what a job would load and read, from settings, headers and tokenizers, without weights."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kleash.checkpoints.resolution import Checkpoint, find_checkpoint
from kleash.engines.local import CPU_BUFFER_BYTES
from kleash.errors import OptionError
from kleash.extras import suppress_library_output
from kleash.jobs import CacheJob, MeasureJob, SweepJob
from kleash.jobs.option_groups import is_endpoint
from kleash.linear.chunked import ENOUGH_TOKENS
from kleash.measuring.model_pair import check_covered, finished_cache
from kleash.measuring.shards import hash_source, source_sequences
from kleash.measuring.sweep_run import check_sweep_folder
from kleash.models import read_prompts
from kleash.models.cache.reference_cache import check_cache_folder
from kleash.models.cache.stored_reference import StoredReference
from kleash.models.filling import ON_META
from kleash.models.model_building import DENSE_TYPES, check_vocab_size, read_context_length
from kleash.models.network_loading import load_base
from kleash.models.pair_loading import resolve_device, resolve_dtype
from kleash.models.tokenizers import load_tokenizers, token_count
from kleash.reports.formatting import format_bytes
from kleash.store import RunFolder
from kleash.store.summary import Name, Summary, SummaryTable, counted

GPU_BYTES_A_TOKEN = 2 * ENOUGH_TOKENS * 2 * 4
"""Memory of a chunk on a GPU for each token of the vocabulary: logits of two models in float32, of twice the tokens."""
UNTIL_RUN = "not known before the first shard; the progress of the run has it then"


def dry_run(job: MeasureJob | CacheJob | SweepJob) -> Summary:
    """What a job would load and read: models with their memory, and the tokens of its source. Nothing is written.

    The source is read and tokenised whole. Responses that the policy draws count with their largest number of tokens.

    Raises:
        OptionError: if a model is behind a server, or the source is a file of base logits.
        RunFolderError: if the run could not be written into its folder.
        ModelError, SourceError, CannotRunError: those of the run that do not need the weights.
    """
    _check_out(job)
    names, source = _models_and_source(job)
    if source.has_base_logits or any(map(is_endpoint, names.values())):
        raise OptionError(
            "--dry-run reads checkpoints; a server and a file of base logits show none, so leave it out"
        )
    device = resolve_device(job.device, job.device_map)
    dtype = resolve_dtype(job.dtype, device)
    stored = finished_cache(source)
    if stored is not None:
        stored.check_reference(job.reference, job.revision_reference, str(dtype).removeprefix("torch."))
    checkpoints = {
        role: find_checkpoint(name, getattr(job, f"revision_{role}", None), role)
        for role, name in names.items()
        if role != "reference" or stored is None
    }
    kind, path = source.source
    limits: Any = _limits(checkpoints, job, stored, device)
    if kind == "prompts":
        prompts = read_prompts(path, limits, limit=source.limit, reading=source)
        drawn = len(prompts) * source.samples_per_prompt
        tokens = source.samples_per_prompt * sum(
            len(prompt.token_ids) + source.max_new_tokens for prompt in prompts
        )
        read = f"at most {counted(tokens, 'token')} in {counted(drawn, 'response')} and their prompts"
    else:
        if stored is not None:
            check_covered(source, limits, stored, hash_source(source))
        lengths = [sequence.num_input_tokens for sequence in source_sequences(source, limits)]
        read = f"{counted(sum(lengths), 'token')} in {counted(len(lengths), 'sequence')}"
    chunk_bytes = CPU_BUFFER_BYTES if device.type == "cpu" else GPU_BYTES_A_TOKEN * limits.vocab_size
    rows = tuple(_model_row(checkpoint, dtype) for checkpoint in checkpoints.values())
    return Summary(
        headline=f"{counted(len(rows), 'model')} would be loaded and {read} read; nothing was loaded or written",
        facts=(
            ("source", f"{kind} of {path}"),
            *([] if stored is None else [("reference", f"read from {stored.folder} and not loaded")]),
            ("device", str(device)),
            ("a batch", f"{counted(job.batch_tokens, 'token')} at most, padding counted"),
            ("a chunk of logits", f"about {format_bytes(chunk_bytes)}, beside the models and a batch"),
            ("time", UNTIL_RUN),
        ),
        tables=(SummaryTable(header=("model", "weights", "on disk", "in memory", "stored as"), rows=rows),),
    )


def _check_out(job: MeasureJob | CacheJob | SweepJob) -> None:
    """Check the folder of a job as its run does where no other process works on it; base logits are one file."""
    match job:
        case MeasureJob(out=str(out)):
            RunFolder(Path(out).expanduser()).check(resume=job.resume)
        case CacheJob(out=str(out), format=None):
            check_cache_folder(Path(out).expanduser())
        case SweepJob(out=str(out)):
            check_sweep_folder(Path(out).expanduser(), resume=job.resume)


def _models_and_source(job: MeasureJob | CacheJob | SweepJob) -> tuple[dict[str, str], MeasureJob]:
    """The models of a job by role, and the measurement that reads its source."""
    match job:
        case MeasureJob():
            return {"policy": job.policy, "reference": job.reference}, job
        case CacheJob():
            return {"reference": job.reference}, job.measurement()
        case SweepJob():
            candidates = {f"candidate {number}": name for number, name in enumerate(job.candidates, 1)}
            return {"reference": job.reference, **candidates}, job.cache_job(Path()).measurement()


def _limits(
    checkpoints: Mapping[str, Checkpoint],
    job: MeasureJob | CacheJob | SweepJob,
    stored: StoredReference | None,
    device: torch.device,
) -> SimpleNamespace:
    """What the source must suit, as of a pair.

    Raises:
        ModelError: if a tokenizer is not that of the reference, or a checkpoint shows in its headers that it cannot be
            loaded.
    """
    reference = {role: checkpoint for role, checkpoint in checkpoints.items() if role == "reference"}
    pairs = [{"policy": each, **reference} for role, each in checkpoints.items() if role not in reference]
    with suppress_library_output():
        stored_tokenizer = stored and stored.tokenizer(job.trust_remote_code)
        loaded = [
            load_tokenizers(pair, job.trust_remote_code, job.tokenizer, stored_tokenizer)[0]
            for pair in pairs or [reference]
        ]
        tokenizer = loaded[0]["reference"]
        networks = {
            str(checkpoint): load_base(
                checkpoint, torch.float32, device, ON_META, job.trust_remote_code
            ).network
            for checkpoint in checkpoints.values()
        }
    rows = {subject: len(network.get_input_embeddings().weight) for subject, network in networks.items()}
    for subject, number in rows.items():
        check_vocab_size(subject, tokenizer, number, "embeddings")
    lengths = [
        *(read_context_length(network.config) for network in networks.values()),
        *([] if stored is None else [stored.contents.context]),
    ]
    return SimpleNamespace(
        tokenizer=tokenizer,
        vocab_size=token_count(tokenizer, min(rows.values())),
        context_length=min((length for length in lengths if length is not None), default=None),
        eos_token_ids=(),
        reference=None,
    )


def _model_row(checkpoint: Checkpoint, dtype: torch.dtype | str) -> tuple[str, ...]:
    """A row of the table of models: weights are counted where they are not packed, or in a GGUF file."""
    tensors = checkpoint.all_tensors
    kinds = dict.fromkeys(tensor.kind for tensor in tensors)
    stored, weights = sum(tensor.num_bytes for tensor in tensors), sum(tensor.elements for tensor in tensors)
    is_dense = all(kind in DENSE_TYPES for kind in kinds)
    in_memory = weights * dtype.itemsize if isinstance(dtype, torch.dtype) else stored
    return (
        Name(checkpoint.name),
        f"{weights:,}" if is_dense or checkpoint.gguf else "packed",
        format_bytes(stored),
        format_bytes(in_memory)
        if is_dense or (checkpoint.gguf and dtype != "auto")
        else "as on disk, or more",
        ", ".join(kinds),
    )
