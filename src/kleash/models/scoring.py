"""Per-token statistics of policy and reference on token sequences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import truncate
from kleash.errors import NonFiniteError
from kleash.extras import suppress_library_output
from kleash.jobs.option_groups import Loading, Sampling, is_gguf
from kleash.linear import (
    Head,
    LinearOptions,
    StatisticsAndTop,
    TopTokens,
    log_probabilities,
    token_statistics,
    token_statistics_and_top,
)
from kleash.models.cache.reference_cache import ReferenceCache
from kleash.models.generation import ignore
from kleash.models.heads import head_on_device, truncate_head
from kleash.models.padding_rows import padding_columns
from kleash.models.pair import Model, Pair
from kleash.models.pair_loading import load_reference
from kleash.registry import require_above
from kleash.sources.sequences import TokenSequence, batch_by_length

STATISTICS = {
    "logp_policy": "token_logp",
    "logp_reference": "token_logq",
    "kl_policy_reference": "kl_pq",
    "kl_reference_policy": "kl_qp",
    "jensen_shannon": "jensen_shannon",
    "total_variation": "total_variation",
    "entropy_policy": "entropy_p",
    "entropy_reference": "entropy_q",
    "top1_policy": "top1_p",
    "top1_reference": "top1_q",
    "top1_probability_policy": "top1_probability_p",
    "top1_probability_reference": "top1_probability_q",
    "rank_reference": "rank_q",
}
"""Columns of a run's token table, and the fields of ``TokenStatistics`` that they hold."""

TOP_TOKENS_AT_ONCE = 64
"""Tokens of which all logits are gathered at once, to list the likeliest of a head over a ``vocabulary_group``."""

HiddenStateReader = Callable[[Sequence[TokenSequence]], Float[Tensor, "tokens dim"]]
"""Returns the final hidden states at the scored positions of a batch, sequences concatenated."""


def score(
    pair: Pair,
    sequences: Sequence[TokenSequence],
    *,
    temperature: float = 1.0,
    batch_tokens: int = 4096,
    options: LinearOptions | None = None,
    cache: ReferenceCache | None = None,
    top: int = 0,
    sampler: Sampling | None = None,
    on_scored: Callable[[int, int], object] = ignore,
    read_reference: HiddenStateReader | None = None,
) -> dict[str, np.ndarray]:
    """Per-token statistics of both models for each response token, in the order of ``sequences``.

    Sequences are scored in batches of similar length. The results do not depend on the batches, except for rounding.
    The reference never generates: it scores the same tokens in the same contexts.

    Args:
        pair: the two models.
        sequences: contexts and responses.
        temperature: divides the logits of both models; above 0.
        batch_tokens: largest number of tokens in a batch, padding included.
        options: of ``token_statistics``.
        cache: stores the reference's hidden states, so that a later call reads them instead.
        top: number of each model's likeliest tokens whose ids and probabilities are returned.
        sampler: also return ``acceptance_of_sampler``: the probability that speculative decoding accepts, where draft
            and target are truncated so, or greedy at its temperature 0.
        on_scored: called after each batch with the number of its sequences and of their tokens.
        read_reference: returns the reference's hidden states for a batch; None to compute or read them as usual.

    Returns:
        A flat array for each column of the token table except ``text``, the sequences' response tokens concatenated.
        ``logp_sampled`` is NaN where it is unknown. With ``top``, also four arrays [tokens, top]:
        ``top_token_id_policy``, ``top_probability_policy``, ``top_token_id_reference``, ``top_probability_reference``.

    Raises:
        NonFiniteError: if a model's logits are NaN or infinite, naming the model, the prompt and the position.
        OptionError: if the temperature is not above 0.
    """
    require_above(0.0, temperature=temperature)
    read = read_reference or partial(read_hidden_states, pair.reference)
    read = read if cache is None else partial(cache.read_or_add, read)
    is_one = read_reference is None and pair.policy.is_same_as(pair.reference)

    def columns_of_batch(indices: list[int]) -> dict[str, np.ndarray]:
        batch = [sequences[index] for index in indices]
        hidden_p = read_hidden_states(pair.policy, batch)
        hidden_q = hidden_p if is_one else read(batch).to(hidden_p.device)
        head_p, head_q = (head_on_device(model.head, hidden_p) for model in (pair.policy, pair.reference))
        inputs = (hidden_p, head_p, hidden_q, head_q)
        return _columns_of_models(pair, batch, inputs, temperature, options, top, sampler)

    columns = columns_in_batches(sequences, batch_tokens, columns_of_batch, on_scored)
    if cache is not None:
        cache.save()
    return columns


@suppress_library_output()
def read_hidden_states(model: Model, batch: Sequence[TokenSequence]) -> Float[Tensor, "tokens dim"]:
    """The final hidden states at the scored positions of a batch, of a model's network or its stored states.

    The last token of a sequence is scored but is no input; each token is predicted at the position before it.

    Raises:
        NonFiniteError: naming the sequence that has NaN or infinities.
    """
    texts = [(*sequence.prompt_ids, *sequence.response_ids)[:-1] for sequence in batch]
    starts = [len(sequence.prompt_ids) - 1 for sequence in batch]
    hidden = torch.cat(model.states_from(texts, starts)) if model.stored is None else model.stored.read(batch)
    _check_finite(model.role, hidden.isfinite().all(-1).cpu().numpy(), batch, "hidden states")
    return hidden


