"""Lines of JSONL files that a serving engine's hidden states come in: responses of SGLang, and log-probabilities."""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

LOGP_ROUNDING_NATS = 1e-3
"""Largest log-probability above 0 that is taken for a rounding error."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineRecord:
    """A line of a JSONL file."""

    token_ids: tuple[int, ...]
    states: Float64[Tensor, "rows 1 dim"] | None = None
    """After the final norm, of all tokens or of all but the last; None of a record of log-probabilities."""
    logps: tuple[float, ...] = ()
    """The log-probability of each token, NaN where it is unknown; none if all are."""


def parse_record(line: bytes) -> EngineRecord:
    """Parse a line: a response of SGLang, or tokens with the engine's log-probabilities.

    Raises:
        ValueError, TypeError, LookupError, RuntimeError, RecursionError: if it is neither.
    """
    record: Any = json.loads(line)
    match record:
        case {"meta_info": {"hidden_states": list()} as meta}:
            return _sglang_record(record, meta)
        case {"choices": [choice]}:  # a response of vLLM's server
            record = choice
        case _:
            pass
    for tokens_name, logps_name in (("token_ids", "logprobs"), ("prompt_token_ids", "prompt_logprobs")):
        match record:
            case {**fields} if isinstance(fields.get(logps_name), list):
                token_ids = _token_ids(fields[tokens_name])
                return EngineRecord(token_ids=token_ids, logps=_token_logps(fields[logps_name], token_ids))
            case _:
                pass
    raise ValueError(
        "it has neither 'meta_info' with 'hidden_states' (SGLang) nor 'token_ids' with 'logprobs'"
    )


def _sglang_record(record: dict[str, Any], meta: dict[str, Any]) -> EngineRecord:
    """A response of SGLang's ``/generate``."""
    token_ids: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()
    for side in ("input", "output"):
        entries = meta.get(f"{side}_token_logprobs") or []
        listed = [entry[1] for entry in entries]
        part = _token_ids(record.get(f"{side}_ids", listed))
        if side == "input" and not part:
            raise ValueError(
                "it has no token ids: add the 'input_ids' of the request, or ask for return_logprob with "
                "logprob_start_len 0"
            )
        is_listed = listed == list(part)
        if side == "output" and entries and not is_listed:
            raise ValueError("it has 'output_token_logprobs' of other tokens than 'output_ids'")
        token_ids += part
        logps += _token_logps([entry[0] for entry in entries] if is_listed else [None] * len(part), part)
    rows: list[Any] = []
    for part in meta["hidden_states"]:
        rows += part if isinstance(part[0], list) else [part]
    states = torch.tensor(rows, dtype=torch.float64)
    if states.ndim != 2 or len(states) not in (len(token_ids), len(token_ids) - 1):
        raise ValueError(
            f"it holds hidden states of shape {list(states.shape)} for {len(token_ids)} tokens; ask for "
            'return_hidden_states true, not "last", and run SGLang with --disable-radix-cache and '
            "--chunked-prefill-size -1, so that no row is left out"
        )
    has_logps = any(not math.isnan(value) for value in logps)
    return EngineRecord(token_ids=token_ids, states=states[:, None], logps=logps if has_logps else ())


def _token_ids(values: Any) -> tuple[int, ...]:
    """A list of token ids as a tuple."""
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError("it has token ids that are not a list of whole numbers")
    return tuple(values)


def _token_logps(values: list[Any], token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities as numbers, NaN for null; vLLM's entries are objects by token id."""
    logps: list[float] = []
    for value, token_id in zip(values, token_ids, strict=True):
        entry = value[str(token_id)] if isinstance(value, dict) else value
        number = math.nan if entry is None else float(entry["logprob"] if isinstance(entry, dict) else entry)
        if entry is not None and not -math.inf < number <= LOGP_ROUNDING_NATS:
            raise ValueError(f"it has {number} as the log-probability of token {len(logps)}")
        logps.append(number)
    return tuple(logps)
