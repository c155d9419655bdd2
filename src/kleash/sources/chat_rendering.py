"""The text of conversations: rendered by a chat template, or their contents joined."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from kleash.errors import summarise_error
from kleash.sandbox.process import TemplateLimitError, render_chat
from kleash.sources.records import (
    SourceRecord,
    check_unicode,
    is_list_of,
    parse_if_json,
    show_value,
    without_nulls,
)
from kleash.sources.sequences import SourceForm

MARK = "kleash"
"""Content of the messages that show what a chat template writes around them."""
RENDERING_OPTIONS = frozenset(
    {"conversation", "tools", "documents", "chat_template", "tokenize", "padding", "truncation", "max_length"}
    | {"add_generation_prompt", "continue_final_message", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask"}
)
"""Arguments of ``apply_chat_template`` that are no variables of a template."""


def join_contents(record: SourceRecord, messages: list[dict[str, Any]], name: str) -> str:
    """The contents of messages, joined by blank lines.

    Args:
        record: the record that they come from, for errors.
        messages: as ``check_messages`` returns them.
        name: the field that they come from, for errors.

    Raises:
        SourceError: if a content is neither text nor a list of texts.
    """
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        parts: list[Any] = [part.get("text") for part in content] if isinstance(content, list) else [content]
        if not all(isinstance(part, str) for part in parts):
            raise record.error(
                f"expected the contents of {name!r} to be text and found {show_value(content)}; leave --chat-template "
                "raw out, or give text"
            )
        texts.append(check_unicode(record, name, "".join(parts)))
    return "\n\n".join(texts)


def render_answer(
    record: SourceRecord,
    prompt: list[dict[str, Any]],
    answer: list[dict[str, Any]],
    tokenizer: Any,
    eos_token_ids: tuple[int, ...] = (),
) -> tuple[str, str]:
    """The text that the chat template adds to a prompt for an answer, and the token that ends it.

    What the template writes after that token, such as a line break, belongs to the next turn and is left out.

    Args:
        record: the record that they come from, for errors.
        prompt: the messages before the answer.
        answer: the messages of the answer.
        tokenizer: its chat template is used.
        eos_token_ids: tokens at which the model stops, as in ``Model``.

    Returns:
        The text up to the end token, and the end token as text; "" if the template writes none.

    Raises:
        SourceError: if the template renders the prompt differently when the answer follows.
    """
    prompt_text = render_messages(record, prompt, tokenizer, "prompt", generate=True)
    whole_text = render_messages(record, prompt + answer, tokenizer, "completion")
    if not whole_text.startswith(prompt_text):
        raise record.error(
            "the chat template writes the prompt in another way once it is answered, so the answer "
            "cannot be told from it; give the response as the text that the model wrote, or 'prompt_token_ids' and "
            "'response_token_ids'"
        )
    return _split_end(whole_text[len(prompt_text) :], tokenizer, eos_token_ids)


def turn_end(tokenizer: Any, eos_token_ids: tuple[int, ...] = ()) -> str:
    """The token that the tokenizer's chat template writes at the end of an answer; "" if there is none."""
    text = render_example(tokenizer, [{"role": role, "content": MARK} for role in ("user", "assistant")])
    return _split_end(text.rpartition(MARK)[2], tokenizer, eos_token_ids)[1]


