"""Scoring a part of the run again to measure the rounding error of a KL: noise floor and dtype gap."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from kleash.engines import Engine
from kleash.jobs import MeasureJob
from kleash.measuring.sequence_clusters import (
    mean_of_sequences,
    sequence_spans,
    sequence_starts,
    sum_sequences,
)
from kleash.measuring.shards import source_sequences
from kleash.models import Pair, TokenSequence, read_prompts
from kleash.store import RunFolder
from kleash.store.statistics import KL_POLICY_REFERENCE
from kleash.uncertainty import Estimate

NOISE_SHARE = 1 / 50
"""Fraction of the run's tokens that is scored again."""
MIN_NOISE_TOKENS, MAX_NOISE_TOKENS = 256, 8192
NOISE_SEQUENCES = 8
"""Smallest number of sequences that are scored again: each is cut to the number of tokens divided by this."""


def noise_tokens(scored: int) -> int:
    """The number of tokens to score again for a run of ``scored`` tokens."""
    return max(MIN_NOISE_TOKENS, min(MAX_NOISE_TOKENS, int(scored * NOISE_SHARE)))


def noise_sequences(sequences: Iterable[TokenSequence], scored: int) -> list[TokenSequence]:
    """The first sequences of a run, each cut short, with ``noise_tokens(scored)`` tokens in all."""
    budget, total = noise_tokens(scored), 0
    short_sequences: list[TokenSequence] = []
    for sequence in sequences:
        short_sequences.append(shortened_to(sequence, budget // NOISE_SEQUENCES))
        total += short_sequences[-1].num_input_tokens
        if total >= budget:
            break
    return short_sequences


def shortened_to(sequence: TokenSequence, tokens: int) -> TokenSequence:
    """The end of a sequence's prompt and the beginning of its response, at most ``tokens`` model inputs."""
    if sequence.num_input_tokens <= tokens:
        return sequence
    prompt = sequence.prompt_ids[-max(1, tokens // 2, tokens + 1 - len(sequence.response_ids)) :]
    count = max(1, tokens + 1 - len(prompt))
    logp_sampled = sequence.logp_sampled
    return replace(
        sequence,
        prompt_ids=prompt,
        response_ids=sequence.response_ids[:count],
        logp_sampled=None if logp_sampled is None else logp_sampled[:count],
    )


def first_sequences(job: MeasureJob, pair: Pair, folder: RunFolder) -> Iterator[TokenSequence]:
    """The run's sequences in order, read lazily from the source or, for generated responses, from the run's files."""
    kind, path = job.source
    if kind != "prompts":
        count = sum(len(part["prompt_id"]) for part in folder.parts("sequences", ["prompt_id"]))
        yield from islice(source_sequences(job, pair), count)
        return
    # each prompt has a token that is scored again, so that no more of them are reached
    limit = MAX_NOISE_TOKENS if job.limit is None else min(job.limit, MAX_NOISE_TOKENS)
    prompts = read_prompts(path, pair, limit=limit, reading=job)
    for part in folder.parts("tokens", ["prompt_id", "sample_id", "token_id"]):
        for begin, end in sequence_spans(part["prompt_id"], part["sample_id"]):
            prompt = prompts[int(part["prompt_id"][begin])]
            yield TokenSequence(
                prompt_id=prompt.prompt_id,
                sample_id=int(part["sample_id"][begin]),
                prompt_ids=prompt.token_ids,
                response_ids=tuple(part["token_id"][begin:end].tolist()),
                prompt_text=prompt.text,
                response_text="",
                prompt_hash=prompt.prompt_hash,
                location=prompt.location,
            )


def measure_rounding(
    job: MeasureJob, engine: Engine, folder: RunFolder, scored: int
) -> tuple[Estimate | None, Estimate | None]:
    """The noise floor and the dtype gap, the parts of a KL that are rounding; on a share of the ``scored`` tokens."""
    sequences = noise_sequences(first_sequences(job, engine.pair, folder), scored)
    noise, gap = (_mean_kl(engine.rounding_columns(kind, sequences), sequences) for kind in ("noise", "gap"))
    return noise, gap


def _mean_kl(columns: Mapping[str, np.ndarray] | None, sequences: Sequence[TokenSequence]) -> Estimate | None:
    """The mean KL of a reference from itself, from ``Engine.rounding_columns``; None if there are none."""
    if columns is None:
        return None
    hash_of = {(sequence.prompt_id, sequence.sample_id): sequence.prompt_hash for sequence in sequences}
    prompt, sample = columns["prompt_id"], columns["sample_id"]
    # A cache was perhaps made with more of the source; a prompt that is not among ``sequences`` is its own.
    hashes = [
        hash_of.get(key := (int(prompt[start]), int(sample[start])), f"{key[0]:x}")
        for start in sequence_starts(prompt, sample)
    ]
    # is_one_model: a KL of 0 on every token is exact here, since the same model is scored twice.
    sums = sum_sequences(columns, hashes, columns[KL_POLICY_REFERENCE])
    return mean_of_sequences([sums], on_text=False, is_one_model=True)
