"""Responses from a source file (off-policy samples), as token sequences."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice, zip_longest
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from kleash.errors import SourceError
from kleash.jobs.reading import DatasetOptions
from kleash.losses import top_k_from
from kleash.sources.chat_rendering import form_of_text, join_contents, render_answer, turn_end
from kleash.sources.dataset_formats import (
    expand_logs,
    expand_responses,
    text_or_messages,
)
from kleash.sources.files import find_source
from kleash.sources.prompts import check_length, check_token_ids, encode_after, tokenise_prompt
from kleash.sources.records import (
    SourceRecord,
    describe_fields,
    get_field,
    is_finite_number,
    show_value,
)
from kleash.sources.sequences import (
    RESPONSE_MASKS,
    ROUNDING_NATS,
    Prompt,
    TokenLimits,
    TokenSequence,
    hash_prompt,
    is_padded,
    padding_length,
    text_after,
)

MAX_ID = 2**31 - 1
ID_RANGE = f"a whole number from 0 to {MAX_ID}"
LISTS = ("teacher_ids", "teacher_logprobs")
"""Fields with the k likeliest tokens of a teacher for each token of a response, and their log-probabilities."""
CHANCE = 25
"""Counts of which one is more than twice the other and this do not differ by chance, or by an engine's rounding."""
LOOKS_NORMALISED = (
    "every list has the whole probability, as after a softmax over its tokens alone or a top-p, and all other tokens "
    "are learned as impossible; give log-probabilities of the teacher's full softmax"
)
IMPOSSIBLE_NATS = 80.0
"""An event of probability below exp(-80) = 2e-35 is taken for an error in the data."""


def read_responses(
    name: str,
    pair: TokenLimits,
    *,
    limit: int | None = None,
    reading: DatasetOptions | None = None,
    with_lists: bool = False,
) -> Iterator[TokenSequence]:
    """Read responses with their prompts from a source of records, one record at a time.

    A record has ``prompt``, ``messages`` or ``prompt_token_ids``, and ``response`` or ``response_token_ids``; token
    ids take precedence over text. It may have ``prompt_id`` and ``sample_id`` (by default equal prompts get equal
    numbers, in order of appearance), ``finish_reason``, ``logprobs`` (one for each response token, in nats, under the
    distribution that it was drawn from) and ``temperature``. The text of a response is tokenised separately from the
    prompt (``encode_after``); the end token is appended only if ``finish_reason`` is "stop": that of the chat template
    where the prompt is rendered by it. TRL's formats are read too: ``completion`` is a response, a preference pair is
    two responses (chosen, rejected), and messages that end with one of the assistant are a prompt and its response. A
    response of messages is the text that the chat template adds to the prompt, up to the end token.

    Args:
        name: the file, "-" for standard input, or a data set, as ``find_source`` takes it.
        pair: the models, whose tokenizer, vocabulary and context length are used.
        limit: largest number of responses to read; None for all.
        reading: split, columns and chat template, such as a job; None for the defaults.
        with_lists: whether each record must have the fields of ``LISTS``, which become ``columns``.

    Raises:
        SourceError: at the first record that is not a response, with what was expected; after the last, if many
            responses end with padding: one token, or tokens whose ``logprobs`` are one value.
    """
    source = find_source(name, "responses", reading)
    ends = {pair.tokenizer.pad_token_id, pair.tokenizer.eos_token_id, *pair.eos_token_ids}
    assigner, read, padded = _IdAssigner(), 0, list[tuple[str, int]]()
    records = expand_logs(source.records())
    responses = (response for record in records for response in expand_responses(record))
    for record in islice(responses, limit):
        read += 1
        sequence = _response(record, pair, assigner, source.reading.chat_template)
        if (token_ids := sequence.response_ids)[-1] in ends:
            logp = np.zeros(len(token_ids)) if sequence.logp_sampled is None else sequence.logp_sampled
            length = padding_length(token_ids, [logp])
            padded += [(record.location, length)] if length else []
        yield replace(sequence, columns=_lists(record, sequence, pair)) if with_lists else sequence
    if not read:
        raise SourceError(f"{name} holds no response")
    if is_padded(len(padded), read):
        location, length = padded[0]
        raise SourceError(
            f"{len(padded)} of {read} responses end with padding, such as the last {length} tokens of "
            f"{location}; cut 'response_token_ids' and 'logprobs' after the last token that was drawn"
        )


