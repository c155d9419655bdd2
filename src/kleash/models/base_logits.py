"""Files of base logits, which ``llama-perplexity --kl-divergence-base`` of llama.cpp writes: reading and writing.

    _logits_ | n_ctx (uint32) | n_vocab (int32) | n_chunk (int32) | n_chunk x n_ctx tokens (int32)
    for each chunk, positions n_ctx // 2 to n_ctx - 2: scale, minimum (float32) | n_vocab codes (uint16), made even

Position k of a chunk predicts token k + 1, after the chunk's tokens up to k, the first of which llama.cpp replaces by
the begin token if the model has one. A code c stands for the log-probability minimum + c · scale; logits of 16 or more
(in ik_llama.cpp 24) below the largest have code 0. Source: llama.cpp, ``tools/perplexity/perplexity.cpp``, and
ik_llama.cpp, ``examples/perplexity/perplexity.cpp``, ``log_softmax``.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError, SourceError
from kleash.store.checksums import reading
from kleash.store.file_hashes import watch_files

MAGIC = b"_logits_"
GIVE_FILE = "give a file of llama-perplexity --kl-divergence-base, or the folder of kleash cache"
HEADER_BYTES = 20
MAX_CONTEXT, MAX_VOCAB = 1 << 22, 1 << 24
RANGE, IK_RANGE = 16.0, 24.0
"""Nats below the largest logit that codes can express: in files of llama.cpp, and of ik_llama.cpp."""
MAX_CODE = 65535
LARGEST_ERROR = 1e-3
"""Error of a row's largest log-probability, which is a sum of numbers in float32."""


@dataclass(frozen=True, kw_only=True)
class BaseLogitsRows:
    """The stored log-probabilities of consecutive positions of one chunk."""

    scale: np.ndarray
    """Nats between neighbouring codes, [rows]."""
    minimum: np.ndarray
    """Log-probability of code 0, [rows]."""
    codes: np.ndarray
    """[rows, vocab], uint16."""

    def __getitem__(self, part: slice) -> "BaseLogitsRows":
        """Some of the rows."""
        return BaseLogitsRows(scale=self.scale[part], minimum=self.minimum[part], codes=self.codes[part])


@dataclass(frozen=True, kw_only=True)
class BaseLogitsFile:
    """A file of base logits whose header agrees with its size."""

    path: Path
    context: int
    """Tokens in a chunk."""
    vocab_size: int
    chunks: int

    @property
    def scored(self) -> int:
        """Scored positions in a chunk."""
        return self.context - 1 - self.context // 2

    def tokens(self, chunk: int) -> np.ndarray:
        """The text of a chunk, [context], int32.

        Raises:
            SourceError: if a token is none of the vocabulary, or the file has become shorter.
        """
        tokens = self._values("<i4", HEADER_BYTES + 4 * self.context * chunk, self.context, chunk)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise SourceError(
                f"{self.path} has a token beyond its vocabulary of {self.vocab_size}; write it again"
            )
        return tokens

    def read(self, chunk: int, start: int, stop: int) -> BaseLogitsRows:
        """Read positions ``start`` to ``stop`` of those that are scored in a chunk.

        Raises:
            SourceError: if a scale or minimum is impossible, or the file has become shorter.
        """
        offset = HEADER_BYTES + 4 * self.context * self.chunks
        width = row_values(self.vocab_size)
        offset += 2 * width * (chunk * self.scored + start)
        rows = self._values("<u2", offset, (stop - start) * width, chunk).reshape(stop - start, width)
        numbers = np.ascontiguousarray(rows[:, :4]).view("<f4")
        scale, minimum = numbers[:, 0].copy(), numbers[:, 1].copy()
        with np.errstate(invalid="ignore"):  # the largest log-probability is between that of equal ones and 0
            largest = minimum + MAX_CODE * scale.astype(np.float64)
        is_valid = (
            (scale >= 0)
            & (scale <= 1.01 * IK_RANGE / MAX_CODE)
            & (largest <= LARGEST_ERROR)
            & (largest >= -math.log(self.vocab_size) - LARGEST_ERROR)
        )
        if not is_valid.all():
            row = int(np.flatnonzero(~is_valid)[0])
            raise SourceError(
                f"{self.path} has the scale {scale[row]:.6g} and the smallest log-probability {minimum[row]:.6g} at "
                f"scored position {start + row} of chunk {chunk}, which llama.cpp does not write; write the file again"
            )
        return BaseLogitsRows(scale=scale, minimum=minimum, codes=rows[:, 4 : 4 + self.vocab_size])

    def _values(self, dtype: str, offset: int, count: int, chunk: int) -> np.ndarray:
        """Numbers at a place of the file.

        Raises:
            SourceError: if it ends before.
        """
        with reading(self.path, GIVE_FILE, SourceError), self.path.open("rb") as file:
            values = np.fromfile(file, dtype=dtype, count=count, offset=offset)
        if values.size != count:
            raise SourceError(f"{self.path} ends within chunk {chunk}; write it again")
        return values


