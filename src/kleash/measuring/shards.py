"""A run's work, cut into shards that are done and kept as wholes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

from kleash.engines import Shard
from kleash.models import (
    Pair,
    Prompt,
    TokenSequence,
    count_documents,
    read_prompts,
    read_responses,
    read_text,
    source_path,
)
from kleash.records import MeasureJob

BATCHES = 4
"""Batches in a shard: so much is lost when a run is killed, and so many sequences can be sorted by length."""

Item = TypeVar("Item", Prompt, TokenSequence)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a job comes to."""

    shards: Iterator[Shard]
    """Always the same ones in the same order."""
    sequences: int | None
    """How many there will be; None of text, whose windows are counted as they come."""


def plan(job: MeasureJob, pair: Pair) -> Plan:
    """The shards of a job. The whole source is looked through first: a broken line near its end must not cost a day.

    Raises:
        SourceError: if a line of the source cannot be read.
    """
    kind, path = job.source
    if kind != "prompts":
        given = None
        if kind == "text":
            count_documents(path, pair.tokenizer, limit=job.limit)
        else:
            given = sum(1 for _ in given_sequences(job, pair))
        parts = _parts(given_sequences(job, pair), lambda one: one.read, job)
        shards = (Shard(index=index, sequences=tuple(part)) for index, part in enumerate(parts))
        return Plan(shards=shards, sequences=given)
    prompts = read_prompts(path, pair, limit=job.limit)
    answers = job.samples_per_prompt * job.max_new_tokens
    parts = _parts(prompts, lambda prompt: len(prompt.token_ids) + answers, job)
    shards = (Shard(index=index, prompts=tuple(part)) for index, part in enumerate(parts))
    return Plan(shards=shards, sequences=len(prompts) * job.samples_per_prompt)


def given_sequences(job: MeasureJob, pair: Pair) -> Iterator[TokenSequence]:
    """The sequences of a source of text or responses, in order; nothing of prompts, whose answers come later."""
    kind, path = job.source
    if kind == "text":
        yield from read_text(path, pair, window=job.window, stride=job.stride, limit=job.limit)
    elif kind == "responses":
        yield from read_responses(path, pair, limit=job.limit)


def source_sha256(job: MeasureJob) -> str:
    """The hash of the source's bytes.

    Raises:
        SourceError: if there is no such file, or nothing in it.
    """
    digest = sha256()
    with source_path(job.source[1]).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _parts(items: Iterable[Item], cost: Callable[[Item], int], job: MeasureJob) -> Iterator[list[Item]]:
    """Neighbours together, as many as cost no more tokens than a shard may."""
    held: list[Item] = []
    spent = 0
    for item in items:
        if held and spent + cost(item) > BATCHES * job.batch_tokens:
            yield held
            held, spent = [], 0
        held.append(item)
        spent += cost(item)
    if held:
        yield held
