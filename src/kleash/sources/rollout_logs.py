"""Responses in the logs of other programs: the samples of lm-evaluation-harness, and rollouts of prime-rl.

The logs of verl ("input", "output"), TRL ("prompt", "completion") and SkyRL ("input_prompt", "output_response") need no
reader: their columns are among the usual names. lm-evaluation-harness writes a line for each document and filter:

    {"doc_id": 0, "filter": "none", "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": options}},
     "resps": [[text, ...]], "filtered_resps": [...]}

prime-rl writes a line for each training sequence:

    {"token_ids": [...], "loss_mask": [...], "inference_logprobs": [...]}

References: ``EvaluationTracker.save_results_samples``, https://github.com/EleutherAI/lm-evaluation-harness;
``TokenExporter``, https://github.com/PrimeIntellect-ai/prime-rl.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

from kleash.sources.records import SourceRecord, is_list_of, parse_json, show_value


def expand_logs(records: Iterable[SourceRecord]) -> Iterator[SourceRecord]:
    """Records of logs as their responses; other records as they are.

    A document stands in a log of lm-evaluation-harness once for each filter of its task, with the same responses; those
    of the first filter are read. In a rollout of prime-rl, what the model drew between two results of tools, or in one
    turn, is a response to everything before it.

    Raises:
        SourceError: if a sample is not of a task that generates text, or a rollout has no tokens that were drawn.
    """
    filters: list[Any] = []
    for record in records:
        fields = record.fields
        if isinstance(fields.get("token_ids"), list) and isinstance(fields.get("loss_mask"), list):
            yield from _training_sequence(record)
        elif "arguments" in fields and "resps" in fields:
            filters = filters or [fields.get("filter")]
            if fields.get("filter") == filters[0]:
                yield from _sample(record)
        else:
            yield record


def _training_sequence(record: SourceRecord) -> Iterator[SourceRecord]:
    """The responses of a training sequence of prime-rl."""
    token_ids, mask, logprobs = (
        record.fields.get(name) for name in ("token_ids", "loss_mask", "inference_logprobs")
    )
    assert isinstance(token_ids, list) and isinstance(mask, list)
    if len(mask) != len(token_ids) or not (logprobs is None or len(logprobs) == len(token_ids)):
        raise record.error(
            f"expected 'loss_mask' and 'inference_logprobs' to have a value for each of the {len(token_ids)} tokens"
        )
    if not any(mask):
        raise record.error("'loss_mask' is false at every token, so there is no response")
    yield from _drawn_runs(record, token_ids, mask, logprobs)


def _drawn_runs(
    record: SourceRecord,
    token_ids: Sequence[Any],
    mask: Sequence[Any],
    logprobs: Sequence[Any] | None,
) -> Iterator[SourceRecord]:
    """A record for each run of tokens that were drawn, after all tokens before it.

    Args:
        record: that they come from.
        token_ids: of the whole sequence.
        mask: whether each token was drawn.
        logprobs: one for each token, None where it is not known; None if none is.
    """
    first, stop = list(map(bool, mask)).index(True), 0
    for is_drawn, run in groupby(mask, bool):
        start, stop = stop, stop + len(list(run))
        if is_drawn:
            values = [None] if logprobs is None else list(logprobs[start:stop])
            fields = {
                "prompt_token_ids": list(token_ids[:start]),
                "response_token_ids": list(token_ids[start:stop]),
                "logprobs": None if None in values else values,
            }
            yield replace(record.with_fields(fields), first_prompt=tuple(token_ids[:first]))


def _sample(record: SourceRecord) -> Iterator[SourceRecord]:
    """The responses of a sample of lm-evaluation-harness, with their prompt."""
    prompt, options = _arguments(record.fields["arguments"])
    texts = record.fields["resps"]
    if isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], list):
        texts = texts[0]
    if prompt is None or not is_list_of(texts, str) or not isinstance(options, dict):
        raise record.error(
            "expected a sample of lm-evaluation-harness with generated text in 'resps' and found "
            f"{show_value(record.fields['resps'])}; only tasks that generate (generate_until) have responses"
        )
    for text in texts:
        yield record.with_fields({"prompt": prompt, "response": text})


def _arguments(arguments: Any) -> tuple[Any, Any]:
    """The prompt of a sample, a text or messages, and the argument after it; None for what is not there."""
    if isinstance(arguments, dict):
        first = arguments.get("gen_args_0")
        values = [first.get("arg_0"), first.get("arg_1")] if isinstance(first, dict) else []
    else:
        first = arguments[0] if isinstance(arguments, list) and arguments else None
        values = first if isinstance(first, list) else []
    prompt, options = (*values, None, None)[:2]
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]  # a conversation, as JSON in a list
    if isinstance(prompt, str) and prompt.startswith('[{"role"'):
        with suppress(ValueError):  # a text that only begins like messages
            return parse_json(prompt), options
    return (prompt if isinstance(prompt, str) else None), options
