"""Generation with keyed sampling noise, and an incremental decoder with a key-value cache."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kleash.divergences import truncate
from kleash.errors import NonFiniteError
from kleash.extras import suppress_library_output
from kleash.jobs.option_groups import Sampling
from kleash.linear import log_probabilities
from kleash.models.heads import rounding_tolerance
from kleash.models.keyed_draws import draw
from kleash.models.pair import Model
from kleash.sources.sequences import Prompt, TokenSequence, batch_by_length, text_after

CACHED_TOKENS_PER_BATCH_TOKEN = 8
"""Tokens in the key-value cache for each token of the batch budget: a cached token takes less memory than one in a
forward pass."""
MAX_ACTIVE_FRACTION = 7 / 8
"""Finished responses are removed from a batch when at most this fraction of it is unfinished."""


def ignore(*_: float) -> None:
    """Do nothing: the default of functions that are told of progress."""


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    batch_tokens: int = 4096,
    on_tokens: Callable[[int, float], object] = ignore,
) -> list[TokenSequence]:
    """Draw ``samples_per_prompt`` responses to each prompt.

    Sample ``s`` of the ``c``-th copy of a prompt is drawn as its sample ``c · samples_per_prompt + s``, with Gumbel-max
    noise keyed by (seed, the prompt's tokens, that number, the position). So the responses depend neither on batches
    and shards nor on the machine, except for rounding: a difference in the last bit of a logit can change a draw.

    A response ends with the model's end token, which is part of it ("stop"), or at ``max_new_tokens`` or the model's
    context length ("length").

    Args:
        model: the policy.
        prompts: not longer than the model's context.
        sampling: how they are drawn, such as a job; at temperature 0 greedily, whatever the other options are.
        batch_tokens: largest number of prompt tokens in a batch, padding included; the key-value cache of a batch holds
            at most eight times as many.
        on_tokens: called after each step with the number of tokens drawn in it, and by how many responses the work is
            nearer to its end: a token is at least one of ``max_new_tokens``, and an end token all that are left.

    Returns:
        The samples of the first prompt, then those of the second, and so on. ``logp_sampled`` is under the sampling
        distribution, temperature and truncation included (0 for greedy decoding).

    Raises:
        NonFiniteError: if the model gives NaN or infinities, with the prompt.
    """
    context = sys.maxsize if model.context_length is None else model.context_length
    responses = [
        _Response(
            prompt=prompt,
            sample=sample,
            max_tokens=min(sampling.max_new_tokens, context - len(prompt.token_ids) + 1),
        )
        for prompt in prompts
        for sample in range(sampling.samples_per_prompt)
    ]
    lengths = [len(response.prompt.token_ids) for response in responses]
    longest = max(lengths, default=0) + sampling.max_new_tokens
    max_sequences = max(1, CACHED_TOKENS_PER_BATCH_TOKEN * batch_tokens // longest)
    for batch in batch_by_length(lengths, batch_tokens, max_sequences=max_sequences):
        _generate_batch(model, [responses[index] for index in batch], sampling, on_tokens)
    return [response.as_sequence(model.tokenizer) for response in responses]


@dataclass(kw_only=True)
class _Response:
    """A response that is being generated."""

    prompt: Prompt
    sample: int
    max_tokens: int
    token_ids: list[int] = field(default_factory=list[int])
    logp: list[float] = field(default_factory=list[float])
    finish_reason: str | None = None
    """"stop" or "length"; None while it is unfinished."""

    def append(self, token: int, logp: float, eos_token_ids: tuple[int, ...]) -> None:
        """Append a token, and set ``finish_reason`` if it is the last."""
        self.token_ids.append(token)
        self.logp.append(logp)
        if token in eos_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_tokens:
            self.finish_reason = "length"

    @property
    def last_share(self) -> float:
        """By how much its newest token brought it nearer to its end, where the whole is 1."""
        before = (len(self.token_ids) - 1) / self.max_tokens
        return 1 / self.max_tokens if self.finish_reason is None else 1 - before

    def as_sequence(self, tokenizer: Any) -> TokenSequence:
        """The finished response as a ``TokenSequence``."""
        return TokenSequence(
            prompt_id=self.prompt.prompt_id,
            sample_id=self.sample,
            prompt_ids=self.prompt.token_ids,
            response_ids=tuple(self.token_ids),
            prompt_text=self.prompt.text,
            response_text=text_after(tokenizer, self.prompt.token_ids, self.token_ids),
            finish_reason=self.finish_reason,
            logp_sampled=np.asarray(self.logp, dtype=np.float32),
            prompt_hash=self.prompt.prompt_hash,
            location=self.prompt.location,
            messages=self.prompt.messages,
            columns=self.prompt.columns,
        )


@suppress_library_output()
@torch.inference_mode()
def _generate_batch(
    model: Model, responses: list[_Response], sampling: Sampling, drawn: Callable[[int, float], object]
) -> None:
    """Generate one batch of responses until all have ended."""
    decoder = IncrementalDecoder(model, [response.prompt.token_ids for response in responses])
    hidden = decoder.start()
    while True:
        tokens, logp = _draw(model, hidden, responses, sampling)
        active = [response for response in responses if response.finish_reason is None]
        for response, token, token_logp in zip(responses, tokens.tolist(), logp.tolist(), strict=True):
            if response.finish_reason is None:
                response.append(token, token_logp, model.eos_token_ids)
        drawn(len(active), sum(response.last_share for response in active))
        active_rows = [row for row, response in enumerate(responses) if response.finish_reason is None]
        if not active_rows:
            return
        if len(active_rows) <= MAX_ACTIVE_FRACTION * len(responses):
            responses, tokens = [responses[row] for row in active_rows], tokens[active_rows]
            decoder.select_rows(active_rows)
        hidden = decoder.step(tokens)


def _draw(
    model: Model, hidden: Float[Tensor, "rows dim"], responses: list[_Response], sampling: Sampling
) -> tuple[Int[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
    """The next token of each response, and its log-probability under the sampling distribution."""
    model.wait_for("logp")
    logp = log_probabilities(hidden, model.head, temperature=sampling.temperature or 1.0)
    if sampling.temperature == 0:
        best = logp.max(-1)
        _check_finite_logp(best.values, responses)
        return best.indices.cpu().numpy(), np.zeros(len(responses))
    if (sampling.top_k, sampling.top_p, sampling.min_p) != (None, None, None):
        logp = truncate(logp, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p).logp
    keys = [
        (
            response.prompt.prompt_hash,
            response.prompt.copy * sampling.samples_per_prompt + response.sample,
            len(response.token_ids),
        )
        for response in responses
    ]
    tokens, token_logp = draw(logp, sampling.seed, keys)
    _check_finite_logp(token_logp, responses)
    return tokens.cpu().numpy(), token_logp.double().cpu().numpy()


def _check_finite_logp(token_logp: Float[Tensor, " rows"], responses: list[_Response]) -> None:
    """Check that the log-probabilities of drawn tokens are finite; with NaN or infinite logits they are not.

    Raises:
        NonFiniteError: with the first prompt for which one is not.
    """
    non_finite = ~token_logp.isfinite().cpu()
    if non_finite.any():
        response = responses[int(non_finite.int().argmax())]
        prompt = response.prompt
        raise NonFiniteError(
            f"the policy gives NaN or infinite logits for prompt {prompt.prompt_id}, sample {response.sample} "
            f"({prompt.location}), response token {len(response.token_ids)}; in 16 bits try float32 (--dtype), else "
            "look at the checkpoint"
        )


CACHE_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Exceptions of networks that cannot run with a key-value cache, such as the byte-latent transformer."""


class IncrementalDecoder:
    """Runs a network one token at a time, with the key-value cache if the network has one.

    Prompts are padded on the left, so that the last column holds the newest token of every row. For a network without
    a key-value cache, or whose output changes with left padding or with the cache, the whole texts are run again for
    each token; also once a text is longer than ``Model.max_padded_length``, where all its numbers change. The cache is
    checked at the first step and, in float32 and float64, at steps 2, 4, 8 and so on.
    """

    def __init__(self, model: Model, prompts: list[tuple[int, ...]]) -> None:
        """Prepare the decoding of prompts, given as token ids."""
        self.model = model
        self.network = model.network if model.head.weight is None else model.backbone
        parameters = inspect.signature(self.network.forward).parameters
        self.takes_position_ids = "position_ids" in parameters
        # The name since transformers 5.24, and that before it, which networks outside transformers keep.
        self.cache_name = next((name for name in ("cache", "past_key_values") if name in parameters), "")
        self.uses_cache = bool(self.cache_name)
        self.steps = 0
        self.cache: Any = None
        self.token_ids = [list(prompt) for prompt in prompts]

    def start(self) -> Float[Tensor, "rows dim"]:
        """The hidden state after each prompt."""
        if not self.uses_cache:
            return self._run_without_cache(self.token_ids)
        # A padding token that the shortest prompt does not contain, so that the check detects its effect.
        padding = int(0 in min(self.token_ids, key=len))
        rows = [torch.tensor(sequence) for sequence in self.token_ids]
        ids = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        self.mask = mask.to(self.model.device)
        return self._run(ids.to(self.model.device), check=bool((mask == 0).any()))

    def step(self, tokens: Int[np.ndarray, " rows"]) -> Float[Tensor, "rows dim"]:
        """The hidden state of each row after one more token."""
        for sequence, token in zip(self.token_ids, tokens.tolist(), strict=True):
            sequence.append(token)
        limit = self.model.max_padded_length
        if limit is not None and max(map(len, self.token_ids)) == limit + 1:
            self.uses_cache = False  # it has the numbers of shorter sequences
        if not self.uses_cache:
            return self._run_without_cache(self.token_ids)
        ids = torch.from_numpy(tokens)[:, None].to(self.model.device)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        self.steps += 1
        # Errors can begin, or add up, after many steps; in half precision, rounding is as large.
        return self._run(
            ids, check=self.steps == 1 or (self.steps.bit_count() == 1 and self.model.dtype.itemsize >= 4)
        )

    def select_rows(self, rows: list[int]) -> None:
        """Drop all rows except ``rows``."""
        self.token_ids = [self.token_ids[row] for row in rows]
        if self.uses_cache:
            indices = torch.tensor(rows, device=self.model.device)
            self.mask = self.mask[indices]
            self.cache.reorder_cache(indices)

    def _run(self, ids: Int[Tensor, "rows new"], *, check: bool) -> Float[Tensor, "rows dim"]:
        """Hidden states after new tokens, with the cache unless it fails, or changes them and that is checked."""
        try:
            hidden = self._run_with_cache(ids)
            if self.cache is not None and (not check or self._is_as_without_cache(hidden)):
                return hidden
        except CACHE_ERRORS:  # a network that makes no cache that fits it
            pass
        self.uses_cache, self.cache = False, None
        return self._run_without_cache(self.token_ids)

    def _run_with_cache(self, ids: Int[Tensor, "rows new"]) -> Float[Tensor, "rows dim"]:
        """Hidden states after new tokens, with the key-value cache of the earlier ones."""
        positions = {"position_ids": (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]}
        self.model.wait_for("pass")
        with self.model.activate_adapter():
            output = self.network(
                input_ids=ids,
                attention_mask=self.mask,
                use_cache=True,
                **{self.cache_name: self.cache, **(positions if self.takes_position_ids else {})},
            )
        self.cache = getattr(output, self.cache_name, None)
        if self.model.head.weight is None:
            return output.logits[:, -1, : self.model.vocab_size]
        return output.last_hidden_state[:, -1].to(self.model.head.weight.device)

    def _is_as_without_cache(self, hidden: Float[Tensor, "rows dim"]) -> bool:
        """Whether the shortest and the longest sequence have the same hidden states when run without a cache.

        Some recurrent networks process the padding, some networks compute positions without the mask or for the new
        token alone, some caches are wrong beyond a window, and some steps differ a little from the whole text, which
        adds up (Zamba2's and Nemotron-H's in transformers 5.23).
        """
        by_length = sorted(range(len(self.token_ids)), key=lambda row: len(self.token_ids[row]))
        rows = sorted({by_length[0], by_length[-1]})
        uncached = self._run_without_cache([self.token_ids[row] for row in rows])
        tolerance = rounding_tolerance(hidden.dtype)
        differences = (hidden[rows] - uncached).abs().amax(-1)
        return bool((differences <= tolerance * uncached.abs().amax(-1)).all())

    def _run_without_cache(self, sequences: list[list[int]]) -> Float[Tensor, "rows dim"]:
        """Hidden states after complete sequences, padded on the right."""
        return torch.cat(self.model.states_from(sequences, [len(sequence) - 1 for sequence in sequences]))
