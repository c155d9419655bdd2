"""Hidden states that a serving engine saved: files of vLLM and SGLang, indexed by the tokens of their requests.

vLLM (0.18 or later): ``ExampleHiddenStatesConnector`` writes one safetensors file per request, with ``hidden_states``
[tokens, layers, dim] and ``token_ids`` [tokens]. The rows are before the final norm; which layers they are is in the
engine's configuration only. SGLang: responses of ``/generate`` with ``return_hidden_states``, one JSON object a line;
``meta_info.hidden_states`` has the rows of the prompt and one row for each further token but the last, after the final
norm.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kleash.checkpoints.files import SafetensorsFiles
from kleash.errors import ModelError, OptionError, summarise_error
from kleash.sources.sequences import ROUNDING_NATS, TokenSequence, hash_tokens
from kleash.store.file_hashes import watch_files

STATES, TOKENS = "hidden_states", "token_ids"
"""Names of the tensors that vLLM's connector writes."""
JSON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Tried in this order for numbers in JSON: the first that holds all of them exactly."""
SAFETENSORS = (
    "whole file of vLLM's ExampleHiddenStatesConnector, with hidden_states [tokens, layers, dim] and token_ids "
    "[tokens]"
)
JSONL = "response of SGLang with hidden states, and no tokens with log-probabilities"
"""What a file, or a line of one, should be."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """Where the hidden states of one request are."""

    path: Path
    line: int | None = None
    """Number of the line in a JSONL file, from 1; None for a safetensors file."""
    offset: int = 0
    """First byte of the line."""

    def __str__(self) -> str:
        """The file and line, for errors."""
        return str(self.path) if self.line is None else f"{self.path}, line {self.line}"


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """What the rows of all requests have in common."""

    dtype: torch.dtype
    num_layers: int
    """Rows saved for each token."""
    dim: int
    is_after_norm: bool
    """Whether the rows are after the final norm (SGLang), or before it (vLLM)."""

    def __str__(self) -> str:
        """In words, for errors."""
        side, dtype = "after" if self.is_after_norm else "before", str(self.dtype).removeprefix("torch.")
        return f"{self.num_layers} layers of {self.dim} numbers in {dtype}, {side} the final norm"


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineRecord:
    """A line of a JSONL file."""

    token_ids: tuple[int, ...]
    states: Float64[Tensor, "rows 1 dim"] | None = None
    """After the final norm, of all tokens or of all but the last; None of a record of log-probabilities."""
    logps: tuple[float, ...] = ()
    """The log-probability of each token, NaN where it is unknown; none if all are."""


class EngineStates:
    """A folder of hidden states that an engine saved.

    All token ids are read when the folder is opened, and nothing else of safetensors files.
    """

    layout: EngineLayout

    def __init__(self, folder: Path) -> None:
        """Index the files ``*.safetensors`` and ``*.jsonl`` of ``folder``.

        Raises:
            ModelError: if a file is damaged, or differs from the others in its layout.
            OptionError: if it holds no hidden states.
        """
        self.folder = folder
        self._requests: dict[str, list[EngineRequest]] = {}
        self._logps: dict[str, EngineRequest] = {}
        self._first: EngineRequest | None = None
        watch_files([*folder.glob("*.safetensors"), *folder.glob("*.jsonl")])
        for path in sorted(folder.glob("*.safetensors")):
            self._add_safetensors(EngineRequest(path=path))
        for path in sorted(folder.glob("*.jsonl")):
            self._add_jsonl(path)
        if self._first is None:
            raise OptionError(
                f"{folder} holds no hidden states: expected *.safetensors of vLLM's ExampleHiddenStatesConnector, or "
                "*.jsonl with the responses of SGLang"
            )

    @property
    def engine(self) -> str:
        """Name of the engine whose layout the files have."""
        return "SGLang" if self.layout.is_after_norm else "vLLM"

    @property
    def has_logps(self) -> bool:
        """Whether the engine's log-probabilities of any tokens were saved."""
        return bool(self._logps)

    def find(self, sequence: TokenSequence) -> list[EngineRequest]:
        """The requests whose rows are those of a sequence: of its input tokens, or of these and the last token."""
        keys = dict.fromkeys(_keys_of(sequence))
        return [request for key in keys for request in self._requests.get(key, ())]

    def read(self, request: EngineRequest, start: int, stop: int) -> Float[Tensor, "tokens dim"]:
        """The last layer of rows ``start`` to ``stop - 1`` of a request, on the CPU, in the saved dtype.

        Raises:
            ModelError: if the file is damaged, or a row has NaN, infinities, or only zeros, as of a buffer that was not
                filled.
        """
        if request.line is None:
            rows = SafetensorsFiles([request.path]).read(STATES, slice(start, stop))[:, -1]
        else:
            states = _read_record(request).states
            assert states is not None, "a request has states"
            rows = states[start:stop, -1].to(self.layout.dtype)
        is_wrong = ~rows.isfinite().all(-1) | (rows == 0).all(-1)
        if is_wrong.any():
            row = start + int(is_wrong.nonzero()[0])
            raise ModelError(
                f"{request} holds NaN, infinities or only zeros in row {row}; let the engine save it again"
            )
        return rows

    def token_logps(self, sequence: TokenSequence) -> Float[np.ndarray, " response"] | None:
        """The engine's log-probability of each response token, NaN where unknown; None if none was saved.

        They are found under the tokens of the whole sequence, or of all but the last, which is then unknown.
        """
        num_prompt, num_tokens = len(sequence.prompt_ids), sequence.num_input_tokens + 1
        for key, count in zip(_keys_of(sequence), (num_tokens, num_tokens - 1), strict=True):
            if key in self._logps:
                values = np.full(num_tokens, np.nan)
                values[:count] = _read_record(self._logps[key]).logps[:count]
                return values[num_prompt:]
        return None

    def _add_safetensors(self, request: EngineRequest) -> None:
        """Index a file of vLLM."""
        with _expected(request, SAFETENSORS):
            file = SafetensorsFiles([request.path])
            rows, num_layers, dim = file[STATES].shape
            token_ids = file.read(TOKENS)
            if token_ids.shape != (rows,) or token_ids.dtype not in (torch.int64, torch.int32):
                raise ValueError(
                    f"{rows} rows of {STATES} and {TOKENS} {list(token_ids.shape)} {token_ids.dtype}"
                )
            dtype = file.read(STATES, slice(0, 1)).dtype
        layout = EngineLayout(dtype=dtype, num_layers=num_layers, dim=dim, is_after_norm=False)
        self._add(request, token_ids.tolist(), layout)

    def _add_jsonl(self, path: Path) -> None:
        """Index a file of SGLang's responses, or of log-probabilities."""
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                request = EngineRequest(path=path, line=number, offset=offset)
                offset += len(line)
                if line.strip():
                    with _expected(request, JSONL):
                        record = parse_record(line)
                    self._add_record(request, record)

    def _add_record(self, request: EngineRequest, record: EngineRecord) -> None:
        """Index a line."""
        states, ids = record.states, record.token_ids
        counts = {len(ids), len(ids) if states is None else len(states)}
        for count in counts if record.logps else ():
            self._logps.setdefault(hash_tokens(ids[:count]), request)
        if states is None:
            return
        dtype = next(
            (dtype for dtype in JSON_DTYPES if torch.equal(states.to(dtype).double(), states)), torch.float64
        )
        if self._first is not None:
            dtype = torch.promote_types(dtype, self.layout.dtype)
            self.layout = replace(self.layout, dtype=dtype)
        layout = EngineLayout(dtype=dtype, num_layers=1, dim=states.shape[-1], is_after_norm=True)
        self._add(request, ids[: len(states)], layout)

    def _add(self, request: EngineRequest, token_ids: Sequence[int], layout: EngineLayout) -> None:
        """Add a request to the index.

        Raises:
            ModelError: if it differs from the first in its layout.
        """
        if self._first is None:
            self._first, self.layout = request, layout
        elif layout != self.layout:
            raise ModelError(
                f"{request} holds {layout} and {self._first} {self.layout}; give a folder of one engine's run"
            )
        self._requests.setdefault(hash_tokens(tuple(token_ids)), []).append(request)


