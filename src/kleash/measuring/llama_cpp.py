"""Measuring a model against llama.cpp's files of base logits, and writing such files."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.errors import ModelError, NonFiniteError, SourceError
from kleash.jobs import LogitsJob
from kleash.measuring.estimand import padding_note, padding_warnings
from kleash.measuring.llama_cpp_summary import (
    LlamaCppColumns,
    concatenated_columns,
    format_llama_cpp,
)
from kleash.models import Loading, Model, Pair, TokenSequence
from kleash.models.base_logit_bounds import (
    LogpIntervals,
    impossible_row,
    kl_bounds,
    logp_intervals,
    restricted,
    reverse_kl_bounds,
)
from kleash.models.base_logits import (
    BaseLogitsFile,
    BaseLogitsRows,
    encode_rows,
    open_base_logits,
    split_chunks,
    write_header,
)
from kleash.models.checkpoints.gguf_files import open_gguf
from kleash.models.checkpoints.resolution import find_checkpoint
from kleash.models.gguf.vocabulary import begin_token
from kleash.models.heads import head_logits, truncate_head
from kleash.models.pair_loading import load_alone
from kleash.models.scoring import checked_reader
from kleash.models.threads import threads_for_scoring
from kleash.models.tokenizers import puts_begin_token, token_count
from kleash.sources.files import read_whole_text
from kleash.store import LogitsMeasurement, Number, WrittenLogits
from kleash.store.file_hashes import require_unchanged_files, watching_files
from kleash.uncertainty import ratio_of_sums

TILE_LOGITS = 1 << 22
"""Logits that are in memory at once: 16 MB in float32, and a few times that in float64."""
COMPARED_LOGITS = 1 << 18
"""Logits that are compared with the file at once: 2 MB in float64, so that results between stay in the CPU's cache."""
CUTOFF = -16.0
"""Log-probabilities of the base at or below it are left out of llama.cpp's KL."""
BOUNDS = (
    "kl_reference_policy_lower",
    "kl_reference_policy_upper",
    "kl_policy_reference_lower",
    "kl_policy_reference_upper",
)
"""Names of the bounds, in the order of ``base_logit_bounds``."""
OnChunks = Callable[[int, int], None]
"""Called with the number of finished chunks and of all."""


@watching_files()
def measure_base_logits(job: LogitsJob, on_chunks: OnChunks | None = None) -> LogitsMeasurement:
    """Measure the policy of a job against its file of base logits.

    Each chunk is one cluster of the standard errors, which llama.cpp's statistics do not have: they take tokens for
    independent.

    Raises:
        SourceError: if the file is damaged.
        ModelError: if the policy cannot be loaded, has fewer logits than the file, or a tokenizer with more tokens.
        NonFiniteError: if the policy's hidden states or logits are NaN or infinite.
        ChangedInputError: if the file of logits or one of the policy is written to meanwhile.
    """
    file = open_base_logits(Path(job.logits).expanduser())
    pair = _load(job, "policy", str(job.policy), job.revision_policy)
    model, notes = _with_vocabulary(pair.policy, file)
    begin = _begin_token(str(job.policy), job.revision_policy, pair)
    chunks = file.chunks if job.limit is None else min(job.limit, file.chunks)
    _check_context(model, file.context)
    columns: list[LlamaCppColumns] = []
    bounds: list[np.ndarray] = []
    padding = _find_padding(pair.policy)
    padded: list[np.ndarray] = []
    with threads_for_scoring(pair):
        for chunk in range(chunks):
            tokens = file.tokens(chunk)
            for start, all_logits in _logits_of_chunk(pair.policy, chunk, tokens, begin):
                logits = all_logits[:, : file.vocab_size]
                rows = file.read(chunk, start, start + len(logits))
                targets = tokens[file.first + 1 + start :][: len(logits)]
                for part in compared_parts(logits):
                    columns.append(llama_cpp_columns(logits[part], rows[part], targets[part]))
                    base = logp_intervals(rows[part])
                    _check_sums(file, chunk, start + part.start, base)
                    bounds.append(base_logit_bounds(logits[part], base))
                    if padding is not None:
                        padded.append(padding_bounds(all_logits[part], base, bounds[-1], padding))
            if on_chunks is not None:
                on_chunks(chunk + 1, chunks)
    require_unchanged_files()
    measurement = _measurement(file, model, columns, np.concatenate(bounds, axis=1), (*pair.notes, *notes))
    return _with_padding(measurement, np.concatenate(padded, axis=1)) if padded else measurement


