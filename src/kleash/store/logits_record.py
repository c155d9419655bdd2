"""The results of ``kleash logits``: a measurement against llama.cpp's base logits, and a file that was written."""

from collections.abc import Mapping
from dataclasses import dataclass

from kleash.estimate import Estimate as Number
from kleash.store.codec import to_json
from kleash.store.measurement import ModelRecord
from kleash.store.notebook import Result


@dataclass(frozen=True, kw_only=True)
class LogitsMeasurement(Result):
    """A model against a file of base logits."""

    path: str
    """Of the file."""
    policy: ModelRecord
    chunks: int
    """Chunks that were read, the clusters of the errors."""
    context: int
    """Tokens in a chunk."""
    tokens: int
    """Scored positions."""
    per_token: Mapping[str, Number]
    """Means per token with errors clustered by chunk: the lower and the upper bound of both KLs, the mean of
    llama.cpp's KLD (that of the base from the policy, without what the base gives less than e^-16),
    ln(PPL(Q)/PPL(base)), and top-1 agreement."""
    llama_cpp: str
    """The statistics that llama-perplexity prints; empty for fewer than 100 tokens."""
    notes: tuple[str, ...] = ()
    """How the model was loaded."""

    def to_json(self) -> str:
        """The record as JSON."""
        return to_json(self)


@dataclass(frozen=True, kw_only=True)
class WrittenLogits:
    """A file of base logits that was written."""

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

    def to_json(self) -> str:
        """The record as JSON."""
        return to_json(self)
