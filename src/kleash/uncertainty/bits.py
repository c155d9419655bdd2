"""float32 numbers as whole numbers that rise as they do."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

HALF = 1 << 16
SIGN = np.uint32(1 << 31)


def keys_of(values: NDArray[Any]) -> NDArray[np.int64]:
    """The bits of float32 numbers, turned so that they rise from 0 as the numbers do; both zeros are one."""
    bits = np.asarray(values + np.float32(0), np.float32).view(np.uint32)  # pyright: ignore[reportUnknownMemberType]
    return np.where(bits & SIGN, ~bits, bits | SIGN).astype(np.int64)


def values_of(keys: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers of these keys; beyond the infinities stand the infinities."""
    lowest, highest = keys_of(np.array([-np.inf, np.inf], np.float32))
    clipped = np.minimum(np.maximum(keys, lowest), highest).astype(np.uint32)
    bits: NDArray[np.uint32] = np.where(clipped & SIGN, clipped ^ SIGN, ~clipped).astype(np.uint32)
    return bits.view(np.float32)  # pyright: ignore[reportUnknownMemberType]
