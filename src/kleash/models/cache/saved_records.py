"""Lines of JSONL files that a serving engine's hidden states come in: responses of SGLang, and log-probabilities."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kleash.errors import ModelError

LARGEST_TOKEN = 2**31 - 1
LOGP_ROUNDING_NATS = 1e-3
"""Largest log-probability above 0 that is taken for a rounding error."""


@dataclass(frozen=True, kw_only=True)
class SavedRequest:
    """Where the hidden states of one request are."""

    path: Path
    line: int | None
    """Number of the line in a JSONL file, from 1; None for a safetensors file."""
    offset: int
    """First byte of the line."""
    rows: int
    """Number of tokens with a hidden state."""

    def __str__(self) -> str:
        """The file and line, for errors."""
        return str(self.path) if self.line is None else f"{self.path}, line {self.line}"


@dataclass(frozen=True, kw_only=True)
class SavedRecord:
    """A line of a JSONL file."""

    token_ids: tuple[int, ...]
    """The tokens of the rows; of a record of log-probabilities, its tokens."""
    states: Tensor | None
    """[rows, 1, dim] in float64; None for a record of log-probabilities."""
    logps: tuple[tuple[tuple[int, ...], list[float]], ...]
    """Token ids and the log-probability of each, NaN where unknown."""


def parse_record(request: SavedRequest, line: bytes) -> SavedRecord:
    """Parse a line: a response of SGLang, or tokens with the engine's log-probabilities.

    Raises:
        ModelError: if it is neither.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{request} is not JSON; let the engine save it again") from error
    if not isinstance(record, dict):
        raise ModelError(f"{request} is not a JSON object; let the engine save it again")
    meta = record.get("meta_info")
    if isinstance(meta, dict) and "hidden_states" in meta:
        return _sglang_record(request, record, meta)
    choices = record.get("choices")
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
        record = choices[0]  # a response of vLLM's server
    for tokens_name, logps_name in (("token_ids", "logprobs"), ("prompt_token_ids", "prompt_logprobs")):
        if isinstance(record.get(tokens_name), list) and isinstance(record.get(logps_name), list):
            token_ids = _token_ids(request, record[tokens_name], tokens_name)
            logps = _token_logps(request, record[logps_name], token_ids)
            return SavedRecord(token_ids=token_ids, states=None, logps=((token_ids, logps),))
    raise ModelError(
        f"{request} has neither 'meta_info' with 'hidden_states' (SGLang) nor 'token_ids' with 'logprobs'; delete it, "
        "or correct it"
    )


def _sglang_record(request: SavedRequest, record: dict[str, Any], meta: dict[str, Any]) -> SavedRecord:
    """A response of SGLang's ``/generate``."""
    token_ids, logps = _sglang_tokens(request, record, meta)
    rows: list[Any] = []
    for part in meta["hidden_states"] if isinstance(meta["hidden_states"], list) else ():
        rows += part if isinstance(part, list) and part and isinstance(part[0], list) else [part]
    try:
        states = torch.tensor(rows, dtype=torch.float64)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ModelError(
            f"{request} holds hidden states that are not rows of numbers of one length; let the engine save it again"
        ) from error
    if states.ndim != 2:
        raise ModelError(
            f"{request} holds hidden states of shape {list(states.shape)}; expected rows of numbers"
        )
    if len(states) not in (len(token_ids), len(token_ids) - 1):
        raise ModelError(
            f"{request} holds {len(states)} rows of hidden states for {len(token_ids)} tokens; ask for "
            'return_hidden_states true, not "last", and run SGLang with --disable-radix-cache and '
            "--chunked-prefill-size -1, so that no row is left out"
        )
    row_ids = token_ids[: len(states)]
    pairs = {ids: logps[: len(ids)] for ids in (token_ids, row_ids)}
    has_logps = any(not math.isnan(value) for value in logps)
    return SavedRecord(
        token_ids=row_ids, states=states[:, None], logps=tuple(pairs.items()) if has_logps else ()
    )


def _sglang_tokens(
    request: SavedRequest, record: dict[str, Any], meta: dict[str, Any]
) -> tuple[tuple[int, ...], list[float]]:
    """The token ids of a response of SGLang with its prompt, and the log-probability of each."""
    token_ids: list[int] = []
    logps: list[float] = []
    for ids_name, logps_name in (
        ("input_ids", "input_token_logprobs"),
        ("output_ids", "output_token_logprobs"),
    ):
        pairs = meta.get(logps_name) or []
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) >= 2 for pair in pairs
        ):
            raise ModelError(f"{request} has {logps_name!r} that are not [log-probability, token id, text]")
        values = record.get(ids_name)
        if values is None and pairs:
            values = [pair[1] for pair in pairs]
        if values is None:
            raise ModelError(
                f"{request} has no token ids: add the 'input_ids' of the request, or ask for return_logprob with "
                "logprob_start_len 0"
            )
        part = _token_ids(request, values, ids_name)
        has_all = len(pairs) == len(part) and [pair[1] for pair in pairs] == list(part)
        if pairs and not has_all and logps_name == "output_token_logprobs":
            raise ModelError(f"{request} has {logps_name!r} of other tokens than {ids_name!r}; correct it")
        token_ids += part
        known = [pair[0] for pair in pairs] if has_all else [None] * len(part)
        logps += _token_logps(request, known, part)
    return tuple(token_ids), logps


def _token_ids(request: SavedRequest, values: Any, name: str) -> tuple[int, ...]:
    """A list of token ids as a tuple."""
    if not isinstance(values, list) or not all(type(v) is int and abs(v) <= LARGEST_TOKEN for v in values):
        raise ModelError(f"{request} has {name!r} that are not a list of token ids; correct it")
    return tuple(values)


def _token_logps(request: SavedRequest, values: list[Any], token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities as numbers, NaN for null; vLLM's entries are objects by token id."""
    if len(values) != len(token_ids):
        raise ModelError(
            f"{request} has {len(values)} log-probabilities for {len(token_ids)} tokens; expected one for each, null "
            "for the first"
        )
    logps: list[float] = []
    for value, token_id in zip(values, token_ids, strict=True):
        entry = value.get(str(token_id)) if isinstance(value, dict) else value
        entry = entry.get("logprob") if isinstance(entry, dict) else entry
        if entry is None and value is None:
            logps.append(math.nan)
            continue
        number = math.nan
        if isinstance(entry, int | float) and not isinstance(entry, bool):
            number = float(entry)
        if not math.isfinite(number) or number > LOGP_ROUNDING_NATS:
            raise ModelError(
                f"{request} has {str(entry)[:40]!r} as the log-probability of token {len(logps)}; expected a finite "
                "number of at most 0"
            )
        logps.append(number)
    return logps
