"""How inference servers are asked for the log-probabilities of given tokens, and how they answer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from kleash.engines.endpoints.answer_fields import check_count, only_choice, read_array, read_object
from kleash.engines.endpoints.listed_logprobs import (
    AnswerError,
    ListedLogprobs,
    Position,
    VocabularyTexts,
    position_from_ids,
    read_logprob,
    read_token_id,
)
from kleash.engines.endpoints.queries import Query, ServerRequest


@dataclass(frozen=True, kw_only=True)
class VLLM:
    """vLLM's completions with ``prompt_logprobs``: a mapping from token ids for each token of the prompt.

    The scored token is among the K likeliest or listed after them, so a position has K or K + 1 entries. A
    log-probability of -inf is written as -9999.
    """

    name: ClassVar[str] = "vLLM"
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
        choice = only_choice(answer)
        rows = choice.get("prompt_logprobs", answer.get("prompt_logprobs"))
        if not isinstance(rows, list):
            raise AnswerError("has no prompt_logprobs")
        check_count(len(rows), len(query.token_ids), "prompt_logprobs")
        texts: dict[int, str] = {}
        positions: list[Position] = []
        for token, row in zip(query.token_ids[query.first :], rows[query.first :], strict=True):
            entries, rank = {}, None
            for key, entry in read_object(row, "prompt_logprobs").items():
                token_id = read_token_id(key, self.vocabulary.size)
                fields = read_object(entry, "a log-probability")
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
        meta = read_object(read_object(answer, "an answer").get("meta_info"), "meta_info")
        token_rows, top = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
        if not isinstance(token_rows, list) or not isinstance(top, list):
            raise AnswerError("has no input_token_logprobs and input_top_logprobs")
        for name, rows in (("input_token_logprobs", token_rows), ("input_top_logprobs", top)):
            if not query.scored <= len(rows) <= len(query.token_ids):
                check_count(len(rows), query.scored + 1, name)
        texts: dict[int, str] = {}
        positions: list[Position] = []
        tokens = query.token_ids[query.first :]
        for token, own_entry, row in zip(
            tokens, token_rows[-query.scored :], top[-query.scored :], strict=True
        ):
            entries = dict(self._entry(entry, texts) for entry in read_array(row, "input_top_logprobs"))
            check_count(len(entries), min(query.top, self.vocabulary.size), "tokens at a position")
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
        values = read_array(entry, "a log-probability")
        if len(values) < 2:
            raise AnswerError(
                f"has an entry of {len(values)} values in place of a log-probability and a token id"
            )
        token_id = read_token_id(values[1], self.vocabulary.size)
        if len(values) > 2 and isinstance(values[2], str):
            texts[token_id] = values[2]
        return token_id, -math.inf if values[0] is None else read_logprob(values[0])


DIALECTS: Mapping[str, type[VLLM] | type[SGLang]] = MappingProxyType({"vllm": VLLM, "sglang": SGLang})
"""By the owner that a server names in its list of models. Any other server is asked as vLLM is."""
LLAMA_CPP = MappingProxyType({"llamacpp": "llama.cpp's own server", "me": "llama-cpp-python"})
"""Servers of llama.cpp by the owner that they name; kleash reads the GGUF file itself, exactly."""
