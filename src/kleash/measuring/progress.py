"""Progress of a measurement, for a display."""

from typing import Protocol, runtime_checkable

from kleash.uncertainty import Estimate


@runtime_checkable
class ProgressReporter(Protocol):
    """Receives the progress of a run: notes, the total, tokens, sequences and the running KL."""

    def note(self, sentence: str) -> None:
        """Report a decision: which base an adapter has, where a run is resumed."""
        ...

    def set_total(self, sequences: int | None) -> None:
        """Begin to count sequences that are scored; None if their total is not known."""
        ...

    def add_generated(self, tokens: int, sequences: float) -> None:
        """Count newly generated tokens, and by how many sequences the generation is nearer to its end."""
        ...

    def add_scored(self, sequences: int, tokens: int) -> None:
        """Count newly scored sequences and their tokens, also of a shard that is not on disk yet."""
        ...

    def update_kl(self, kl: Estimate) -> None:
        """Show KL(policy || reference) per token so far; called after each shard that is on disk."""
        ...


class NullProgressReporter:
    """A reporter that does nothing."""

    def note(self, sentence: str) -> None:
        """Do nothing."""

    def set_total(self, sequences: int | None) -> None:
        """Do nothing."""

    def add_generated(self, tokens: int, sequences: float) -> None:
        """Do nothing."""

    def add_scored(self, sequences: int, tokens: int) -> None:
        """Do nothing."""

    def update_kl(self, kl: Estimate) -> None:
        """Do nothing."""
