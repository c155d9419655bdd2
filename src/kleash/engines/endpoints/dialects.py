"""How inference servers are asked for the log-probabilities of given tokens, and how they answer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

from kleash.engines.endpoints.http_client import MAX_ANSWER_BYTES
from kleash.engines.endpoints.listed_logprobs import (
    AnswerError,
    ListedLogprobs,
    Position,
    UnsendableError,
    VocabularyTexts,
    position_from_ids,
    position_from_texts,
    read_logprob,
    read_token_id,
)

ENTRY_BYTES = 2**10
"""Of a listed token in an answer, at most on average."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """A sequence whose last tokens a server is asked to score."""

    token_ids: Sequence[int]
    """Context and scored tokens."""
    scored: int
    """Number of scored tokens, at the end; less than all."""
    top: int
    """Number of likeliest tokens to list at each position."""
    model: str
    """The model's name on the server."""
    is_adapter: bool = False
    """Whether the server lists it as an adapter of another model."""

    @property
    def max_answer_bytes(self) -> int:
        """Bytes that no answer exceeds."""
        return MAX_ANSWER_BYTES + len(self.token_ids) * (self.top + 1) * ENTRY_BYTES

    @property
    def first(self) -> int:
        """Index of the first scored token."""
        return len(self.token_ids) - self.scored


@dataclass(frozen=True, kw_only=True)
class ServerRequest:
    """A request in a server's form."""

    path: str
    body: Mapping[str, Any]


