"""What an inference server is asked, and the interface of the kinds of servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from kleash.engines.endpoints.http_client import MAX_ANSWER_BYTES
from kleash.engines.endpoints.listed_logprobs import ListedLogprobs, VocabularyTexts

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
