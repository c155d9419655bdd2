"""What a measurement tells whoever waits for it."""

from typing import Protocol, runtime_checkable

from kleash.records import Number


@runtime_checkable
class Watcher(Protocol):
    """Told of a run's progress; what it does with that is its own affair."""

    def said(self, sentence: str) -> None:
        """Something worth knowing was decided: which base an adapter took, where a run goes on."""
        ...

    def planned(self, sequences: int | None) -> None:
        """So many sequences are to be scored; None if that is not known."""
        ...

    def generated(self, tokens: int) -> None:
        """So many more tokens were drawn."""
        ...

    def scored(self, sequences: int, tokens: int) -> None:
        """So many more sequences, of so many tokens, were scored."""
        ...

    def shard_written(self, kl: Number) -> None:
        """A shard is safe on disk, and this is KL(policy || reference) per token so far."""
        ...


class Nobody:
    """A watcher who does not look."""

    def said(self, sentence: str) -> None:
        """Not listened to."""

    def planned(self, sequences: int | None) -> None:
        """Not looked at."""

    def generated(self, tokens: int) -> None:
        """Not looked at."""

    def scored(self, sequences: int, tokens: int) -> None:
        """Not looked at."""

    def shard_written(self, kl: Number) -> None:
        """Not looked at."""