@runtime_checkable
class Dialect(Protocol):
    """How one kind of server is asked, and how it answers."""

    name: ClassVar[str]
    context_tokens: ClassVar[int]
    """Tokens at the beginning of a sequence of which the server gives no log-probability."""
    reserved_tokens: ClassVar[int]
    """Tokens of its context length that a sequence cannot have. The last token of a sequence is sent too."""

    @property
    def vocabulary(self) -> VocabularyTexts:
        """The texts of the local model's tokens."""
        ...

    def request(self, query: Query) -> ServerRequest:
        """The request for a query."""
        ...

    def read(self, answer: Any, query: Query) -> ListedLogprobs:
        """The log-probabilities in an answer.

        Raises:
            AnswerError: if they are not those that were asked for.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class VLLM:
    """vLLM's completions with ``prompt_logprobs``: a mapping from token ids for each token of the prompt.

    The scored token is among the K likeliest or listed after them, so a position has K or K + 1 entries. A
    log-probability of -inf is written as -9999.
    """

    name: ClassVar[str] = "vLLM"
    context_tokens: ClassVar[int] = 1
    reserved_tokens: ClassVar[int] = 1
    """It generates a token."""
    vocabulary: VocabularyTexts

    def request(self, query: Query) -> ServerRequest:
        """The request for a query."""
        body = {
            "model": query.model,
            "prompt": list(query.token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": query.top,
        }
        return ServerRequest(path="/v1/completions", body=body)

    def read(self, answer: Any, query: Query) -> ListedLogprobs:
        """The log-probabilities in an answer; raises AnswerError."""
        choice = _only_choice(answer)
        rows = choice.get("prompt_logprobs", answer.get("prompt_logprobs"))
        if not isinstance(rows, list):
            raise AnswerError("has no prompt_logprobs")
        _check_count(len(rows), len(query.token_ids), "prompt_logprobs")
        texts: dict[int, str] = {}
        positions: list[Position] = []
        for token, row in zip(query.token_ids[query.first :], rows[query.first :], strict=True):
            entries, rank = {}, None
            for key, entry in _mapping(row, "prompt_logprobs").items():
                token_id = read_token_id(key, self.vocabulary.size)
                fields = _mapping(entry, "a log-probability")
                entries[token_id] = read_logprob(fields.get("logprob"))
                if isinstance(fields.get("decoded_token"), str):
                    texts[token_id] = fields["decoded_token"]
                if token_id == token and isinstance(fields.get("rank"), int) and fields["rank"] > 0:
                    rank = fields["rank"] - 1  # which counts other tokens of the same probability
            if token not in entries:
                raise AnswerError(
                    f"lacks the log-probability of token {token} at position {query.first + len(positions)}, as after "
                    "a hit of the prefix cache (then start vLLM with --no-enable-prefix-caching)"
                )
            positions.append(position_from_ids(entries, token, query.top, self.vocabulary.size, rank))
        return ListedLogprobs.of(positions, texts)


@dataclass(frozen=True, kw_only=True)
class SGLang:
    """SGLang's ``/generate`` with ``return_logprob``: lists of [log-probability, token id, text].

    The lists begin at ``logprob_start_len`` and end with the last token of the prompt; the first entry may be null. A
    log-probability of -inf is written as null. The token of the largest id is scored, and written as token 0.
    """

    name: ClassVar[str] = "SGLang"
    context_tokens: ClassVar[int] = 1
    reserved_tokens: ClassVar[int] = 7
    """``max_req_input_len`` of its workers is 6 tokens less, and a request is shorter than that."""
    vocabulary: VocabularyTexts

    def request(self, query: Query) -> ServerRequest:
        """The request for a query."""
        body = {
            "input_ids": list(query.token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": query.first - 1,
            "top_logprobs_num": query.top,
            "return_text_in_logprobs": True,
            **({"lora_path": query.model} if query.is_adapter else {}),
        }
        return ServerRequest(path="/generate", body=body)

    def read(self, answer: Any, query: Query) -> ListedLogprobs:
        """The log-probabilities in an answer; raises AnswerError."""
        answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
        meta = _mapping(_mapping(answer, "an answer").get("meta_info"), "meta_info")
        token_rows, top = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
        if not isinstance(token_rows, list) or not isinstance(top, list):
            raise AnswerError("has no input_token_logprobs and input_top_logprobs")
        for name, rows in (("input_token_logprobs", token_rows), ("input_top_logprobs", top)):
            if not query.scored <= len(rows) <= len(query.token_ids):
                _check_count(len(rows), query.scored + 1, name)
        texts: dict[int, str] = {}
        positions: list[Position] = []
        tokens = query.token_ids[query.first :]
        for token, own_entry, row in zip(
            tokens, token_rows[-query.scored :], top[-query.scored :], strict=True
        ):
            entries = dict(self._entry(entry, texts) for entry in _list(row, "input_top_logprobs"))
            _check_count(len(entries), min(query.top, self.vocabulary.size), "tokens at a position")
            if all(logp == -math.inf for logp in entries.values()):
                raise AnswerError("has null in place of all log-probabilities of a position, as for NaN")
            token_id, token_logp = self._entry(own_entry, {} if token == self.vocabulary.size - 1 else texts)
            if token_id not in (token, 0 if token == self.vocabulary.size - 1 else token):
                raise AnswerError(f"scores token {token_id} where token {token} was sent")
            entries.setdefault(token, token_logp)
            positions.append(position_from_ids(entries, token, query.top, self.vocabulary.size))
        return ListedLogprobs.of(positions, texts)

    def _entry(self, entry: Any, texts: dict[int, str]) -> tuple[int, float]:
        """Token id and log-probability of an entry, whose text is added to ``texts``."""
        values = _list(entry, "a log-probability")
        if len(values) < 2:
            raise AnswerError(
                f"has an entry of {len(values)} values in place of a log-probability and a token id"
            )
        token_id = read_token_id(values[1], self.vocabulary.size)
        if len(values) > 2 and isinstance(values[2], str):
            texts[token_id] = values[2]
        return token_id, -math.inf if values[0] is None else read_logprob(values[0])


@dataclass(frozen=True, kw_only=True)
class EchoServer:
    """Completions with ``echo`` and ``logprobs``, as of llama-cpp-python: tokens are named by their texts.

    It takes text and not token ids, so each answer is checked for being cut into the tokens that were meant.
    llama-cpp-python leaves the begin token out of its lists, whose first entry is null. Without a begin token it gives
    each token the log-probabilities of the next position, which ``server.check_alignment`` detects.
    """

    name: ClassVar[str] = "echo and logprobs"
    context_tokens: ClassVar[int] = 2
    reserved_tokens: ClassVar[int] = 1
    """It generates a token."""
    vocabulary: VocabularyTexts
    adds_begin_token: bool = False
    """Whether the server puts the begin token before every text."""
    writes_spaces: bool = False
    """Whether it writes the leading space of a token, so that texts that differ in spaces are other tokens."""

    def request(self, query: Query) -> ServerRequest:
        """The request for a query.

        Raises:
            UnsendableError: if the server would put a begin token before a sequence that has none.
        """
        body = {
            "model": query.model,
            "prompt": self.text(query.token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "echo": True,
            "logprobs": query.top,
        }
        return ServerRequest(path="/v1/completions", body=body)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text that the server cuts into these tokens.

        Raises:
            UnsendableError: if the server would put a begin token before a sequence that has none, or if parts of
                characters are other tokens than those of the text.
        """
        if self.adds_begin_token and token_ids[0] != self.vocabulary.tokenizer.bos_token_id:
            raise UnsendableError(
                "the server puts a begin token before every text, and this sequence has none; read each document whole "
                "(a larger --window), or serve the model with vLLM or SGLang"
            )
        words = token_ids[1:] if self.adds_begin_token else token_ids
        text = self.vocabulary.decode(words)
        if self.vocabulary.has_parts(words) and not self.vocabulary.cuts_into(text, words):
            raise _other_tokens("it has parts of characters, as where a response was cut short")
        return text

    def read(self, answer: Any, query: Query) -> ListedLogprobs:
        """The log-probabilities in an answer.

        Raises:
            AnswerError: if they are not those that were asked for.
            UnsendableError: if the server cuts the text into other tokens, or does not score a begin token.
        """
        choice = _only_choice(answer)
        logprobs = _mapping(choice.get("logprobs"), "logprobs")
        texts, token_rows, top = (
            _list(logprobs.get(name), name) for name in ("tokens", "token_logprobs", "top_logprobs")
        )
        if not len(texts) == len(token_rows) == len(top):
            raise AnswerError(
                f"has {len(texts)} tokens, {len(token_rows)} log-probabilities and {len(top)} lists"
            )
        sent = len(query.token_ids)
        counted = _count(_mapping(answer.get("usage"), "usage"), "prompt_tokens")
        if counted != sent:
            raise _other_tokens(f"{counted} where it has {sent}")
        listed = self._listed(query.token_ids, texts)
        if len(texts) < len(listed):
            _check_count(len(texts) + sent - len(listed), sent, "tokens in its lists")
        rows = {index: row for row, index in enumerate(listed)}
        positions: list[Position] = []
        for index in range(query.first, sent):
            if index not in rows:
                raise UnsendableError(
                    f"it has the begin token {self.vocabulary.tokenizer.bos_token!r} as token {index}, of which the "
                    "server gives no log-probability; take it out of the text, or serve the model with vLLM or SGLang"
                )
            row, token = rows[index], query.token_ids[index]
            text = texts[row]
            if not isinstance(text, str) or not self._writes(token, text):
                raise _other_tokens(
                    f"{str(text)[:40]!r} as token {index}, which is {self.vocabulary.piece_of(token)!r}"
                )
            entries = {
                str(name): read_logprob(value) for name, value in _mapping(top[row], "top_logprobs").items()
            }
            entries[text] = read_logprob(token_rows[row])
            positions.append(position_from_texts(entries, token, text, query.top, self.vocabulary))
        return ListedLogprobs.of(positions)

    def _writes(self, token_id: int, text: str) -> bool:
        """Whether ``text`` is how the server may write a token."""
        matches = self.vocabulary.matches_exactly if self.writes_spaces else self.vocabulary.matches
        return matches(token_id, text)

    def _listed(self, token_ids: Sequence[int], texts: Sequence[Any]) -> list[int]:
        """Indices of the tokens that the lists of an answer have: all, or all but begin tokens."""
        begin = self.vocabulary.tokenizer.bos_token_id
        every = list(range(len(token_ids)))
        without_begin = [index for index in every if token_ids[index] != begin]

        def matches(listed: Sequence[int]) -> int:
            pairs = zip(listed, texts, strict=False)
            return sum(self.vocabulary.matches(token_ids[index], str(text)) for index, text in pairs)

        return max((without_begin, every), key=matches)

    def next_token_request(self, token_ids: Sequence[int], query: Query) -> ServerRequest:
        """The request for the distribution of the token after ``token_ids``."""
        body = {**self.request(query).body, "prompt": self.text(token_ids), "echo": False}
        return ServerRequest(path="/v1/completions", body=body)

    def read_next_token(self, answer: Any) -> dict[str, float]:
        """Text -> log-probability of the likeliest tokens after a text; raises AnswerError."""
        logprobs = _mapping(_only_choice(answer).get("logprobs"), "logprobs")
        rows = _list(logprobs.get("top_logprobs"), "top_logprobs")
        if not rows:
            raise AnswerError("has no log-probabilities of the token that it generated")
        return {str(name): read_logprob(value) for name, value in _mapping(rows[-1], "top_logprobs").items()}

    def of_answer(self, answer: Any, words: Sequence[int]) -> "EchoServer":
        """The dialect of a server that answered a text of these tokens, with or without a begin token before it.

        Raises:
            AnswerError: if it counts another number of tokens, or has no texts.
        """
        counted = _count(_mapping(_mapping(answer, "an answer").get("usage"), "usage"), "prompt_tokens")
        if counted not in (len(words), len(words) + 1):
            _check_count(counted, len(words), "tokens")
        begin = self.vocabulary.tokenizer.bos_token_id
        token_ids = list(words) if begin is None else [begin, *words]
        texts = _list(_mapping(_only_choice(answer).get("logprobs"), "logprobs").get("tokens"), "tokens")
        pairs = list(zip(self._listed(token_ids, texts), texts, strict=False))[1:]
        return replace(
            self,
            adds_begin_token=counted == len(words) + 1,
            writes_spaces=all(
                self.vocabulary.matches_exactly(token_ids[index], str(text)) for index, text in pairs
            ),
        )


