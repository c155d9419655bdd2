"""What is asked of the models once more when all is scored: how much of a drift is rounding."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from kleash.engines import LocalEngine
from kleash.measuring.sequence_clusters import Ledger, sequence_spans
from kleash.measuring.shards import given_sequences
from kleash.models import Pair, TokenSequence, read_prompts, retokenisation_warnings
from kleash.records import MeasureJob, Number, RunFolder

NOISE_SHARE = 1 / 50
"""Tokens on which the noise floor is measured, as a share of the run's."""
NOISE_TOKENS = (256, 8192)
"""The fewest and the most of them."""
NOISE_SEQUENCES = 8
"""Sequences on which it is measured, where they are long; each is shortened to its share."""


def noise_tokens(scored: int) -> int:
    """How many tokens the reference reads for the noise floor of a run with so many."""
    fewest, most = NOISE_TOKENS
    return max(fewest, min(most, int(scored * NOISE_SHARE)))


def noise_sequences(sequences: Iterable[TokenSequence], scored: int) -> list[TokenSequence]:
    """The first of a run's sequences, shortened and as many as it takes, for the noise floor of ``scored`` tokens."""
    budget, read = noise_tokens(scored), 0
    found: list[TokenSequence] = []
    for sequence in sequences:
        found.append(shortened_to(sequence, budget // NOISE_SEQUENCES))
        read += found[-1].read
        if read >= budget:
            break
    return found


def shortened_to(sequence: TokenSequence, read: int) -> TokenSequence:
    """A piece of a sequence of which models read at most so many tokens: the prompt's last, the response's first."""
    if sequence.read <= read:
        return sequence
    prompt = sequence.prompt_ids[-max(1, read // 2, read + 1 - len(sequence.response_ids)) :]
    count = max(1, read + 1 - len(prompt))
    sampled = sequence.logp_sampled
    return replace(
        sequence,
        prompt_ids=prompt,
        response_ids=sequence.response_ids[:count],
        logp_sampled=None if sampled is None else sampled[:count],
    )


def first_sequences(job: MeasureJob, pair: Pair, folder: RunFolder) -> Iterator[TokenSequence]:
    """A run's sequences in their order, from its source and its files; no more of these are read than are taken."""
    kind, path = job.source
    if kind != "prompts":
        count = sum(len(part["prompt_id"]) for part in folder.sequence_parts(["prompt_id"]))
        yield from islice(given_sequences(job, pair), count)
        return
    most = NOISE_TOKENS[1]
    prompts = read_prompts(path, pair, limit=most if job.limit is None else min(job.limit, most))
    for part in folder.token_parts(["prompt_id", "sample_id", "token_id"]):
        for begin, end in sequence_spans(part["prompt_id"], part["sample_id"]):
            if part["prompt_id"][begin] >= len(prompts):
                return
            prompt = prompts[int(part["prompt_id"][begin])]
            yield TokenSequence(
                prompt_id=prompt.prompt_id,
                sample_id=int(part["sample_id"][begin]),
                prompt_ids=prompt.token_ids,
                response_ids=tuple(part["token_id"][begin:end].tolist()),
                prompt_text=prompt.text,
                response_text="",
                prompt_hash=prompt.prompt_hash,
                where=prompt.where,
            )


@dataclass(kw_only=True)
class SourceChecks:
    """What given responses say of themselves that limits what can be concluded from them."""

    temperature: float
    """At which the run scores."""
    sequences: int = 0
    retokenised: int = 0
    other_temperatures: set[float] = field(default_factory=set)

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        """Count the sequences of a shard."""
        for one in sequences:
            self.sequences += 1
            self.retokenised += one.retokenised
            if one.temperature is not None and one.temperature != self.temperature:
                self.other_temperatures.add(one.temperature)

    def warnings(self) -> tuple[str, ...]:
        """The sentences that the measurement must carry."""
        found = retokenisation_warnings(self.sequences, self.retokenised)
        if not self.other_temperatures:
            return found
        said = ", ".join(f"{value:g}" for value in sorted(self.other_temperatures))
        sentence = (
            f"some responses say that they were drawn at temperature {said}, and both models were scored at "
            f"{self.temperature:g}; give --temperature"
        )
        return (*found, sentence)


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """How much of a drift is rounding."""

    noise_floor: Number | None
    dtype_gap: Number | None
    warnings: tuple[str, ...]


def measure_rounding(job: MeasureJob, engine: LocalEngine, folder: RunFolder, scored: int) -> Aftermath:
    """The noise floor and the dtype's gap, on a share of the run's ``scored`` tokens."""
    first = noise_sequences(first_sequences(job, engine.pair, folder), scored)
    noise = engine.noise(first)
    return Aftermath(
        noise_floor=_mean(noise),
        dtype_gap=_mean(engine.float32_gap(first)),
        warnings=() if noise is not None else (_no_floor(engine),),
    )


def _no_floor(engine: LocalEngine) -> str:
    return (
        f"there is no noise floor: the reference was not loaded, and its cache knows of none at temperature "
        f"{engine.temperature:g}; kleash cache with --temperature {engine.temperature:g} adds it"
    )


def _mean(columns: dict[str, np.ndarray] | None) -> Number | None:
    if columns is None:
        return None
    # Rounding that changes no token at all is the code's doing, not that of the sequences it was tried on.
    ledger = Ledger(on_text=False, one_model=True)
    ledger.add(columns)
    return Number.of(ledger.kl())
