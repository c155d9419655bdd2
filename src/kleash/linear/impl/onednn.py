"""Matrix products in float32 by oneDNN, on processors where it is faster than torch's own product.

On AMD processors with AVX-512, torch multiplies float32 matrices by MKL, which uses AVX-512 only on Intel's processors;
oneDNN, which torch has for other operations, uses what the processor supports. It is faster for the logits and for
their gradient times the weight (``benchmarks/linear_peers.py`` measures both), the more so the fewer tokens there are.
A weight's gradient is computed by MKL, which is faster at factors with that layout.
"""

from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

CPUINFO = Path("/proc/cpuinfo")
AMD_VENDOR_ID = "AuthenticAMD"


def is_faster(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of factors of this dtype on this device are computed by oneDNN."""
    is_float32_on_cpu = dtype == torch.float32 and device.type == "cpu"
    return is_float32_on_cpu and torch.backends.mkldnn.enabled and is_faster_on_this_machine()


@cache
def is_faster_on_this_machine() -> bool:
    """Whether oneDNN is the faster one on this processor, and torch has its function."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and is_amd_with_avx512()


def is_amd_with_avx512() -> bool:
    """Whether this processor has AVX-512 that MKL does not use."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return AMD_VENDOR_ID in CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def product(
    a: Float[Tensor, "rows inner"], b: Float[Tensor, "columns inner"]
) -> Float[Tensor, "rows columns"]:
    """``a b^T``."""
    if torch.compiler.is_compiling():  # the compiler takes oneDNN's function with constants only
        return a @ b.T
    result = cast("Any", torch.ops.mkldnn)._linear_pointwise(a, b, None, "none", [], "")
    return cast("Tensor", result)
