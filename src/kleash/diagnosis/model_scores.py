"""The log-probabilities of rollouts' tokens under the models, also at other settings and after other prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.diagnosis.residuals import Floats
from kleash.diagnosis.rollout_records import RolloutRecord
from kleash.diagnosis.token_table import TokenTable
from kleash.errors import SourceError
from kleash.models import Model, Pair, TokenSequence
from kleash.models.scoring import read_hidden_states
from kleash.sources.sequences import batch_by_length

LOGITS_AT_ONCE = 2**22
"""Logits that are in memory at a time."""
FITTED_RESPONSES, FITTED_TOKENS = 8, 192
"""First responses to which settings are fitted, at least, and tokens of them at most."""
Transform = Callable[[Tensor, np.ndarray], Tensor]
"""Maps logits, and the indices of their tokens in the table, to values of all tokens or one value each."""


def log_probabilities(logits: Tensor, rows: np.ndarray) -> Tensor:
    """The log-probabilities of all tokens; ``rows`` has no effect."""
    return logits.log_softmax(-1)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelScores:
    """A pair of models on the tokens of rollouts, at one temperature."""

    pair: Pair
    table: TokenTable
    sequences: tuple[TokenSequence, ...]
    batch_tokens: int
    hidden: Float[Tensor, "tokens dim"]
    """The policy's final hidden states at the tokens of the table."""
    temperature: float = 1.0
    """What all logits are divided by."""
    logits: Float[Tensor, "tokens vocab"] | None = None
    """The policy's, if there are few tokens."""

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

    def few(self) -> "ModelScores":
        """The scores of some tokens of the first responses, to which settings are fitted."""
        ends = np.searchsorted(self.table.sequence, np.arange(1, len(self.sequences) + 1))
        count = min(len(ends), max(FITTED_RESPONSES, int(np.searchsorted(ends, FITTED_TOKENS)) + 1))
        rows = np.unique(np.linspace(0, ends[count - 1] - 1, FITTED_TOKENS).astype(int))
        part = replace(
            self,
            table=self.table.selected(rows),
            sequences=self.sequences[:count],
            hidden=self.hidden[torch.from_numpy(rows)],
        )
        return replace(part, logits=torch.cat([logits for logits, _ in part.blocks()]))

    @cached_property
    def order(self) -> Int[Tensor, "tokens vocab"] | None:
        """The policy's tokens from the least likely on, which no temperature changes; None if there are many."""
        return None if self.logits is None else self.logits.argsort(dim=-1, stable=True)

    @cached_property
    def policy(self) -> Floats:
        """Log-probabilities of the tokens under the policy, in nats."""
        return self.column()

    @cached_property
    def reference(self) -> Floats:
        """Log-probabilities of the tokens under the reference, in nats."""
        return self.with_model(self.pair.reference)

    def column(
        self,
        transform: Transform = log_probabilities,
        *,
        model: Model | None = None,
        hidden: Tensor | None = None,
    ) -> Floats:
        """A function of the logits at the tokens.

        Args:
            transform: maps float32 logits [tokens, vocab] and the tokens' indices in the table to values of all tokens
                of the vocabulary, or [tokens, 1] for one value each; by default log-probabilities.
            model: whose head is used; None for the policy.
            hidden: hidden states of the tokens; None for the policy's.
        """
        ids = torch.from_numpy(self.table.token_id)
        values: list[Tensor] = []
        for logits, rows in self.blocks(model=model, hidden=hidden):
            of_tokens = transform(logits, rows)
            if of_tokens.shape[-1] > 1:
                of_tokens = of_tokens.gather(-1, ids[rows].to(logits.device).unsqueeze(-1))
            values.append(of_tokens[:, 0].double().cpu())
        return torch.cat(values).numpy()

    def blocks(
        self, *, model: Model | None = None, hidden: Tensor | None = None
    ) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Float32 logits of the tokens in blocks, with the tokens' indices; arguments of ``column``."""
        every, is_policy = np.arange(len(self.table.trainer)), model is None and hidden is None
        step = max(1, LOGITS_AT_ONCE // self.pair.vocab_size)
        if self.logits is not None and is_policy:
            yield from zip(self.logits.split(step), np.split(every, every[step::step]), strict=True)
            return
        head, hidden = (model or self.pair.policy).head, self.hidden if hidden is None else hidden
        with torch.inference_mode():
            for start in range(0, len(every), step):
                block = hidden[start : start + step].float()
                weight = head.weight
                product = block if weight is None else block @ weight.to(block.device).float().T
                yield head.logits_of_product(product) / self.temperature, every[start : start + step]

    def counts(self, rows: np.ndarray, *, with_prompt: bool) -> Float[Tensor, "tokens vocab"]:
        """How often each token of the vocabulary stands before each of some tokens.

        Args:
            rows: indices of the tokens in the table.
            with_prompt: whether those of the prompt count, or those of the response alone.
        """
        places = zip(self.table.sequence[rows], self.table.position[rows], strict=True)
        before = [
            np.array(
                [*each.prompt_ids[: len(each.prompt_ids) * with_prompt], *each.response_ids[:position]],
                dtype=int,
            )
            for each, position in ((self.sequences[number], position) for number, position in places)
        ]
        offsets = np.repeat(np.arange(len(rows)), [len(ids) for ids in before]) * self.pair.vocab_size
        counts = torch.zeros(len(rows) * self.pair.vocab_size)
        counts.index_add_(0, torch.from_numpy(offsets + np.concatenate(before)), torch.ones(len(offsets)))
        return counts.view(len(rows), -1)

    def with_model(
        self, model: Model, change: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple
    ) -> Floats:
        """Log-probabilities of the tokens under a model, after prompts that ``change`` makes of the own ones."""
        changed = [replace(sequence, prompt_ids=change(sequence.prompt_ids)) for sequence in self.sequences]
        hidden = hidden_states(model, changed, self.batch_tokens)
        return self.column(model=model, hidden=hidden[torch.from_numpy(self.table.rows)])


def _sequence(rollout: RolloutRecord, pair: Pair) -> TokenSequence:
    """A rollout as a token sequence, after a check that the models can read it."""
    token_ids, longest = (*rollout.prompt_ids, *rollout.response_ids), pair.context_length
    if (largest := max(token_ids)) >= pair.vocab_size:
        raise SourceError(
            f"{rollout.location}: token {largest} is not in the models' vocabulary of {pair.vocab_size}; give the "
            "models that drew and trained on these tokens"
        )
    if longest is not None and len(token_ids) > longest:
        raise SourceError(
            f"{rollout.location}: {len(token_ids)} tokens are more than the {longest} that the models can read"
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
    counts = [len(sequence.response_ids) for sequence in sequences]
    parts: list[Tensor] = [torch.empty(0)] * len(sequences)
    for batch in batch_by_length([sequence.num_input_tokens for sequence in sequences], batch_tokens):
        states = read_hidden_states(model, [sequences[index] for index in batch])
        for index, part in zip(batch, states.split([counts[index] for index in batch]), strict=True):
            parts[index] = part
    return torch.cat(parts)


def at_temperature(temperature: float) -> Transform:
    """The transform to log-probabilities at a temperature."""
    return lambda logits, rows: (logits / temperature).log_softmax(-1)
