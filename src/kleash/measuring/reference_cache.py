"""The caching job: a reference run once over a source, and what it takes to do without it afterwards."""

from collections.abc import Sequence
from datetime import datetime
from errno import ENOSPC
from pathlib import Path

import numpy as np
import torch

from kleash.engines import LocalEngine
from kleash.errors import Interrupted, RunFolderError
from kleash.measuring.model_pair import loading, source_of
from kleash.measuring.progress import Nobody, Watcher
from kleash.measuring.rescoring import noise_sequences
from kleash.measuring.sequence_clusters import Ledger
from kleash.measuring.shards import given_sequences, plan, source_sha256
from kleash.models import (
    Pair,
    ReferenceCache,
    TokenSequence,
    finish,
    finite_reader,
    head_tensors,
    load_reference,
    save_rounding,
)
from kleash.models.cache.reference_cache import require_cache
from kleash.models.cache.stored_reference import TOKENIZER
from kleash.records import CacheContents, CacheJob
from kleash.records.atomic import remove_leftovers
from kleash.records.locking import folder_lock


def default_cache() -> str:
    """Where a cache goes that was not told: a folder named by the date and the time."""
    return str(Path("kleash-caches") / datetime.now().strftime("%Y-%m-%d-%H%M%S"))


def cache_reference(job: CacheJob, watcher: Watcher | None = None) -> CacheContents:
    """Run the reference once over a source and keep what measuring needs of it.

    Writes its final hidden states at every scored position, its head and its tokenizer into ``job.out``.
    Killed at any moment and started again, it goes on after the last finished shard; nothing that is there is
    computed again. A finished cache is only read: any number of measurements can use it at once.

    Args:
        job: which reference reads what.
        watcher: told how it goes.

    Returns:
        What the cache holds, as it stands in ``contents.json``.

    Raises:
        SourceError: if the text or the responses cannot be read.
        ModelError: if the reference cannot be loaded, or the folder holds another one's hidden states.
        NonFiniteError: if the reference gives NaN or infinities, naming the sequence.
        RunFolderError: if ``job.out`` cannot be written, holds something else, or is being written.
        OptionError, CannotRunError, MissingExtraError: if the job asks for what cannot be.
        Interrupted: at Ctrl-C, saying what was kept.
    """
    watching = watcher if watcher is not None else Nobody()
    folder = Path(job.out if job.out is not None else default_cache()).expanduser()
    require_cache(folder)
    digest = source_sha256(job.measurement())
    for note in job.measurement().without_effect():
        watching.said(note)
    pair = load_reference(job.reference, job.revision_reference, loading(job.measurement()))
    for note in pair.notes:
        watching.said(note)
    try:
        with folder_lock(folder, "wait for it, or give another --out"):
            for path in (folder, folder / TOKENIZER):
                remove_leftovers(path)
            return _cache(job, pair, folder, digest, watching)
    except KeyboardInterrupt as stop:
        raise Interrupted(
            f"interrupted; what was finished is kept: give the same command again with --out {folder}"
        ) from stop
    except RunFolderError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == ENOSPC:
            raise RunFolderError(
                f"no space is left in {folder}; what was finished is kept: free some space and give the same "
                f"command again with --out {folder}"
            ) from error
        raise


def _cache(job: CacheJob, pair: Pair, folder: Path, digest: str, watching: Watcher) -> CacheContents:
    asked = job.measurement()
    cache = ReferenceCache(folder, pair.reference, source_of(asked, pair, digest))
    if len(cache.states):
        watching.said(f"going on after {len(cache.states)} sequences in {folder}")
    read = finite_reader(pair.reference)
    planned = plan(asked, pair)
    watching.planned(planned.sequences)
    scored = 0
    for shard in planned.shards:
        scored += sum(len(one.response_ids) for one in shard.sequences)
        cache.fill(read, shard.sequences, asked.batch_tokens)
        watching.scored(len(shard.sequences), sum(len(one.response_ids) for one in shard.sequences))
    _look_at_rounding(
        LocalEngine(pair=pair, job=asked), folder, noise_sequences(given_sequences(asked, pair), scored)
    )
    contents = _contents(pair, cache)
    finish(folder, pair.reference, contents)
    return contents


def _look_at_rounding(engine: LocalEngine, folder: Path, sequences: Sequence[TokenSequence]) -> None:
    """Keep how much of a drift is rounding, which nobody can ask a reference that is not loaded."""
    for what, columns in (("noise", engine.noise(sequences)), ("gap", engine.float32_gap(sequences))):
        if columns is not None:
            needed = {name: np.ascontiguousarray(columns[name]) for name in Ledger.READ}
            save_rounding(folder, what, engine.temperature, needed)


def _contents(pair: Pair, cache: ReferenceCache) -> CacheContents:
    reference, head = pair.reference, head_tensors(pair.reference.head)
    logit_bytes = torch.empty(0, dtype=reference.dtype).element_size()
    return CacheContents(
        sequences=len(cache.states),
        tokens=cache.states.tokens,
        hidden_size=head["weight"].shape[1],
        hidden_bytes=cache.states.size_bytes,
        head_bytes=sum(part.numel() * part.element_size() for part in head.values()),
        logits_bytes=cache.states.tokens * reference.vocabulary * logit_bytes,
        context=reference.context,
        scale=reference.head.scale,
        softcap=reference.head.softcap,
        notes=pair.notes,
    )
