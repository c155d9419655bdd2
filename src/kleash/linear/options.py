"""How the numbers are computed, which changes their cost and not their meaning."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from kleash.errors import OptionError
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

CPU_BYTES = 128 * 2**20
"""Memory for chunks on a CPU, where larger chunks are no faster."""


class Skipped(NamedTuple):
    """What ``skip_below`` left out of a gradient, for all tokens in a row.

    With W the weight and h the hidden states of p (of q likewise), what is missing from the gradient in a token's
    hidden states is no longer than ``left_out_p`` times the longest row of W, and what is missing from the gradient
    in W no longer, all its numbers taken together, than the sum over the tokens of ``left_out_p`` times h's length.
    """

    left_out_p: Float[Tensor, " tokens"] | None
    """Sizes of all entries left out of the gradient in p's ``hidden W^T``, added up, in nats; of the token's
    loss, or of its value where what comes in for it is not known yet. None if no product was needed."""
    left_out_q: Float[Tensor, " tokens"] | None
    """The same for q."""
    multiplied: float
    """The share of the entries that were multiplied, with hidden states and weight; 1 is all of them."""


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Implementation, memory and compilation of the functions that start from hidden states.

    Raises:
        UnknownNameError: if there is no such implementation or way to compile.
        OptionError: if ``buffer_bytes`` is not positive, or ``skip_below`` not a share below 1.
    """

    impl: str = "auto"
    """Which implementation: auto, reference, chunked or triton. All mean the same number; auto takes triton for
    what it can do of CUDA tensors, chunked otherwise. A triton that cannot run is an error."""
    buffer_bytes: int | None = None
    """Memory for the logits of a chunk of tokens, of both models together; a chunk is one token at least. None is
    chosen by device: 128 MiB on a CPU; on a GPU enough for 1024 tokens a chunk, as far as an eighth of the free memory
    goes."""
    compile: Literal["auto", "always", "never"] | bool = "auto"
    """Whether the elementwise work of KL (values, losses, objectives) and of token statistics is compiled. On a CPU,
    float32 is done by a library in C that is built once on a machine, in two seconds; the rest is compiled by
    torch, in about 10 seconds in each process. auto asks for the library from 10^6 logits on, and for torch's compiler
    where this call alone wins its seconds back; always is an error where there is neither."""
    skip_below: float = 0.0
    """Share of a token's gradient in the logits, by the sum of its entries' sizes, that may be left out of the
    products with weight and hidden states: its smallest entries, nearly as many as fit. Values stay exact.
    0 leaves nothing out. Only chunked can: triton and reference refuse."""
    report: Callable[[Skipped], None] | None = None
    """Called with what each gradient left out, if ``skip_below`` is above 0."""

    @property
    def chunk_bytes(self) -> int:
        """``buffer_bytes``; what a CPU takes where that is None, and no device has been asked yet."""
        return CPU_BYTES if self.buffer_bytes is None else self.buffer_bytes

    def __post_init__(self) -> None:
        """Refuse what means nothing or is not here yet."""
        look_up(IMPLS, self.impl, "implementation of the linear functions")
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "always" if self.compile else "never")
        look_up(COMPILE, str(self.compile), "way to compile")
        if self.buffer_bytes is not None and self.buffer_bytes <= 0:
            raise OptionError(f"buffer_bytes is {self.buffer_bytes}; give the chunks at least one byte")
        if not 0.0 <= self.skip_below < 1.0:
            raise OptionError(f"skip_below is a share from 0 to below 1, not {self.skip_below}")