@watching_files()
def write_base_logits(job: LogitsJob, on_chunks: OnChunks | None = None) -> WrittenLogits:
    """Write the logits of the reference of a job on its text, in llama.cpp's format.

    The file is written under another name and renamed when it is complete.

    Raises:
        SourceError: if the text cannot be read or is too short, or the file cannot be written.
        ModelError: if the reference cannot be loaded, or its logits are not finite.
        ChangedInputError: if the text or a file of the reference is written to meanwhile.
    """
    pair = _load(job, "reference", str(job.reference), job.revision_reference)
    model = pair.reference
    begin = _begin_token(str(job.reference), job.revision_reference, pair)
    tokens = split_chunks(_read_tokens(job, pair, begin), job.context, job.limit)
    _check_context(model, job.context)
    path = Path(job.logits).expanduser()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file, threads_for_scoring(pair):
            write_header(file, tokens, model.vocab_size)
            padding, in_padding = _find_padding(model), []
            for chunk, chunk_tokens in enumerate(tokens):
                for _, logits in _logits_of_chunk(model, chunk, chunk_tokens, begin):
                    file.write(encode_rows(logits).tobytes())
                    if padding is not None:
                        in_padding.append(logits.softmax(-1)[:, padding.to(logits.device)].sum(-1).cpu())
                if on_chunks is not None:
                    on_chunks(chunk + 1, len(tokens))
        require_unchanged_files()
        size = unfinished.stat().st_size
        unfinished.replace(path)
    except OSError as error:
        raise SourceError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return WrittenLogits(
        path=str(path),
        reference=model.record(),
        chunks=len(tokens),
        context=job.context,
        vocabulary=model.vocab_size,
        bytes=size,
        notes=(
            *pair.notes,
            *((padding_note({"reference": float(torch.cat(in_padding).mean())}),) if in_padding else ()),
        ),
    )


def _load(job: LogitsJob, role: str, name: str, revision: str | None) -> Pair:
    """The model of a job, as a pair of it alone."""
    loading = Loading(
        dtype=job.dtype,
        device=job.device,
        device_map=job.device_map,
        trust_remote_code=job.trust_remote_code,
        tokenizer=job.tokenizer,
    )
    return load_alone(role, name, revision, loading)


def _read_tokens(job: LogitsJob, pair: Pair, begin: int | None) -> list[int]:
    """The tokens of the whole text, after the begin token if the model has one."""
    text = read_whole_text(str(job.text))
    token_ids = pair.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [*([] if begin is None else [begin]), *token_ids]


def _begin_token(name: str, revision: str | None, pair: Pair) -> int | None:
    """The token that llama.cpp puts in place of the first of each chunk; None for none.

    The settings of a GGUF file say it. Of other models, it is the begin token that the tokenizer puts before a text.
    """
    checkpoint = find_checkpoint(name, revision)
    if checkpoint.gguf:
        return begin_token(open_gguf(checkpoint.gguf).settings)
    return pair.tokenizer.bos_token_id if puts_begin_token(pair.tokenizer) else None


def _with_vocabulary(model: Model, file: BaseLogitsFile) -> tuple[Model, tuple[str, ...]]:
    """The model with as many logits as the file; also a note if some are left out.

    Raises:
        ModelError: if the model has fewer logits than the file, or its tokenizer has more tokens.
    """
    tokens = token_count(model.tokenizer)
    if tokens > file.vocab_size:
        raise ModelError(
            f"the tokenizer of the policy {model.path} has {tokens} tokens and {file.path} has logits of "
            f"{file.vocab_size}; give a file of a base with the policy's vocabulary"
        )
    if model.vocab_size < file.vocab_size:
        raise ModelError(
            f"the policy {model.path} has {model.vocab_size} logits and {file.path} has {file.vocab_size}; give a "
            "file of a base with the policy's vocabulary"
        )
    if model.vocab_size == file.vocab_size:
        return model, ()
    note = (
        f"the policy has {model.vocab_size} logits and the file {file.vocab_size}; the policy is cut to those of the "
        "file and normalised over them"
    )
    return replace(model, head=truncate_head(model.head, file.vocab_size), vocab_size=file.vocab_size), (
        note,
    )


