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
    check_layout,
    check_rounding,
    check_token_logps,
    final_norm,
    final_states,
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
        layer_ids = None if job.layers is None else tuple(map(int, job.layers.split(",")))
        check_layout(saved, pair.reference, layer_ids)
        tokens = range(min(NORM_TOKENS, pair.vocab_size))
        self._norm = None if saved.layout.is_after_norm else final_norm(pair.reference, tokens)
        probes = self._find_sequences(job, pair)
        self._probes = {sequence_key(probe): (probe, request) for probe, request in probes}
        self._median_error = float(np.median([self._error(*probe) for probe in probes]))
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
            logps = self._saved.token_logps(sequence)
            difference = check_token_logps(logps, self._model, sequence, hidden, str(first))
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
        return self._read(request, len(sequence.prompt_ids) - 1, sequence.num_input_tokens)

    def _read(self, request: EngineRequest, start: int, stop: int) -> Tensor:
        """The final hidden states of rows ``start`` to ``stop - 1``, on the model's device and in its dtype."""
        last = self._saved.read(request, start, stop).to(self._model.device, self._model.dtype)
        return last if self._norm is None else self._norm(last)

    def _error(self, sequence: TokenSequence, request: EngineRequest) -> float:
        """The median relative error of the saved rows of a probe, against those that the model computes itself.

        Raises:
            ModelError: if rows differ by more than rounding: of another model, layer or token, or on the other side of
                the final norm.
        """
        token_ids = (*sequence.prompt_ids, *sequence.response_ids)[:-1]
        side = "after" if self._norm is None else "before"
        return check_rounding(
            self._read(request, 0, len(token_ids)),
            final_states(self._model, token_ids),
            self._model.dtype,
            str(request),
            f"the hidden states of {self._model.path}",
            f"they must be those {side} the final norm, of the tokens as they were sent, without chunked prefill and "
            "prefix caching, from the weights, adapter and quantisation of --reference",
        )

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
