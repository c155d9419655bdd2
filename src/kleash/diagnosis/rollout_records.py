"""Rollouts with two or three columns of log-probabilities, and how a record of a file is read as one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kleash.errors import SourceError
from kleash.sources.records import SourceRecord, get_field, show_value
from kleash.sources.sequences import hash_tokens

FIELD_NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt_token_ids": ("prompt_token_ids", "prompts", "prompt_ids"),
    "response_token_ids": ("response_token_ids", "responses", "completion_ids"),
    "trainer_logprobs": ("trainer_logprobs", "old_log_probs", "old_per_token_logps", "action_log_probs"),
    "engine_logprobs": (
        *("engine_logprobs", "rollout_log_probs", "sampling_per_token_logps"),
        *("inference_logprobs", "completion_logprobs"),
    ),
    "reference_logprobs": (
        *("reference_logprobs", "ref_log_prob", "ref_per_token_logps", "ref_logprobs"),
        "base_action_log_probs",
    ),
}
"""Field -> its names: kleash's, then those of verl, TRL, prime-rl and OpenRLHF."""
RESPONSE_MASKS = ("response_mask", "completion_mask", "tool_mask", "loss_mask")
"""Masks over the response; a token counts if all that a record has are 1."""
PROMPT_MASKS = ("prompt_mask",)
LOSS_MASK = "loss_mask"


class WholeSequence(NamedTuple):
    """Fields of tokens of prompt and response in one list, with a mask and columns over all of them."""

    ids: str
    mask: str
    first: int
    """The token to which the first values of mask and columns belong."""


SEQUENCES = WholeSequence("sequences", "action_mask", 1)
"""OpenRLHF's ``Experience``: its values are those of the next token."""
WHOLE_SEQUENCES = (WholeSequence("token_ids", LOSS_MASK, 0), SEQUENCES)
"""prime-rl's token export, and OpenRLHF's."""
TEXT_DUMP = ("input", "output")
"""Fields of verl's ``trainer.rollout_data_dir``, which are texts."""
LOSS_WEIGHTS = ("rl_weights", "ref_kl_weights")
"""prime-rl's weights of the losses on tokens that the engine drew; 0 in both at tokens of another source."""
ATTENTION_MASK = "attention_mask"
"""verl's mask over prompt and response; 0 at padding, which is removed."""
LARGEST_TOKEN_ID = 2**31 - 1
LOG_OF_ZERO = -745.0
"""Log-probabilities below it are of a probability that is 0 in float64."""
LARGEST_LOGIT = 1e4
ROUNDING_NATS = 1e-3
"""Log-probabilities above 0 by at most this are rounding."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutRecord:
    """A response with the log-probabilities of its tokens under the trainer, the engine and perhaps the reference."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    trainer: np.ndarray
    """By the training code, in nats; one for each response token."""
    engine: np.ndarray
    """As returned by the rollout engine with the tokens."""
    reference: np.ndarray | None
    """None if the record has none."""
    is_counted: np.ndarray
    """Which response tokens count: those that the engine drew."""
    location: str
    """File and line, for errors."""
    file: str = ""
    """File that it was read from."""


class PaddedRollouts(NamedTuple):
    """The columns of rollouts as [sequence, time], padded on the right."""

    trainer: Tensor
    engine: Tensor
    is_counted: Tensor
    prompts: Tensor
    """A label for each sequence, equal for equal prompts."""


def padded(rollouts: Sequence[RolloutRecord]) -> PaddedRollouts:
    """The columns of rollouts as tensors, with a label for each prompt."""
    time = max(len(rollout.response_ids) for rollout in rollouts)
    trainer, engine = torch.zeros(2, len(rollouts), time, dtype=torch.float64)
    is_counted = torch.zeros(len(rollouts), time, dtype=torch.bool)
    labels: dict[str, int] = {}
    prompts = [labels.setdefault(hash_tokens(rollout.prompt_ids), len(labels)) for rollout in rollouts]
    for row, rollout in enumerate(rollouts):
        length = len(rollout.response_ids)
        trainer[row, :length] = torch.from_numpy(rollout.trainer)
        engine[row, :length] = torch.from_numpy(rollout.engine)
        is_counted[row, :length] = torch.from_numpy(rollout.is_counted)
    return PaddedRollouts(trainer, engine, is_counted, torch.tensor(prompts))


