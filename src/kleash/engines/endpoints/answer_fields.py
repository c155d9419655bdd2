"""Fields of the JSON answers of inference servers, checked for their types."""

from collections.abc import Mapping
from typing import Any

from kleash.engines.endpoints.listed_logprobs import AnswerError


def read_object(value: Any, what: str) -> Mapping[str, Any]:
    """``value`` as a JSON object; raises AnswerError."""
    if not isinstance(value, dict):
        raise AnswerError(f"has {str(value)[:40]!r} in place of {what}")
    return value


def read_array(value: Any, what: str) -> list[Any]:
    """``value`` as a JSON array; raises AnswerError."""
    if not isinstance(value, list):
        raise AnswerError(f"has {str(value)[:40]!r} in place of {what}")
    return value


def check_count(count: int, expected: int, what: str) -> None:
    """Raise AnswerError unless two counts are equal."""
    if count != expected:
        raise AnswerError(f"has {count} {what} where {expected} were sent or asked for")


def only_choice(answer: Any) -> Mapping[str, Any]:
    """The one entry of ``choices``; raises AnswerError."""
    choices = read_array(read_object(answer, "an answer").get("choices"), "choices")
    check_count(len(choices), 1, "choices")
    return read_object(choices[0], "choices")
