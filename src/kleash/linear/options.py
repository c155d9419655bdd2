"""The options of the linear functions, which change time and memory but not the results."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kleash.errors import OptionError
from kleash.registry import look_up

IMPLS = MappingProxyType(
    {
        "auto": "triton where it can run on a GPU, else chunked",
        "reference": "all logits at once, by plain torch: the specification of the others",
        "chunked": "a few tokens at a time, within buffer_bytes",
        "triton": "as chunked, with kernels for CUDA tensors",
    }
)
COMPILE = MappingProxyType({"auto": "where it saves time", "always": "or an error", "never": "eager"})

CPU_BYTES = 128 * 2**20
"""The default of ``buffer_bytes`` on a CPU, where larger chunks are no faster."""


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Implementation, memory and compilation of the functions that start from hidden states.

    Raises:
        UnknownNameError: if ``impl`` or ``compile`` is not one of its values.
        OptionError: if ``buffer_bytes`` is not positive.
    """

    impl: str = "auto"
    """The implementation: auto, reference, chunked or triton. All return the same number. auto takes triton for CUDA
    tensors where triton supports the call, and chunked otherwise; impl="triton" raises where it does not."""
    buffer_bytes: int | None = None
    """Memory for the logits of a chunk of tokens, of both models together; a chunk has at least one token. None
    chooses by device: 128 MiB on a CPU; on a GPU enough for 1024 tokens in a chunk, within an eighth of the free
    memory."""
    compile: Literal["auto", "always", "never"] | bool = "auto"
    """Whether the elementwise work of KL (values, losses, objectives) and of token statistics is compiled. float32 on a
    CPU uses a library in C that is built once on a machine, in two seconds; the rest is compiled by torch, in about 10
    seconds in each process. auto uses the library from 10^6 logits on, and torch's compiler where this call alone
    saves more time than compiling takes; always raises where neither is available."""

    @property
    def chunk_bytes(self) -> int:
        """``buffer_bytes``, or the default of a CPU if it is None."""
        return CPU_BYTES if self.buffer_bytes is None else self.buffer_bytes

    def __post_init__(self) -> None:
        """Check the values."""
        look_up(IMPLS, self.impl, "implementation of the linear functions")
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "always" if self.compile else "never")
        look_up(COMPILE, str(self.compile), "way to compile")
        if self.buffer_bytes is not None and self.buffer_bytes <= 0:
            raise OptionError(f"buffer_bytes is {self.buffer_bytes}; give the chunks at least one byte")
