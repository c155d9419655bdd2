"""The label and the contents of a reference cache, as JSON files in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kleash.store.checksums import Checksums
from kleash.store.measurement import ModelRecord
from kleash.store.summary import JSONRecord

CACHE_SCHEMA = 1
"""Raised when a file of a cache is renamed or means something else."""
LABEL, CONTENTS = "reference.json", "contents.json"
REMAKE_CACHE = "delete it and give the kleash cache command again, or make the cache anew in another folder"


@dataclass(frozen=True, kw_only=True)
class CachedSource:
    """What the reference read."""

    kind: str
    """"text" or "responses"."""
    path: str
    """As it was asked for."""
    sha256: str
    """Of its bytes."""
    window: int | None
    """Tokens read at once, of text."""
    stride: int | None
    """Tokens from one window to the next, of text."""
    limit: int | None
    """The most documents or responses that were read; None for all."""
    batch_tokens: int
    reading: Mapping[str, str] = field(default_factory=dict[str, str])
    """The options that say which split and columns were read, and what was rendered; empty for the defaults."""

    def __str__(self) -> str:
        """In words, for errors."""
        windows = f", windows of {self.window} tokens every {self.stride}" if self.kind == "text" else ""
        limit = "" if self.limit is None else f", the first {self.limit}"
        options = "".join(f", --{name.replace('_', '-')} {value}" for name, value in self.reading.items())
        what = f"sha256 {self.sha256[:12]}{options}{windows}{limit}"
        return f"{self.path} ({what}, in batches of {self.batch_tokens} tokens)"

    def agrees(self, other: "CachedSource") -> bool:
        """Whether the same sequences come out of both, in the same batches."""
        return replace(self, path=other.path) == other

    def covers(self, other: "CachedSource") -> bool:
        """Whether all that comes out of ``other`` comes out of this one too; False if that is not plain."""
        same = replace(self, path=other.path, limit=other.limit, batch_tokens=other.batch_tokens) == other
        return same and (self.limit is None or (other.limit is not None and other.limit <= self.limit))


@dataclass(frozen=True, kw_only=True)
class CacheLabel:
    """``reference.json``: whose hidden states a folder holds, and of what; written before the first of them."""

    schema: int = CACHE_SCHEMA
    kleash: str
    """The version that began it."""
    reference: ModelRecord
    source: CachedSource | None = None
    """None where measurements have filled the folder as they went."""
    from_engine: bool = False
    """Whether a serving engine computed the hidden states, and kleash read them from its files."""


@dataclass(frozen=True, kw_only=True)
class CacheContents(JSONRecord):
    """``contents.json``: what a finished cache holds, and what of the reference is not a tensor."""

    sequences: int
    """Windows of text, or responses."""
    tokens: int
    """Positions whose hidden state is kept."""
    hidden_size: int
    """Numbers in a hidden state."""
    hidden_bytes: int
    """Size of all hidden states on disk."""
    head_bytes: int
    """Size of the head on disk."""
    logits_bytes: int
    """Size that the logits of the same positions would have, in the same dtype."""
    context: int | None
    """The most tokens the reference reads at once."""
    scale: float
    """What its logits are multiplied by."""
    softcap: float | None
    """The size that no logit of it exceeds."""
    notes: tuple[str, ...]
    """What was said when it was loaded."""


@dataclass(frozen=True, kw_only=True)
class WrittenLogits(JSONRecord):
    """A file of llama.cpp's base logits that was written."""

    path: str
    reference: ModelRecord
    chunks: int
    context: int
    """Tokens in a chunk."""
    vocabulary: int
    bytes: int
    """Of the file."""
    notes: tuple[str, ...] = ()
    """How the model was loaded."""


def cache_fingerprint(folder: Path) -> str:
    """The hash of the checksums of a cache's hidden states; those of an engine differ from kleash's by rounding.

    Raises:
        RunFolderError: if they are damaged.
    """
    return Checksums.read(folder).fingerprint(lambda name: name.startswith("part-"))


def read_label(folder: Path) -> CacheLabel:
    """Whose hidden states a cache holds, and of what.

    Raises:
        RunFolderError: if the file is damaged, or of another version of kleash.
    """
    return Checksums.read(folder).read_record(
        CacheLabel, folder / LABEL, "a part of a reference cache", REMAKE_CACHE
    )


def read_contents(folder: Path) -> CacheContents:
    """The contents of a finished cache, from its ``contents.json``.

    Raises:
        RunFolderError: if the file is damaged.
    """
    return Checksums.read(folder).read_record(
        CacheContents, folder / CONTENTS, "a part of a reference cache", REMAKE_CACHE
    )
