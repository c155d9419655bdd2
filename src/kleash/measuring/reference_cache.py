"""The caching job: run the reference once over a source and store what later measurements need of it."""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from kleash.checkpoints.resolution import find_checkpoint
from kleash.engines import LocalEngine
from kleash.engines.base_logits import (
    begin_token_of,
    chunk_sequence,
    logit_tiles,
    require_context,
)
from kleash.jobs import CacheJob
from kleash.measuring.estimand import padding_note
from kleash.measuring.imported_states import ImportedStates, with_saved_dtype
from kleash.measuring.model_pair import source_of
from kleash.measuring.progress import LOADING, ProgressReporter
from kleash.measuring.rescoring import noise_sequences
from kleash.measuring.run import default_out, resumable
from kleash.measuring.shards import hash_source, plan_shards, source_sequences
from kleash.models import Pair, ReferenceCache, describe_source, load_reference
from kleash.models.base_logits import encode_rows, split_chunks, write_header
from kleash.models.cache.engine_states import EngineStates
from kleash.models.cache.reference_cache import check_cache_folder
from kleash.models.cache.stored_reference import (
    TOKENIZER,
    StoredReference,
    finish_cache,
    head_tensors,
    save_rounding_columns,
)
from kleash.models.pair_loading import resolve_device, resolve_dtype
from kleash.models.scoring import read_hidden_states
from kleash.models.threads import threads_for_scoring
from kleash.sources.files import read_whole_text
from kleash.store import CacheContents, WrittenLogits
from kleash.store.atomic import remove_leftovers, write_atomically
from kleash.store.cache import REMAKE_CACHE
from kleash.store.file_hashes import require_unchanged_files, watching_files
from kleash.store.job_folder import ADVICE_IF_LOCKED
from kleash.store.locks import folder_lock
from kleash.store.statistics import KL_POLICY_REFERENCE

ROUNDING_COLUMNS = ("prompt_id", "sample_id", KL_POLICY_REFERENCE)
"""Columns of the noise floor and the dtype gap that are stored."""


def is_cached(job: CacheJob, *, any_dtype: bool = False) -> bool:
    """Whether ``job.out`` is the finished cache of this job, so that the reference need not be loaded.

    Args:
        job: as for ``cache_reference``.
        any_dtype: whether a cache in another dtype than "auto" is on this machine will do, since others read it.

    Raises:
        ModelError: if the reference cannot be found.
        RunFolderError: if the cache is damaged.
    """
    stored, measure_job = StoredReference.find(Path(str(job.out)).expanduser()), job.measurement()
    if stored is None:
        return False
    source, cached = stored.label.source, stored.label.reference
    checkpoint = find_checkpoint(job.reference, job.revision_reference)
    dtype = str(resolve_dtype(job.dtype, resolve_device(job.device, job.device_map))).removeprefix("torch.")
    is_same_dtype = dtype in ("auto", cached.dtype) or (any_dtype and job.dtype == "auto")
    if source is None or cached.fingerprint != checkpoint.fingerprint() or not is_same_dtype:
        return False
    stored.checksums.check_all(lambda name: not name.startswith("part-"), REMAKE_CACHE)
    return (
        source.agrees(source_of(measure_job, stored.contents.context, hash_source(measure_job)))
        and len(stored.states) >= stored.contents.sequences
        and stored.rounding_columns("noise", measure_job.temperature or 1.0) is not None
    )


@watching_files()
def cache_reference(job: CacheJob, reporter: ProgressReporter | None = None) -> CacheContents | WrittenLogits:
    """Run the reference once over a source and store its hidden states for later measurements.

    With ``job.from_hidden_states``, the hidden states are read from the files of a serving engine, and the reference
    is run on a few sequences only, to check them.

    Writes the final hidden states at every scored position, the head and the tokenizer to ``job.out``. If the job is
    interrupted or killed and started again, it resumes after the last finished shard. A finished cache is only read, so
    any number of measurements can use it at once.

    Args:
        job: the reference and the source.
        reporter: receives the progress.

    Returns:
        The contents of the cache, as in ``contents.json``; with ``job.format``, what was written into the file.

    Raises:
        SourceError: if the text or the responses cannot be read.
        ModelError: if the reference cannot be loaded, the folder holds the cache of another reference, or the engine's
            hidden states are not those of the reference, with the cause.
        NonFiniteError: if the reference gives NaN or infinities, naming the sequence.
        RunFolderError: if ``job.out`` cannot be written, holds other files, or is in use by another process.
        OptionError, CannotRunError, MissingExtraError: if an option is unsupported or a dependency is missing.
        ChangedInputError: if a file of the reference or the source is written to meanwhile.
        Interrupted: on Ctrl-C, with the command that resumes.
    """
    reporter = reporter if reporter is not None else ProgressReporter()
    reporter.note(LOADING)
    if job.format is not None:
        return write_base_logits(job, reporter)
    folder = Path(job.out if job.out is not None else default_out("kleash-caches")).expanduser()
    check_cache_folder(folder)
    saved = (
        None if job.from_hidden_states is None else EngineStates(Path(job.from_hidden_states).expanduser())
    )
    if saved is not None:
        job = with_saved_dtype(job, saved)
    digest = hash_source(job.measurement())
    reporter.note_all((*job.measurement().without_effect(), *describe_source(*job.measurement().source, job)))
    pair = load_reference(job.reference, job.revision_reference, job)
    reporter.note_all(pair.notes)
    how = "what is finished is on disk: run the same command again with"
    with resumable(folder, how), folder_lock(folder, ADVICE_IF_LOCKED):
        for path in (folder, folder / TOKENIZER):
            remove_leftovers(path)
        with threads_for_scoring(pair) as notes:
            reporter.note_all(notes)
            return _cache(job, pair, folder, digest, reporter, saved)


