"""The engine of a model behind an inference server, compared with a local one."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kleash.engines.base import (
    EngineTraits,
    JobEngine,
    Shard,
    ShardResult,
    round_outwards,
    shard_result,
    with_unknown,
)
from kleash.engines.endpoints.divergence_bounds import divergence_bounds
from kleash.engines.endpoints.listed_logprobs import ListedLogprobs
from kleash.engines.endpoints.server import Endpoint
from kleash.engines.local import CPU_BUFFER_BYTES
from kleash.errors import EndpointError
from kleash.extras import suppress_library_output
from kleash.linear import LinearOptions, token_statistics
from kleash.models import Model, TokenSequence
from kleash.models.scoring import columns_in_batches, read_hidden_states
from kleash.store.measurement import ModelRecord
from kleash.store.statistics import DIVERGENCE_COLUMNS
from kleash.store.tables import BOUND_COLUMNS

GPU_BUFFER_BYTES = 2**30


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedModel(Model):
    """A model behind a server. Its vocabulary and tokenizer are the local model's, which the server's must equal."""

    endpoint: Endpoint
    """The server."""

    def record(self) -> ModelRecord:
        """The model's entry in a run's records; the server does not say its weights or dtype."""
        return replace(super().record(), dtype="unknown", fingerprint="")


def served_model(endpoint: Endpoint, role: str, local: Model) -> ServedModel:
    """The model of a server, beside the local model that it is compared with."""
    return ServedModel(
        role=role,
        path=f"{endpoint.client.url} ({endpoint.probe.model})",
        dtype=local.dtype,
        device=local.device,
        parameters=None,
        vocab_size=local.vocab_size,
        context_length=endpoint.max_input_tokens(local.context_length),
        eos_token_ids=local.eos_token_ids,
        head=local.head,
        fingerprint=f"{endpoint.dialect.name}: {endpoint.probe.model}",
        tokenizer=local.tokenizer,
        network=None,
        backbone=None,
        endpoint=endpoint,
    )


@dataclass(frozen=True, kw_only=True)
class EndpointEngine(JobEngine):
    """Scores sequences by a server, which lists the likeliest tokens, and by a local model, which is known exactly.

    Several requests are in flight at once, while the local model scores the same sequences.
    """

    endpoint: Endpoint
    endpoint_role: str
    """"policy" or "reference"."""

    @property
    def local_model(self) -> Model:
        """The model of this process."""
        return self.pair.reference if self.endpoint_role == "policy" else self.pair.policy

    @property
    def traits(self) -> EngineTraits:
        """Servers give log-probabilities of prompts at temperature 1, of the tokens that they list."""
        reason = (
            f"the server of the {self.endpoint_role} lists {self.endpoint.probe.top} tokens at each position and not "
            "its whole distribution"
        )
        return EngineTraits(
            unknown_columns=dict.fromkeys((*DIVERGENCE_COLUMNS, f"entropy_{self.endpoint_role}"), reason),
            no_noise_floor="the reference is behind a server, which scores a sequence in batches of its own choice",
        )

    def run(self, shard: Shard) -> ShardResult:
        """Score the sequences of ``shard``.

        Raises:
            EndpointError: if the server cannot be reached, serves another model than before, or an answer is not about
                the sequence that was sent.
            NonFiniteError: if the local model's outputs are NaN or infinite, or the server gives a token no
                probability.
        """
        sequences = shard.sequences
        pool = ThreadPoolExecutor(
            max_workers=self.job.endpoint_concurrency, thread_name_prefix="kleash-endpoint"
        )
        try:
            answers = [pool.submit(self.endpoint.score, sequence) for sequence in sequences]
            columns = self._columns(sequences, answers)
            self.endpoint.require_same_model()
            self.on_scored(len(sequences), len(columns["token_id"]))
        except BaseException:
            # ends the retries of requests that are still waiting
            self.endpoint.client.is_closed.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return shard_result(self.pair, sequences, columns)

    def _columns(
        self, sequences: Sequence[TokenSequence], answers: Sequence["Future[ListedLogprobs]"]
    ) -> dict[str, Any]:
        """The columns of ``tokens/`` of a shard."""
        is_padding = self.local_model.padding_mask()

        def columns_of_batch(batch: list[int]) -> dict[str, np.ndarray]:
            hidden = read_hidden_states(self.local_model, [sequences[index] for index in batch])
            answer = ListedLogprobs.concatenate([answers[index].result() for index in batch])
            with suppress_library_output(), torch.inference_mode():
                columns = self._columns_of_batch(hidden, answer, is_padding)
            if np.isnan(columns["kl_policy_reference_lower"]).any():
                raise EndpointError(
                    f"{self.endpoint.client.subject} gives probabilities for some of the sequences from "
                    f"{sequences[batch[0]].name} on that no distribution over {self.local_model.vocab_size} tokens has"
                )
            return columns

        return with_unknown(
            columns_in_batches(sequences, self.job.batch_tokens, columns_of_batch), BOUND_COLUMNS
        )

    def _columns_of_batch(
        self, hidden: torch.Tensor, answer: ListedLogprobs, is_padding: torch.Tensor | None
    ) -> dict[str, np.ndarray]:
        """The columns of both models for the positions of a batch."""
        served = self.endpoint_role
        local = self.local_model.role
        head, tokens = self.local_model.head, torch.from_numpy(answer.token_ids).to(hidden.device)
        buffer_bytes = CPU_BUFFER_BYTES if hidden.device.type == "cpu" else GPU_BUFFER_BYTES
        statistics = token_statistics(
            hidden,
            head,
            hidden,
            head,
            tokens,
            options=LinearOptions(buffer_bytes=buffer_bytes if hidden.device.type == "cpu" else None),
        )
        bounds = divergence_bounds(
            hidden,
            head,
            answer,
            endpoint_role=served,
            buffer_bytes=buffer_bytes,
            is_padding=is_padding,
        )
        rows, top1 = np.arange(len(tokens)), answer.listed_logp.argmax(-1)
        rank = statistics.rank_q.cpu().numpy() if served == "policy" else answer.rank
        return {
            f"logp_{served}": answer.token_logp.astype(np.float32),
            f"logp_{local}": statistics.token_logp.float().cpu().numpy(),
            f"entropy_{local}": statistics.entropy_p.float().cpu().numpy(),
            f"top1_{served}": answer.listed_ids[rows, top1].astype(np.int32),
            f"top1_{local}": statistics.top1_p.cpu().numpy().astype(np.int32),
            f"top1_probability_{served}": np.exp(answer.listed_logp[rows, top1]).astype(np.float32),
            f"top1_probability_{local}": statistics.top1_probability_p.float().cpu().numpy(),
            "rank_reference": rank.astype(np.int32),
            **{name: round_outwards(name, values) for name, values in bounds.items()},
        }
