"""Writing the logits of a reference as a file of base logits, as llama.cpp does."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from kleash.engines.base_logits import (
    begin_token_of,
    chunk_sequence,
    find_padding,
    logit_tiles,
    require_context,
)
from kleash.errors import SourceError
from kleash.jobs import CacheJob
from kleash.measuring.estimand import padding_note
from kleash.measuring.model_pair import loading
from kleash.measuring.progress import ProgressReporter
from kleash.models import load_reference
from kleash.models.base_logits import encode_rows, split_chunks, write_header
from kleash.models.scoring import checked_reader
from kleash.models.threads import threads_for_scoring
from kleash.sources.files import read_whole_text
from kleash.store import WrittenLogits
from kleash.store.file_hashes import require_unchanged_files


def write_base_logits(job: CacheJob, reporter: ProgressReporter) -> WrittenLogits:
    """Write the logits of the reference of a job on its text, in llama.cpp's format.

    The file is written under another name and renamed when it is complete.

    Raises:
        SourceError: if the text cannot be read or is too short, or the file cannot be written.
        ModelError: if the reference cannot be loaded, or its logits are not finite.
        ChangedInputError: if the text or a file of the reference is written to meanwhile.
    """
    pair = load_reference(job.reference, job.revision_reference, loading(job.measurement()))
    model, notes = pair.reference, pair.notes
    begin = begin_token_of(model, job.revision_reference)
    text = read_whole_text(job.measurement().source[1])
    token_ids = pair.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = split_chunks([*([] if begin is None else [begin]), *token_ids], job.chunk_tokens, job.limit)
    require_context(model, job.chunk_tokens)
    reporter.set_total(len(tokens))
    path = Path(str(job.out)).expanduser()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    read, padding, in_padding = checked_reader(model), find_padding(model), []
    try:
        with unfinished.open("wb") as file, threads_for_scoring(pair):
            write_header(file, tokens, model.vocab_size)
            for chunk, chunk_tokens in enumerate(tokens):
                sequence = chunk_sequence(chunk, chunk_tokens, begin, pair.tokenizer)
                for _, logits in logit_tiles(model, read([sequence]), sequence.name):
                    file.write(encode_rows(logits).tobytes())
                    if padding is not None:
                        in_padding.append(logits.softmax(-1)[:, padding.to(logits.device)].sum(-1).cpu())
                reporter.add_scored(1, len(sequence.response_ids))
        require_unchanged_files()
        size = unfinished.stat().st_size
        unfinished.replace(path)
    except OSError as error:
        raise SourceError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    if in_padding:
        notes += (padding_note({"reference": float(torch.cat(in_padding).mean())}),)
    return WrittenLogits(
        path=str(path),
        reference=model.record(),
        chunks=len(tokens),
        context=job.chunk_tokens,
        vocabulary=model.vocab_size,
        bytes=size,
        notes=notes,
    )
