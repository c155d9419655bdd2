"""A connection to an inference server: which model and dialect it has, and whether its tokens are the local model's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kleash.engines.endpoints.answer_precision import LogprobPrecision, check_totals, find_precision
from kleash.engines.endpoints.dialects import DIALECTS, NO_PROMPT_LOGPROBS, VLLM
from kleash.engines.endpoints.echo_server import EchoServer
from kleash.engines.endpoints.http_client import JSONClient, RefusedRequestError
from kleash.engines.endpoints.listed_logprobs import (
    AnswerError,
    ListedLogprobs,
    UnsendableError,
    VocabularyTexts,
)
from kleash.engines.endpoints.queries import Dialect, Query
from kleash.errors import EndpointError, NonFiniteError
from kleash.models import TokenizerMismatchError, TokenSequence
from kleash.store.job_folder import PROBE_NATS, probe_change

PROBE = "The quick brown fox isn't quick; it jumps over 12 lazy dogs, and they sleep."
"""A text that every server scores before the run, to check its tokens and their order."""
ALIGNMENT_NATS = 0.25
"""Largest difference of a likely token's log-probability between a prompt and a generation. Rounding in bfloat16 stays
below it; the log-probabilities of another position do not."""
ALIGNMENT_PREFIXES = (0.4, 0.6, 0.8)
"""Shares of the probe after which the two are compared."""
LIKELY_NATS = -4.0
"""Tokens below this log-probability are not compared."""
SERVERS_ADVICE = "serve the model with vLLM, SGLang or llama-cpp-python"

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

    def scorable(self, sequence: TokenSequence) -> TokenSequence | None:
        """The sequence without the first tokens that the server does not score; None if no other token is left."""
        missing = self.dialect.context_tokens - len(sequence.prompt_ids)
        if missing <= 0:
            return sequence
        if missing >= len(sequence.response_ids):
            return None
        logp_sampled = sequence.logp_sampled
        return replace(
            sequence,
            prompt_ids=(*sequence.prompt_ids, *sequence.response_ids[:missing]),
            response_ids=sequence.response_ids[missing:],
            logp_sampled=None if logp_sampled is None else logp_sampled[missing:],
        )

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
        except UnsendableError as error:
            raise EndpointError(f"{self.client.subject} cannot score {sequence.name}: {error}") from error
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
    if owner == NO_PROMPT_LOGPROBS:
        raise EndpointError(
            f"{client.subject} is llama.cpp's own server, which gives log-probabilities of generated tokens only, and "
            f"kleash needs those of given tokens: {SERVERS_ADVICE}"
        )
    vocabulary = VocabularyTexts(tokenizer=tokenizer, size=vocab_size)
    token_ids = tokenizer(PROBE)["input_ids"]
    dialects = [DIALECTS[owner]] if owner in DIALECTS else [VLLM, EchoServer]
    failures: list[str] = []
    without_answer: list[EndpointError] = []
    for kind in dialects:
        scored = len(token_ids) - kind.context_tokens
        query = Query(
            token_ids=token_ids,
            scored=scored,
            top=min(top, vocab_size),
            model=name,
            is_adapter=is_adapter,
        )
        try:
            dialect, answer = _probe(client, kind(vocabulary=vocabulary), query)
            precision = find_precision(answer)
            check_totals(answer, np.asarray(token_ids[query.first :]), vocab_size, precision)
        except AnswerError as error:
            failures.append(f"as {kind.name}, its answer to the probe {error}")
        except UnsendableError as error:
            if len(dialects) == 1:
                raise EndpointError(f"{client.subject} cannot score the probe: {error}") from error
            failures.append(f"as {kind.name}, {error}")
        except RefusedRequestError as error:
            if len(dialects) == 1:
                raise EndpointError(f"{error}{error.advice}") from error
            failures.append(f"as {kind.name}, it {str(error).removeprefix(client.subject + ' ')}")
        except EndpointError as error:
            without_answer.append(error)
            failures.append(f"as {kind.name}, it {str(error).removeprefix(client.subject + ' ')}")
        else:
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
    if len(without_answer) == len(dialects):  # no server, a refused key, or an error that each request has
        raise without_answer[0]
    reason = "; ".join(failures)
    if len(dialects) == 1:
        raise EndpointError(
            f"{client.subject} ({dialects[0].name}): {reason.partition(', ')[2]}; {ANSWER_ADVICE}"
        )
    raise EndpointError(
        f"{client.subject} gives no log-probabilities of given tokens, which kleash needs: {SERVERS_ADVICE} ({reason})"
    )


def _probe(client: JSONClient, dialect: Dialect, query: Query) -> tuple[Dialect, ListedLogprobs]:
    """Score the probe; for a server that takes text, also find out whether it adds a begin token.

    Raises:
        AnswerError, EndpointError: as ``Endpoint.score``; also if its positions are shifted.
    """
    if isinstance(dialect, EchoServer):
        begin = int(query.token_ids[0] == dialect.vocabulary.tokenizer.bos_token_id)
        words = query.token_ids[begin:]
        request = dialect.request(replace(query, token_ids=words, scored=1))
        dialect = dialect.of_answer(client.post(request.path, request.body), words)
    answer = _ask(client, dialect, query)
    if isinstance(dialect, EchoServer):
        check_alignment(client, dialect, query, answer)
    return dialect, answer


def check_alignment(client: JSONClient, dialect: EchoServer, query: Query, answer: ListedLogprobs) -> None:
    """Check that the log-probabilities of a prompt are those of generating its tokens.

    After some prefixes of the probe the server is asked for the next token's distribution, which must agree with the
    distribution at the same position of the prompt. llama-cpp-python gives that of the next position to a prompt that
    begins without a begin token.

    Raises:
        EndpointError: if they do not agree.
    """
    for share in ALIGNMENT_PREFIXES:
        index = max(query.first, round(share * len(query.token_ids)))
        request = dialect.next_token_request(query.token_ids[:index], query)
        generated = dialect.read_next_token(client.post(request.path, request.body))
        row = index - query.first
        token = query.token_ids[index]
        listed = dict(zip(answer.listed_ids[row].tolist(), answer.listed_logp[row].tolist(), strict=True))
        listed.setdefault(token, float(answer.token_logp[row]))
        for text, logp in generated.items():
            token_id = dialect.vocabulary.id_of(text)
            if token_id is None or logp < LIKELY_NATS:
                continue
            prompt_logp = listed.get(token_id, float(answer.unlisted_most[row]))
            difference = abs(prompt_logp - logp) if token_id in listed else logp - prompt_logp
            if difference > ALIGNMENT_NATS:
                raise EndpointError(
                    f"{client.subject} gives {text!r} a log-probability of {logp:.2f} where it generates the token "
                    f"after {index} tokens, and {prompt_logp:.2f} or less in a prompt: its log-probabilities of "
                    "prompts belong to other positions (llama-cpp-python shifts them by one token for a model "
                    "without a begin token); serve the model with vLLM or SGLang"
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
