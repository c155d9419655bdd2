"""Rollouts with two or three columns of log-probabilities: how records of files are read as such, and written."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kleash.errors import OptionError
from kleash.sources.records import SourceRecord, describe_fields, get_field, show_value
from kleash.sources.sequences import RESPONSE_MASKS, ROUNDING_NATS, hash_tokens
from kleash.store.atomic import write_atomically

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
LARGEST_TOKEN_ID, LARGEST_INTEGER = 2**31 - 1, 10**300
LOG_OF_ZERO = -745.0
"""Log-probabilities below it are of a probability that is 0 in float64."""
LARGEST_LOGIT = 1e4


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
    has_prompt_mask: bool = False
    """Whether a mask says which tokens of the prompt are padding."""
    padding: int = 0
    """Tokens at the end that look like padding; 0 where a mask says which tokens count."""


class PaddedRollouts(NamedTuple):
    """The columns of rollouts as [sequence, time], padded on the right."""

    trainer: Tensor
    engine: Tensor
    is_counted: Tensor
    prompts: Tensor
    """A label for each sequence, equal for equal prompts."""


def padded(rollouts: Sequence[RolloutRecord]) -> PaddedRollouts:
    """The columns of rollouts as tensors, with a label for each prompt."""
    trainer, engine, is_counted = (
        pad_sequence([torch.from_numpy(getattr(rollout, name)) for rollout in rollouts], batch_first=True)
        for name in ("trainer", "engine", "is_counted")
    )
    labels = np.unique([hash_tokens(rollout.prompt_ids) for rollout in rollouts], return_inverse=True)[1]
    return PaddedRollouts(trainer, engine, is_counted, torch.from_numpy(labels))


def _split_sequence(record: SourceRecord) -> SourceRecord:
    """A record of prime-rl or OpenRLHF with prompt and response apart; every other record as it is.

    prime-rl's export (``token_exports/step_N/rank_R.jsonl``) and OpenRLHF's ``Experience`` have one list of tokens, and
    columns over all of them. The response begins at the first token of the mask.

    Raises:
        SourceError: if the mask or a column has another length than the tokens, or the response begins at the first.
    """
    fields, (prompts, responses, *columns) = record.fields, FIELD_NAMES.values()
    matches = [
        each for each in WHOLE_SEQUENCES if isinstance(fields.get(each.ids), list) and fields.get(each.mask)
    ]
    if not matches or any(fields.get(name) is not None for name in (*prompts, *responses)):
        return record
    whole = matches[0]
    token_ids = _values(record, whole.ids, "token ids")
    length = len(token_ids) - whole.first
    mask = np.array(_values(record, whole.mask, "0 and 1", length), dtype=bool)
    values = {
        name: _values(record, name, "numbers", length)
        for name in (*LOSS_WEIGHTS, *(name for names in columns for name in names))
        if any(
            value is not None for value in fields.get(name) or ()
        )  # the export has null for what is not there
    }
    weights = [values.pop(name) for name in LOSS_WEIGHTS if name in values]
    first = int(mask.argmax()) if mask.any() else length - 1
    start = first + whole.first  # the mask's first value belongs to token ``whole.first``
    if start == 0:
        raise record.error(
            f"{whole.mask!r} counts the first of {len(token_ids)} tokens, which no prompt precedes; leave "
            "the record out"
        )
    if weights:  # a token counts if any loss has a weight at it
        mask = mask & np.array([any(of_token) for of_token in zip(*weights, strict=True)])
    split = {
        prompts[0]: token_ids[:start],
        responses[0]: token_ids[start:],
        LOSS_MASK: mask[first:].tolist(),
        ATTENTION_MASK: fields.get(ATTENTION_MASK) if whole is SEQUENCES else None,
    }
    return replace(record, fields=split | {name: column[first:] for name, column in values.items()})


def read_rollout(record: SourceRecord, allow_logits: bool) -> RolloutRecord:
    """The rollout of a record, in the field names of kleash, verl, TRL, prime-rl or OpenRLHF.

    Raises:
        SourceError: if it is none, with what was expected.
    """
    record = _split_sequence(record)
    names = {field: _name_in(record, field) for field in FIELD_NAMES}
    prompt, response = (
        _values(record, str(names[f"{part}_token_ids"]), "token ids") for part in ("prompt", "response")
    )
    for name, ids in zip(names.values(), (prompt, response), strict=False):
        if not ids:
            raise record.error(f"{name!r} is empty; leave the record out")

    def mask(names: Sequence[str], length: int) -> np.ndarray:
        """Where all masks of these names that the record has are 1."""
        there = [name for name in names if record.fields.get(name) is not None]
        masks = [np.array(_values(record, name, "0 and 1", length), dtype=bool) for name in there]
        return np.all([np.ones(length, dtype=bool), *masks], axis=0)

    is_counted = mask(RESPONSE_MASKS, len(response))
    columns: dict[str, np.ndarray | None] = {}
    for field in ("trainer_logprobs", "engine_logprobs", "reference_logprobs"):
        name, columns[field] = names[field], None
        if name is not None:
            values = _values(record, name, "numbers", len(response))
            column = columns[field] = np.array(
                [math.nan if value is None else float(value) for value in values]
            )
            _check_values(record, name, np.where(is_counted, column, -1.0), allow_logits, field)
    attended = mask((ATTENTION_MASK,), len(prompt) + len(response))
    stays = attended[: len(prompt)] & mask(PROMPT_MASKS, len(prompt)), attended[len(prompt) :]
    if is_counted[stays[1]].any() and not stays[0].any():
        raise record.error("the masks leave no token of the prompt; they are 1 at tokens that were read")
    trainer, engine, reference = (None if column is None else column[stays[1]] for column in columns.values())
    assert trainer is not None and engine is not None
    return RolloutRecord(
        prompt_ids=tuple(compress(prompt, stays[0])),
        response_ids=tuple(compress(response, stays[1])),
        trainer=trainer,
        engine=engine,
        reference=reference,
        is_counted=is_counted[stays[1]],
        location=record.location,
        has_prompt_mask=any(record.fields.get(name) is not None for name in (ATTENTION_MASK, *PROMPT_MASKS)),
    )


def _name_in(record: SourceRecord, field: str) -> str | None:
    """The name that a record has for a field; None for a reference that it lacks.

    Raises:
        SourceError: if it has several, or lacks one that is needed.
    """
    present = [name for name in FIELD_NAMES[field] if record.fields.get(name) is not None]
    if len(present) > 1:
        raise record.error(f"{present[0]!r} and {present[1]!r} are the same column; give one")
    if present or field == "reference_logprobs":
        return present[0] if present else None
    if all(isinstance(record.fields.get(name), str) for name in TEXT_DUMP):
        raise record.error(
            f"{' and '.join(map(repr, TEXT_DUMP))} are texts, as verl's trainer.rollout_data_dir writes, without token "
            "ids and log-probabilities; write the batch with kleash.diagnosis.write_rollouts"
        )
    raise record.error(
        f"expected a field {' or '.join(map(repr, FIELD_NAMES[field]))}, and the record has {describe_fields(record)}"
    )


VALUES: Mapping[str, Callable[[Any], bool]] = {
    "token ids": lambda value: type(value) is int and 0 <= value <= LARGEST_TOKEN_ID,
    "0 and 1": lambda value: isinstance(value, int | float) and value in (0, 1),
    "numbers": lambda value: (
        value is None or isinstance(value, float) or (type(value) is int and abs(value) < LARGEST_INTEGER)
    ),
}
"""What a list holds -> whether it may hold a value."""


def _values(record: SourceRecord, name: str, expected: str, length: int | None = None) -> list[Any]:
    """The values of a list of a record.

    Raises:
        SourceError: if one is not of the kind that is expected, or their number is not ``length``.
    """
    values = get_field(record, name, list, f"a list of {expected}") or []
    for value in values:
        if not VALUES[expected](value):
            raise record.error(f"expected {name!r} to hold {expected}, and it holds {show_value(value)}")
    if length is not None and len(values) != length:
        raise record.error(f"{name!r} has {len(values)} values for {length} tokens; give one each")
    return values


def _check_values(
    record: SourceRecord, name: str, counted: np.ndarray, allow_logits: bool, field: str
) -> None:
    """Check the values of a column, -1 at tokens that do not count.

    Raises:
        SourceError: if one is NaN or +inf, or above 0 (with ``allow_logits``, above any logit), or if the engine gives
            a drawn token probability 0.
    """
    is_impossible = (counted < LOG_OF_ZERO) & (field == "engine_logprobs")
    largest = LARGEST_LOGIT if allow_logits else ROUNDING_NATS
    for is_bad, reason in (
        (np.isnan(counted) | (counted == math.inf), "mask the token, or leave the record out"),
        (is_impossible, "the engine drew this token, so it has a probability; mask it if not"),
        (counted > LARGEST_LOGIT, "neither a log-probability nor a logit is as large; mask the token"),
        (counted > largest, "log-probabilities are at most 0; kleash doctor says more about this file"),
    ):
        if is_bad.any():
            place = int(is_bad.argmax())
            raise record.error(f"{name!r} is {counted[place]:g} at token {place}; {reason}")


def write_rollouts(path: str | Path, batch: Mapping[str, Any], **of_each: int | float | str) -> None:
    """Write the rollouts of a batch as JSONL, a line for each response; the file is there whole or not at all.

    Args:
        path: the file; its folder is made.
        batch: columns [responses, time], or nested ones without padding, under the names of ``kleash mismatch``
            (docs/reference/doctor.md): a batch of TRL, verl's ``DataProto.batch`` or what its queue returns, or
            ``vars`` of an ``Experience`` of OpenRLHF. Other entries are left out.
        **of_each: further fields of each line, such as ``version=step``.

    Raises:
        OptionError: if token ids or one of the two columns of log-probabilities are missing.
        RunFolderError: if the file cannot be written.
    """
    names = [name for group in FIELD_NAMES.values() for name in group]
    names += [*RESPONSE_MASKS, *PROMPT_MASKS, ATTENTION_MASK, SEQUENCES.ids, SEQUENCES.mask]
    columns = {name: value for name in names if isinstance(value := batch.get(name, None), Tensor)}
    for field, group in FIELD_NAMES.items():
        is_ids = field.endswith("token_ids")
        if field == "reference_logprobs" or (is_ids and SEQUENCES.ids in columns):
            continue
        if not columns.keys() & set(group):
            raise OptionError(
                f"the batch has no {' or '.join(map(repr, group))}, which a rollout needs; it has "
                f"{', '.join(map(repr, batch.keys()))}"
            )
    rows = zip(*(column.detach().cpu().unbind() for column in columns.values()), strict=True)
    lines = [json.dumps({**of_each, **dict(zip(columns, map(_finite, row), strict=True))}) for row in rows]
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def _finite(row: Tensor) -> list[Any]:
    """The values, null for those that are not finite, which JSON does not have."""
    return [
        None if isinstance(value, float) and not math.isfinite(value) else value for value in row.tolist()
    ]
