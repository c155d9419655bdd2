"""Completions with echoed prompts, as of llama-cpp-python: how they are asked for, and how they are answered."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kleash.engines.endpoints.answer_fields import (
    check_count,
    only_choice,
    read_array,
    read_count,
    read_object,
)
from kleash.engines.endpoints.listed_logprobs import (
    AnswerError,
    ListedLogprobs,
    Position,
    UnsendableError,
    VocabularyTexts,
    position_from_texts,
    read_logprob,
)
from kleash.engines.endpoints.queries import Query, ServerRequest


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
        choice = only_choice(answer)
        logprobs = read_object(choice.get("logprobs"), "logprobs")
        texts, token_rows, top = (
            read_array(logprobs.get(name), name) for name in ("tokens", "token_logprobs", "top_logprobs")
        )
        if not len(texts) == len(token_rows) == len(top):
            raise AnswerError(
                f"has {len(texts)} tokens, {len(token_rows)} log-probabilities and {len(top)} lists"
            )
        sent = len(query.token_ids)
        counted = read_count(read_object(answer.get("usage"), "usage"), "prompt_tokens")
        if counted != sent:
            raise _other_tokens(f"{counted} where it has {sent}")
        listed = self._listed(query.token_ids, texts)
        if len(texts) < len(listed):
            check_count(len(texts) + sent - len(listed), sent, "tokens in its lists")
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
                str(name): read_logprob(value)
                for name, value in read_object(top[row], "top_logprobs").items()
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
        logprobs = read_object(only_choice(answer).get("logprobs"), "logprobs")
        rows = read_array(logprobs.get("top_logprobs"), "top_logprobs")
        if not rows:
            raise AnswerError("has no log-probabilities of the token that it generated")
        return {
            str(name): read_logprob(value) for name, value in read_object(rows[-1], "top_logprobs").items()
        }

    def of_answer(self, answer: Any, words: Sequence[int]) -> "EchoServer":
        """The dialect of a server that answered a text of these tokens, with or without a begin token before it.

        Raises:
            AnswerError: if it counts another number of tokens, or has no texts.
        """
        counted = read_count(
            read_object(read_object(answer, "an answer").get("usage"), "usage"), "prompt_tokens"
        )
        if counted not in (len(words), len(words) + 1):
            check_count(counted, len(words), "tokens")
        begin = self.vocabulary.tokenizer.bos_token_id
        token_ids = list(words) if begin is None else [begin, *words]
        texts = read_array(
            read_object(only_choice(answer).get("logprobs"), "logprobs").get("tokens"), "tokens"
        )
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