def _split_sequence(record: SourceRecord) -> SourceRecord:
    """A record of prime-rl or OpenRLHF with prompt and response apart; every other record as it is.

    prime-rl's export (``token_exports/step_N/rank_R.jsonl``) and OpenRLHF's ``Experience`` have one list of tokens, and
    columns over all of them. The response begins at the first token of the mask.

    Raises:
        SourceError: if the mask or a column has another length than the tokens, or the response begins at the first.
    """
    fields = record.fields or {}
    ids_names = (*FIELD_NAMES["prompt_token_ids"], *FIELD_NAMES["response_token_ids"])
    matches = [
        whole
        for whole in WHOLE_SEQUENCES
        if isinstance(fields.get(whole.ids), list) and fields.get(whole.mask) is not None
    ]
    if not matches or any(fields.get(name) is not None for name in ids_names):
        return record
    whole = matches[0]
    token_ids = _token_ids(record, whole.ids)
    length = len(token_ids) - whole.first
    mask = _mask(record, whole.mask, length)
    assert mask is not None
    names = [*LOSS_WEIGHTS, *(name for group in list(FIELD_NAMES.values())[2:] for name in group)]
    columns: dict[str, list[Any]] = {}
    for name in names:
        values = fields.get(name)
        if not isinstance(values, list) or all(value is None for value in values):
            continue  # the export writes null for every token of a column that is not there
        if len(values) != length:
            raise SourceError(
                f"{record.location}: {name!r} has {len(values)} values for {length} tokens; give one each"
            )
        columns[name] = values
    first = int(mask.argmax()) if mask.any() else length - 1
    start = first + whole.first
    if start == 0:
        raise SourceError(
            f"{record.location}: {whole.mask!r} counts the first of {len(token_ids)} tokens, which no prompt precedes; "
            "leave the record out"
        )
    has_weights = LOSS_WEIGHTS[0] in columns
    weights = [columns.pop(name) for name in LOSS_WEIGHTS if name in columns]
    if has_weights:
        mask = mask & np.array([any(values) for values in zip(*weights, strict=True)])
    prompt_name, response_name = (group[0] for group in list(FIELD_NAMES.values())[:2])
    return replace(
        record,
        fields={
            prompt_name: token_ids[:start],
            response_name: token_ids[start:],
            LOSS_MASK: mask[first:].tolist(),
            ATTENTION_MASK: fields.get(ATTENTION_MASK) if whole is SEQUENCES else None,
            **{name: values[first:] for name, values in columns.items()},
        },
    )


def read_rollout(record: SourceRecord, allow_logits: bool) -> RolloutRecord:
    """The rollout of a record, in the field names of kleash, verl, TRL, prime-rl or OpenRLHF.

    Raises:
        SourceError: if it is none, with what was expected.
    """
    record = _split_sequence(record)
    names = {field: _name_in(record, field) for field in FIELD_NAMES}
    prompt = _token_ids(record, names["prompt_token_ids"])
    response = _token_ids(record, names["response_token_ids"])
    mask = np.ones(len(response), dtype=bool)
    for name in RESPONSE_MASKS:
        values = _mask(record, name, len(response))
        mask = mask if values is None else mask & values
    columns = {
        field: _column(record, names[field], mask)
        for field in ("trainer_logprobs", "engine_logprobs", "reference_logprobs")
    }
    for field, column in columns.items():
        if column is not None:
            _check_values(
                record, names[field] or field, column, mask, allow_logits, field == "engine_logprobs"
            )
    is_prompt_token = np.ones(len(prompt), dtype=bool)
    for name in PROMPT_MASKS:
        values = _mask(record, name, len(prompt))
        is_prompt_token = is_prompt_token if values is None else values
    attended = _mask(record, ATTENTION_MASK, len(prompt) + len(response))
    is_response_token = np.ones(len(response), dtype=bool)
    if attended is not None:
        is_prompt_token, is_response_token = (
            is_prompt_token & attended[: len(prompt)],
            attended[len(prompt) :],
        )
    trainer, engine, reference = columns.values()
    assert trainer is not None and engine is not None
    return RolloutRecord(
        prompt_ids=tuple(token for token, stays in zip(prompt, is_prompt_token, strict=True) if stays),
        response_ids=tuple(token for token, stays in zip(response, is_response_token, strict=True) if stays),
        trainer=trainer[is_response_token],
        engine=engine[is_response_token],
        reference=None if reference is None else reference[is_response_token],
        is_counted=mask[is_response_token],
        location=record.location,
    )


