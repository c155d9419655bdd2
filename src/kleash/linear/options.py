"""The options of the linear functions, which change time and memory but not the results."""

from dataclasses import dataclass
from types import MappingProxyType

from kleash.errors import OptionError
from kleash.registry import look_up

IMPLS = MappingProxyType(
    {
        "auto": "chunked",
        "reference": "all logits at once, by plain torch: the specification, with derivatives of every order",
        "chunked": "a few tokens at a time, within buffer_bytes",
    }
)


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Implementation, memory and compilation of the functions that start from hidden states.

    Raises:
        UnknownNameError: if ``impl`` is not one of its values.
        OptionError: if ``buffer_bytes`` is not positive, or ``compile`` not a bool.
    """

    impl: str = "auto"
    """The implementation: reference or chunked; auto is chunked. Both return the same number. Where several ranks share
    or store a head, the call is chunked in any case."""
    buffer_bytes: int | None = None
    """Memory for the logits of a chunk of tokens, of both models together; a chunk has at least one token. None
    chooses by device: 128 MiB on a CPU, enough for 1024 tokens on a GPU."""
    compile: bool | None = None
    """Whether torch compiles the elementwise work of KL (values, losses, objectives) and of token statistics, which
    takes about 10 seconds in each process. None compiles on a GPU, and on a CPU where this call alone saves more time
    than compiling takes; True raises where the compiler is missing."""

    def __post_init__(self) -> None:
        """Check the values."""
        look_up(IMPLS, self.impl, "implementation of the linear functions")
        if self.compile not in (True, False, None):
            raise OptionError(
                f"compile is {self.compile!r}; give True, False or None, which decides by the call"
            )
        if self.buffer_bytes is not None and self.buffer_bytes <= 0:
            raise OptionError(f"buffer_bytes is {self.buffer_bytes}; give the chunks at least one byte")
