"""Selects the backend of a call."""

from types import MappingProxyType

from kleash.divergences import Divergence
from kleash.errors import CannotRunError
from kleash.linear.impl.base import KL, Backend, HeadPair, Request
from kleash.linear.impl.buffer import with_buffer
from kleash.linear.impl.chunked import CHUNKED
from kleash.linear.impl.reference import REFERENCE
from kleash.linear.impl.triton.backend import TRITON
from kleash.linear.options import LinearOptions

BACKENDS: MappingProxyType[str, Backend] = MappingProxyType(
    {"reference": REFERENCE, "chunked": CHUNKED, "triton": TRITON}
)


def prepare(
    pair: HeadPair, options: LinearOptions | None, divergence: Divergence = KL
) -> tuple[Backend, Request]:
    """The backend of a call, and the call with its memory chosen.

    Raises:
        CannotRunError: as ``select_backend``.
    """
    options = with_buffer(options or LinearOptions(), pair)
    request = Request(pair=pair, options=options, divergence=divergence)
    return select_backend(request), request


def select_backend(request: Request) -> Backend:
    """The backend that ``options.impl`` names; for "auto", triton for CUDA tensors if it can, else chunked.

    Raises:
        CannotRunError: if the backend cannot do the call.
    """
    name = request.options.impl
    if name == "auto":
        on_gpu = request.pair.p.hidden.device.type == "cuda"
        name = "triton" if on_gpu and TRITON.unsupported(request) is None else "chunked"
    reason = BACKENDS[name].unsupported(request)
    if reason is not None:
        raise CannotRunError(f"impl={name!r} {reason}")
    return BACKENDS[name]
