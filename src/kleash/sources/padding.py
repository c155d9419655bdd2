"""Padding of responses that no mask marks: tokens at the end at which the log-probabilities have one value."""

from collections.abc import Sequence

import numpy as np

LEAST_RUN = 3
"""Tokens of the shortest end of a response that counts as padding."""
LEAST_RESPONSES, LEAST_SHARE = 2, 0.1
"""Number and share of the responses that must end so: a single one may repeat a token with certainty."""


def padding_length(token_ids: Sequence[int], columns: Sequence[np.ndarray]) -> int:
    """The number of tokens at the end of a response that look like padding; 0 if there are fewer than 3.

    At these tokens each column of log-probabilities has one value. Where all values are 0, which is also the
    log-probability of a token that is certain, the tokens are one token as well.
    """
    values = np.stack(columns)
    is_padding = (values == values[:, -1:]).all(axis=0)
    if not values[:, -1].any():
        is_padding &= np.asarray(token_ids) == token_ids[-1]
    length = len(token_ids) if is_padding.all() else int((~is_padding[::-1]).argmax())
    return length if LEAST_RUN <= length < len(token_ids) else 0


def is_padded(padded: int, responses: int) -> bool:
    """Whether so many of the responses end like padding that they are padded."""
    return padded >= max(LEAST_RESPONSES, LEAST_SHARE * responses)
