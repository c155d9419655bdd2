"""The upper bound of the KL of best-of-n sampling from the reference."""

import math

from kleash.errors import OptionError


def best_of_n_bound(n: int) -> float:
    """The upper bound log n - (n - 1) / n nats of the KL of best-of-n, exact if rewards never tie.

    It is often quoted as the KL itself. The two are equal only if no single response is likely and no two responses
    have the same reward; over finitely many outcomes the KL is at most -log of the smallest probability.

    Raises:
        OptionError: if ``n`` is below 1.

    References:
        Beirami et al., "Theoretical Guarantees on the Best-of-n Alignment Policy" (2024),
        https://arxiv.org/abs/2401.01879
    """
    if n < 1:
        raise OptionError(f"n is {n}; the best is taken of at least 1")
    return math.log(n) - (n - 1) / n