@dataclass
class _IdAssigner:
    """Assigns prompt and sample ids to responses, and checks those that records state."""

    prompt_ids: dict[str, int] = field(default_factory=dict[str, int])
    """Assigned prompt ids by the hash of the prompt, or by the text that records state."""
    next_prompt_ids: Iterator[int] = field(default_factory=count)
    """The prompt ids from 0 on that were not looked at yet."""
    prompts: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """Hash of the prompt, or of the first of several turns, and location of its first record, by prompt id."""
    sample_ids: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Sample ids in use, by prompt id."""
    next_sample_ids: defaultdict[int, Iterator[int]] = field(default_factory=lambda: defaultdict(count))
    """By prompt id: the sample ids from 0 on that were not looked at yet."""

    def assign(self, record: SourceRecord, prompt_hash: str) -> tuple[int, int]:
        """Prompt id and sample id of a record: those that it states, or the next free ones; texts are numbered.

        Args:
            record: the record.
            prompt_hash: hash of its prompt; of one of several turns, that of the prompt of the first.

        Raises:
            SourceError: if a prompt id stands for two prompts, or a sample id is used twice.
        """
        stated = get_field(record, "prompt_id", (int, str), f"text, or {ID_RANGE}", _is_id)
        sample = get_field(record, "sample_id", int, ID_RANGE, _is_id)
        group = (stated if isinstance(stated, str) else "") or prompt_hash
        if not isinstance(stated, int) and group not in self.prompt_ids:
            self.prompt_ids[group] = next(
                index for index in self.next_prompt_ids if index not in self.prompts
            )
        prompt = stated if isinstance(stated, int) else self.prompt_ids[group]
        known_hash, location = self.prompts.setdefault(prompt, (prompt_hash, record.location))
        if known_hash != prompt_hash:
            raise record.error(
                f"'prompt_id' {show_value(stated)} stands for another prompt at {location}; give each prompt one, or "
                "leave all out"
            )
        used = self.sample_ids[prompt]
        if sample is None:
            sample = next(index for index in self.next_sample_ids[prompt] if index not in used)
        elif sample in used:
            raise record.error(f"sample {sample} of prompt {prompt} has been there before")
        used.add(sample)
        return prompt, sample


def _response(
    record: SourceRecord, pair: TokenLimits, assigner: _IdAssigner, chat_template: str | None
) -> TokenSequence:
    """The token sequence of one response."""
    prompt = tokenise_prompt(record, pair, chat_template)
    finish_reason = get_field(record, "finish_reason", str, "text")
    response_ids, response_text, retokenised = _answer(record, pair, prompt, finish_reason, chat_template)
    check_length(record, "prompt with its response", len(prompt.token_ids) + len(response_ids) - 1, pair)
    temperature = get_field(
        record, "temperature", (int, float), "a number from 0 on", lambda x: is_finite_number(x) and x >= 0
    )
    prompt_id, sample_id = assigner.assign(
        record, _first_hash(record, pair, chat_template) or prompt.prompt_hash
    )
    return TokenSequence(
        prompt_id=prompt_id,
        sample_id=sample_id,
        prompt_ids=prompt.token_ids,
        response_ids=response_ids,
        prompt_text=prompt.text,
        response_text=response_text,
        finish_reason=finish_reason,
        logp_sampled=_logprobs(record, len(response_ids), pair.vocab_size),
        prompt_hash=prompt.prompt_hash,
        temperature=None if temperature is None else float(temperature),
        retokenised=retokenised,
        location=record.location,
        prompt_form=prompt.form,
    )


def _first_hash(record: SourceRecord, pair: TokenLimits, chat_template: str | None) -> str | None:
    """The hash of the prompt of the first of several turns; None of a response alone."""
    first = record.first_prompt
    if isinstance(first, list):
        return tokenise_prompt(
            record.with_fields({**record.fields, "prompt": first}), pair, chat_template
        ).prompt_hash
    return None if first is None else hash_prompt(first, pair.tokenizer)


def _answer(
    record: SourceRecord,
    pair: TokenLimits,
    prompt: Prompt,
    finish_reason: str | None,
    chat_template: str | None,
) -> tuple[tuple[int, ...], str, bool]:
    """Token ids and text of the response, and whether the ids were made from the text."""
    text, end = _response_text(record, pair, chat_template)
    values = get_field(record, "response_token_ids", list, "a list of token ids")
    if values is not None:
        token_ids = check_token_ids(record, "response_token_ids", values, pair)
        partial_masks = [
            name
            for name in RESPONSE_MASKS
            if not all(get_field(record, name, list, "a list of 0 and 1") or [])
        ]
        if partial_masks:
            raise record.error(
                f"{partial_masks[0]!r} leaves out tokens of the response, all of which would be scored: cut off "
                "padding; where tools wrote some, give prompt and response as one 'token_ids', with its 'loss_mask'"
            )
        text = text_after(pair.tokenizer, prompt.token_ids, token_ids) if text is None else text
        return token_ids, text, False
    if text is None:
        raise record.error(
            f"expected a field 'response' or 'response_token_ids' and found {describe_fields(record)}; "
            "--response-column names another"
        )
    if end and finish_reason == "length":
        text = text.removesuffix(end)
    token_ids = encode_after(
        pair.tokenizer,
        prompt,
        text,
        is_rendered=chat_template != "raw" and isinstance(record.fields.get("response"), list),
    )
    if finish_reason == "stop" and not end:
        token_ids += _missing_end(token_ids, pair, prompt.text)
    if not token_ids:
        raise record.error("the response has no tokens, so there is nothing to score; leave the line out")
    return check_token_ids(record, "response", token_ids, pair), text, True


def _missing_end(token_ids: list[int], pair: TokenLimits, prompt_text: str) -> list[int]:
    """The end token that a finished response lacks: that of the chat template if it rendered the prompt."""
    tokenizer, stops = pair.tokenizer, pair.eos_token_ids
    ends = [tokenizer.eos_token_id]
    if form_of_text(prompt_text, tokenizer) == "rendered text" and (end := turn_end(tokenizer, stops)):
        ends.insert(0, tokenizer.convert_tokens_to_ids(end))
    has_end = token_ids and token_ids[-1] in (*ends, *stops)
    return [] if has_end or ends[0] is None else ends[:1]


def _response_text(
    record: SourceRecord, pair: TokenLimits, chat_template: str | None
) -> tuple[str | None, str]:
    """The text of the response, None if the record has none, and the end token that the chat template wrote, or ""."""
    response = text_or_messages(record, "response")
    if not isinstance(response, list):
        return response, ""
    if chat_template == "raw":
        return join_contents(record, response, "response"), ""
    prompt = text_or_messages(record, "messages") or text_or_messages(record, "prompt")
    if isinstance(prompt, str) and chat_template == "apply":
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise record.error(
            "the response is a list of messages and the prompt is none; give both as text or both as messages"
        )
    return render_answer(record, prompt, response, pair.tokenizer, pair.eos_token_ids)


def _logprobs(record: SourceRecord, tokens: int, vocab_size: int) -> np.ndarray | None:
    """The log-probabilities with which the response was drawn, in nats; None if the record has none.

    The expectation of ``exp(-logp)`` of a drawn token is at most ``vocab_size``, and of the product over a response of
    n tokens at most ``vocab_size**n``. So by Markov's inequality the sum of ``-logp`` is above ``n·log(vocab_size) +
    IMPOSSIBLE_NATS`` with a probability below ``exp(-IMPOSSIBLE_NATS)``: such values are placeholders, or belong to
    other tokens.

    Raises:
        SourceError: if their number is not ``tokens``, or they cannot be log-probabilities of drawn tokens.
    """
    values = get_field(record, "logprobs", list, "a list of numbers")
    if values is None:
        return None
    if len(values) != tokens:
        raise record.error(
            f"expected a number in 'logprobs' for each of the {tokens} response tokens and "
            f"found {len(values)}; give one for each of 'response_token_ids'"
        )
    for value in values:
        if not is_finite_number(value) or value > ROUNDING_NATS:
            raise record.error(
                f"expected 'logprobs' to hold natural logarithms of probabilities, at most "
                f"0, and found {show_value(value)}"
            )
    excess = -sum(values) - tokens * math.log(vocab_size)
    lowest = min(values)
    if max(excess, -lowest - math.log(vocab_size)) > IMPOSSIBLE_NATS:
        raise record.error(
            f"'logprobs' are too low to be of drawn tokens (down to {lowest:.6g}, "
            f"{sum(values):.6g} in all): draws from {vocab_size} tokens never sum to so little; give the "
            "log-probabilities of the tokens that were drawn, under the distribution they were drawn from"
        )
    return np.minimum(np.asarray(values, dtype=np.float32), 0.0)


def _lists(record: SourceRecord, sequence: TokenSequence, pair: TokenLimits) -> dict[str, np.ndarray]:
    """The fields of ``LISTS`` as arrays [response, k], int64 and float32; shorter lists end with -1 and -inf.

    Raises:
        SourceError: if they are not lists of different tokens, and of their log-probabilities, for each token of the
            response.
    """
    length = len(sequence.response_ids)
    try:
        ids, logp = (
            np.array([*zip_longest(*get_field(record, name, list, "a list of lists"), fillvalue=end)]).T
            for name, end in zip(LISTS, (-1, np.nan), strict=True)
        )
    except (TypeError, ValueError):  # no lists of numbers
        ids, logp = np.empty(0), np.empty(0)
    # vLLM writes -9999 for a probability of 0
    if not (
        ids.ndim == 2
        and ids.shape == logp.shape
        and len(ids) == length
        and ids.dtype.kind + logp.dtype.kind in ("if", "ii")
        and ids[:, 0].min() >= 0
        and ids.max() < pair.vocab_size
        and ((ids >= 0) == ((logp > -9999) & (logp <= 0))).all()
    ):
        raise record.error(
            f"expected {' and '.join(map(repr, LISTS))}, for each of the {length} tokens of the response a list of "
            f"different token ids below {pair.vocab_size} and one of their log-probabilities, above -9999 and at most "
            "0; or give --teacher or --teacher-cache"
        )
    ids_in_order = np.sort(ids)
    for row, column in np.argwhere((np.diff(ids_in_order) == 0) & (ids_in_order[:, 1:] >= 0))[:1]:
        raise record.error(
            f"'teacher_ids' has the token {ids_in_order[row, column]} twice in the list of response token {row + 1}; "
            "give different ones"
        )
    return dict(zip(LISTS, (ids, np.where(ids < 0, -np.inf, logp).astype(np.float32)), strict=True))


def check_lists(
    responses: Sequence[TokenSequence], source: str, *, vocab_size: int, drawn_at: float | None
) -> list[str]:
    """Check the lists that ``read_responses`` read; returns a note if they look normalised over their tokens alone.

    A single position can have any list: what is unlikely is counted over all positions.

    Args:
        responses: with the lists as columns.
        source: their name, for errors.
        vocab_size: number of tokens.
        drawn_at: the temperature at which the teacher drew the responses; None if anybody wrote them.

    Raises:
        SourceError: if a list has more than probability 1; if the lists are those of the previous or the next position;
            or if the teacher did not draw the responses, or did not say with which ``logprobs``.
    """
    counts = np.zeros(7)
    for response in responses:
        counts += _count_lists(response, vocab_size)
        if drawn_at is not None and (
            response.logp_sampled is None or response.temperature not in (None, drawn_at)
        ):
            raise SourceError(
                f"{response.location}: expected 'logprobs', with which the teacher drew the response at temperature "
                f"{drawn_at}; give them, or --tail bucket"
            )
    total, rest, full, spread, previous, listed, following = counts.tolist()
    hits, name = max((previous, "previous"), (following, "next"))
    if hits > 2 * listed + CHANCE:
        raise SourceError(
            f"{source}: of {total:.0f} lists, {listed:.0f} have the token that they stand for, and {hits:.0f} the "
            f"{name} one, so they are of the {name} position; give the list from which each token was drawn"
        )
    few, many = sorted((total - listed, rest))
    if drawn_at is not None and many > 2 * few + CHANCE:
        raise SourceError(
            f"{source}: {total - listed:.0f} of {total:.0f} response tokens are outside their lists, and of draws from "
            f"the teacher {rest:.0f} would be; give tokens that it drew and lists of its full softmax, without the "
            "drawn token that an engine adds, or --tail bucket"
        )
    return [LOOKS_NORMALISED] if full == total and spread else []


def _count_lists(response: TokenSequence, vocab_size: int) -> np.ndarray:
    """The number of a response's lists, and the sum of the probabilities that they leave out.

    Then how many have the whole probability; of these, have a last token of 20 times what all others may have together;
    have the token of the response before theirs; their own; and the one after.
    """
    ids, logp = (torch.from_numpy(response.columns[name]) for name in LISTS)
    side: Any = top_k_from(ids, logp)
    is_wrong = side.log_rest.isnan()
    if is_wrong.any():
        raise SourceError(
            f"{response.location}: the probabilities in the list of response token {int(is_wrong.int().argmax()) + 1} "
            "sum to more than 1; give natural logarithms, in float32 with all digits"
        )
    is_full = side.log_rest_least == -torch.inf
    last = torch.where(ids < 0, torch.inf, logp).amin(-1)
    is_spread = is_full & (side.log_rest + math.log(20) < last) & (2 * ids.shape[1] < vocab_size)
    around = pad(torch.tensor(response.response_ids), (1, 1), value=-2).unfold(0, 3, 1)
    is_listed = (ids.unsqueeze(-1) == around.unsqueeze(1)).any(1)
    counted = torch.stack([is_full, is_spread, *is_listed.T]).sum(-1)
    return np.array([len(ids), float(side.log_rest.exp().sum()), *counted.tolist()])


def _is_id(value: int | str) -> bool:
    """Whether a value can be the id of a prompt or a sample; texts stand for numbers that are assigned."""
    return isinstance(value, str) or 0 <= value <= MAX_ID