def _cache(
    job: CacheJob,
    pair: Pair,
    folder: Path,
    digest: str,
    reporter: ProgressReporter,
    saved: EngineStates | None,
) -> CacheContents:
    """Fill and finish the cache in a locked folder."""
    measure_job = job.measurement()
    imported = None
    if saved is not None and pair.reference.head.weight is not None:  # otherwise ReferenceCache raises
        imported = ImportedStates(job, pair, saved)
    source = source_of(measure_job, pair.context_length, digest)
    cache = ReferenceCache(folder, pair.reference, source, from_engine=saved is not None)
    if len(cache.states):
        reporter.note(f"resuming after {len(cache.states)} sequences in {folder}")
    reader = partial(read_hidden_states, pair.reference) if imported is None else imported.read
    plan = plan_shards(measure_job, pair)
    reporter.note_all(plan.notes)
    # of documents that occur twice, one is stored
    reporter.set_total(None if plan.sequences is None else max(0, plan.sequences - len(cache.states)))
    num_scored = 0
    for shard in plan.shards:
        cache.fill(reader, shard.sequences, measure_job.batch_tokens, reporter.add_scored)
        num_scored += sum(len(sequence.response_ids) for sequence in shard.sequences)
    engine = LocalEngine(pair=pair, job=measure_job)
    sequences = noise_sequences(source_sequences(measure_job, pair), num_scored)
    if imported is None:
        noise, notes = engine.rounding_columns("noise", sequences), pair.notes
    else:
        noise, notes = imported.noise_columns(engine.traits.temperature), (*pair.notes, *imported.summary())
    if noise is not None and "padding_probability_reference" in noise:
        probability = float(np.mean(noise["padding_probability_reference"], dtype=np.float64))
        note = f"{padding_note({'reference': probability})} on the tokens of the noise floor"
        reporter.note(note)
        notes = (*notes, note)
    # the noise floor and the dtype gap cannot be measured once the reference is not loaded
    for rounding, columns in (("noise", noise), ("gap", engine.rounding_columns("gap", sequences))):
        if columns is not None:
            kl_columns = {name: np.ascontiguousarray(columns[name]) for name in ROUNDING_COLUMNS}
            save_rounding_columns(folder, rounding, engine.traits.temperature, kl_columns)
    contents = _contents(pair, cache, notes)
    require_unchanged_files()
    finish_cache(folder, pair.reference, contents)
    return contents


def _contents(pair: Pair, cache: ReferenceCache, notes: tuple[str, ...]) -> CacheContents:
    """The record of a filled cache."""
    reference, head = pair.reference, head_tensors(pair.reference.head)
    return CacheContents(
        sequences=len(cache.states),
        tokens=cache.states.tokens,
        hidden_size=head["weight"].shape[1],
        hidden_bytes=cache.states.size_bytes,
        head_bytes=sum(part.nbytes for part in head.values()),
        logits_bytes=cache.states.tokens * reference.vocab_size * reference.dtype.itemsize,
        context=reference.context_length,
        scale=reference.head.scale,
        softcap=reference.head.softcap,
        notes=notes,
    )


def write_base_logits(job: CacheJob, reporter: ProgressReporter) -> WrittenLogits:
    """Write the logits of the reference of a job on its text, in llama.cpp's format.

    Raises:
        SourceError: if the text cannot be read or is too short.
        RunFolderError: if the file cannot be written.
        ModelError: if the reference cannot be loaded, or its logits are not finite.
        ChangedInputError: if the text or a file of the reference is written to meanwhile.
    """
    pair = load_reference(job.reference, job.revision_reference, job)
    model, notes = pair.reference, pair.notes
    begin = begin_token_of(model)
    text = read_whole_text(job.measurement().source[1])
    token_ids = pair.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = split_chunks([*([] if begin is None else [begin]), *token_ids], job.chunk_tokens, job.limit)
    require_context(model, job.chunk_tokens)
    reporter.set_total(len(tokens))
    is_padding, in_padding = model.padding_mask(), list[torch.Tensor]()

    def write(unfinished: Path) -> None:
        with unfinished.open("wb") as file, threads_for_scoring(pair):
            write_header(file, tokens, model.vocab_size)
            for chunk, chunk_tokens in enumerate(tokens):
                sequence = chunk_sequence(chunk, chunk_tokens, begin, pair.tokenizer)
                for _, logits in logit_tiles(model, read_hidden_states(model, [sequence]), sequence.name):
                    file.write(encode_rows(logits).tobytes())
                    if is_padding is not None:
                        in_padding.append(logits.softmax(-1)[:, is_padding.to(logits.device)].sum(-1).cpu())
                reporter.add_scored(1, len(sequence.response_ids))

    path = Path(str(job.out)).expanduser()
    write_atomically(path, write, before_rename=lambda _: require_unchanged_files())
    if in_padding:
        notes += (padding_note({"reference": float(torch.cat(in_padding).mean())}),)
    return WrittenLogits(
        path=str(path),
        reference=model.record(),
        chunks=len(tokens),
        context=job.chunk_tokens,
        vocabulary=model.vocab_size,
        bytes=path.stat().st_size,
        notes=notes,
    )
