"""Products in float32 by oneDNN, where torch's own are slower.

On a processor of AMD with AVX-512, torch multiplies float32 matrices by MKL, which keeps its AVX-512 functions to
Intel's own processors; oneDNN, which torch has for other things, asks only what a processor can do. That pays for the
logits and for their gradient times the weight (``benchmarks/linear_peers.py`` has both ways), the more so the fewer
tokens there are; a weight's gradient stays with MKL, which is faster at factors that lie that way.
"""

from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

PROCESSORS = Path("/proc/cpuinfo")
MAKER = "AuthenticAMD"


def pays(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of such factors are made here: a question of their kind and of the machine."""
    ours = dtype == torch.float32 and device.type == "cpu"
    return ours and torch.backends.mkldnn.enabled and faster_here()


@cache
def faster_here() -> bool:
    """Whether this is a processor where oneDNN is the faster one, and torch has it."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and is_amd_with_avx512()


def is_amd_with_avx512() -> bool:
    """Whether MKL keeps to AVX2 on this processor, which could do more."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return MAKER in PROCESSORS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def product(
    a: Float[Tensor, "rows inner"], b: Float[Tensor, "columns inner"]
) -> Float[Tensor, "rows columns"]:
    """``a b^T``."""
    if torch.compiler.is_compiling():  # the compiler takes oneDNN's function with constants only
        return a @ b.T
    made = cast("Any", torch.ops.mkldnn)._linear_pointwise(a, b, None, "none", [], "")
    return cast("Tensor", made)