def row_values(vocab_size: int) -> int:
    """16-bit values in a row: four for scale and minimum, and the codes, made even."""
    return 2 * ((vocab_size + 1) // 2) + 4


def open_base_logits(path: Path) -> BaseLogitsFile:
    """Read and validate the header and the tokens of a file of base logits.

    Raises:
        SourceError: if it is not such a file, its size differs from what its header says, or a token is none of its
            vocabulary.
    """
    with reading(path, GIVE_FILE, SourceError):
        size = path.stat().st_size
        watch_files([path])
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
    if head[:8] != MAGIC:
        raise SourceError(
            f"{path} does not begin with _logits_, so it is no file of base logits; {GIVE_FILE}"
        )
    context, vocab_size, chunks = np.frombuffer(head[8:].ljust(12, b"\0"), dtype="<i4").tolist()
    opened = BaseLogitsFile(path=path, context=context, vocab_size=vocab_size, chunks=chunks)
    expected = HEADER_BYTES + chunks * (4 * context + 2 * opened.scored * row_values(vocab_size))
    is_possible = 4 <= context <= MAX_CONTEXT and 1 <= vocab_size <= MAX_VOCAB and chunks >= 1
    if not is_possible or size != expected:
        raise SourceError(
            f"{path} is of {chunks} chunks of {context} tokens and a vocabulary of {vocab_size} by its header, and has "
            f"{size} bytes; write it again"
        )
    for chunk in range(chunks):
        opened.tokens(chunk)
    return opened


def write_header(file: BinaryIO, tokens: np.ndarray, vocab_size: int) -> None:
    """Write the header and the tokens [chunks, context]."""
    chunks, context = tokens.shape
    file.write(MAGIC + np.array([context, vocab_size, chunks], dtype="<i4").tobytes())
    file.write(tokens.astype("<i4").tobytes())


def encode_rows(logits: Float[Tensor, "rows vocab"]) -> np.ndarray:
    """Encode logits as llama.cpp does, in float32: [rows, ``row_values``] of uint16.

    Raises:
        ModelError: if a logit is not finite.
    """
    values = logits.float()
    if not bool(values.isfinite().all()):
        raise ModelError(
            "the logits of the reference are not all finite, and llama.cpp's format has no code for them"
        )
    largest = values.amax(-1, keepdim=True)
    smallest = torch.maximum(values.amin(-1, keepdim=True), largest - RANGE)
    log_sum = (values - largest).exp().double().sum(-1, keepdim=True).log().float()
    scale = (largest - smallest) / MAX_CODE
    inverse = torch.where(scale > 0, 1 / scale, 0)
    codes = torch.where(values > smallest, (inverse * (values - smallest)).round(), 0)
    rows = np.zeros((len(values), row_values(values.shape[-1])), dtype="<u2")
    numbers = torch.cat([scale, smallest - largest - log_sum], -1).cpu().numpy().astype("<f4")
    rows[:, :4] = numbers.view("<u2")
    rows[:, 4 : 4 + values.shape[-1]] = codes.cpu().numpy().astype("<u2")
    return rows


def split_chunks(token_ids: Iterable[int], context: int, chunks: int | None) -> np.ndarray:
    """The tokens of a text as chunks, [chunks, context]; the rest that fills no chunk is left out.

    Raises:
        SourceError: if there are fewer than two chunks, which llama.cpp refuses.
    """
    stream = np.fromiter(token_ids, dtype=np.int32)
    if len(stream) < 2 * context:
        raise SourceError(
            f"the text has {len(stream)} tokens, and llama.cpp needs two chunks of {context}; give a longer text or a "
            "smaller --window"
        )
    whole = stream[: len(stream) // context * context].reshape(-1, context)
    return whole if chunks is None else whole[:chunks]