def _other_tokens(difference: str) -> UnsendableError:
    """The error about a text that a server cuts into other tokens."""
    return UnsendableError(
        f"the server takes text, and cuts it into other tokens ({difference}); see that its model has the tokenizer of "
        "the local one, leave the sequence out, or serve the model with vLLM or SGLang, which take token ids"
    )


DIALECTS: Mapping[str, type[VLLM] | type[SGLang] | type[EchoServer]] = MappingProxyType(
    {"vllm": VLLM, "sglang": SGLang, "me": EchoServer}
)
"""By the owner that a server names in its list of models; "me" is llama-cpp-python's."""
NO_PROMPT_LOGPROBS = "llamacpp"
"""The owner that llama.cpp's token_rows server names."""


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    """``value`` as a JSON object; raises AnswerError."""
    if not isinstance(value, dict):
        raise AnswerError(f"has {str(value)[:40]!r} in place of {what}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    """``value`` as a JSON array; raises AnswerError."""
    if not isinstance(value, list):
        raise AnswerError(f"has {str(value)[:40]!r} in place of {what}")
    return value


def _count(usage: Mapping[str, Any], name: str) -> int:
    """A number of tokens in the field ``usage``; raises AnswerError."""
    value = usage.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise AnswerError(f"has {str(value)[:40]!r} as {name}")
    return value


def _check_count(count: int, expected: int, what: str) -> None:
    """Raise AnswerError unless two counts are equal."""
    if count != expected:
        raise AnswerError(f"has {count} {what} where {expected} were sent or asked for")


def _only_choice(answer: Any) -> Mapping[str, Any]:
    """The one entry of ``choices``; raises AnswerError."""
    choices = _list(_mapping(answer, "an answer").get("choices"), "choices")
    _check_count(len(choices), 1, "choices")
    return _mapping(choices[0], "choices")
