"""A connection to an inference server: which model and dialect it has, and whether its tokens are the local model's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kleash.engines.endpoints.answer_precision import LogprobPrecision, check_totals, find_precision
from kleash.engines.endpoints.dialects import DIALECTS, LLAMA_CPP, VLLM
from kleash.engines.endpoints.http_client import JSONClient, RefusedRequestError
from kleash.engines.endpoints.listed_logprobs import (
    AnswerError,
    ListedLogprobs,
    VocabularyTexts,
)
from kleash.engines.endpoints.queries import Dialect, Query
from kleash.errors import EndpointError, NonFiniteError
from kleash.models import TokenizerMismatchError, TokenSequence
from kleash.store.job_folder import PROBE_NATS, probe_change

PROBE = "The quick brown fox isn't quick; it jumps over 12 lazy dogs, and they sleep."
"""A text that every server scores before the run, to check its tokens and their order."""
SERVERS_ADVICE = "serve the model with vLLM or SGLang"

ANSWER_ADVICE = (
    "see that it returns natural logarithms of probabilities, and that its model has the tokenizer of the "
    "local one"
)


class ListedModel(NamedTuple):
    """A model in a server's list."""

    name: str
    owner: str
    """By which the dialect is known; "" if the server has no list."""
    context_length: int | None
    """Largest number of tokens that the server reads; None if it does not say."""
    is_adapter: bool = False
    """Whether it is listed as an adapter of another model."""


def find_model(client: JSONClient, model: str | None) -> ListedModel:
    """The model to measure, from the server's list of models.

    Args:
        client: for the server's address.
        model: the model's name on the server; None for the only one.

    Raises:
        EndpointError: if the server cannot be reached, has no such model, or has several and none was named.
    """
    answer = client.get("/v1/models")
    entries = answer.get("data") if isinstance(answer, dict) else None
    models = {
        entry["id"]: entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    }
    if not models:
        if model is None and answer is None:
            raise EndpointError(
                f"{client.subject} has no list of models at {client.url}/v1/models; see that its address is what "
                "stands before /v1/models, or name its model with --policy-model or --reference-model"
            )
        if model is None:
            raise EndpointError(
                f"{client.subject} lists no models; load one, or name its model with --policy-model or "
                "--reference-model"
            )
        return ListedModel(model, "", None)
    names = ", ".join(list(models)[:8])
    if model is None and len(models) > 1:
        raise EndpointError(
            f"{client.subject} has {len(models)} models ({names}); choose one with --policy-model or --reference-model"
        )
    if model is not None and model not in models:
        raise EndpointError(f"{client.subject} has no model {model!r}; it has {names}")
    name = next(iter(models)) if model is None else model
    entry = models[name]
    parent = models.get(str(entry.get("parent")))
    is_adapter = parent is not None and parent is not entry
    length = entry.get("max_model_len") or (parent or entry).get("max_model_len")  # an adapter may lack it
    is_length = isinstance(length, int) and not isinstance(length, bool) and length > 0
    return ListedModel(name, str(entry.get("owned_by", "")), length if is_length else None, is_adapter)


