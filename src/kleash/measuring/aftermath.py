"""What is asked of the models once more when all is scored: how much of a drift is rounding, and the alternatives."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kleash.engines import LocalEngine
from kleash.measuring.ledger import Ledger
from kleash.measuring.rows import sequence_starts
from kleash.measuring.shards import given_sequences
from kleash.models import Pair, Sequence, read_prompts, retokenisation_doubts
from kleash.records import Drifted, MeasureJob, Number, RunFolder

NOISE_BATCHES = 2
"""Batches on which the noise floor is measured."""


def sequences_again(job: MeasureJob, pair: Pair, folder: RunFolder) -> Iterator[Sequence]:
    """The sequences of a run in their order, made again from its source and its files."""
    count = sum(len(part["prompt_id"]) for part in folder.sequence_parts(["prompt_id"]))
    kind, path = job.source
    if kind != "prompts":
        yield from islice(given_sequences(job, pair), count)
        return
    prompts = read_prompts(path, pair, limit=job.limit)
    for part in folder.token_parts(["prompt_id", "sample_id", "token_id"]):
        starts = sequence_starts(part["prompt_id"], part["sample_id"])
        for begin, end in zip(starts, [*starts[1:], len(part["token_id"])], strict=True):
            prompt = prompts[int(part["prompt_id"][begin])]
            yield Sequence(
                prompt_id=prompt.prompt_id,
                sample_id=int(part["sample_id"][begin]),
                prompt_ids=prompt.token_ids,
                response_ids=tuple(part["token_id"][begin:end].tolist()),
                prompt_text=prompt.text,
                response_text="",
                prompt_hash=prompt.prompt_hash,
                where=prompt.where,
            )


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """What a second look at some of the sequences told."""

    noise_floor: Number | None
    dtype_gap: Number | None
    doubts: tuple[str, ...]


def look_again(
    job: MeasureJob, engine: LocalEngine, folder: RunFolder, worst: tuple[Drifted, ...]
) -> Aftermath:
    """Measure the noise, write the alternatives in the worst sequences, and gather what the source gives to doubt."""
    wanted = {(one.prompt_id, one.sample_id): place for place, one in enumerate(worst)}
    first: list[Sequence] = []
    found: dict[int, Sequence] = {}
    seen, retokenised, read = 0, 0, 0
    temperatures: set[float] = set()
    for sequence in sequences_again(job, engine.pair, folder):
        seen += 1
        retokenised += sequence.retokenised
        if sequence.temperature is not None and sequence.temperature != job.temperature:
            temperatures.add(sequence.temperature)
        if read < NOISE_BATCHES * job.batch_tokens:
            first.append(sequence)
            read += sequence.read
        place = wanted.get((sequence.prompt_id, sequence.sample_id))
        if place is not None:
            found[place] = sequence
    folder.write_alternatives(engine.alternatives([found[place] for place in sorted(found)]))
    noise = engine.noise(first)
    return Aftermath(
        noise_floor=_mean(noise),
        dtype_gap=_mean(engine.float32_gap(first)),
        doubts=(
            *retokenisation_doubts(seen, retokenised),
            *_temperature_doubts(job, temperatures),
            *([] if noise is not None else [_no_floor(engine)]),
        ),
    )


def _no_floor(engine: LocalEngine) -> str:
    return (
        f"there is no noise floor: the reference was not loaded, and its cache knows of none at temperature "
        f"{engine.temperature:g}; kleash cache with --temperature {engine.temperature:g} adds it"
    )


def _mean(columns: dict[str, np.ndarray] | None) -> Number | None:
    if columns is None:
        return None
    ledger = Ledger(on_text=False)
    ledger.add(columns)
    return Number.of(ledger.kl())


def _temperature_doubts(job: MeasureJob, others: set[float]) -> tuple[str, ...]:
    if not others:
        return ()
    said = ", ".join(f"{value:g}" for value in sorted(others))
    sentence = (
        f"some responses say that they were drawn at temperature {said}, and both models were scored at "
        f"{job.temperature:g}; give --temperature"
    )
    return (sentence,)
