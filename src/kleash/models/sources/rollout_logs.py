"""Responses in the logs of other programs: the samples of lm-evaluation-harness.

The logs of verl ("input", "output"), TRL ("prompt", "completion") and SkyRL ("input_prompt", "output_response") need no
reader: their columns are among the usual names. lm-evaluation-harness writes a line for each document and filter:

    {"doc_id": 0, "filter": "none", "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": options}},
     "resps": [[text, ...]], "filtered_resps": [...]}

Reference: ``EvaluationTracker.save_results_samples``, https://github.com/EleutherAI/lm-evaluation-harness.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from kleash.errors import SourceError
from kleash.models.sources.source_records import SourceRecord, show_value

UNFILTERED = object()


def expand_logs(records: Iterable[SourceRecord]) -> Iterator[SourceRecord]:
    """Records with each sample of lm-evaluation-harness as its responses; other records as they are.

    A document stands in a log once for each filter of its task, with the same responses; those of the first filter are
    read.

    Raises:
        SourceError: if a sample is not of a task that generates text.
    """
    first_filter: Any = UNFILTERED
    for record in records:
        fields = record.fields or {}
        if "arguments" not in fields or "resps" not in fields:
            yield record
            continue
        first_filter = fields.get("filter") if first_filter is UNFILTERED else first_filter
        if fields.get("filter") == first_filter:
            yield from _sample(record, fields)


def _sample(record: SourceRecord, fields: dict[str, Any]) -> Iterator[SourceRecord]:
    """The responses of a sample, with their prompt."""
    prompt, options = _arguments(fields["arguments"])
    texts = fields["resps"]
    if isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], list):
        texts = texts[0]
    is_generated = isinstance(texts, list) and bool(texts) and all(isinstance(text, str) for text in texts)
    if prompt is None or not is_generated or isinstance(options, str):
        raise SourceError(
            f"{record.location}: expected a sample of lm-evaluation-harness with generated text in 'resps' and found "
            f"{show_value(fields['resps'])}; only tasks that generate (generate_until) have responses"
        )
    for text in texts:
        columns = record.columns or fields
        yield replace(record, fields={"prompt": prompt, "response": text}, columns=columns)


def _arguments(arguments: Any) -> tuple[Any, Any]:
    """The prompt of a sample, a text or messages, and the argument after it; None for what is not there."""
    if isinstance(arguments, dict):
        first = arguments.get("gen_args_0")
        prompt, options = (
            (first.get("arg_0"), first.get("arg_1")) if isinstance(first, dict) else (None, None)
        )
    else:
        first = arguments[0] if isinstance(arguments, list) and arguments else None
        prompt, options = (*first, None, None)[:2] if isinstance(first, list) else (None, None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]  # a conversation, as JSON in a list
    if isinstance(prompt, str) and prompt.startswith('[{"role"'):
        try:
            return json.loads(prompt), options
        except (ValueError, RecursionError):  # a text that only begins like messages, or is nested too deeply
            return prompt, options
    return (prompt, options) if isinstance(prompt, str) else (None, options)
