"""Responses from a source file (off-policy samples), as token sequences."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as default
from itertools import count, islice

import numpy as np

from kleash.errors import SourceError
from kleash.models.pair import Pair
from kleash.models.sequences import TokenSequence, hash_tokens
from kleash.models.sources.dataset_formats import expand_responses, render_answer, text_or_messages
from kleash.models.sources.prompts import (
    check_length,
    check_token_ids,
    describe_fields,
    encode_text,
    tokenise_prompt,
)
from kleash.models.sources.records import SourceRecord, get_field, is_finite_number, show_value, source_label
from kleash.models.sources.source_files import detect_format, read_records, source_path

LARGEST_ID = 2**31 - 1
ROUNDING_NATS = 1e-3
"""A log-probability may be so far above 0 by rounding; it counts as 0."""
IMPOSSIBLE_NATS = 80.0
"""A probability below exp(-80) = 2e-35 is not met, whatever the number of tokens drawn."""


def read_responses(name: str, pair: Pair, *, limit: int | None = None) -> Iterator[TokenSequence]:
    """The responses of a source of records, each with its prompt; one record at a time is held in memory.

    A record has ``prompt``, ``messages`` or ``prompt_token_ids``, and ``response`` or ``response_token_ids``;
    ids win over text. It may have ``prompt_id`` and ``sample_id`` (otherwise equal prompts share a number,
    in the order of appearance), ``finish_reason``, ``logprobs`` (one for each response token, in nats, under
    the distribution it was drawn from) and ``temperature``. Text is tokenised apart from the prompt; the end
    token is added to it only where ``finish_reason`` is "stop". TRL's formats are read too: ``completion`` is a
    response, a preference pair two of them (chosen, rejected), and messages that end with the assistant's are a prompt
    and its response. A response of messages is what the chat template adds to the prompt, up to the end token.

    Args:
        name: the file, of JSONL, a JSON array, CSV or Parquet, or "-" for standard input.
        pair: whose tokenizer, vocabulary and context count.
        limit: the most responses to read; None for all.

    Raises:
        SourceError: at the first line that is not such a response, saying what was expected.
    """
    path = source_path(name)
    if detect_format(path) == "plain text":
        raise SourceError(
            f"{source_label(path)} is not JSONL; responses come as records with their prompts: JSONL, a JSON array, "
            "CSV or Parquet"
        )
    numbering, empty = _Numbering(), True
    responses = (response for record in read_records(path) for response in expand_responses(record))
    for record in islice(responses, limit):
        empty = False
        yield _response(record, pair, numbering)
    if empty:
        raise SourceError(f"{name} holds no response, only blank lines")


@dataclass
class _Numbering:
    """Which prompt and sample numbers have been given, and to what."""

    prompts: dict[str, int] = default(default_factory=dict)
    hashes: dict[int, tuple[str, str]] = default(default_factory=dict)
    samples: dict[int, set[int]] = default(default_factory=dict)
    free: dict[int, int] = default(default_factory=dict)
    """Of each prompt: no smaller sample number is free."""
    given: bool | None = None

    def number(self, record: SourceRecord, prompt_hash: str) -> tuple[int, int]:
        """The ids of a line, its own or the next free ones."""
        prompt, sample = (_identity(record, name) for name in ("prompt_id", "sample_id"))
        if self.given is None:
            self.given = prompt is not None
        if self.given is not (prompt is not None):
            raise SourceError(
                f"{record.location}: expected every line to have a 'prompt_id', or none of them"
            )
        if prompt is None:
            prompt = self.prompts.setdefault(prompt_hash, len(self.prompts))
        known, location = self.hashes.setdefault(prompt, (prompt_hash, record.location))
        if known != prompt_hash:
            raise SourceError(
                f"{record.location}: 'prompt_id' {prompt} stands for another prompt at {location}"
            )
        taken = self.samples.setdefault(prompt, set())
        if sample is None:
            sample = next(free for free in count(self.free.get(prompt, 0)) if free not in taken)
            self.free[prompt] = sample
        if sample in taken:
            raise SourceError(f"{record.location}: sample {sample} of prompt {prompt} has been there before")
        taken.add(sample)
        return prompt, sample


def _response(record: SourceRecord, pair: Pair, numbering: _Numbering) -> TokenSequence:
    prompt_ids, prompt_text = tokenise_prompt(record, pair)
    finish_reason = get_field(record, "finish_reason", str, "text")
    response_ids, response_text, retokenised = _answer(record, pair, finish_reason)
    check_length(record, "prompt with its response", len(prompt_ids) + len(response_ids) - 1, pair)
    prompt_hash = hash_tokens(prompt_ids)
    prompt_id, sample_id = numbering.number(record, prompt_hash)
    return TokenSequence(
        prompt_id=prompt_id,
        sample_id=sample_id,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        prompt_text=prompt_text,
        response_text=response_text,
        finish_reason=finish_reason,
        logp_sampled=_logprobs(record, len(response_ids), pair.vocab_size),
        prompt_hash=prompt_hash,
        temperature=_temperature(record),
        retokenised=retokenised,
        location=record.location,
    )


def _answer(record: SourceRecord, pair: Pair, finish_reason: str | None) -> tuple[tuple[int, ...], str, bool]:
    """Token ids and text of the response, and whether the ids were made from the text."""
    text = _response_text(record, pair)
    values = get_field(record, "response_token_ids", list, "a list of token ids")
    if values is not None:
        token_ids = check_token_ids(record, "response_token_ids", values, pair)
        return token_ids, pair.tokenizer.decode(list(token_ids)) if text is None else text, False
    if text is None:
        raise SourceError(
            f"{record.location}: expected a field 'response' or 'response_token_ids' and found "
            f"{describe_fields(record)}"
        )
    made = encode_text(pair.tokenizer, text, special=False)
    end = pair.tokenizer.eos_token_id
    if finish_reason == "stop" and end is not None and made[-1:] != [end]:
        made.append(end)
    if not made:
        raise SourceError(
            f"{record.location}: the response has no tokens, so there is nothing to score; leave the line out"
        )
    return tuple(made), text, True


def _response_text(record: SourceRecord, pair: Pair) -> str | None:
    """The text of the response; of messages, what the chat template makes of them."""
    response = text_or_messages(record, "response")
    if not isinstance(response, list):
        return response
    prompt = text_or_messages(record, "messages") or text_or_messages(record, "prompt")
    if not isinstance(prompt, list):
        raise SourceError(
            f"{record.location}: the response is a list of messages and the prompt is none; give both as text or both "
            "as messages"
        )
    return render_answer(record, prompt, response, pair.tokenizer)


def _logprobs(record: SourceRecord, tokens: int, vocab_size: int) -> np.ndarray | None:
    """The log-probabilities under which the response was drawn, in nats; None if the record has none.

    The expectation of ``exp(-logp)`` of a drawn token is at most ``vocab_size``, and of the product over a response of
    n tokens at most ``vocab_size**n``. So by Markov's inequality the sum of ``-logp`` is above ``n·log(vocab_size) +
    IMPOSSIBLE_NATS`` with a probability below ``exp(-IMPOSSIBLE_NATS)``: such numbers are placeholders, or of other
    tokens than those of the response.
    """
    values = get_field(record, "logprobs", list, "a list of numbers")
    if values is None:
        return None
    if len(values) != tokens:
        raise SourceError(
            f"{record.location}: expected a number in 'logprobs' for each of the {tokens} response tokens and "
            f"found {len(values)}; give 'response_token_ids' with them"
        )
    for value in values:
        if not is_finite_number(value) or value > ROUNDING_NATS:
            raise SourceError(
                f"{record.location}: expected 'logprobs' to hold natural logarithms of probabilities, at most "
                f"0, and found {show_value(value)}"
            )
    excess = -sum(values) - tokens * math.log(vocab_size)
    lowest = min(values)
    if max(excess, -lowest - math.log(vocab_size)) > IMPOSSIBLE_NATS:
        raise SourceError(
            f"{record.location}: 'logprobs' are too low to be of drawn tokens (down to {lowest:.6g}, "
            f"{sum(values):.6g} in all): draws from {vocab_size} tokens never sum to so little; give the "
            "log-probabilities of the tokens that were drawn, under the distribution they were drawn from"
        )
    return np.minimum(np.asarray(values, dtype=np.float32), 0.0)


def _temperature(record: SourceRecord) -> float | None:
    value = get_field(record, "temperature", (int, float), "a number")
    if value is not None and not (is_finite_number(value) and value >= 0):
        raise SourceError(
            f"{record.location}: expected 'temperature' to be a number from 0 on and found {show_value(value)}"
        )
    return None if value is None else float(value)


def _identity(record: SourceRecord, name: str) -> int | None:
    value = get_field(record, name, int, "a whole number")
    if value is not None and not 0 <= value <= LARGEST_ID:
        raise SourceError(
            f"{record.location}: expected {name!r} to be from 0 to {LARGEST_ID} and found {show_value(value)}"
        )
    return value