@contextmanager
def _expected(request: EngineRequest, what: str) -> Iterator[None]:
    """Context in which a file or line is read that should be ``what``.

    Raises:
        ModelError: if it is of another layout.
    """
    try:
        yield
    except Exception as error:  # a file of another layout can raise any
        raise ModelError(
            f"{request} is no {what} ({summarise_error(error)}); let the engine save it again, or wait until it "
            "is written"
        ) from error


def _keys_of(sequence: TokenSequence) -> tuple[str, str]:
    """The hashes of all tokens of a sequence and of its input tokens."""
    token_ids = (*sequence.prompt_ids, *sequence.response_ids)
    return hash_tokens(token_ids), hash_tokens(token_ids[:-1])


@lru_cache(maxsize=1)
def _read_record(request: EngineRequest) -> EngineRecord:
    """A line of a JSONL file, parsed; the last one is kept."""
    with _expected(request, JSONL), request.path.open("rb") as file:
        file.seek(request.offset)
        return parse_record(file.readline())


def parse_record(line: bytes) -> EngineRecord:
    """Parse a line: a response of SGLang, or tokens with the engine's log-probabilities.

    Raises:
        ValueError, TypeError, LookupError, RuntimeError, RecursionError: if it is neither.
    """
    record: Any = json.loads(line)
    meta, choices = record.get("meta_info"), record.get("choices")
    if meta is not None and "hidden_states" in meta:
        return _sglang_record(record, meta)
    if choices is not None:  # a response of vLLM's server
        (record,) = choices
    for tokens_name, logps_name in (("token_ids", "logprobs"), ("prompt_token_ids", "prompt_logprobs")):
        if isinstance(record.get(logps_name), list):
            token_ids = _token_ids(record[tokens_name])
            return EngineRecord(token_ids=token_ids, logps=_token_logps(record[logps_name], token_ids))
    raise ValueError(
        "it has neither 'meta_info' with 'hidden_states' (SGLang) nor 'token_ids' with 'logprobs'"
    )


def _sglang_record(record: dict[str, Any], meta: dict[str, Any]) -> EngineRecord:
    """The tokens, hidden states and log-probabilities of a response of SGLang's ``/generate``.

    Hidden states are [tokens, 1, dim]; log-probabilities are NaN where not listed, and () if none is.

    Raises:
        ValueError: if the response lacks a part, or its parts do not fit together.
    """
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
    parts = (part if isinstance(part[0], list) else [part] for part in meta["hidden_states"])
    rows = [row for part in parts for row in part]
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
        if entry is not None and not -math.inf < number <= ROUNDING_NATS:
            raise ValueError(f"it has {number} as the log-probability of token {len(logps)}")
        logps.append(number)
    return tuple(logps)
