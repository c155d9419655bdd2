"""How the numbers are computed, which changes their cost and not their meaning."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kleash.errors import CannotRunError, OptionError
from kleash.registry import look_up

IMPLS = MappingProxyType(
    {
        "auto": "triton where it can run on a GPU, else chunked",
        "reference": "all logits at once, in a few lines: what the others have to equal",
        "chunked": "a few tokens at a time, within buffer_bytes",
        "triton": "the same with kernels for CUDA tensors",
    }
)
COMPILE = MappingProxyType({"auto": "where it pays", "always": "or an error", "never": "eager"})


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Implementation, memory and compilation of the functions that start from hidden states.

    Raises:
        UnknownNameError: if there is no such implementation or way to compile.
        OptionError: if ``buffer_bytes`` is not positive.
        CannotRunError: if this version lacks what was asked for.
    """

    impl: str = "auto"
    """Which implementation: auto, reference, chunked or triton. All mean the same number; auto takes triton for
    what it can do of CUDA tensors, chunked otherwise. A triton that cannot run is an error."""
    buffer_bytes: int = 128 * 2**20
    """Memory for the logits of a chunk of tokens, of both models together; a chunk is one token at least."""
    compile: Literal["auto", "always", "never"] | bool = "auto"
    """Whether the elementwise core of the values is compiled, which takes about 10 seconds in a process:
    auto does so if a C++ compiler is there and this call alone has enough work to win that back."""
    skip_below: float = 0.0
    """Leave out vocabulary tiles whose mass is below this; only 0, nothing left out, is possible yet."""

    def __post_init__(self) -> None:
        """Refuse what means nothing or is not here yet."""
        look_up(IMPLS, self.impl, "implementation of the linear functions")
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "always" if self.compile else "never")
        look_up(COMPILE, str(self.compile), "way to compile")
        if self.buffer_bytes <= 0:
            raise OptionError(f"buffer_bytes is {self.buffer_bytes}; give the chunks at least one byte")
        if self.skip_below != 0.0:
            raise CannotRunError(f"skip_below={self.skip_below} cannot be done yet; leave it at 0")
