"""Reading files that gzip or zstd compressed, without unpacking more than their size makes plausible."""

import gzip
import io
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

from kleash.errors import SourceError, summarise_error
from kleash.extras import import_extra

COMPRESSIONS = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
"""Program -> first bytes of its files; pzstd begins with a frame that is skipped (RFC 8878, 3.1.2)."""
SUFFIXES = frozenset({".gz", ".gzip", ".zst", ".zstd"})
"""Suffixes that they add to a file's name."""
FREE_BYTES = 64 * 2**20
"""Bytes that any file may unpack to."""
LARGEST_RATIO = 200
"""Unpacked bytes for each compressed byte beyond ``FREE_BYTES``. Text of records reaches 5 to 50."""
BLOCK_BYTES = 1 << 20


def open_unpacked(path: Path, label: str) -> BinaryIO:
    """Open a file for reading, unpacked if it is compressed.

    Args:
        path: the file.
        label: its name in errors, which reading can raise too.

    Raises:
        OSError: if the file cannot be opened.
        MissingExtraError: if it is compressed by zstd and pyarrow is not installed.
    """
    file = path.open("rb")
    try:
        program = compression_of(file)
        if program is None:
            return file
        if program == "gzip":
            stream: Any = gzip.GzipFile(fileobj=file)
        else:
            stream = import_extra("pyarrow", "models").CompressedInputStream(file, "zstd")
        reader = _BoundedReader(stream, file, f"{label} is packed by {program}")
        return cast(BinaryIO, io.BufferedReader(reader, BLOCK_BYTES))
    except BaseException:
        file.close()
        raise


def compression_of(file: BinaryIO) -> str | None:
    """The program that compressed a file, which is at its beginning; None if it is not compressed."""
    start = file.read(4)
    file.seek(0)
    return next((program for program, pattern in COMPRESSIONS.items() if pattern.match(start)), None)


def uncompressed_suffix(path: Path) -> str:
    """The suffix of a file in lower case, without that of its compression: ".jsonl" of "a.jsonl.gz"."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in SUFFIXES else suffix


class _BoundedReader(io.RawIOBase):
    """An unpacked stream that ends with a SourceError where it is damaged, or grows beyond ``LARGEST_RATIO``."""

    def __init__(self, stream: Any, file: BinaryIO, subject: str) -> None:
        self.stream, self.file, self.subject, self.unpacked = stream, file, subject, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            block = self.stream.read(min(len(buffer), BLOCK_BYTES))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise SourceError(
                f"{self.subject}, and cannot be unpacked: {summarise_error(error)}; make or fetch it again"
            ) from error
        self.unpacked += len(block)
        if self.unpacked > FREE_BYTES + LARGEST_RATIO * self.file.tell():
            raise SourceError(
                f"{self.subject}, and unpacks to more than {LARGEST_RATIO} times its size, as files do that are made "
                "to fill a memory; unpack it first if you trust it"
            )
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        self.file.close()
        super().close()