def columns_in_batches(
    sequences: Sequence[TokenSequence],
    batch_tokens: int,
    columns_of_batch: Callable[[list[int]], Mapping[str, np.ndarray]],
    on_scored: Callable[[int, int], object] = ignore,
) -> dict[str, np.ndarray]:
    """Columns of the token table, with a row for each response token, in the order of ``sequences``.

    Args:
        sequences: that are scored, in batches of similar length.
        batch_tokens: largest number of tokens in a batch, padding included.
        columns_of_batch: the columns that need models, of the concatenated tokens of sequences that are given by index.
        on_scored: called after each batch with the number of its sequences and of their tokens.

    Returns:
        These columns and those that need no model, as int32 or float32.
    """
    counts = [len(sequence.response_ids) for sequence in sequences]
    ends = np.cumsum(counts, dtype=np.int64)
    columns = columns_of_sequences(sequences, counts)
    for batch in batch_by_length([sequence.num_input_tokens for sequence in sequences], batch_tokens):
        batch_columns = columns_of_batch(batch)
        rows = np.concatenate([np.arange(ends[index] - counts[index], ends[index]) for index in batch])
        for name, values in batch_columns.items():
            dtype = np.int32 if values.dtype.kind == "i" else np.float32
            columns.setdefault(name, np.empty((sum(counts), *values.shape[1:]), dtype=dtype))[rows] = values
        on_scored(len(batch), len(rows))
    return columns


def columns_of_sequences(sequences: Sequence[TokenSequence], counts: list[int]) -> dict[str, np.ndarray]:
    """The columns that need no model: ids, positions, tokens and sampling log-probabilities."""
    empty = np.empty(0)
    sampling_logps = [
        np.full(count, np.nan) if sequence.logp_sampled is None else sequence.logp_sampled
        for sequence, count in zip(sequences, counts, strict=True)
    ]
    return {
        "prompt_id": np.repeat([sequence.prompt_id for sequence in sequences], counts).astype(np.int32),
        "sample_id": np.repeat([sequence.sample_id for sequence in sequences], counts).astype(np.int32),
        "position": np.concatenate([empty, *(np.arange(count) for count in counts)]).astype(np.int32),
        "token_id": np.concatenate([empty, *(sequence.response_ids for sequence in sequences)]).astype(
            np.int32
        ),
        "logp_sampled": np.concatenate([empty, *sampling_logps]).astype(np.float32),
    }


@torch.inference_mode()
def _columns_of_models(
    pair: Pair,
    batch: list[TokenSequence],
    inputs: tuple[Tensor, Head, Tensor, Head],
    temperature: float,
    options: LinearOptions | None,
    top: int,
    sampler: Sampling | None,
) -> dict[str, np.ndarray]:
    """The columns computed by both models for one batch, on the CPU."""
    policy, reference = pair.policy, pair.reference
    ids = [token for sequence in batch for token in sequence.response_ids]
    tokens = torch.tensor(ids, device=inputs[0].device)
    columns: dict[str, np.ndarray] = {}
    if policy.turns is not None:  # until all ranks that store weights compare the two models
        policy.turns.wait_for(policy.role, "statistics_and_top" if top else "statistics")
    if top:
        statistics, *top_of_models = _statistics_and_top(inputs, tokens, top, temperature, options)
        for role, top_tokens in zip(("policy", "reference"), top_of_models, strict=True):
            columns[f"top_token_id_{role}"] = _to_numpy(top_tokens.token_ids)
            columns[f"top_probability_{role}"] = _to_numpy(top_tokens.probability)
    else:
        statistics = token_statistics(*inputs, tokens, temperature=temperature, options=options)
    columns |= {name: _to_numpy(getattr(statistics, field)) for name, field in STATISTICS.items()}
    if policy.padding is not None and reference.padding is not None:
        columns |= padding_columns((policy.padding, reference.padding), inputs, columns, tokens, temperature)
    if sampler is not None:
        columns["acceptance_of_sampler"] = _acceptance(pair, sampler, inputs, columns, temperature)
    for model, role in ((policy, "policy"), (reference, "reference")):
        _check_finite(model.role, np.isfinite(columns[f"logp_{role}"]), batch)
    return columns


def _statistics_and_top(
    inputs: tuple[Tensor, Head, Tensor, Head],
    tokens: Tensor,
    top: int,
    temperature: float,
    options: LinearOptions | None,
) -> StatisticsAndTop:
    """The statistics of each token and the likeliest tokens of both models, also over a ``vocabulary_group``."""
    if inputs[1].vocabulary_group is None and inputs[3].vocabulary_group is None:
        return token_statistics_and_top(*inputs, tokens, top=top, temperature=temperature, options=options)
    statistics = token_statistics(*inputs, tokens, temperature=temperature, options=options)
    return StatisticsAndTop(
        statistics,
        _likeliest(*inputs[:2], top, temperature),
        _likeliest(*inputs[2:], top, temperature),
    )


