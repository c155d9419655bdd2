"""The log-probabilities of rollouts' tokens under the models, also at other settings and after other prompts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.diagnosis.noise_models import Floats
from kleash.diagnosis.rollout_records import RolloutRecord
from kleash.diagnosis.token_table import TokenTable
from kleash.divergences import truncate
from kleash.errors import SourceError
from kleash.models import Model, Pair, TokenSequence
from kleash.models.scoring import checked_reader
from kleash.models.sequences import batch_by_length

LOGITS_AT_ONCE = 2**24
"""Logits that are in memory at a time."""
FITTED_TOKENS = 512
"""Tokens to which a temperature or a truncation is fitted, before all are scored with it."""
Settings = Mapping[str, int | float]
"""Settings of truncated sampling: "top_p", "top_k" or "min_p"."""


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
        return self.token_logp()

    @cached_property
    def reference(self) -> Floats:
        """Log-probabilities of the tokens under the reference, in nats."""
        hidden = hidden_states(self.pair.reference, self.sequences, self.batch_tokens)
        return self.token_logp(hidden=hidden[torch.from_numpy(self.table.rows)], model=self.pair.reference)

    def token_logp(
        self,
        transform: Callable[[Tensor], Tensor] = lambda logits: logits.log_softmax(-1),
        *,
        hidden: Tensor | None = None,
        model: Model | None = None,
        rows: np.ndarray | None = None,
    ) -> Floats:
        """A function of the logits at the drawn tokens.

        Args:
            transform: maps float32 logits [tokens, vocab] to values of all tokens of the vocabulary, by default
                log-probabilities.
            hidden: hidden states of all tokens of the table; None for the policy's.
            model: whose head is used; None for the policy.
            rows: indices of the tokens in the table; None for all.
        """
        hidden = self.hidden if hidden is None else hidden
        token_ids = torch.from_numpy(self.table.token_id)
        if rows is not None:
            hidden, token_ids = hidden[torch.from_numpy(rows)], token_ids[torch.from_numpy(rows)]
        values = [
            transform(logits).gather(-1, ids.to(logits.device).unsqueeze(-1)).squeeze(-1).double().cpu()
            for logits, ids in self._logits(hidden, token_ids, model or self.pair.policy)
        ]
        return torch.cat(values).numpy()

    def at_temperature(self, temperature: float) -> Floats:
        """Log-probabilities of the tokens under the policy at a temperature."""
        return self.token_logp(lambda logits: (logits / temperature).log_softmax(-1))

    @cached_property
    def sample(self) -> "LogitSample":
        """Logits of some tokens spread over the table, to which settings are fitted."""
        count = len(self.table.trainer)
        rows = np.unique(np.linspace(0, count - 1, min(count, FITTED_TOKENS)).astype(int))
        token_ids = torch.from_numpy(self.table.token_id[rows])
        blocks = self._logits(self.hidden[torch.from_numpy(rows)], token_ids, self.pair.policy)
        return LogitSample(
            rows=rows, token_ids=token_ids, logits=torch.cat([logits for logits, _ in blocks]).cpu()
        )

    def with_prompts(
        self, change: Callable[[tuple[int, ...]], tuple[int, ...]], sequences: int | None = None
    ) -> Floats:
        """Log-probabilities of the first ``sequences`` responses under the policy after changed prompts."""
        changed = [
            replace(sequence, prompt_ids=change(sequence.prompt_ids))
            for sequence in self.sequences[:sequences]
        ]
        hidden = hidden_states(self.pair.policy, changed, self.batch_tokens)
        rows = np.flatnonzero(self.table.rows < len(hidden))
        states = self.hidden.clone()
        states[torch.from_numpy(rows)] = hidden[torch.from_numpy(self.table.rows[rows])]
        return self.token_logp(hidden=states, rows=rows)

    @staticmethod
    def _logits(hidden: Tensor, token_ids: Tensor, model: Model) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of float32 logits and the token ids that belong to them."""
        weight = model.head.weight
        step = max(1, LOGITS_AT_ONCE // model.vocab_size)
        with torch.inference_mode():
            for start in range(0, len(hidden), step):
                block = hidden[start : start + step].float()
                product = block if weight is None else block @ weight.to(block.device).float().T
                yield model.head.logits_of_product(product), token_ids[start : start + step]


@dataclass(frozen=True, eq=False, kw_only=True)
class LogitSample:
    """Logits of the policy at some of the tokens."""

    rows: np.ndarray
    """Their indices in the table."""
    token_ids: Tensor
    logits: Float[Tensor, "tokens vocab"]

    def at_temperature(self, temperature: float) -> Floats:
        """Log-probabilities of the tokens at a temperature."""
        logp = (self.logits / temperature).log_softmax(-1)
        return logp.gather(-1, self.token_ids.unsqueeze(-1)).squeeze(-1).double().numpy()

    def every(self, step: int) -> "LogitSample":
        """Each ``step``-th token of the sample."""
        return LogitSample(
            rows=self.rows[::step], token_ids=self.token_ids[::step], logits=self.logits[::step]
        )

    @cached_property
    def descending(self) -> Float[Tensor, "tokens vocab"]:
        """The logits of each token, the largest first: an order that no temperature changes."""
        return self.logits.sort(dim=-1, descending=True).values

    def log_kept_masses(self, candidates: Sequence[Settings], temperature: float = 1.0) -> Floats:
        """Log of the mass that each of several truncations keeps at a temperature: [candidates, tokens], in nats.

        As ``log_kept_mass``, but the logits are sorted once: what a truncation keeps are the first of them.
        """
        step = max(1, LOGITS_AT_ONCE // self.logits.shape[-1])
        blocks: list[Tensor] = []
        for logits in self.descending.split(step):
            logp = (logits.double() / temperature).log_softmax(-1)
            mass = logp.exp().cumsum(-1)
            blocks.append(torch.stack([_mass_of_first(logp, mass, settings) for settings in candidates]))
        return torch.cat(blocks, dim=-1).log().numpy()


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


def _mass_of_first(logp: Tensor, mass: Tensor, settings: Settings) -> Tensor:
    """The mass that a truncation keeps of each row of a distribution; arguments of ``truncate``.

    Args:
        logp: [rows, vocab], descending.
        mass: its cumulative sum as probabilities.
    """
    count = torch.full_like(logp[:, :1], logp.shape[-1], dtype=torch.long)
    if "top_k" in settings:
        last = logp[:, [min(int(settings["top_k"]), logp.shape[-1]) - 1]]
        count = (logp >= last).sum(-1, keepdim=True)
    if "top_p" in settings:
        within = mass < settings["top_p"] * mass.gather(-1, count - 1)
        count = torch.minimum(within.sum(-1, keepdim=True) + 1, count)
    if "min_p" in settings:
        threshold = logp[:, :1] + math.log(settings["min_p"])
        count = torch.minimum((logp >= threshold).sum(-1, keepdim=True), count)
    return mass.gather(-1, count - 1).squeeze(-1)


def log_kept_mass(
    scores: ModelScores, settings: Settings, rows: np.ndarray | None = None, temperature: float = 1.0
) -> Floats:
    """Log of the mass that a truncation of the policy keeps at each token's position, in nats."""
    top_k = None if "top_k" not in settings else int(settings["top_k"])

    def transform(logits: Tensor) -> Tensor:
        cut = truncate(
            (logits / temperature).log_softmax(-1),
            top_p=settings.get("top_p"),
            top_k=top_k,
            min_p=settings.get("min_p"),
        )
        return cut.log_kept_mass.unsqueeze(-1).expand_as(logits)

    return scores.token_logp(transform, rows=rows)
