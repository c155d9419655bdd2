"""Generation with keyed sampling noise, and an incremental decoder with a key-value cache."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import truncate
from kleash.errors import NonFiniteError, OptionError
from kleash.linear import log_probabilities
from kleash.models.compat import suppress_library_output
from kleash.models.keyed_draws import draw
from kleash.models.pair import Model
from kleash.models.sequences import Prompt, TokenSequence, batch_by_length

CACHED_PER_READ = 8
"""Tokens kept in the key-value cache for each token of the budget: they take less room than tokens being
read."""
DROP_BELOW = 7 / 8
"""Share of a batch still going below which the finished rows are dropped from it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of sampling."""

    samples_per_prompt: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    """Divides the logits; 0 means greedy decoding, whatever the other options."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            OptionError: naming the invalid option.
        """
        for name in ("samples_per_prompt", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}; it is at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise OptionError(f"a temperature of {self.temperature} means nothing; it is a number from 0 on")


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    batch_tokens: int = 4096,
    drawn: Callable[[int], object] | None = None,
) -> list[TokenSequence]:
    """Draw ``samples_per_prompt`` responses to each prompt.

    Sample ``s`` of the ``c``-th copy of a prompt draws as sample ``c · samples_per_prompt + s`` of it, with
    Gumbel-max noise keyed by (seed, the prompt's tokens, that number, the position). So what is drawn
    depends on no batch, shard or machine, but for rounding: logits that differ in the last bit can turn a
    draw that was within that bit of another.

    A response ends with the model's end token, which belongs to it ("stop"), or at ``max_new_tokens`` or the
    model's context ("length").

    Args:
        model: the policy.
        prompts: not longer than its context.
        sampling: how to draw.
        batch_tokens: the most prompt tokens, padding included, that are read at once; the key-value cache of
            a batch holds at most eight times as many.
        drawn: called after each step with the number of tokens drawn in it.

    Returns:
        The samples of the first prompt, then those of the second, and so on; ``logp_sampled`` under the
        distribution that was drawn from, temperature and truncation included (0 where it is greedy).

    Raises:
        NonFiniteError: if the model gives NaN or infinities, naming the prompt.
        OptionError: if a truncation option is out of its range.
    """
    rows = [_Row(prompt=prompt, sample=s) for prompt in prompts for s in range(sampling.samples_per_prompt)]
    for row in rows:
        room = sampling.max_new_tokens
        if model.context_length is not None:
            room = min(room, model.context_length - len(row.prompt.token_ids) + 1)
        row.room = room
    lengths = [len(row.prompt.token_ids) for row in rows]
    longest = max(lengths, default=0) + sampling.max_new_tokens
    at_once = max(1, CACHED_PER_READ * batch_tokens // longest)
    for batch in batch_by_length(lengths, batch_tokens, max_sequences=at_once):
        with suppress_library_output():
            _answer(model, [rows[index] for index in batch], sampling, drawn)
    return [row.sequence(model.tokenizer) for row in rows]


@dataclass(kw_only=True)
class _Row:
    """A response that is being generated."""

    prompt: Prompt
    sample: int
    room: int = 0
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, token: int, logp: float, ends: tuple[int, ...]) -> None:
        self.token_ids.append(token)
        self.logp.append(logp)
        if token in ends:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.room:
            self.finish_reason = "length"

    def sequence(self, tokenizer: Any) -> TokenSequence:
        return TokenSequence(
            prompt_id=self.prompt.prompt_id,
            sample_id=self.sample,
            prompt_ids=self.prompt.token_ids,
            response_ids=tuple(self.token_ids),
            prompt_text=self.prompt.text,
            response_text=tokenizer.decode(self.token_ids),
            finish_reason=self.finish_reason,
            logp_sampled=np.asarray(self.logp, dtype=np.float32),
            prompt_hash=self.prompt.prompt_hash,
            location=self.prompt.location,
            messages=self.prompt.messages,
            columns=self.prompt.columns,
        )


def _answer(
    model: Model, rows: list[_Row], sampling: Sampling, drawn: Callable[[int], object] | None
) -> None:
    """Generate one batch of responses until all have ended."""
    with torch.inference_mode(), model.activate_adapter():
        writer = IncrementalDecoder(model, [row.prompt.token_ids for row in rows])
        hidden = writer.start()
        while True:
            tokens, logp = _draw(model, hidden, rows, sampling)
            writing = [row.finish_reason is None for row in rows]
            for row, token, value, still in zip(rows, tokens.tolist(), logp.tolist(), writing, strict=True):
                if still:
                    row.take(token, value, model.eos_token_ids)
            if drawn is not None:
                drawn(sum(writing))
            going = [place for place, row in enumerate(rows) if row.finish_reason is None]
            if not going:
                return
            if len(going) <= DROP_BELOW * len(rows):
                rows, tokens = [rows[place] for place in going], tokens[going]
                writer.keep(going)
            hidden = writer.step(tokens)


def _draw(
    model: Model, hidden: Float[Tensor, "rows dim"], rows: list[_Row], sampling: Sampling
) -> tuple[Int[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
    """The next token of each row, and its log-probability under the distribution it was drawn from."""
    logp = log_probabilities(hidden, model.head, temperature=sampling.temperature or 1.0)
    if sampling.temperature == 0:
        best = logp.max(-1)
        _refuse_non_finite(best.values, rows)
        return best.indices.cpu().numpy(), np.zeros(len(rows))
    if (sampling.top_k, sampling.top_p, sampling.min_p) != (None, None, None):
        logp = truncate(logp, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p).logp
    samples = sampling.samples_per_prompt
    keys = [
        (row.prompt.prompt_hash, row.prompt.copy * samples + row.sample, len(row.token_ids)) for row in rows
    ]
    tokens, token_logp = draw(logp, sampling.seed, keys)
    _refuse_non_finite(token_logp, rows)
    return tokens.cpu().numpy(), token_logp.double().cpu().numpy()


def _refuse_non_finite(token_logp: Float[Tensor, " rows"], rows: list[_Row]) -> None:
    """Check that every row has a finite log-probability; NaN or infinite logits leave none."""
    bad = ~token_logp.isfinite().cpu()
    if bad.any():
        row = rows[int(bad.int().argmax())]
        raise NonFiniteError(
            f"the policy gives NaN or infinite logits for prompt {row.prompt.prompt_id}, sample {row.sample} "
            f"({row.prompt.location}), response token {len(row.token_ids)}; try --dtype float32, or look at the "
            "checkpoint"
        )


ROUNDING = 1e-3
"""Relative difference of hidden states that two ways of reading the same text may have in float32."""

COARSE_ROUNDING = 5e-2
"""The same in half precision."""


class IncrementalDecoder:
    """Runs a network one token at a time, with the key-value cache if the network has one.

    Prompts are padded on the left, so that the last column holds the newest token of every row. For a network without
    a key-value cache, or whose output changes with left padding, the whole text is run again for each token.
    """

    def __init__(self, model: Model, prompts: list[tuple[int, ...]]) -> None:
        """Start from the token ids of the prompts; the caller has activated the model's adapter."""
        self.model = model
        whole = model.head.weight is None
        self.network = model.network if whole else model.backbone
        known = inspect.signature(self.network.forward).parameters
        self.positions = "position_ids" in known
        self.cached = "past_key_values" in known
        self.past: Any = None
        self.texts = [list(prompt) for prompt in prompts]

    def start(self) -> Float[Tensor, "rows dim"]:
        """The hidden state after each prompt."""
        if not self.cached:
            return self._all_again()
        longest = max(len(text) for text in self.texts)
        # Another token than the shortest prompt's own, where ``_reads_alike`` looks.
        padding = int(0 in min(self.texts, key=len))
        ids = torch.full((len(self.texts), longest), padding)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(self.texts):
            ids[row, longest - len(text) :] = torch.tensor(text)
            mask[row, longest - len(text) :] = 1
        self.mask = mask.to(self.model.device)
        hidden = self._run(ids.to(self.model.device))
        if self.cached and self._reads_alike(hidden):
            return hidden
        self.cached, self.past = False, None
        return self._all_again()

    def step(self, tokens: Int[np.ndarray, " rows"]) -> Float[Tensor, "rows dim"]:
        """The hidden state after one more token each."""
        if not self.cached:
            for text, token in zip(self.texts, tokens.tolist(), strict=True):
                text.append(token)
            return self._all_again()
        ids = torch.from_numpy(tokens)[:, None].to(self.model.device)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        return self._run(ids)

    def keep(self, places: list[int]) -> None:
        """Drop the rows that are not in ``places``."""
        self.texts = [self.texts[place] for place in places]
        if self.cached:
            chosen = torch.tensor(places, device=self.model.device)
            self.mask = self.mask[chosen]
            self.past.reorder_cache(chosen)

    def _run(self, ids: Int[Tensor, "rows new"]) -> Float[Tensor, "rows dim"]:
        where = {"position_ids": (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]}
        out = self.network(
            input_ids=ids,
            attention_mask=self.mask,
            past_key_values=self.past,
            use_cache=True,
            **(where if self.positions else {}),
        )
        self.past = getattr(out, "past_key_values", None)
        self.cached = self.past is not None
        return self._last(out)[:, -1]

    def _last(self, out: Any) -> Float[Tensor, "rows time dim"]:
        if self.model.head.weight is None:
            return out.logits[..., : self.model.vocab_size]
        return out.last_hidden_state

    def _reads_alike(self, hidden: Float[Tensor, "rows dim"]) -> bool:
        """Whether the shortest prompt has the same hidden state with left padding as without.

        Some recurrent networks process the padding, and some compute positions without the mask.
        """
        shortest = min(range(len(self.texts)), key=lambda row: len(self.texts[row]))
        alone = self._read([self.texts[shortest]])[0]
        slack = ROUNDING if hidden.dtype in (torch.float32, torch.float64) else COARSE_ROUNDING
        return bool((hidden[shortest] - alone).abs().max() <= slack * alone.abs().max())

    def _all_again(self) -> Float[Tensor, "rows dim"]:
        return self._read(self.texts)

    def _read(self, texts: list[list[int]]) -> Float[Tensor, "rows dim"]:
        """Hidden states after complete texts, padded on the right."""
        ends = [len(text) - 1 for text in texts]
        ids = torch.zeros(len(texts), max(ends) + 1, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        out = self.network(input_ids=ids.to(self.model.device), use_cache=False)
        return self._last(out)[torch.arange(len(ends)), ends]
