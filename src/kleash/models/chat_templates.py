"""Chat templates, which are programs of a checkpoint's author, rendered in a process that can be killed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kleash.errors import SourceError
from kleash.extras import need
from kleash.models.bounded_work import WORK, FailedError, StoppedError

_LOCK = threading.RLock()


class TemplateError(SourceError):
    """A chat template that does not end, makes too long a text, or refuses the messages."""


def chat_text(tokenizer: Any, messages: list[Any], **options: Any) -> str:
    """The text that a tokenizer's chat template makes of messages, as ``apply_chat_template`` gives it.

    Args:
        tokenizer: of transformers.
        messages: a conversation.
        options: of ``apply_chat_template``, but for ``tokenize``.

    Raises:
        TemplateError: if the template does not end, or takes too much memory.
    """
    with bounded_templates():
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@contextmanager
def bounded_templates() -> Iterator[None]:
    """Inside, every tokenizer of transformers has its templates rendered in the process that can be killed."""
    module: Any = need("transformers.tokenization_utils_base", "models")
    with _LOCK:
        own = module.render_jinja_template
        module.render_jinja_template = _render
    try:
        yield
    finally:
        with _LOCK:
            module.render_jinja_template = own


def _render(conversations: Any, tools: Any = None, **request: Any) -> Any:
    """Stands in for transformers' ``render_jinja_template``: the same arguments, the same texts."""
    if tools is not None and any(callable(tool) for tool in tools):
        schema = need("transformers.utils.chat_template_utils", "models").get_json_schema
        tools = [schema(tool) if callable(tool) else tool for tool in tools]
    try:
        texts, places = WORK.ask("render", {"conversations": conversations, "tools": tools, **request})
    except StoppedError as error:
        raise TemplateError(
            f"it was stopped, since {error}; give a template that ends, or prompts as text"
        ) from error
    except FailedError as error:
        raise TemplateError(str(error)) from error
    return texts, places