def _check_context(model: Model, context: int) -> None:
    """Check that a model reads as many tokens as a chunk has."""
    if model.context_length is not None and model.context_length < context:
        raise ModelError(
            f"{model.path} reads {model.context_length} tokens and a chunk has {context}; write the file with a "
            "smaller --context"
        )


def _logits_of_chunk(
    model: Model, chunk: int, tokens: np.ndarray, begin: int | None
) -> Iterator[tuple[int, Tensor]]:
    """The logits [rows, vocab] at the scored positions of a chunk, its second half, with the number of the first row.

    A few rows at a time, counted from the first scored position.

    Raises:
        NonFiniteError: if a hidden state or a row's largest logit is NaN or infinite.
    """
    first = len(tokens) // 2
    ids = [int(token) for token in tokens]
    ids[0] = ids[0] if begin is None else begin
    sequence = TokenSequence(
        prompt_id=chunk,
        sample_id=0,
        prompt_ids=tuple(ids[: first + 1]),
        response_ids=tuple(ids[first + 1 :]),
        prompt_text="",
        response_text="",
        location=f"chunk {chunk}",
    )
    hidden = checked_reader(model)([sequence])
    step = max(1, TILE_LOGITS // model.vocab_size)
    for start in range(0, len(hidden), step):
        with torch.inference_mode():
            logits = head_logits(hidden[start : start + step], model.head)[:, : model.vocab_size]
        if not bool(logits.amax(-1).isfinite().all()):  # -inf is the logit of a probability of 0
            raise NonFiniteError(
                f"the {model.role} gives NaN or infinite logits in chunk {chunk}, from position {first + start} on; "
                "try --dtype float32, or look at the checkpoint"
            )
        yield start, logits


def compared_parts(logits: Tensor) -> Iterator[slice]:
    """Slices of rows that are compared at once."""
    step = max(1, COMPARED_LOGITS // logits.shape[-1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def _check_sums(file: BaseLogitsFile, chunk: int, start: int, base: LogpIntervals) -> None:
    """Check that the probabilities of each row can sum to 1.

    Raises:
        SourceError: with the chunk and the position of a row of which they cannot.
    """
    row = impossible_row(base)
    if row is not None:
        low, high = float(base.p_lowest[row].sum()), float(base.p_highest[row].sum())
        raise SourceError(
            f"{file.path} has probabilities that sum to between {low:.6g} and {high:.6g}, and not to 1, at scored "
            f"position {start + row} of chunk {chunk}; write the file again"
        )


def base_logit_bounds(logits: Tensor, base: LogpIntervals) -> np.ndarray:
    """Bounds of KL(base ‖ policy) and KL(policy ‖ base), [4, rows]."""
    logq = logits.double().cpu().log_softmax(-1)
    return torch.stack([*kl_bounds(base, logq), *reverse_kl_bounds(base, logq)]).numpy()


def _find_padding(model: Model) -> Tensor | None:
    """Whether each logit of a model is of no token of its tokenizer; None if all are of tokens."""
    is_padding = torch.ones(model.vocab_size, dtype=torch.bool)
    is_padding[list(model.tokenizer.get_vocab().values())] = False
    return is_padding if bool(is_padding.any()) else None


def padding_bounds(
    logits: Float[Tensor, "rows vocab_policy"],
    base: LogpIntervals,
    bounds: np.ndarray,
    is_padding: Bool[Tensor, " vocab_policy"],
) -> np.ndarray:
    """The probability of logits of no token, policy's and base's, and bounds over tokens and over all logits.

    Args:
        logits: all of the policy.
        base: as many intervals as the file has logits.
        bounds: from ``base_logit_bounds``, over the logits of the file.
        is_padding: whether each logit is of no token.

    Returns:
        [10, rows]: the two probabilities, then the bounds of ``base_logit_bounds`` over the tokens and over all logits.
    """
    count = base.lowest.shape[-1]
    logp = logits.double().cpu().log_softmax(-1)
    of_policy = logp[:, is_padding].exp().sum(-1)
    is_token = ~is_padding[:count]
    center = (base.p_lowest + base.p_highest) / 2
    over_tokens = base_logit_bounds(logits[:, :count].cpu()[:, is_token], restricted(base, is_token))
    # the base gives logits that the file does not have no probability
    log_rest = logp[:, :count].logsumexp(-1).numpy()
    over_all = bounds.copy()
    over_all[:2] -= log_rest
    if count < logits.shape[-1]:
        over_all[2:] = np.where(log_rest < 0, np.inf, over_all[2:])
    probabilities = np.stack([of_policy.numpy(), center[:, ~is_token].sum(-1).numpy()])
    return np.concatenate([probabilities, over_tokens, over_all])


def _with_padding(measurement: LogitsMeasurement, values: np.ndarray) -> LogitsMeasurement:
    """The measurement with what logits of no token contribute; ``values`` from ``padding_bounds`` of all tokens."""
    means = values.mean(-1)
    probabilities = {"policy": means[0], "base": means[1]}
    over_tokens, over_rows = (
        {
            "KL(base ‖ policy)": f"between {low:.4g} and {high:.4g}",
            "KL(policy ‖ base)": f"between {reverse_low:.4g} and {reverse_high:.4g}",
        }
        for low, high, reverse_low, reverse_high in (means[2:6], means[6:])
    )
    warnings = padding_warnings(probabilities, over_rows, over_tokens)
    per_token = {
        name: replace(number, warnings=(*number.warnings, *warnings)) if name in BOUNDS else number
        for name, number in measurement.per_token.items()
    }
    return replace(measurement, per_token=per_token, notes=(*measurement.notes, padding_note(probabilities)))


def _measurement(
    file: BaseLogitsFile,
    model: Model,
    parts: list[LlamaCppColumns],
    bounds: np.ndarray,
    notes: tuple[str, ...],
) -> LogitsMeasurement:
    """The record of a measurement from the values of its tokens; ``bounds`` [4, tokens] from ``base_logit_bounds``."""
    columns = concatenated_columns(parts)
    counts = np.full(len(columns.kld) // file.scored, file.scored)

    def mean(
        values: np.ndarray, unit: str = "nats", lower: float | None = None, upper: float | None = None
    ) -> Number:
        sums = values.astype(np.float64).reshape(len(counts), -1).sum(-1)
        return ratio_of_sums(sums, counts, unit=unit, lower=lower, upper=upper)

    per_token = {name: mean(values, lower=0.0) for name, values in zip(BOUNDS, bounds, strict=True)}
    per_token["llama_cpp_kld"] = mean(columns.kld)
    per_token["log_perplexity_ratio"] = mean(columns.nll.astype(np.float64) - columns.nll_base)
    per_token["top1_agreement"] = mean(columns.same_top, "probability", 0.0, 1.0)
    return LogitsMeasurement(
        path=str(file.path),
        policy=model.record(),
        chunks=len(counts),
        context=file.context,
        tokens=len(columns.kld),
        per_token=per_token,
        llama_cpp=format_llama_cpp(columns),
        notes=notes,
    )


def llama_cpp_columns(
    logits: Float[Tensor, "rows vocab"], rows: BaseLogitsRows, targets: np.ndarray
) -> LlamaCppColumns:
    """llama.cpp's values of some positions.

    Args:
        logits: of the quantised model, float32.
        rows: the base's log-probabilities at the same positions.
        targets: the tokens that follow, [rows].
    """
    values = logits.float().cpu()
    largest = values.amax(-1, keepdim=True)
    log_sum = (values - largest).exp().double().sum(-1, keepdim=True).log().float()
    index = torch.from_numpy(targets.astype(np.int64))[:, None]
    nll = (largest + log_sum - values.gather(-1, index))[:, 0].numpy()
    base = rows.scale[:, None] * rows.codes.astype(np.float32) + rows.minimum[:, None]
    nll_base = -base[np.arange(len(base)), targets]
    logp = torch.from_numpy(base)
    terms = logp.exp() * (logp - values + (largest + log_sum))
    kld = torch.where(logp > CUTOFF, terms, 0).double().sum(-1).numpy()
    return LlamaCppColumns(
        nll=nll,
        nll_base=nll_base,
        kld=kld,
        dp=np.exp(-nll) - np.exp(-nll_base),
        same_top=values.argmax(-1).numpy() == base.argmax(-1),
    )
