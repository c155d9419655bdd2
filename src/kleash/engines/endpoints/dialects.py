"""How inference servers are asked for the log-probabilities of given tokens, and how they answer."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kleash.engines.endpoints.listed_logprobs import AnswerError, ListedLogprobs


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
    vocab_size: int
    """Number of tokens of the model."""
    is_adapter: bool = False
    """Whether the server lists it as an adapter of another model."""

    @property
    def first(self) -> int:
        """Index of the first scored token."""
        return len(self.token_ids) - self.scored


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one kind of server is asked, and how it answers."""

    name: str
    path: str
    """Of requests."""
    reserved_tokens: int
    """Tokens of its context length that a sequence cannot have. The last token of a sequence is sent too."""
    request: Callable[[Query], Mapping[str, Any]]
    """The body of the request for a query."""
    rows: Callable[[Any, Query, dict[int, str]], Iterator[Mapping[int, float]]]
    """For each scored token of an answer, log-probabilities by token id; the texts of tokens are put into the last
    argument. An answer of another form may raise any error of a look-up or a conversion."""

    def read(self, answer: Any, query: Query) -> ListedLogprobs:
        """The log-probabilities in an answer.

        Raises:
            AnswerError: if they are not those that were asked for.
        """
        texts: dict[int, str] = {}
        try:
            return ListedLogprobs.of(
                query.token_ids[query.first :],
                self.rows(answer, query, texts),
                top=query.top,
                vocab_size=query.vocab_size,
                texts=texts,
            )
        except AnswerError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"[:200]
            raise AnswerError(f"has not the form of {self.name}'s ({reason})") from error


def _rows_of_vllm(answer: Any, query: Query, texts: dict[int, str]) -> Iterator[Mapping[int, float]]:
    """The rows of ``prompt_logprobs``: a mapping from token ids for each token of the prompt.

    The scored token is among the K likeliest or listed after them, so a position has K or K + 1 entries. A
    log-probability of -inf is written as -9999.
    """
    (choice,) = answer["choices"]
    rows = choice["prompt_logprobs"]
    if len(rows) != len(query.token_ids):
        raise AnswerError(f"has {len(rows)} prompt_logprobs where {len(query.token_ids)} tokens were sent")
    for row in rows[query.first :]:
        entries = {int(str(key)): entry for key, entry in row.items()}
        texts.update({token: entry.get("decoded_token") or "" for token, entry in entries.items()})
        yield {token: float(entry["logprob"]) for token, entry in entries.items()}


def _rows_of_sglang(answer: Any, query: Query, texts: dict[int, str]) -> Iterator[Mapping[int, float]]:
    """The rows of ``input_top_logprobs`` with those of ``input_token_logprobs``: lists of [logp, token id, text].

    The lists begin at ``logprob_start_len`` and end with the last token of the prompt; the first entry may be null. A
    log-probability of -inf is written as null. The token of the largest id is scored, and written as token 0.
    """
    meta = (answer[0] if isinstance(answer, list) else answer)["meta_info"]
    token_rows = meta["input_token_logprobs"][-query.scored :]
    top_rows = meta["input_top_logprobs"][-query.scored :]
    if not len(token_rows) == len(top_rows) == query.scored:
        raise AnswerError(
            f"has {len(token_rows)} input_token_logprobs where {query.scored} tokens were to be scored"
        )
    last = query.vocab_size - 1
    for token, (own_logp, own_id, own_text), row in zip(
        query.token_ids[query.first :], token_rows, top_rows, strict=True
    ):
        if own_id not in (token, 0 if token == last else token):
            raise AnswerError(f"scores token {own_id} where token {token} was sent")
        if len(row) != min(query.top, query.vocab_size):
            raise AnswerError(f"lists {len(row)} tokens where {query.top} were asked for")
        texts[token] = own_text if own_id == token and own_text else ""
        texts.update({int(str(each)): text or "" for _, each, text in row})
        entries = {int(str(each)): _or_zero(logp) for logp, each, _ in row}
        yield {token: _or_zero(own_logp)} | entries


def _or_zero(logp: Any) -> float:
    """A log-probability of SGLang, with -inf, the logarithm of 0, for null."""
    return -math.inf if logp is None else float(logp)


VLLM = Dialect(
    name="vLLM",
    path="/v1/completions",
    reserved_tokens=1,  # it generates a token
    request=lambda query: {
        "model": query.model,
        "prompt": list(query.token_ids),
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": query.top,
    },
    rows=_rows_of_vllm,
)
SGLANG = Dialect(
    name="SGLang",
    path="/generate",
    reserved_tokens=7,  # `max_req_input_len` of its workers is 6 tokens less, and a request is shorter than that
    request=lambda query: {
        "input_ids": list(query.token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": query.first - 1,
        "top_logprobs_num": query.top,
        "return_text_in_logprobs": True,
        **({"lora_path": query.model} if query.is_adapter else {}),
    },
    rows=_rows_of_sglang,
)
DIALECTS: Mapping[str, Dialect] = MappingProxyType({"vllm": VLLM, "sglang": SGLANG})
"""By the owner that a server names in its list of models. Any other server is asked as vLLM is."""
