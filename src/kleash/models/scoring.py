"""What both models say about each token of given sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import NonFiniteError, OptionError
from kleash.linear import Head, LinearOptions, token_statistics, token_statistics_and_top
from kleash.models.cache.reference_cache import ReferenceCache
from kleash.models.compat import suppress_library_output
from kleash.models.heads import truncate_head
from kleash.models.pair import Model, Pair
from kleash.models.pair_loading import load_pair
from kleash.models.sequences import TokenSequence, batch_by_length

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
"""The columns of a run's token table, and what ``token_statistics`` calls them."""

HiddenStateReader = Callable[[Sequence[TokenSequence]], Float[Tensor, "tokens dim"]]
"""Final hidden states at the scored positions of a batch, one sequence after the other."""


def score(
    pair: Pair,
    sequences: Sequence[TokenSequence],
    *,
    temperature: float = 1.0,
    batch_tokens: int = 4096,
    options: LinearOptions | None = None,
    cache: ReferenceCache | None = None,
    top: int = 0,
) -> dict[str, np.ndarray]:
    """Per-token statistics of both models for each response token, in the order of ``sequences``.

    The sequences are computed in batches of like length; no number depends on which (in float32: to float32
    rounding). The reference only reads: what it would have generated is never asked.

    Args:
        pair: the two models.
        sequences: contexts and responses.
        temperature: divides the logits of both models; above 0.
        batch_tokens: the most tokens in a batch, padding included.
        options: how ``token_statistics`` is computed.
        cache: where the reference's hidden states are read from and written to.
        top: of how many of each model's likeliest tokens ids and probabilities are wanted.

    Returns:
        A flat array for each column of the token table except ``text``: every response token of the first
        sequence, then of the second, and so on. ``logp_sampled`` is NaN where it is unknown. With ``top``, four
        arrays [tokens, top] besides: ``top_token_id_policy``, ``top_probability_policy``, and those of the reference.

    Raises:
        NonFiniteError: if a model gives NaN or infinities, naming the model, the prompt and the position.
        OptionError: if the temperature is not above 0.
    """
    read: HiddenStateReader | None = None
    if not pair.policy.is_same_as(pair.reference):
        read = hidden_state_reader(pair.reference)
        read = read if cache is None else cache.cached_reader(read)
    sides = PairReaders(pair=pair, policy=hidden_state_reader(pair.policy), reference=read)
    columns = score_with_readers(sides, sequences, temperature, batch_tokens, options, top)
    if cache is not None:
        cache.save()
    return columns


def pad_batch(batch: Sequence[TokenSequence]) -> tuple[Tensor, Tensor, Tensor]:
    """A batch as a model reads it: ids padded on the right, and row and column of each scored position.

    The last token of a sequence is scored and not read; the position before a token is the one that predicts
    it. Padding is token 0: a causal model does not see it from the positions that count.
    """
    ids = torch.zeros(len(batch), max(one.num_input_tokens for one in batch), dtype=torch.long)
    rows, cols = [], []
    for row, one in enumerate(batch):
        ids[row, : one.num_input_tokens] = torch.tensor((*one.prompt_ids, *one.response_ids)[:-1])
        rows.append(torch.full((len(one.response_ids),), row))
        cols.append(torch.arange(len(one.prompt_ids) - 1, one.num_input_tokens))
    return ids, torch.cat(rows), torch.cat(cols)


@dataclass(frozen=True, kw_only=True)
class PairReaders:
    """Two models, and how their hidden states are come by."""

    pair: Pair
    policy: HiddenStateReader
    reference: HiddenStateReader | None
    """None where the policy's hidden states are the reference's too."""


def hidden_state_reader(model: Model) -> HiddenStateReader:
    """How ``model`` reads a batch: itself, or from what was stored of it."""
    if model.stored is not None:
        return model.stored.read

    def read(batch: Sequence[TokenSequence]) -> Tensor:
        ids, rows, cols = pad_batch(batch)
        hidden = model.hidden_states(ids)
        return hidden[rows.to(hidden.device), cols.to(hidden.device)]

    return read


def checked_reader(model: Model) -> HiddenStateReader:
    """``reader``, which refuses what must not be kept.

    Raises:
        NonFiniteError: when it reads NaN or infinities, naming the sequence.
    """
    plain = hidden_state_reader(model)

    def read(batch: Sequence[TokenSequence]) -> Tensor:
        with suppress_library_output():
            hidden = plain(batch)
        _refuse_non_finite(model.role, hidden.isfinite().all(-1).cpu().numpy(), batch, "hidden states")
        return hidden

    return read


def score_with_readers(
    sides: PairReaders,
    sequences: Sequence[TokenSequence],
    temperature: float,
    batch_tokens: int,
    options: LinearOptions | None,
    top: int = 0,
) -> dict[str, np.ndarray]:
    """``score``, of hidden states that come from wherever ``sides`` says."""
    if not temperature > 0:
        raise OptionError(f"scores are taken at a temperature above 0, not at {temperature}")
    counts = [len(one.response_ids) for one in sequences]
    ends = np.cumsum(counts, dtype=np.int64)
    columns = _known(sequences, counts)
    for batch in batch_by_length([one.num_input_tokens for one in sequences], batch_tokens):
        chosen = [sequences[index] for index in batch]
        with suppress_library_output():
            found = _statistics(sides, chosen, temperature, options, top)
        places = np.concatenate([np.arange(ends[index] - counts[index], ends[index]) for index in batch])
        for name, values in found.items():
            shape = (sum(counts), *values.shape[1:])
            columns.setdefault(name, np.empty(shape, dtype=values.dtype))[places] = values
    return columns


