"""Prompts and token sequences, the records that sources, generation and scoring exchange, and their batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Float

from kleash.registry import grouped, require_at_least

SourceForm = Literal["messages", "text", "rendered text", "token ids"]
"""What a source has for a prompt or document; "rendered text" is plain text that a chat template made."""
ROUNDING_NATS = 1e-3
"""Largest log-probability above 0 that is taken for a rounding error."""
RESPONSE_MASKS = ("response_mask", "completion_mask", "tool_mask", "loss_mask")
"""Masks over the response; a token was drawn by the model if all that a record has are 1."""
LEAST_PADDING_RUN = 3
"""Tokens of the shortest end of a response that counts as padding."""
LEAST_RESPONSES, LEAST_SHARE = 2, 0.1
"""Number and share of the responses that must end so: a single one may repeat a token with certainty."""


class TokenLimits(Protocol):
    """What token sequences must suit: the tokens of a pair of models, and the longest input (``models.Pair``)."""

    @property
    def tokenizer(self) -> Any:
        """Of transformers; both models read its tokens."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens that both models give a probability to."""

    @property
    def context_length(self) -> int | None:
        """Largest number of input tokens for both; None if there is no limit."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response of the policy."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as token ids."""

    prompt_id: int
    """Index in the source, from 0."""
    token_ids: tuple[int, ...]
    text: str
    """The text of the tokens, chat template included."""
    prompt_hash: str
    copy: int = 0
    """Number of earlier prompts with the same tokens: each copy draws different samples."""
    location: str = ""
    """File and line, for errors."""
    form: SourceForm = "text"
    """What the source has for it."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The messages that the text was rendered from; None for plain text."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The other fields of its record, for reward functions; empty unless they were requested."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenSequence:
    """A context and the tokens after it whose probabilities are measured."""

    prompt_id: int
    sample_id: int
    prompt_ids: tuple[int, ...]
    """The context, at least one token; not scored."""
    response_ids: tuple[int, ...]
    """The scored tokens, at least one."""
    prompt_text: str
    response_text: str
    finish_reason: str | None = None
    """"stop" if it ended with an end token, "length" if it was truncated, None if unknown."""
    logp_sampled: Float[np.ndarray, " response"] | None = None
    """Log-probabilities under the distribution that was sampled from, in nats; None if unknown."""
    prompt_hash: str = ""
    """Hash of the prompt's tokens, or of all tokens of a window of text. It pairs the sequences of two runs."""
    temperature: float | None = None
    """Sampling temperature that the source states for the response; None if unknown."""
    retokenised: bool = False
    """Whether the response was tokenised from text, so that its tokens may differ from those sampled."""
    location: str = ""
    """File and line, for errors."""
    prompt_form: SourceForm = "text"
    """What the source has for the prompt."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The messages that the prompt was rendered from; only of generated responses."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The prompt's columns of generated responses; of those of a source, lists of a teacher that were requested."""

    @property
    def num_input_tokens(self) -> int:
        """Input tokens of a forward pass that scores the response: all but the last."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    @property
    def name(self) -> str:
        """The sequence's name in error messages."""
        return f"prompt {self.prompt_id}, sample {self.sample_id}{f' ({self.location})' if self.location else ''}"


def hash_tokens(token_ids: tuple[int, ...]) -> str:
    """A 64-bit BLAKE2b hash of token ids as 16 hex digits, the same on every machine."""
    return blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()


def hash_prompt(token_ids: tuple[int, ...], tokenizer: Any) -> str:
    """The hash of a prompt's tokens, without the tokenizer's padding tokens before and after them."""
    padding = getattr(tokenizer, "pad_token_id", None)
    counted = [place for place, token in enumerate(token_ids) if token != padding]
    return hash_tokens(token_ids[counted[0] : counted[-1] + 1] if counted else token_ids)


def text_after(tokenizer: Any, prompt_ids: Sequence[int], response_ids: Sequence[int], **options: Any) -> str:
    """The text of tokens where they follow others, as a response its prompt.

    Tokenizers as those of Llama 2 and Mistral drop a space at the beginning of what they decode, so that a response
    decoded alone lacks the space after the last word of its prompt. ``options`` are those of ``tokenizer.decode``,
    which removes no space, as some tokenizers would before punctuation.
    """
    last, both, alone = (
        tokenizer.decode(list(ids), clean_up_tokenization_spaces=False, **options)
        for ids in (prompt_ids[-1:], (*prompt_ids[-1:], *response_ids), response_ids)
    )
    # the last token of the prompt may be a part of a character, and then changes with what follows
    return both.removeprefix(last) if both.startswith(last) else alone


def batch_by_length(
    lengths: Sequence[int], batch_tokens: int, *, max_sequences: int | None = None
) -> list[list[int]]:
    """Group sequences of similar length into batches of at most ``batch_tokens`` tokens, padding included.

    The longest sequences come first, so that a lack of memory shows in the first batch. A sequence longer than the
    budget is alone in a batch. Sequences of equal length keep their order, so equal lengths always give equal batches.

    Args:
        lengths: number of tokens of each sequence.
        batch_tokens: largest number of tokens in a batch, padding included.
        max_sequences: largest number of sequences in a batch; None for no limit.

    Raises:
        OptionError: if the budget is below one token.
    """
    require_at_least(1, batch_tokens=batch_tokens)
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        longest = lengths[batches[-1][0]] if batches else 0
        is_full = not batches or longest * (len(batches[-1]) + 1) > batch_tokens
        if is_full or (max_sequences is not None and len(batches[-1]) >= max_sequences):
            batches.append([])
        batches[-1].append(index)
    return batches


def group_for_padding(lengths: Sequence[int], max_padded_length: int | None) -> list[list[int]]:
    """Divide a batch into groups whose padding changes no number of a model: indices into ``lengths``.

    Args:
        lengths: number of tokens of each sequence.
        max_padded_length: longest length to which sequences may be padded (``Model.max_padded_length``); None for any.

    Returns:
        All sequences as one group if none is too long; otherwise those that are not, and one group for each greater
        length.
    """
    longest = inf if max_padded_length is None else max_padded_length
    return list(
        grouped((0 if length <= longest else length, index) for index, length in enumerate(lengths)).values()
    )


def padding_length(token_ids: Sequence[int], columns: Sequence[np.ndarray]) -> int:
    """The number of tokens at the end of a response that look like padding that no mask marks.

    0 for fewer than 3, and if all tokens look like it. At these tokens each column of log-probabilities has one value.
    Where all values are 0, which is also the log-probability of a token that is certain, the tokens are one token as
    well.
    """
    values = np.stack(columns)
    is_padding = (values == values[:, -1:]).all(axis=0)
    if not values[:, -1].any():
        is_padding &= np.asarray(token_ids) == token_ids[-1]
    length = len(token_ids) if is_padding.all() else int((~is_padding[::-1]).argmax())
    return length if LEAST_PADDING_RUN <= length < len(token_ids) else 0


def is_padded(padded: int, responses: int) -> bool:
    """Whether so many of the responses end like padding that they are padded."""
    return padded >= max(LEAST_RESPONSES, LEAST_SHARE * responses)
