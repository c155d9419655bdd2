"""The shards of a run's source, which are scored and written as a whole, and warnings about the source."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kleash.engines import Shard
from kleash.engines.base_logits import BaseLogits
from kleash.jobs import MeasureJob
from kleash.models import Pair, Prompt, TokenSequence, find_source, read_prompts, read_responses, read_text
from kleash.sources.documents import count_documents
from kleash.sources.prompts import describe_forms
from kleash.sources.sequences import SourceForm

BATCHES = 4
"""Batches in a shard. A killed run loses at most one shard, and sequences are sorted by length within one."""

Item = TypeVar("Item", Prompt, TokenSequence)


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The shards of a job."""

    shards: Iterator[Shard]
    """The shards; the job alone determines them and their order."""
    sequences: int | None
    """Total number of sequences; None for text, whose windows are counted as they are read."""
    notes: tuple[str, ...]
    """What the chat template renders of the source."""
    documents: int = 0
    """Number of documents of a text, those without a window included."""
    declared: Sequence[tuple[bool, float | None]] = ()
    """Of each given response whether it was tokenised again, and its temperature, if the source has it."""


def plan_shards(job: MeasureJob, pair: Pair) -> ShardPlan:
    """The shards of a job. The whole source is parsed first, so that a malformed line is found before any scoring.

    Raises:
        SourceError: if a line of the source cannot be read.
    """
    kind, path = job.source
    forms, declared, total = Counter[SourceForm](), list[tuple[bool, float | None]](), None
    if kind == "prompts":
        prompts = read_prompts(path, pair, limit=job.limit, reading=job)
        response_tokens = job.samples_per_prompt * job.max_new_tokens
        groups = group_by_cost(prompts, lambda prompt: len(prompt.token_ids) + response_tokens, job)
        shards = (Shard(index=index, prompts=tuple(group)) for index, group in enumerate(groups))
        forms.update(prompt.form for prompt in prompts)
        total = len(prompts) * job.samples_per_prompt
    else:
        groups = group_by_cost(source_sequences(job, pair), lambda sequence: sequence.num_input_tokens, job)
        shards = (Shard(index=index, sequences=tuple(group)) for index, group in enumerate(groups))
    if kind == "text" and not job.has_base_logits:
        forms = count_documents(path, pair.tokenizer, limit=job.limit, reading=job)
    elif kind == "responses":
        for sequence in source_sequences(job, pair):
            forms[sequence.prompt_form] += 1
            declared.append((sequence.retokenised, sequence.temperature))
        total = forms.total()
    return ShardPlan(
        shards=shards,
        sequences=total,
        notes=describe_forms(kind, forms, pair.tokenizer, job),
        documents=forms.total() if kind == "text" else 0,
        declared=declared,
    )


def source_sequences(job: MeasureJob, pair: Pair) -> Iterator[TokenSequence]:
    """The sequences of a source of text or responses, in order; none for prompts, whose responses are generated."""
    kind, path = job.source
    if isinstance(pair.reference, BaseLogits):
        yield from pair.reference.sequences(job.limit)
    elif kind == "text":
        yield from read_text(path, pair, window=job.window, stride=job.stride, limit=job.limit, reading=job)
    elif kind == "responses":
        yield from read_responses(path, pair, limit=job.limit, reading=job)


def hash_source(job: MeasureJob) -> str:
    """The SHA-256 of the source's bytes, as ``Source.sha256``.

    Raises:
        SourceError: if the file is missing or empty.
    """
    kind, name = job.source
    return find_source(name, kind, job).sha256()


def group_by_cost(
    items: Iterable[Item], cost: Callable[[Item], int], job: MeasureJob
) -> Iterator[list[Item]]:
    """Iterate over groups of consecutive items whose cost is at most the tokens of a shard."""
    group: list[Item] = []
    group_cost = 0
    for item in items:
        if group and group_cost + cost(item) > BATCHES * job.batch_tokens:
            yield group
            group, group_cost = [], 0
        group.append(item)
        group_cost += cost(item)
    if group:
        yield group


def source_warnings(declared: Sequence[tuple[bool, float | None]], temperature: float) -> tuple[str, ...]:
    """Warnings of the measurement about given responses.

    Args:
        declared: as in ``ShardPlan``, of the responses that were scored.
        temperature: at which both models were scored.
    """
    warnings: list[str] = []
    if retokenised := sum(is_retokenised for is_retokenised, _ in declared):
        warnings.append(
            f"{retokenised} of {len(declared)} responses came as text and were tokenised again: where they were drawn "
            "as other tokens, the numbers are of tokens that were not drawn; give response_token_ids to be sure"
        )
    if temperatures := sorted({value for _, value in declared if value} - {temperature}):
        warnings.append(
            f"some responses declare temperature {', '.join(f'{value:g}' for value in temperatures)}, and both models "
            f"were scored at {temperature:g}; set --temperature"
        )
    return tuple(warnings)
