"""A connection to an inference server: which model and dialect it has, and whether its tokens are the local model's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kleash.engines.endpoints.dialects import DIALECTS, VLLM, Dialect, Query
from kleash.engines.endpoints.http_client import JSONClient
from kleash.engines.endpoints.listed_logprobs import (
    AnswerError,
    ListedLogprobs,
    check_totals,
    require_float32,
)
from kleash.errors import EndpointError, NonFiniteError
from kleash.models import TokenizerMismatchError, TokenSequence
from kleash.models.tokenizers import token_count
from kleash.store.job_folder import PROBE_NATS, probe_change

PROBE = "The quick brown fox isn't quick; it jumps over 12 lazy dogs, and they sleep."
"""A text that every server scores before the run, to check its tokens and their order."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
ADVICE = (
    "serve the model by vLLM or SGLang with the tokenizer of the local one, returning natural logarithms of "
    "probabilities in float32, or name a GGUF file itself, which needs no server"
)


class ListedModel(NamedTuple):
    """A model in a server's list."""

    name: str
    owner: str
    """By which the dialect is known."""
    context_length: int | None
    """Largest number of tokens that the server reads; None if it does not say."""
    is_adapter: bool
    """Whether it is listed as an adapter of another model."""


def find_model(client: JSONClient, model: str | None) -> ListedModel:
    """The model to measure, from the server's list of models.

    Args:
        client: for the server's address.
        model: the model's name on the server; None for the only one.

    Raises:
        EndpointError: if the server cannot be reached, has no such model, or has several and none was named.
    """
    answer = client.request("/v1/models")
    try:
        models = {str(entry["id"]): entry for entry in answer["data"]}
    except (LookupError, TypeError) as error:
        raise EndpointError(f"{client.subject} has no list of models at /v1/models; {ADVICE}") from error
    names = ", ".join(list(models)[:8])
    if model is None and len(models) != 1:
        raise EndpointError(
            f"{client.subject} has {len(models)} models ({names}); choose one with --policy-model or --reference-model"
        )
    if model is not None and model not in models:
        raise EndpointError(f"{client.subject} has no model {model!r}; it has {names}")
    name = next(iter(models)) if model is None else model
    entry = models[name]
    parent = models.get(str(entry.get("parent")), entry)
    length = entry.get("max_model_len") or parent.get("max_model_len")  # an adapter may lack it
    return ListedModel(name, str(entry.get("owned_by", "")), length, parent is not entry)


