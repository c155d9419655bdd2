"""Which sequences are computed together."""

from collections.abc import Sequence

from kleash.errors import OptionError


def length_batches(lengths: Sequence[int], batch_tokens: int, *, rows: int | None = None) -> list[list[int]]:
    """Indices in batches of like length, each at most ``batch_tokens`` tokens with its padding.

    Longest first, so that memory runs out in the first batch or never. A sequence longer than the budget is
    alone in its batch. Equal lengths stay in their order, so the same lengths always give the same batches.

    Args:
        lengths: tokens of each sequence.
        batch_tokens: the budget, padding included.
        rows: the most sequences in a batch; None for no limit.

    Raises:
        OptionError: if the budget is below one token.
    """
    if batch_tokens < 1:
        raise OptionError(f"batch_tokens is {batch_tokens}; a batch holds at least one token")
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        longest = lengths[batches[-1][0]] if batches else 0
        full = not batches or longest * (len(batches[-1]) + 1) > batch_tokens
        if full or (rows is not None and len(batches[-1]) >= rows):
            batches.append([])
        batches[-1].append(index)
    return batches