def render_example(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """The text that the tokenizer's chat template makes of messages; "" if it has none, or refuses them."""
    try:
        return render_chat(tokenizer, messages)
    except Exception:  # there is none, or it raises: a template is code of the checkpoint
        return ""


def _split_end(text: str, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> tuple[str, str]:
    """The text of an answer up to and including the token that ends its turn, and that token; "" if there is none.

    The end is looked for among the special tokens and the white space after the rest of the text. It is the first token
    there at which the model stops. If there is none, as in a base model with the template of a chat model, it is the
    last of the special tokens before white space.
    """
    special_tokens, stops = _end_tokens(tokenizer, len(tokenizer), eos_token_ids)
    tokens: list[tuple[str, int]] = []
    end = len(text.rstrip())
    while text.endswith(special_tokens, 0, end):
        token = next(token for token in special_tokens if text.endswith(token, 0, end))
        tokens.insert(0, (token, end))
        end -= len(token)
        while end and text[end - 1].isspace():
            end -= 1
    known_stops = stops.intersection(token for token, _ in tokens)
    for token, end in tokens:
        is_last = not text[end : end + 1].strip() or text.startswith(token, end)
        if token in known_stops or (is_last and not known_stops):
            return text[:end], token
    return text, ""


@lru_cache(maxsize=4)
def _end_tokens(
    tokenizer: Any, size: int, eos_token_ids: tuple[int, ...]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """The special tokens of a tokenizer of ``size`` tokens, long ones first, and those at which the model stops."""
    stops = {str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in eos_token_ids if token_id < size}
    special_tokens = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special_tokens |= {*stops, *tokenizer.all_special_tokens}
    return tuple(
        sorted(filter(str.strip, special_tokens), key=lambda token: (-len(token), token))
    ), frozenset(stops)


def render_messages(
    record: SourceRecord, messages: list[dict[str, Any]], tokenizer: Any, name: str, *, generate: bool = False
) -> str:
    """The text of messages, rendered by the tokenizer's chat template.

    A content of text parts is given to a template that takes texts as one text, and a text as a part to a template that
    takes parts.

    Args:
        record: the record that they come from, for errors.
        messages: as ``check_messages`` returns them.
        tokenizer: its chat template is used.
        name: the field that they come from, for errors.
        generate: whether to end where the assistant continues: after the generation prompt, or within the last message
            if it is the assistant's.

    Raises:
        SourceError: if there is no template, it raises an error, or it prints parts as Python does.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise record.error(
            f"a chat template renders its {name!r}, and the policy's tokenizer has none; give texts, a policy "
            "whose tokenizer has one, or --chat-template raw where the command has this option"
        )
    continues_last = generate and messages[-1]["role"] == "assistant"
    render = partial(
        render_chat,
        tokenizer,
        add_generation_prompt=generate and not continues_last,
        continue_final_message=continues_last,
        **template_options(record),
    )
    try:
        text = _render_in_its_form(messages, render)
    except Exception as error:  # a template is code of the checkpoint and can raise any exception
        raise record.error(f"the chat template refuses the messages: {summarise_error(error)}") from error
    if _prints_parts(text, messages):
        raise record.error(
            f"the chat template prints the parts of a content of {name!r} as Python does; give the "
            "content as text"
        )
    return check_unicode(record, name, text)


def _render_in_its_form(messages: list[dict[str, Any]], render: Callable[[Any], str]) -> str:
    """The rendered messages, whose contents have the form that the template takes: text, or a list of parts.

    A template that takes the other form raises, prints parts as Python does, or leaves texts out. The form is that of
    the messages, unless the template shows the contents in another one alone.

    Raises:
        Exception: that of the template for the messages as they are.
    """
    as_text = [
        {**message, "content": _joined_parts(message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    as_parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
    results: list[str | Exception] = []
    for form in (messages, *(form for form in (as_text, as_parts) if form != messages)):
        try:
            result: str | Exception = render(form)
        except TemplateLimitError:
            raise
        except Exception as error:  # of the template, which may take another form
            result = error
        if isinstance(result, str) and _shows_contents(result, messages):
            return result
        results.append(result)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _joined_parts(content: Any) -> Any:
    """The text of a content of parts; any other content as it is."""
    if not isinstance(content, list):
        return content
    return "".join(str(part.get("text") or "") for part in content)


def _shows_contents(text: str, messages: list[dict[str, Any]]) -> bool:
    """Whether a rendered text has all that the system and users say, perhaps trimmed, and no printed parts."""
    texts = [_joined_parts(each.get("content")) for each in messages if each["role"] in ("system", "user")]
    return not _prints_parts(text, messages) and all(
        each.strip() in text for each in texts if each is not None
    )


def _prints_parts(text: str, messages: list[dict[str, Any]]) -> bool:
    """Whether a rendered text has the parts of a content as Python prints them."""
    return any(
        content and isinstance(content, list) and str(content) in text
        for content in (message.get("content") for message in messages)
    )


def form_of_text(text: str, tokenizer: Any) -> SourceForm:
    """Whether a chat template made a plain text: it begins as the template does, or has a special token that it writes.

    Such are the prompts in a log of a program that rendered them, with or without their special tokens.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "text"
    beginnings, special_tokens = _beginning_of_template(
        tokenizer, len(tokenizer), str(tokenizer.chat_template)
    )
    is_rendered = text.startswith(beginnings) or any(token in text for token in special_tokens)
    return "rendered text" if is_rendered else "text"


@lru_cache(maxsize=4)
def _beginning_of_template(
    tokenizer: Any, size: int, template: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a chat template writes before a user's message: as texts, and the special tokens in it but the first.

    A tokenizer may get other tokens or another template later; ``size`` and ``template`` are those that it has.
    """
    text = render_example(tokenizer, [{"role": "user", "content": MARK}])
    if not text:
        return (), ()
    bos = tokenizer.bos_token or ""
    before = without_special_tokens = text.partition(MARK)[0].removeprefix(bos)
    special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    for token in special_tokens:
        without_special_tokens = without_special_tokens.replace(token, "")
    beginnings = [text for text in (before, without_special_tokens) if text.strip()]
    return (*beginnings, *filter(None, [bos])), tuple(token for token in special_tokens if token in before)


def template_options(record: SourceRecord) -> dict[str, Any]:
    """The tools of a record, and the variables of its chat template: TRL's "tools" and "chat_template_kwargs".

    Raises:
        SourceError: if the tools are no list of objects, the variables no object, or one of them an option.
    """
    tools, variables = (
        parse_if_json(record.source_fields.get(name)) for name in ("tools", "chat_template_kwargs")
    )
    if tools and not is_list_of(tools, dict):
        raise record.error(
            f"expected 'tools' to be a list of JSON schemas and found {show_value(tools)}; leave the column out"
        )
    if variables and (not isinstance(variables, dict) or RENDERING_OPTIONS.intersection(variables)):
        raise record.error(
            "expected 'chat_template_kwargs' to be an object with variables of the chat template and found "
            f"{show_value(variables)}"
        )
    options: dict[str, Any] = {"tools": [without_nulls(tool) for tool in tools]} if tools else {}
    return options | {name: value for name, value in (variables or {}).items() if value is not None}