def _name_in(record: SourceRecord, field: str) -> str | None:
    """The name that a record has for a field; None for a reference that it lacks.

    Raises:
        SourceError: if it has several, or lacks one that is needed.
    """
    fields = record.fields or {}
    present = [name for name in FIELD_NAMES[field] if fields.get(name) is not None]
    if len(present) > 1:
        raise SourceError(
            f"{record.location}: {present[0]!r} and {present[1]!r} are the same column; give one"
        )
    if present or field == "reference_logprobs":
        return present[0] if present else None
    if all(isinstance(fields.get(name), str) for name in TEXT_DUMP):
        raise SourceError(
            f"{record.location}: {' and '.join(map(repr, TEXT_DUMP))} are texts, as verl's trainer.rollout_data_dir "
            "writes, without token ids and log-probabilities; write the batch with kleash.diagnosis.write_rollouts"
        )
    alternatives = " or ".join(repr(name) for name in FIELD_NAMES[field])
    shown = ", ".join(repr(name) for name in list(fields)[:8]) or "no fields"
    raise SourceError(f"{record.location}: expected a field {alternatives}, and the record has {shown}")


def _token_ids(record: SourceRecord, name: str | None) -> list[int]:
    """A list of token ids."""
    values = get_field(record, str(name), list, "a list of token ids")
    for value in values or []:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_TOKEN_ID:
            raise SourceError(
                f"{record.location}: expected {name!r} to hold token ids, and it holds {show_value(value)}"
            )
    if not values:
        raise SourceError(f"{record.location}: {name!r} is empty; leave the record out")
    return values


def _mask(record: SourceRecord, name: str, length: int) -> np.ndarray | None:
    """A mask of 0 and 1; None if the record has none."""
    values = get_field(record, name, list, "a list of 0 and 1")
    if values is None:
        return None
    for value in values:
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise SourceError(
                f"{record.location}: expected {name!r} to hold 0 and 1, and it holds {show_value(value)}"
            )
    if len(values) != length:
        raise SourceError(
            f"{record.location}: {name!r} has {len(values)} values for {length} tokens; give one each"
        )
    return np.asarray(values, dtype=bool)


def _column(record: SourceRecord, name: str | None, mask: np.ndarray) -> np.ndarray | None:
    """A column of log-probabilities, NaN where it is null; None if the record has none."""
    if name is None:
        return None
    values = get_field(record, name, list, "a list of numbers")
    for value in values:
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise SourceError(
                f"{record.location}: expected {name!r} to hold numbers, and it holds {show_value(value)}"
            )
    if len(values) != len(mask):
        raise SourceError(
            f"{record.location}: {name!r} has {len(values)} values for {len(mask)} response tokens; give one each"
        )
    try:
        return np.array([math.nan if value is None else float(value) for value in values])
    except OverflowError as error:
        raise SourceError(f"{record.location}: {name!r} holds a number of more than 308 digits") from error


def _check_values(
    record: SourceRecord, name: str, column: np.ndarray, mask: np.ndarray, allow_logits: bool, is_engine: bool
) -> None:
    """Check the values of the tokens that count.

    Raises:
        SourceError: if one is NaN or +inf, or above 0 (with ``allow_logits``, above any logit), or if the engine gives
            a drawn token probability 0.
    """
    counted = np.where(mask, column, -1.0)

    def refuse(is_bad: np.ndarray, reason: str) -> None:
        if is_bad.any():
            place = int(np.flatnonzero(is_bad)[0])
            raise SourceError(f"{record.location}: {name!r} is {counted[place]:g} at token {place}; {reason}")

    refuse(np.isnan(counted) | (counted == math.inf), "mask the token, or leave the record out")
    refuse(counted > LARGEST_LOGIT, "neither a log-probability nor a logit is as large; mask the token")
    if is_engine:
        refuse(counted < LOG_OF_ZERO, "the engine drew this token, so it has a probability; mask it if not")
    if not allow_logits:
        refuse(
            counted > ROUNDING_NATS,
            "log-probabilities are at most 0; kleash doctor says more about this file",
        )