@dataclass(frozen=True, eq=False, kw_only=True)
class Endpoint:
    """A server that has been asked for its models and has scored a probe."""

    client: JSONClient
    dialect: Dialect
    tokenizer: Any
    """The local model's."""
    context_length: int | None
    """Largest number of tokens that the server reads; None if it does not say."""
    probe: Query
    """Of the model that is measured, and the number of tokens that are listed at each position."""
    probe_logps: tuple[float, ...]
    """Log-probabilities of the probe's scored tokens when the server was connected, in nats."""
    checked_texts: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """Token ids and texts of the server that were found to be those of the local tokenizer."""

    def require_same_model(self) -> None:
        """Score the probe again.

        Raises:
            EndpointError: if the server serves another model than when it was connected, or cannot be reached.
        """
        answer = ask(self.client, self.dialect, self.probe, "the probe")
        change = probe_change(self.probe_logps, answer.token_logp.tolist())
        if change > PROBE_NATS:
            raise EndpointError(
                f"{self.client.subject} serves another model than when the run began: its log-probabilities of the "
                f"probe have changed by {change:.2g} nats in the median; serve {self.probe.model} again, and go on "
                "with --resume"
            )

    def max_input_tokens(self, local_length: int | None) -> int | None:
        """Largest number of tokens before the last of a sequence; None if it is not known.

        Args:
            local_length: the local model's. A server that does not say its own is taken to have the same.
        """
        length = self.context_length or local_length
        if length is None:
            return None
        limit = max(1, length - self.dialect.reserved_tokens - 1)
        return limit if local_length is None else min(limit, local_length)

    def score(self, sequence: TokenSequence) -> ListedLogprobs:
        """What the server says about the response tokens of a sequence.

        Raises:
            EndpointError: if the server cannot be reached, or its answer is not about this sequence.
            TokenizerMismatchError: if a token has another text than here.
            NonFiniteError: if a response token has no finite log-probability.
        """
        query = replace(
            self.probe,
            token_ids=(*sequence.prompt_ids, *sequence.response_ids),
            scored=len(sequence.response_ids),
        )
        answer = ask(self.client, self.dialect, query, sequence.name)
        self.check_texts(answer.texts)
        if np.isneginf(answer.token_logp).any():
            raise NonFiniteError(
                f"{self.client.subject} gives response token {np.argmin(answer.token_logp)} of {sequence.name} a "
                "probability of 0, so its log ratio is infinite; see that it serves the model that the responses are of"
            )
        return answer

    def check_texts(self, texts: Mapping[int, str]) -> None:
        """Check that the server's tokens, texts by ids, have the texts of the local tokenizer.

        Raises:
            TokenizerMismatchError: with the first that differ.
        """
        unchecked = dict(text for text in texts.items() if text not in self.checked_texts)
        different = {token: text for token, text in unchecked.items() if not self._has_text(token, text)}
        if different:
            examples = "; ".join(
                f"token {token} is {text[:40]!r} there and {self._text_of(token)!r} here"
                for token, text in list(different.items())[:3]
            )
            raise TokenizerMismatchError(
                f"{self.client.subject} has another tokenizer: {len(different)} of {len(unchecked)} tokens differ "
                f"({examples}); compare models of one tokenizer"
            )
        self.checked_texts.update(unchecked.items())

    def _has_text(self, token: int, text: str) -> bool:
        """Whether ``text`` is how a server may write a token: leading spaces and parts of characters may differ."""
        local_text = self._text_of(token)
        if not text or REPLACEMENT in local_text or REPLACEMENT in text:
            return True
        # SentencePiece's mark of a space, which special tokens of DeepSeek have as well
        return local_text.replace("\u2581", " ").strip() == text.replace("\u2581", " ").strip()

    def _text_of(self, token: int) -> str:
        """The text of a token decoded by itself; "" beyond the tokenizer."""
        if token >= self._token_count:
            return ""
        return self.tokenizer.decode([token], clean_up_tokenization_spaces=False)

    @cached_property
    def _token_count(self) -> int:
        return token_count(self.tokenizer)


def ask(
    client: JSONClient, dialect: Dialect, query: Query, name: str, *, is_first: bool = False
) -> ListedLogprobs:
    """Send a query, and read and check the answer.

    Args:
        client: for the server.
        dialect: its own.
        query: the sequence.
        name: of the sequence, for errors.
        is_first: whether the rounding of the server's numbers is checked, too.

    Raises:
        EndpointError: if the server cannot be reached or refuses, or its answer has no log-probabilities, or rounded
            ones.
    """
    answer = client.request(dialect.path, dialect.request(query))
    try:
        listed = dialect.read(answer, query)
        check_totals(listed, query.vocab_size)
        if is_first:
            require_float32(listed)
    except AnswerError as error:
        raise EndpointError(f"{client.subject}: its answer for {name} {error}; {ADVICE}") from error
    return listed


def connect(
    client: JSONClient, listed_model: ListedModel, *, tokenizer: Any, vocab_size: int, top: int
) -> Endpoint:
    """Find the dialect of a server, and check its tokens and their order on a probe.

    Args:
        client: for the server's address.
        listed_model: the model to measure, from ``find_model``.
        tokenizer: the local model's.
        vocab_size: tokens that have a logit in the local model.
        top: number of likeliest tokens to ask for.

    Raises:
        EndpointError: if the server cannot be reached, gives no log-probabilities of given tokens, gives those of
            other positions, or rounds them.
        TokenizerMismatchError: if its tokens are not those of the tokenizer.
    """
    token_ids = tokenizer(PROBE)["input_ids"]
    dialect = DIALECTS.get(listed_model.owner, VLLM)
    query = Query(
        token_ids=token_ids,
        scored=len(token_ids) - 1,
        top=min(top, vocab_size),
        model=listed_model.name,
        vocab_size=vocab_size,
        is_adapter=listed_model.is_adapter,
    )
    answer = ask(client, dialect, query, "the probe", is_first=True)
    endpoint = Endpoint(
        client=client,
        dialect=dialect,
        tokenizer=tokenizer,
        context_length=listed_model.context_length,
        probe=query,
        probe_logps=tuple(answer.token_logp.tolist()),
    )
    endpoint.check_texts(answer.texts)
    return endpoint
