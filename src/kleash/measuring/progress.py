"""Progress of a measurement, for a display."""

from collections.abc import Iterable

from kleash.estimate import Estimate

LOADING = "loading the models; those of the hub are downloaded first"
"""Note before models are loaded, which may take long and is silent."""


class ProgressReporter:
    """Receives the progress of a run: notes, the total, tokens, sequences and the running KL. This one drops it."""

    def note(self, sentence: str) -> None:
        """Report a decision: which base an adapter has, where a run is resumed."""

    def note_all(self, sentences: Iterable[str]) -> None:
        """Report several decisions."""
        for sentence in sentences:
            self.note(sentence)

    def set_total(self, sequences: int | None) -> None:
        """Begin to count sequences that are scored; None if their total is not known."""

    def add_generated(self, tokens: int, sequences: float) -> None:
        """Count newly generated tokens, and by how many sequences the generation is nearer to its end."""

    def add_scored(self, sequences: int, tokens: int) -> None:
        """Count newly scored sequences and their tokens, also of a shard that is not on disk yet."""

    def update_kl(self, kl: Estimate) -> None:
        """Show KL(policy || reference) per token so far; called after shards that are on disk."""