@dataclass(frozen=True, eq=False, kw_only=True)
class Endpoint:
    """A server that has been asked for its models and has scored a probe."""

    client: JSONClient
    dialect: Dialect
    model: str
    """The model's name on the server."""
    top: int
    """Number of likeliest tokens listed at each position."""
    context_length: int | None
    """Largest number of tokens that the server reads; None if it does not say."""
    precision: LogprobPrecision
    """Of the log-probabilities that the server writes."""
    probe: Query
    probe_logps: tuple[float, ...]
    """Log-probabilities of the probe's scored tokens when the server was connected, in nats."""
    checked_texts: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """Token ids and texts of the server that were found to be those of the local tokenizer."""

    def require_same_model(self) -> None:
        """Score the probe again.

        Raises:
            EndpointError: if the server serves another model than when it was connected, or cannot be reached.
        """
        try:
            answer = _ask(self.client, self.dialect, self.probe)
        except AnswerError as error:
            raise EndpointError(
                f"{self.client.subject}: the answer to the probe {error}; {ANSWER_ADVICE}"
            ) from error
        change = probe_change(self.probe_logps, answer.token_logp.tolist())
        if change > PROBE_NATS:
            raise EndpointError(
                f"{self.client.subject} serves another model than when the run began: its log-probabilities of the "
                f"probe have changed by {change:.2g} nats in the median; serve {self.model} again, and go on with "
                "--resume"
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
        vocabulary = self.dialect.vocabulary
        try:
            answer = _ask(self.client, self.dialect, query)
            check_totals(answer, np.asarray(sequence.response_ids), vocabulary.size, self.precision)
        except AnswerError as error:
            raise EndpointError(
                f"{self.client.subject}: the answer for {sequence.name} {error}; {ANSWER_ADVICE}"
            ) from error
        except RefusedRequestError as error:
            raise EndpointError(f"{error}{error.advice}") from error
        texts = [text for text in answer.texts.items() if text not in self.checked_texts]
        check_texts(self.client, vocabulary, dict(texts))
        self.checked_texts.update(texts)
        for position, logp in enumerate(answer.token_logp.tolist()):
            if logp == -float("inf"):
                raise NonFiniteError(
                    f"{self.client.subject} gives response token {position} of {sequence.name} a probability of 0, so "
                    "its log ratio is infinite; see that it serves the model that the responses are of"
                )
        return answer


def _ask(client: JSONClient, dialect: Dialect, query: Query) -> ListedLogprobs:
    """Send a query and read the answer; raises AnswerError and EndpointError."""
    request = dialect.request(query)
    return dialect.read(client.post(request.path, request.body, max_bytes=query.max_answer_bytes), query)


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
        EndpointError: if the server cannot be reached, gives no log-probabilities of given tokens, or gives those of
            other positions.
        TokenizerMismatchError: if its tokens are not those of the tokenizer.
    """
    name, owner, context_length, is_adapter = listed_model
    if owner in LLAMA_CPP:
        raise EndpointError(
            f"{client.subject} is {LLAMA_CPP[owner]}; kleash reads the GGUF file itself, exactly: name the file in "
            "place of the address"
        )
    vocabulary = VocabularyTexts(tokenizer=tokenizer, size=vocab_size)
    token_ids = tokenizer(PROBE)["input_ids"]
    dialect = DIALECTS.get(owner, VLLM)(vocabulary=vocabulary)
    query = Query(
        token_ids=token_ids,
        scored=len(token_ids) - 1,
        top=min(top, vocab_size),
        model=name,
        is_adapter=is_adapter,
    )
    advice = ANSWER_ADVICE if owner in DIALECTS else SERVERS_ADVICE
    try:
        answer = _ask(client, dialect, query)
        precision = find_precision(answer)
        check_totals(answer, np.asarray(token_ids[query.first :]), vocab_size, precision)
    except AnswerError as error:
        raise EndpointError(
            f"{client.subject} ({dialect.name}): its answer to the probe {error}; {advice}"
        ) from error
    except RefusedRequestError as error:
        raise EndpointError(f"{error}{error.advice if owner in DIALECTS else f'; {advice}'}") from error
    check_texts(client, vocabulary, answer.texts)
    return Endpoint(
        client=client,
        dialect=dialect,
        model=name,
        top=query.top,
        context_length=context_length,
        precision=precision,
        probe=query,
        probe_logps=tuple(answer.token_logp.tolist()),
    )


def check_texts(client: JSONClient, vocabulary: VocabularyTexts, texts: Mapping[int, str]) -> None:
    """Check that the server's tokens, texts by ids, have the texts of the local tokenizer.

    Raises:
        TokenizerMismatchError: with the first that differ.
    """
    different = {token_id: text for token_id, text in texts.items() if not vocabulary.matches(token_id, text)}
    if different:
        examples = "; ".join(
            f"token {token_id} is {text[:40]!r} there and {vocabulary.text_of(token_id)!r} here"
            for token_id, text in list(different.items())[:3]
        )
        raise TokenizerMismatchError(
            f"{client.subject} has another tokenizer: {len(different)} of {len(texts)} tokens differ "
            f"({examples}); compare models of one tokenizer"
        )