def _known(sequences: Sequence[TokenSequence], counts: list[int]) -> dict[str, np.ndarray]:
    """The columns that are known without asking a model."""
    nowhere = np.empty(0)
    sampled = [
        np.full(count, np.nan) if one.logp_sampled is None else one.logp_sampled
        for one, count in zip(sequences, counts, strict=True)
    ]
    return {
        "prompt_id": np.repeat([one.prompt_id for one in sequences], counts).astype(np.int32),
        "sample_id": np.repeat([one.sample_id for one in sequences], counts).astype(np.int32),
        "position": np.concatenate([nowhere, *(np.arange(count) for count in counts)]).astype(np.int32),
        "token_id": np.concatenate([nowhere, *(one.response_ids for one in sequences)]).astype(np.int32),
        "logp_sampled": np.concatenate([nowhere, *sampled]).astype(np.float32),
    }


def _statistics(
    sides: PairReaders,
    batch: list[TokenSequence],
    temperature: float,
    options: LinearOptions | None,
    top: int,
) -> dict[str, np.ndarray]:
    """The columns that both models make of one batch, on the CPU."""
    policy, reference = sides.pair.policy, sides.pair.reference
    hidden_p = sides.policy(batch)
    hidden_q = hidden_p if sides.reference is None else sides.reference(batch).to(hidden_p.device)
    tokens = torch.tensor([token for one in batch for token in one.response_ids], device=hidden_p.device)
    both = hidden_p, _beside(policy.head, hidden_p), hidden_q, _beside(reference.head, hidden_p)
    columns: dict[str, np.ndarray] = {}
    with torch.inference_mode():
        if top:
            found, *tops = token_statistics_and_top(
                *both, tokens, top=top, temperature=temperature, options=options
            )
            for side, one in zip(("policy", "reference"), tops, strict=True):
                columns[f"top_token_id_{side}"] = _plain(one.token_ids)
                columns[f"top_probability_{side}"] = _plain(one.probability)
        else:
            found = token_statistics(*both, tokens, temperature=temperature, options=options)
    columns |= {name: _plain(getattr(found, field)) for name, field in STATISTICS.items()}
    for model, side in ((policy, "policy"), (reference, "reference")):
        _refuse_non_finite(model.role, np.isfinite(columns[f"logp_{side}"]), batch)
    return columns


def _beside(head: Head, hidden: Tensor) -> Head:
    """``head`` on the device of ``hidden_states``; itself if it is there already."""
    if head.weight is None or head.weight.device == hidden.device:
        return head
    bias = None if head.bias is None else head.bias.to(hidden.device)
    return replace(head, weight=head.weight.to(hidden.device), bias=bias)


def _plain(values: Tensor) -> np.ndarray:
    return values.to(torch.float32 if values.is_floating_point() else torch.int32).cpu().numpy()


def _refuse_non_finite(
    role: str, finite: np.ndarray, batch: Sequence[TokenSequence], what: str = "logits"
) -> None:
    if finite.all():
        return
    position = int(np.flatnonzero(~finite)[0])
    for one in batch:
        if position < len(one.response_ids):
            raise NonFiniteError(
                f"the {role} gives NaN or infinite {what} for {one.name}, response token {position}; "
                "try --dtype float32, or look at the checkpoint"
            )
        position -= len(one.response_ids)


def score_batched_against_single(
    model: Model,
    sequences: Sequence[TokenSequence],
    *,
    temperature: float = 1.0,
    batch_tokens: int = 4096,
    options: LinearOptions | None = None,
) -> dict[str, np.ndarray]:
    """``score`` of a model in batches (as policy) against itself with each sequence alone (as reference).

    Its KL would be 0 if arithmetic were exact: it is the floor below which a drift in this dtype is noise.
    """
    pair = Pair(policy=model, reference=model, tokenizer=model.tokenizer)
    together = hidden_state_reader(model)
    sides = PairReaders(
        pair=pair, policy=together, reference=lambda batch: torch.cat([together([one]) for one in batch])
    )
    return score_with_readers(sides, sequences, temperature, batch_tokens, options)


def score_against_float32(
    model: Model,
    sequences: Sequence[TokenSequence],
    *,
    temperature: float = 1.0,
    batch_tokens: int = 4096,
    options: LinearOptions | None = None,
) -> dict[str, np.ndarray] | None:
    """``score`` of a model as it runs (as policy) against itself loaded in float32 (as reference).

    Its KL is what the dtype costs. The model is loaded once more, so for a while it is there twice.

    Returns:
        The columns, or None where the model runs in float32 or float64 already.
    """
    if model.dtype in (torch.float32, torch.float64):
        return None
    wide = load_pair(
        model.path,
        model.path,
        revision_policy=model.revision,
        revision_reference=model.revision,
        dtype="float32",
        device="auto" if model.device_map else str(model.device),
        device_map=model.device_map,
        trust_remote_code=model.trust_remote_code,
    ).reference
    wide = replace(wide, head=truncate_head(wide.head, model.vocab_size), vocab_size=model.vocab_size)
    pair = Pair(policy=model, reference=wide, tokenizer=model.tokenizer)
    return score(pair, sequences, temperature=temperature, batch_tokens=batch_tokens, options=options)
