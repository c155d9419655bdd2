"""The log-probabilities of rollouts' tokens under the models, also at other settings and after other prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.diagnosis.residuals import Floats
from kleash.diagnosis.rollout_records import RolloutRecord
from kleash.diagnosis.token_table import TokenTable
from kleash.divergences import truncate
from kleash.errors import SourceError
from kleash.models import Model, Pair, TokenSequence
from kleash.models.scoring import checked_reader
from kleash.sources.sequences import batch_by_length

LOGITS_AT_ONCE = 2**22
"""Logits that are in memory at a time."""
FITTED_TOKENS = 384
"""Tokens to which a temperature or a truncation is fitted, before all are scored with it."""
Transform = Callable[[Tensor, np.ndarray], Tensor]
"""Maps logits, and the indices of their tokens in the table, to values of all tokens or one value each."""


def log_probabilities(logits: Tensor, rows: np.ndarray) -> Tensor:
    """The log-probabilities of all tokens; ``rows`` has no effect."""
    return logits.log_softmax(-1)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelScores:
    """A pair of models on the tokens of rollouts."""

    pair: Pair
    table: TokenTable
    sequences: tuple[TokenSequence, ...]
    batch_tokens: int
    hidden: Float[Tensor, "tokens dim"]
    """The policy's final hidden states at the tokens of the table."""

    @classmethod
    def of(
        cls, pair: Pair, rollouts: Sequence[RolloutRecord], table: TokenTable, batch_tokens: int = 4096
    ) -> "ModelScores":
        """Score rollouts with the policy.

        Raises:
            SourceError: if a rollout has a token that the models lack, or is longer than they can read.
        """
        sequences = tuple(_sequence(rollout, pair) for rollout in rollouts)
        hidden = hidden_states(pair.policy, sequences, batch_tokens)[torch.from_numpy(table.rows)]
        return cls(pair=pair, table=table, sequences=sequences, batch_tokens=batch_tokens, hidden=hidden)

    @cached_property
    def policy(self) -> Floats:
        """Log-probabilities of the tokens under the policy, in nats."""
        return self.column()

    @cached_property
    def reference(self) -> Floats:
        """Log-probabilities of the tokens under the reference, in nats."""
        return self.column(model=self.pair.reference)

    @cached_property
    def reference_hidden(self) -> Float[Tensor, "tokens dim"]:
        """The reference's final hidden states at the tokens of the table."""
        return hidden_states(self.pair.reference, self.sequences, self.batch_tokens)[
            torch.from_numpy(self.table.rows)
        ]

    @cached_property
    def sample(self) -> np.ndarray:
        """Indices of some tokens spread over the table, to which settings are fitted."""
        count = len(self.table.trainer)
        return np.unique(np.linspace(0, count - 1, min(count, FITTED_TOKENS)).astype(int))

    def column(
        self,
        transform: Transform = log_probabilities,
        *,
        rows: np.ndarray | None = None,
        model: Model | None = None,
        hidden: Tensor | None = None,
    ) -> Floats:
        """A function of the logits at the tokens.

        Args:
            transform: maps float32 logits [tokens, vocab] and the tokens' indices in the table to values of all tokens
                of the vocabulary, or [tokens, 1] for one value each; by default log-probabilities.
            rows: indices of the tokens in the table; None for all.
            model: whose head, and hidden states unless given, are used; None for the policy.
            hidden: hidden states of the tokens ``rows``.
        """
        rows = np.arange(len(self.table.trainer)) if rows is None else rows
        ids = torch.from_numpy(self.table.token_id[rows])
        values: list[Tensor] = []
        for logits, part in self.blocks(rows, model=model, hidden=hidden):
            of_tokens = transform(logits, rows[part])
            if of_tokens.shape[-1] > 1:
                of_tokens = of_tokens.gather(-1, ids[part].to(logits.device).unsqueeze(-1))
            values.append(of_tokens[:, 0].double().cpu())
        return torch.cat(values).numpy()

    def blocks(
        self, rows: np.ndarray, *, model: Model | None = None, hidden: Tensor | None = None
    ) -> Iterator[tuple[Tensor, slice]]:
        """Float32 logits of some tokens, in blocks, and the place of each block among them; arguments of ``column``."""
        model = model or self.pair.policy
        if hidden is None:
            hidden = self.reference_hidden if model is self.pair.reference else self.hidden
            hidden = hidden[torch.from_numpy(rows)]
        weight, step = model.head.weight, max(1, LOGITS_AT_ONCE // model.vocab_size)
        with torch.inference_mode():
            for start in range(0, len(rows), step):
                part = slice(start, start + step)
                block = hidden[part].float()
                product = block if weight is None else block @ weight.to(block.device).float().T
                yield model.head.logits_of_product(product), part

    @cached_property
    def _sample_logits(self) -> Float[Tensor, "tokens vocab"]:
        """Float32 logits of the policy at the sample's tokens."""
        return torch.cat([logits for logits, _ in self.blocks(self.sample)])

    def sampled(self, transform: Transform = log_probabilities, *, step: int = 1) -> Floats:
        """A function of the policy's logits at each ``step``-th token of the sample; see ``column``."""
        ids = self.table.token_id[self.sample[::step]]
        with torch.inference_mode():
            of_tokens = transform(self._sample_logits[::step], self.sample[::step])
            if of_tokens.shape[-1] > 1:
                of_tokens = of_tokens.gather(-1, torch.from_numpy(ids).to(of_tokens.device).unsqueeze(-1))
        return of_tokens[:, 0].double().cpu().numpy()

    def counts(self, rows: np.ndarray, *, with_prompt: bool) -> Float[Tensor, "tokens vocab"]:
        """How often each token of the vocabulary stands before each of some tokens.

        Args:
            rows: indices of the tokens in the table.
            with_prompt: whether those of the prompt count, or those of the response alone.
        """
        before: list[np.ndarray] = []
        for row in rows:
            sequence = self.sequences[self.table.sequence[row]]
            prompt = sequence.prompt_ids if with_prompt else ()
            before.append(
                np.array((*prompt, *sequence.response_ids[: self.table.position[row]]), dtype=np.int64)
            )
        places = np.repeat(np.arange(len(rows)), [len(ids) for ids in before]) * self.pair.vocab_size
        counts = torch.zeros(len(rows) * self.pair.vocab_size)
        counts.index_add_(0, torch.from_numpy(places + np.concatenate(before)), torch.ones(len(places)))
        return counts.view(len(rows), -1)

    def with_prompts(
        self, change: Callable[[tuple[int, ...]], tuple[int, ...]], sequences: int | None = None
    ) -> Floats:
        """Log-probabilities of the first ``sequences`` responses under the policy after changed prompts."""
        changed = [
            replace(sequence, prompt_ids=change(sequence.prompt_ids))
            for sequence in self.sequences[:sequences]
        ]
        return self.with_model(self.pair.policy, changed)

    def with_model(self, model: Model, sequences: Sequence[TokenSequence]) -> Floats:
        """Log-probabilities of the first responses, as ``sequences`` with their contexts, under a model."""
        hidden = hidden_states(model, sequences, self.batch_tokens)
        rows = np.flatnonzero(self.table.rows < len(hidden))
        return self.column(rows=rows, model=model, hidden=hidden[torch.from_numpy(self.table.rows[rows])])


def _sequence(rollout: RolloutRecord, pair: Pair) -> TokenSequence:
    """A rollout as a token sequence, after a check that the models can read it."""
    largest = max(*rollout.prompt_ids, *rollout.response_ids)
    if largest >= pair.vocab_size:
        raise SourceError(
            f"{rollout.location}: token {largest} is not in the models' vocabulary of {pair.vocab_size}; give the "
            "models that drew and trained on these tokens"
        )
    length = len(rollout.prompt_ids) + len(rollout.response_ids)
    if pair.context_length is not None and length > pair.context_length:
        raise SourceError(
            f"{rollout.location}: {length} tokens are more than the {pair.context_length} that the models can read"
        )
    return TokenSequence(
        prompt_id=0,
        sample_id=0,
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        prompt_text="",
        response_text="",
        location=rollout.location,
    )


def hidden_states(
    model: Model, sequences: Sequence[TokenSequence], batch_tokens: int
) -> Float[Tensor, "tokens dim"]:
    """Final hidden states at all response tokens, in the order of the sequences.

    Raises:
        NonFiniteError: if a hidden state is NaN or infinite.
    """
    read = checked_reader(model)
    counts = [len(sequence.response_ids) for sequence in sequences]
    parts: list[Tensor] = [torch.empty(0)] * len(sequences)
    for batch in batch_by_length([sequence.num_input_tokens for sequence in sequences], batch_tokens):
        states = read([sequences[index] for index in batch])
        for index, part in zip(batch, states.split([counts[index] for index in batch]), strict=True):
            parts[index] = part
    return torch.cat(parts)


def at_temperature(temperature: float) -> Transform:
    """The transform to log-probabilities at a temperature."""
    return lambda logits, rows: (logits / temperature).log_softmax(-1)


def cut(settings: Mapping[str, Any]) -> Transform:
    """The transform to log-probabilities after truncated sampling by "top_p", "top_k" or "min_p"; -inf outside."""

    def transform(logits: Tensor, rows: np.ndarray) -> Tensor:
        logp = logits.log_softmax(-1)
        return logp - truncate(logp, **settings).log_kept_mass.unsqueeze(-1)

    return transform
