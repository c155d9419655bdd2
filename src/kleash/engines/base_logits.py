"""The engine of a reference whose log-probabilities are in a file of llama.cpp's base logits, with its text."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.checkpoints.gguf.vocabulary import adds_begin_token, begin_token, puts_begin_token
from kleash.engines.base import (
    EngineTraits,
    JobEngine,
    Shard,
    ShardResult,
    round_outwards,
    shard_result,
    with_unknown,
)
from kleash.errors import ModelError, NonFiniteError, SourceError
from kleash.models import Model, TokenSequence
from kleash.models.base_logit_bounds import (
    LogpIntervals,
    impossible_row,
    kl_bounds,
    logp_intervals,
    restricted,
    reverse_kl_bounds,
)
from kleash.models.base_logits import BaseLogitsFile, BaseLogitsRows
from kleash.models.heads import head_logits
from kleash.models.scoring import columns_in_batches, read_hidden_states
from kleash.models.tokenizers import token_count
from kleash.sources.sequences import hash_tokens, text_after
from kleash.store.measurement import ModelRecord
from kleash.store.statistics import DIVERGENCE_COLUMNS
from kleash.store.tables import KL_BOUND_COLUMNS, LLAMA_CPP_COLUMNS

TILE_LOGITS = 1 << 22
"""Logits that are in memory at once: 16 MB in float32."""
COMPARED_LOGITS = 1 << 18
"""Logits that are compared with the file at once: 2 MB in float64, so that results between stay in the CPU's cache."""
CUTOFF = -16.0
"""Log-probabilities of the base at or below it are left out of llama.cpp's KL."""
REASON = "the file of base logits has 16 bits for each log-probability of the reference"


@dataclass(frozen=True, eq=False, kw_only=True)
class BaseLogits(Model):
    """A reference that is not loaded. Its tokenizer is the policy's: the file has the numbers of tokens alone."""

    file: BaseLogitsFile
    begin_token: int | None
    """What llama.cpp puts in place of the first token of each chunk; None for nothing."""

    def record(self) -> ModelRecord:
        """The model's entry in a run's records."""
        return replace(super().record(), dtype="16 bits a log-probability")

    def sequences(self, limit: int | None) -> Iterator[TokenSequence]:
        """The chunks of the text, the first ``limit`` of them, each a document of one window."""
        for chunk in range(self.file.chunks if limit is None else min(limit, self.file.chunks)):
            yield chunk_sequence(chunk, self.file.tokens(chunk), self.begin_token, self.tokenizer)


def base_logits_beside(policy: Model, file: BaseLogitsFile, fingerprint: str) -> BaseLogits:
    """The reference of a file, to which a policy is compared.

    Args:
        policy: loaded.
        file: of base logits.
        fingerprint: hash of the file.

    Raises:
        ModelError: if the policy has fewer logits than the file, a tokenizer with more tokens, or a shorter context.
    """
    tokens = token_count(policy.tokenizer, file.vocab_size)
    if tokens > file.vocab_size or policy.vocab_size < file.vocab_size:
        raise ModelError(
            f"the policy {policy.path} has {policy.vocab_size} logits for {tokens} tokens and {file.path} has "
            f"{file.vocab_size} logits; give a file of a base with the policy's vocabulary"
        )
    require_context(policy, file.context)
    return BaseLogits(
        role="reference",
        path=str(file.path),
        dtype=policy.dtype,
        device=policy.device,
        parameters=None,
        vocab_size=file.vocab_size,
        context_length=None,
        eos_token_ids=(),
        head=policy.head,
        fingerprint=fingerprint,
        tokenizer=policy.tokenizer,
        network=None,
        backbone=None,
        file=file,
        begin_token=begin_token_of(policy, int(file.tokens(0)[0])),
    )


def require_context(model: Model, context: int) -> None:
    """Check that a model reads as many tokens as a chunk has.

    Raises:
        ModelError: if not.
    """
    if model.context_length is not None and model.context_length < context:
        raise ModelError(
            f"{model.path} reads {model.context_length} tokens and a chunk has {context}; write the file with a "
            "smaller --window"
        )


def begin_token_of(model: Model, first: int | None = None) -> int | None:
    """The begin token that is put before a text, and in place of the first token of each chunk; None for none.

    Args:
        model: whose begin token it is. The settings of a GGUF file say whether it is put, else the tokenizer does.
        first: first token of a file's text, which tells whether it was put, since llama.cpp takes no special token from
            a text; None for a new file.
    """
    if model.checkpoint is not None and model.checkpoint.gguf:
        settings = model.checkpoint.gguf_files.settings
        begin, is_put = begin_token(settings), adds_begin_token(settings)
    else:
        begin, is_put = model.tokenizer.bos_token_id, puts_begin_token(model.tokenizer)
    return begin if (is_put if first is None else first == begin) else None


