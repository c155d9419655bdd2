"""Hidden states that a serving engine saved: files of vLLM and SGLang, indexed by the tokens of their requests.

vLLM (0.18 or later): ``ExampleHiddenStatesConnector`` writes one safetensors file per request, with ``hidden_states``
[tokens, layers, dim] and ``token_ids`` [tokens]. The rows are before the final norm; which layers they are is in the
engine's configuration only. SGLang: responses of ``/generate`` with ``return_hidden_states``, one JSON object a line;
``meta_info.hidden_states`` has the rows of the prompt and one row for each further token but the last, after the final
norm.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.checkpoints.files import SafetensorsFiles, open_safetensors
from kleash.errors import ModelError, NonFiniteError, OptionError, RunFolderError, summarise_error
from kleash.models.cache.hidden_states import KEY_BYTES
from kleash.models.cache.saved_records import SavedRecord, SavedRequest, parse_record
from kleash.sources.sequences import TokenSequence
from kleash.store.file_hashes import watch_files

STATES, TOKENS = "hidden_states", "token_ids"
"""Names of the tensors that vLLM's connector writes."""
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TOKEN_DTYPES = ("I64", "I32")
JSON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Tried in this order for numbers in JSON: the first that holds all of them exactly."""


class SavedStates:
    """A folder of hidden states that an engine saved.

    All token ids are read when the folder is opened, and nothing else of safetensors files.
    """

    def __init__(self, folder: Path) -> None:
        """Index the files ``*.safetensors`` and ``*.jsonl`` of ``folder``.

        Raises:
            ModelError: if a file is damaged, or differs from the others in dtype, layers or dim.
            OptionError: if it is not a folder, or holds no hidden states.
        """
        if not folder.is_dir():
            raise OptionError(
                f"{folder} is not a folder; give the folder in which the engine saved hidden states"
            )
        self.folder = folder
        self.is_after_norm = False
        """Whether the rows are after the final norm (SGLang), or before it (vLLM)."""
        self.dtype: torch.dtype = torch.bfloat16
        self.num_layers = 1
        """Rows saved for each token."""
        self.dim = 0
        self.num_rows = 0
        self.token_range: tuple[int, int] = (0, 0)
        """Smallest and largest token id."""
        self._requests: dict[bytes, list[SavedRequest]] = {}
        self._logps: dict[bytes, SavedRequest] = {}
        self._first: SavedRequest | None = None
        self._last_record: tuple[SavedRequest, SavedRecord] | None = None
        """The line that was parsed last."""
        watch_files([*folder.glob("*.safetensors"), *folder.glob("*.jsonl")])
        for path in sorted(folder.glob("*.safetensors")):
            self._add_safetensors(path)
        has_safetensors = self._first is not None
        for path in sorted(folder.glob("*.jsonl")):
            self._add_jsonl(path, has_safetensors)
        if self._first is None:
            within = next((path.parent for path in sorted(folder.glob("*/*.safetensors"))), None)
            advice = "" if within is None else f"; files are in {within}: give that folder"
            raise OptionError(
                f"{folder} holds no hidden states: expected *.safetensors of vLLM's ExampleHiddenStatesConnector, or "
                f"*.jsonl with the responses of SGLang{advice}"
            )

    def __len__(self) -> int:
        """Number of requests with different tokens."""
        return len(self._requests)

    @property
    def engine(self) -> str:
        """Name of the engine whose layout the files have."""
        return "SGLang" if self.is_after_norm else "vLLM"

    @property
    def has_logps(self) -> bool:
        """Whether the engine's log-probabilities of any tokens were saved."""
        return bool(self._logps)

    def requests(self) -> Iterator[SavedRequest]:
        """All requests, in the order of files and lines."""
        for requests in self._requests.values():
            yield from requests

    def find(self, sequence: TokenSequence) -> list[SavedRequest]:
        """The requests whose rows are those of a sequence: of its input tokens, or of these and the last token."""
        keys = dict.fromkeys(_keys_of(sequence))
        return [request for key in keys for request in self._requests.get(key, ())]

    def check_shape(self, dim: int, vocab_size: int, name: str) -> None:
        """Check the width of the rows and the token ids against a model.

        Raises:
            ModelError: if they cannot be of that model.
        """
        if self.dim != dim:
            raise ModelError(
                f"{self._first} holds hidden states of {self.dim} numbers and those of {name} have {dim}; give the "
                "model that the engine served as --reference"
            )
        for token_id in self.token_range:
            if not 0 <= token_id < vocab_size:
                raise ModelError(
                    f"{self.folder} holds the token id {token_id} and {name} has the ids 0 to {vocab_size - 1}; give "
                    "the model that the engine served as --reference"
                )

    def token_ids(self, request: SavedRequest) -> tuple[int, ...]:
        """The token ids of a request's rows."""
        if request.line is None:
            return tuple(SafetensorsFiles([request.path]).read(TOKENS).tolist())
        return self._read_record(request).token_ids

    def read(self, request: SavedRequest, start: int, stop: int) -> Float[Tensor, "tokens layers dim"]:
        """Rows ``start`` to ``stop - 1`` of a request, on the CPU, in the saved dtype.

        Raises:
            ModelError: if the file is damaged.
        """
        if request.line is not None:
            states = self._read_record(request).states
            assert states is not None
            return states[start:stop].to(self.dtype)
        return open_safetensors(request.path).get_slice(STATES)[start:stop]

    def token_logps(self, sequence: TokenSequence) -> Float[np.ndarray, " response"] | None:
        """The engine's log-probability of each response token, NaN where unknown; None if none was saved."""
        num_prompt, num_tokens = (
            len(sequence.prompt_ids),
            len(sequence.prompt_ids) + len(sequence.response_ids),
        )
        for key in _keys_of(sequence):
            request = self._logps.get(key)
            if request is not None:
                for token_ids, logps in self._read_record(request).logps:
                    if _key(token_ids) == key:
                        values = np.full(num_tokens, np.nan)
                        values[: len(logps)] = logps
                        return values[num_prompt:]
        return None

    def _add_safetensors(self, path: Path) -> None:
        """Index a file of vLLM."""
        try:
            header = SafetensorsFiles([path])
        except ModelError as error:
            raise ModelError(
                f"{summarise_error(error).replace('; fetch or make it again', '')}: let the engine save it again, or "
                "wait until it is written"
            ) from error
        missing = [name for name in (STATES, TOKENS) if name not in header]
        if missing:
            raise ModelError(
                f"{path} has no tensor {missing[0]!r}; expected the files of vLLM's ExampleHiddenStatesConnector"
            )
        states, tokens = header[STATES], header[TOKENS]
        shape, token_shape = list(states.shape), list(tokens.shape)
        if states.kind not in FLOAT_DTYPES or tokens.kind not in TOKEN_DTYPES:
            raise ModelError(
                f"{path} holds hidden states of dtype {states.kind} and token ids of dtype {tokens.kind}; "
                "expected BF16, F16, F32 or F64, and I64 or I32"
            )
        if len(shape) != 3 or len(token_shape) != 1:
            raise ModelError(
                f"{path} holds hidden states of shape {shape} and token ids of shape {token_shape}; expected "
                "[tokens, layers, dim] and [tokens]"
            )
        if shape[0] != token_shape[0]:
            raise ModelError(
                f"{path} holds {shape[0]} rows of hidden states (shape {shape}) for {token_shape[0]} tokens; let the "
                "engine save it again, as [tokens, layers, dim] and without chunked prefill"
            )
        request = SavedRequest(path=path, line=None, offset=0, rows=shape[0])
        self._add(request, self.token_ids(request), FLOAT_DTYPES[states.kind], *shape[1:])

    def _add_jsonl(self, path: Path, has_safetensors: bool) -> None:
        """Index a file of SGLang's responses, or of log-probabilities."""
        try:
            with path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, 1):
                    request = SavedRequest(path=path, line=number, offset=offset, rows=0)
                    offset += len(line)
                    if line.strip():
                        self._add_line(request, line, has_safetensors)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read: {error.strerror or error}") from error

    def _add_line(self, request: SavedRequest, line: bytes, has_safetensors: bool) -> None:
        record = parse_record(request, line)
        for token_ids, _ in record.logps:
            self._logps.setdefault(_key(token_ids), request)
        if record.states is None:
            return
        if has_safetensors:
            raise OptionError(
                f"{request} holds hidden states of SGLang and {self._first} those of vLLM; give a folder of one engine"
            )
        states = record.states
        if not states.isfinite().all():
            row = int((~states.isfinite()).any(-1).any(-1).nonzero()[0])
            raise NonFiniteError(
                f"{request} holds NaN or infinities in row {row}; let the engine save it again"
            )
        dtype = next(
            (dtype for dtype in JSON_DTYPES if torch.equal(states.to(dtype).double(), states)), torch.float64
        )
        self.is_after_norm = True
        request = SavedRequest(path=request.path, line=request.line, offset=request.offset, rows=len(states))
        wider = torch.promote_types(dtype, self.dtype)
        if self._first is not None:
            self.dtype = dtype = wider
        self._add(request, record.token_ids, dtype, *states.shape[1:])

    def _add(
        self, request: SavedRequest, token_ids: Sequence[int], dtype: torch.dtype, num_layers: int, dim: int
    ) -> None:
        """Add a request to the index.

        Raises:
            ModelError: if it has no tokens, or differs from the first in dtype, layers or dim.
        """
        if not token_ids:
            raise ModelError(
                f"{request} holds no tokens, as of a request of embeddings instead of tokens; delete it"
            )
        if self._first is None:
            self._first = request
            self.dtype, self.num_layers, self.dim = dtype, num_layers, dim
            self.token_range = token_ids[0], token_ids[0]
        elif (dtype, num_layers, dim) != (self.dtype, self.num_layers, self.dim):
            raise ModelError(
                f"{request} holds {num_layers} layers of {dim} numbers in {_dtype_name(dtype)} and {self._first} "
                f"{self.num_layers} of {self.dim} in {_dtype_name(self.dtype)}; give a folder of one engine's run"
            )
        self.token_range = min(*self.token_range, *token_ids), max(*self.token_range, *token_ids)
        self.num_rows += len(token_ids)
        self._requests.setdefault(_key(token_ids), []).append(request)

    def _read_record(self, request: SavedRequest) -> SavedRecord:
        """A line of a JSONL file, parsed."""
        last = self._last_record
        if last is not None and (last[0].path, last[0].offset) == (request.path, request.offset):
            return last[1]
        try:
            with request.path.open("rb") as file:
                file.seek(request.offset)
                record = parse_record(request, file.readline())
        except OSError as error:
            raise RunFolderError(f"{request} cannot be read: {error.strerror or error}") from error
        self._last_record = request, record
        return record


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _key(token_ids: Sequence[int]) -> bytes:
    """A hash of token ids."""
    return blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=KEY_BYTES).digest()


def _keys_of(sequence: TokenSequence) -> tuple[bytes, bytes]:
    """The hashes of all tokens of a sequence and of its input tokens."""
    token_ids = (*sequence.prompt_ids, *sequence.response_ids)
    return _key(token_ids), _key(token_ids[:-1])


def check_rows(states: Tensor, request: SavedRequest, start: int) -> None:
    """Check that rows of a request are finite, and that the last layer of none is zero in all numbers.

    Args:
        states: [rows, layers, dim].
        request: where they are.
        start: the number of the first row.

    Raises:
        NonFiniteError: naming the file and the row.
        ModelError: likewise, if the row is zero, as in a buffer that was not filled.
    """
    finite = states.isfinite().flatten(1).all(-1)
    if not finite.all():
        row = start + int((~finite).nonzero()[0])
        raise NonFiniteError(f"{request} holds NaN or infinities in row {row}; let the engine save it again")
    filled = (states[:, -1] != 0).any(-1)
    if not filled.all():
        row = start + int((~filled).nonzero()[0])
        raise ModelError(
            f"{request} holds only zeros in row {row}, which no model computes; let the engine save it again"
        )