def _likeliest(hidden: Tensor, head: Head, top: int, temperature: float) -> TopTokens:
    """The likeliest tokens of one model, a few tokens at a time, since their logits are gathered."""
    parts: list[tuple[Tensor, Tensor]] = []
    for some in hidden.split(TOP_TOKENS_AT_ONCE):
        logp, token_ids = log_probabilities(some, head, temperature=temperature).topk(top)
        parts.append((token_ids, logp.exp()))
    return TopTokens(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _acceptance(
    pair: Pair,
    sampler: Sampling,
    inputs: tuple[Tensor, Head, Tensor, Head],
    columns: dict[str, np.ndarray],
    temperature: float,
) -> np.ndarray:
    """sum_x min(p(x), q(x)) at each position, of both distributions as the sampler truncates them."""
    hidden_p, head_p, hidden_q, head_q = inputs
    if sampler.temperature == 0:
        return (columns["top1_policy"] == columns["top1_reference"]).astype(np.float32)
    limits = {"top_k": sampler.top_k, "top_p": sampler.top_p, "min_p": sampler.min_p}
    parts: list[Tensor] = []
    for some_p, some_q in zip(*(x.split(TOP_TOKENS_AT_ONCE) for x in (hidden_p, hidden_q)), strict=True):
        logps: list[Tensor] = []
        for model, hidden, head in ((pair.policy, some_p, head_p), (pair.reference, some_q, head_q)):
            model.wait_for("logp")
            logps.append(truncate(log_probabilities(hidden, head, temperature=temperature), **limits).logp)
        parts.append(torch.minimum(*logps).exp().sum(-1))
    return _to_numpy(torch.cat(parts))


def _to_numpy(values: Tensor) -> np.ndarray:
    """The values on the CPU: float32, or int32 if they are integers."""
    return values.to(torch.float32 if values.is_floating_point() else torch.int32).cpu().numpy()


def _check_finite(
    role: str, finite: np.ndarray, batch: Sequence[TokenSequence], quantity: str = "logits"
) -> None:
    """Check that every element of ``finite``, one for each scored token, is true.

    Raises:
        NonFiniteError: with the sequence and position of the first that is not.
    """
    if finite.all():
        return
    position = int(np.flatnonzero(~finite)[0])
    for sequence in batch:
        if position < len(sequence.response_ids):
            raise NonFiniteError(
                f"the {role} gives NaN or infinite {quantity} for {sequence.name}, response token {position}; "
                "in 16 bits try float32 (--dtype), else look at the checkpoint"
            )
        position -= len(sequence.response_ids)


def score_against_itself(
    model: Model,
    sequences: Sequence[TokenSequence],
    states: HiddenStateReader | None = None,
    *,
    temperature: float = 1.0,
    batch_tokens: int = 4096,
    options: LinearOptions | None = None,
) -> dict[str, np.ndarray]:
    """``score`` of a model in batches (as policy) against hidden states of it computed otherwise (as reference).

    In exact arithmetic the KL would be 0. With ``states`` from elsewhere it is the difference between two
    implementations of one model. Without, each sequence is run alone, and the KL is the noise floor: a smaller drift in
    this dtype cannot be measured.
    """

    return score(
        Pair(policy=model, reference=model, tokenizer=model.tokenizer),
        sequences,
        temperature=temperature,
        batch_tokens=batch_tokens,
        options=options,
        read_reference=states or (lambda batch: torch.cat([read_hidden_states(model, [x]) for x in batch])),
    )


def score_against_float32(
    model: Model,
    sequences: Sequence[TokenSequence],
    *,
    temperature: float = 1.0,
    batch_tokens: int = 4096,
    options: LinearOptions | None = None,
) -> dict[str, np.ndarray] | None:
    """``score`` of a model as it runs (as policy) against itself loaded in float32 (as reference).

    Its KL is the error due to the dtype. The model is loaded a second time for this.

    Returns:
        The columns; None if the model already runs in float32 or float64.
    """
    if model.dtype in (torch.float32, torch.float64):
        return None
    loading = Loading(
        dtype="float32",
        device="auto" if model.device_map else str(model.device),
        device_map=model.device_map,
        trust_remote_code=model.trust_remote_code,
        tokenizer=model.tokenizer.name_or_path if is_gguf(model.path) else None,
    )
    float32_model = load_reference(model.path, model.revision, loading).reference
    float32_model = replace(
        float32_model,
        head=truncate_head(float32_model.head, model.vocab_size),
        vocab_size=model.vocab_size,
        padding=None,
    )
    pair = Pair(policy=model, reference=float32_model, tokenizer=model.tokenizer)
    return score(pair, sequences, temperature=temperature, batch_tokens=batch_tokens, options=options)


RoundingKind = Literal["noise", "gap"]
ROUNDING: Mapping[RoundingKind, Callable[..., dict[str, np.ndarray] | None]] = {
    "noise": score_against_itself,
    "gap": score_against_float32,
}
"""Kind of a rounding error -> the function that scores a model against itself without it."""