def chunk_sequence(chunk: int, tokens: np.ndarray, begin: int | None, tokenizer: Any) -> TokenSequence:
    """A chunk of a text, whose second half is scored."""
    ids = tokens.tolist() if begin is None else [begin, *tokens[1:].tolist()]
    first = len(ids) // 2 + 1
    return TokenSequence(
        prompt_id=chunk,
        sample_id=0,
        prompt_ids=tuple(ids[:first]),
        response_ids=tuple(ids[first:]),
        prompt_text=text_after(tokenizer, (), ids[:first]),
        response_text=text_after(tokenizer, ids[:first], ids[first:]),
        prompt_hash=hash_tokens(tuple(ids)),
        location=f"chunk {chunk}",
    )


def logit_tiles(model: Model, hidden: Tensor, name: str) -> Iterator[tuple[int, Float[Tensor, "rows vocab"]]]:
    """The logits of a sequence, a few rows at a time, each part with the number of its first row.

    Args:
        model: of the hidden states.
        hidden: [rows, dim].
        name: of the sequence, for errors.

    Raises:
        NonFiniteError: if a row's largest logit is NaN or infinite.
    """
    step = max(1, TILE_LOGITS // model.vocab_size)
    for start in range(0, len(hidden), step):
        with torch.inference_mode():
            logits = head_logits(hidden[start : start + step], model.head)[:, : model.vocab_size]
        if not bool(logits.amax(-1).isfinite().all()):  # -inf is the logit of a probability of 0
            raise NonFiniteError(
                f"the {model.role} gives NaN or infinite logits in {name}, from response token {start} on; try "
                "--dtype float32, or look at the checkpoint"
            )
        yield start, logits


@dataclass(frozen=True, kw_only=True)
class BaseLogitsEngine(JobEngine):
    """Scores the chunks of a file of base logits by the policy, whose logits are compared with the stored ones."""

    reference: BaseLogits
    """That of the pair."""

    @property
    def traits(self) -> EngineTraits:
        """The columns that a file of base logits cannot give, and why there is no noise floor."""
        return EngineTraits(
            unknown_columns=MappingProxyType(
                dict.fromkeys((*DIVERGENCE_COLUMNS, "entropy_reference"), REASON)
            ),
            no_noise_floor="the reference is a file of base logits, which does not tell its batches",
        )

    def run(self, shard: Shard) -> ShardResult:
        """Score the chunks of ``shard``.

        Raises:
            NonFiniteError: if the policy's outputs are NaN or infinite.
            SourceError: if a part of the file is damaged.
        """
        sequences = shard.sequences
        is_padding = self.pair.policy.padding_mask()

        def columns_of_batch(batch: list[int]) -> dict[str, np.ndarray]:
            chunks = [sequences[index] for index in batch]
            counts = [len(chunk.response_ids) for chunk in chunks]
            states = read_hidden_states(self.pair.policy, chunks).split(counts)
            parts = [
                part
                for chunk, hidden in zip(chunks, states, strict=True)
                for part in self._columns_of_chunk(chunk, hidden, is_padding)
            ]
            return {
                name: round_outwards(name, np.concatenate([part[name] for part in parts]))
                for name in parts[0]
            }

        columns = with_unknown(
            columns_in_batches(sequences, self.job.batch_tokens, columns_of_batch, self.on_scored),
            LLAMA_CPP_COLUMNS,
        )
        return shard_result(self.pair, sequences, columns)

    def _columns_of_chunk(
        self, sequence: TokenSequence, hidden: Tensor, is_padding: Tensor | None
    ) -> Iterator[dict[str, np.ndarray]]:
        """The columns of a few rows of a chunk at a time.

        Raises:
            SourceError: with the chunk and the position of a row whose probabilities cannot sum to 1.
        """
        file = self.reference.file
        chunk = sequence.prompt_id  # the number of its chunk in the file
        for start, tile in logit_tiles(self.pair.policy, hidden, sequence.name):
            rows = file.read(chunk, start, start + len(tile))
            targets = np.asarray(sequence.response_ids[start : start + len(tile)])
            step = max(1, COMPARED_LOGITS // tile.shape[-1])  # rows whose logits are compared at once
            for row in range(0, len(tile), step):
                part = slice(row, row + step)
                base = logp_intervals(rows[part])
                wrong = impossible_row(base)
                if wrong is not None:
                    low, high = float(base.p_lowest[wrong].sum()), float(base.p_highest[wrong].sum())
                    raise SourceError(
                        f"{file.path} has probabilities that sum to between {low:.6g} and {high:.6g}, and not to 1, at "
                        f"scored position {start + row + wrong} of chunk {chunk}; write the file again"
                    )
                yield columns_of_rows(tile[part], rows[part], base, targets[part], is_padding)


def columns_of_rows(
    logits: Float[Tensor, "rows vocab_policy"],
    rows: BaseLogitsRows,
    base: LogpIntervals,
    targets: np.ndarray,
    is_padding: Bool[Tensor, " vocab_policy"] | None = None,
) -> dict[str, np.ndarray]:
    """The columns of ``tokens/`` of some positions.

    Args:
        logits: of the policy; those beyond the file's are cut off.
        rows: of the file.
        base: their intervals.
        targets: the tokens that follow, [rows].
        is_padding: whether each of the policy's logits is of no token; None if all are of tokens.
    """
    logits = logits.double().cpu()
    logp = logits[:, : base.lowest.shape[-1]].log_softmax(-1)
    top = logp.max(-1)
    stored = rows.scale[:, None] * rows.codes.astype(np.float32) + rows.minimum[:, None]
    positions, logq = np.arange(len(stored)), torch.from_numpy(stored)
    likeliest = rows.codes.argmax(-1)
    terms = logq.double().exp() * (logq - logp)
    bounds = kl_bounds_of_rows(logp, base)
    columns = {
        "logp_policy": logp.numpy()[positions, targets],
        "logp_reference": stored[positions, targets],
        "entropy_policy": torch.special.entr(logp.exp()).sum(-1).numpy(),
        "top1_policy": top.indices.numpy(),
        "top1_reference": likeliest,
        "top1_probability_policy": top.values.exp().numpy(),
        "top1_probability_reference": np.exp(stored[positions, likeliest]),
        "llama_cpp_kld": torch.where(logq > CUTOFF, terms, 0).sum(-1).numpy(),
        "is_clipped": base.lowest.isneginf().numpy()[positions, targets],
        **bounds,
    }
    return (
        columns
        if is_padding is None
        else columns | padding_columns_of_base(logits, base, bounds, targets, is_padding)
    )


def kl_bounds_of_rows(logp: Float[Tensor, "rows vocab"], base: LogpIntervals) -> dict[str, np.ndarray]:
    """The columns ``KL_BOUND_COLUMNS``, from the policy's log-probabilities."""
    of_reference, of_policy = kl_bounds(base, logp), reverse_kl_bounds(base, logp)
    return dict(zip(KL_BOUND_COLUMNS, (x.numpy() for x in (*of_policy, *of_reference)), strict=True))


def padding_columns_of_base(
    logits: Float[Tensor, "rows vocab_policy"],
    base: LogpIntervals,
    bounds: Mapping[str, np.ndarray],
    targets: np.ndarray,
    is_padding: Bool[Tensor, " vocab_policy"],
) -> dict[str, np.ndarray]:
    """The columns about logits of no token: their probability, and both KLs over the tokens and over all logits.

    The base gives logits that the file does not have no probability.

    Args:
        logits: all of the policy, in float64.
        base: as many intervals as the file has logits.
        bounds: from ``kl_bounds_of_rows``, over the logits of the file.
        targets: the tokens that follow, [rows].
        is_padding: whether each logit is of no token.
    """
    count = base.lowest.shape[-1]
    logp, is_token = logits.log_softmax(-1), ~is_padding[:count]
    of_reference = ((base.p_lowest + base.p_highest) / 2)[:, ~is_token].sum(-1)
    tokens = kl_bounds_of_rows(logits[:, :count][:, is_token].log_softmax(-1), restricted(base, is_token))
    over_rows = dict(bounds)
    if count < len(is_padding):
        log_rest = logp[:, :count].logsumexp(-1).numpy()
        for name, values in bounds.items():
            of_policy = np.where(log_rest < 0, np.inf, values)
            over_rows[name] = of_policy if name.startswith("kl_policy") else values - log_rest
    return {
        "is_padding": is_padding.numpy()[targets],
        "padding_probability_policy": logp[:, is_padding].exp().sum(-1).numpy(),
        "padding_probability_reference": of_reference.numpy(),
        **{_over(name, "tokens"): values for name, values in tokens.items()},
        **{_over(name, "rows"): values for name, values in over_rows.items()},
    }


def _over(bound: str, part: str) -> str:
    """The name of a bound of a KL over a part of the logits."""
    name, _, end = bound.rpartition("_")
    return f"{name}_over_{part}_{end}"
