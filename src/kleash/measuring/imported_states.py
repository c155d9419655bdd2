"""Reading a reference cache from the hidden states that a serving engine saved, and checking them on the way."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError, OptionError
from kleash.jobs import CacheJob
from kleash.measuring.rescoring import NOISE_SEQUENCES, noise_tokens
from kleash.measuring.shards import source_sequences
from kleash.models import Pair, TokenSequence
from kleash.models.cache.engine_state_checks import (
    EngineStateReader,
    check_layout,
    check_rounding,
    final_norm,
)
from kleash.models.cache.engine_states import EngineRequest, EngineStates
from kleash.models.cache.hidden_states import sequence_key
from kleash.models.scoring import score_against_itself

NORM_TOKENS = 8
"""Tokens on which the final norm is found."""


def with_saved_dtype(job: CacheJob, saved: EngineStates) -> CacheJob:
    """The job with the dtype of the saved hidden states, in which the reference is loaded too.

    Raises:
        OptionError: if the job names another dtype.
    """
    dtype = str(saved.layout.dtype).removeprefix("torch.")
    if job.dtype not in ("auto", dtype):
        raise OptionError(
            f"the hidden states in {saved.folder} are in {dtype} and --dtype is {job.dtype}; leave --dtype out"
        )
    return replace(job, dtype=dtype)


class ImportedStates:
    """The final hidden states of a source, read from an engine's files."""

    def __init__(self, job: CacheJob, pair: Pair, saved: EngineStates) -> None:
        """Check that the files hold the source, and on a few of its sequences that they are the reference's.

        Args:
            job: the caching job.
            pair: the reference, loaded, on both sides.
            saved: the engine's files.

        Raises:
            ModelError: if a sequence is in no file, or hidden states are not the reference's.
            OptionError: if ``--layers`` is not the list of the files.
        """
        self._saved, self._model = saved, pair.reference
        check_layout(saved, pair.reference, job.layer_ids())
        has_norm = not saved.layout.is_after_norm
        norm = final_norm(pair.reference, range(min(NORM_TOKENS, pair.vocab_size))) if has_norm else None
        self._reader = EngineStateReader(saved=saved, model=pair.reference, norm=norm)
        probes = self._find_sequences(job, pair)
        self._probes = {sequence_key(probe): (probe, request) for probe, request in probes}
        errors = [self._reader.check_states(request, probe) for probe, request in probes]
        self._median_error = float(np.median(errors))
        self._largest_difference = 0.0

    def read(self, batch: Sequence[TokenSequence]) -> Float[Tensor, "tokens dim"]:
        """Final hidden states at the scored positions of a batch, one sequence after the other.

        Raises:
            ModelError: if they are NaN or infinite, naming file and row; if they contradict the engine's
                log-probabilities; or if two files of one request differ.
        """
        parts: list[Tensor] = []
        for sequence in batch:
            first, *copies = self._saved.find(sequence)
            hidden = self._rows(first, sequence)
            for copy in copies:
                check_rounding(
                    self._rows(copy, sequence),
                    hidden,
                    self._model.dtype,
                    f"{first} and {copy} hold the same tokens",
                    "the same",
                    "delete the file that is not of this reference",
                )
            difference = self._reader.check_token_logps(first, sequence, hidden)
            self._largest_difference = max(self._largest_difference, difference)
            parts.append(hidden)
        return torch.cat(parts)

    def noise_columns(self, temperature: float) -> dict[str, np.ndarray]:
        """Token columns of the reference as it runs here compared with the engine's hidden states, on the probes."""

        def read(batch: Sequence[TokenSequence]) -> Tensor:
            requests = [self._probes[sequence_key(probe)][1] for probe in batch]
            return torch.cat([self._rows(*pair) for pair in zip(requests, batch, strict=True)])

        probes = [probe for probe, _ in self._probes.values()]
        return score_against_itself(self._model, probes, read, temperature=temperature)

    def summary(self) -> tuple[str, ...]:
        """Sentences about where the hidden states come from and what was verified."""
        origin = (
            f"the hidden states of {self._model.path} were computed by {self._saved.engine} and read from "
            f"{self._saved.folder}; on {len(self._probes)} sequences they differ from those computed by kleash by "
            f"{self._median_error:.2g} (relative, median of the rows)"
        )
        verified = (
            "the rows agree with the engine's log-probabilities of their tokens, where it saved them, to "
            f"{self._largest_difference:.2g} nats"
        )
        unverified = "the engine's log-probabilities were not saved, so that its head was not verified"
        return origin, verified if self._saved.has_logps else unverified

    def _rows(self, request: EngineRequest, sequence: TokenSequence) -> Tensor:
        """The final hidden states of a request at the scored positions of a sequence."""
        start = len(sequence.prompt_ids) - 1
        return self._reader.read(request, start, start + len(sequence.response_ids))

    def _find_sequences(self, job: CacheJob, pair: Pair) -> list[tuple[TokenSequence, EngineRequest]]:
        """Evenly spaced probes of the source with their requests."""
        requests: list[list[EngineRequest]] = []
        num_tokens, missing = 0, list[str]()
        for sequence in source_sequences(job.measurement(), pair):
            requests.append(self._saved.find(sequence))
            num_tokens += len(sequence.response_ids)
            if not requests[-1]:
                missing.append(sequence.name)
        if missing:
            kind, path = job.measurement().source
            raise ModelError(
                f"{self._saved.folder} holds no hidden states of {len(missing)} of the {len(requests)} sequences of "
                f"--{kind} {path}, the first being {missing[0]}; send the "
                "token ids of each sequence, and not its text, to the engine as one prompt, without prefix caching and "
                "chunked prefill"
            )
        picks = set(np.linspace(0, len(requests) - 1, NOISE_SEQUENCES).round().astype(int).tolist())
        budget = noise_tokens(num_tokens) // NOISE_SEQUENCES
        sequences = enumerate(source_sequences(job.measurement(), pair))
        return [(_cut(each, budget), requests[place][0]) for place, each in sequences if place in picks]


def _cut(sequence: TokenSequence, tokens: int) -> TokenSequence:
    """The beginning of a sequence: its prompt, and at least one response token, at most ``tokens`` inputs if it can."""
    count = max(1, tokens - len(sequence.prompt_ids) + 1)
    return replace(sequence, response_ids=sequence.response_ids[:count], logp_sampled=None)
