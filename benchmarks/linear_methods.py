"""The methods that the linear benchmarks compare: the KL, or another loss of the head, and its gradient.

Each takes `Inputs` and returns the mean over the tokens as a scalar, for backpropagation into the hidden states and the
head of p; q is frozen. Installed packages are called at their defaults. torchtune's method (logits in eight chunks, all
stored for the backward pass) and checkpointing are implemented here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, kl_div, log_softmax
from torch.utils.checkpoint import checkpoint

from kleash.divergences import phi
from kleash.linear import Head, LinearOptions, linear_kl_loss, token_statistics
from kleash.linear.products import product


@dataclass
class Inputs:
    """Two models, one step apart, and some tokens."""

    hidden_p: Tensor
    weight_p: Tensor
    hidden_q: Tensor
    weight_q: Tensor
    ids: Tensor

    @property
    def models(self) -> tuple[Tensor, Head, Tensor, Head]:
        return self.hidden_p, Head(self.weight_p), self.hidden_q, Head(self.weight_q)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers in another dtype, as new leaf tensors."""
        p, wp, q, wq = (
            x.detach().to(dtype) for x in (self.hidden_p, self.weight_p, self.hidden_q, self.weight_q)
        )
        return Inputs(p.requires_grad_(), wp.requires_grad_(), q, wq, self.ids)

    def at(self, token: int) -> "Inputs":
        """The inputs of one token."""
        row = slice(token, token + 1)
        return replace(
            self, hidden_p=self.hidden_p.detach()[row], hidden_q=self.hidden_q[row], ids=self.ids[row]
        )


def make_inputs(
    tokens: int, hidden: int, vocabulary: int, distance: float = 1.0, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Random inputs whose KL grows with ``distance``; logits have a standard deviation of 1.6 in any size."""
    random = torch.Generator(torch.get_default_device()).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    size = 1.6 / hidden**0.5
    p, w = normal(tokens, hidden), normal(vocabulary, hidden) * size
    q = p + 0.05 * distance * normal(tokens, hidden)
    wq = w + 0.02 * size * min(distance, 1.0) * normal(vocabulary, hidden)
    ids = torch.randint(vocabulary, (tokens,), generator=random)
    return Inputs(p, w, q, wq, ids).to(dtype)


def bare(x: Inputs, size: int = 512) -> Callable[[], tuple[Tensor, Tensor]]:
    """The four matmuls that any such gradient needs, in chunks of tokens and into preallocated buffers.

    p's logits stand in for their gradient: the function returns logits·W and logitsᵀ·hidden, of p.
    """
    buffers = torch.empty(2, size, len(x.weight_p), dtype=x.weight_p.dtype)
    in_weight, in_hidden = torch.empty_like(x.weight_p), torch.empty_like(x.hidden_p)

    @torch.no_grad()
    def run() -> tuple[Tensor, Tensor]:
        in_weight.zero_()
        for start in range(0, len(x.hidden_p), size):
            chunk = slice(start, start + size)
            zp, zq = buffers[:, : len(x.hidden_p[chunk])]
            torch.mm(x.hidden_p[chunk], x.weight_p.T, out=zp)
            torch.mm(x.hidden_q[chunk], x.weight_q.T, out=zq)
            torch.mm(zp, x.weight_p, out=in_hidden[chunk])
            in_weight.addmm_(zp.T, x.hidden_p[chunk])
        return in_hidden, in_weight

    return run


def bare_by_kleash(x: Inputs, size: int = 512) -> Callable[[], tuple[Tensor, Tensor]]:
    """The same four matmuls by kleash's product, which takes oneDNN where that is faster."""
    buffer, tile = torch.empty(size, len(x.weight_p)), max(1, 2**22 // max(size, x.hidden_p.shape[1]))
    in_weight, in_hidden = torch.empty_like(x.weight_p), torch.empty_like(x.hidden_p)

    @torch.no_grad()
    def run() -> tuple[Tensor, Tensor]:
        in_weight.zero_()
        for start in range(0, len(x.hidden_p), size):
            chunk = slice(start, start + size)
            z = buffer[: len(x.hidden_p[chunk])]
            for hidden, weight in ((x.hidden_q, x.weight_q), (x.hidden_p, x.weight_p)):
                for first in range(0, len(weight), tile):
                    columns = slice(first, first + tile)
                    z[:, columns].copy_(product(hidden[chunk], weight[columns]))
            total = torch.zeros_like(x.hidden_p[chunk])
            for first in range(0, len(x.weight_p), tile):
                columns = slice(first, first + tile)
                total.add_(product(z[:, columns], x.weight_p[columns].T))
            in_hidden[chunk] = total
            in_weight.addmm_(z.T, x.hidden_p[chunk])
        return in_hidden, in_weight

    return run


def kleash(x: Inputs, options: LinearOptions | None = None) -> Tensor:
    weights = torch.full((len(x.ids),), 1 / len(x.ids))
    return linear_kl_loss(*x.models, weights=weights, options=options).loss


def trl(x: Inputs) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    per_token, _ = ChunkedDivergenceFunction.apply(
        x.hidden_p, x.weight_p, None, x.hidden_q, x.weight_q, None, 1.0
    )
    return per_token.mean()


def liger(x: Inputs) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0)
    return loss(x.hidden_p, x.weight_p, x.hidden_q, x.weight_q, x.ids)


def torchtune(x: Inputs, chunks: int = 8) -> Tensor:
    """Logits in eight chunks, then float32 softmaxes of each chunk, under autograd."""
    of_p = [hidden @ x.weight_p.T for hidden in x.hidden_p.chunk(chunks)]
    with torch.no_grad():
        of_q = [hidden @ x.weight_q.T for hidden in x.hidden_q.chunk(chunks)]
    total = x.hidden_p.new_zeros((), dtype=torch.float32)
    for zp, zq in zip(of_p, of_q, strict=True):
        p = zp.softmax(-1, dtype=torch.float32)
        cross = (p * zq.log_softmax(-1, dtype=torch.float32)).sum(-1)
        total = total + ((p * zp.log_softmax(-1, dtype=torch.float32)).sum(-1) - cross).sum()
    return total / len(x.ids)


def checkpointed(x: Inputs, size: int = 512) -> Tensor:
    """`F.kl_div` of 512 tokens at a time; each chunk is recomputed in the backward pass."""

    def of(p: Tensor, wp: Tensor, q: Tensor, wq: Tensor) -> Tensor:
        logp, logq = (log_softmax(z, -1, dtype=torch.float32) for z in (p @ wp.T, q @ wq.T))
        return kl_div(logq, logp, log_target=True, reduction="sum")

    parts = zip(x.hidden_p.split(size), x.hidden_q.split(size), strict=True)
    sums = [checkpoint(of, p, x.weight_p, q, x.weight_q, use_reentrant=False) for p, q in parts]
    return torch.stack(sums).sum() / len(x.ids)


def naive(x: Inputs) -> tuple[Tensor, Tensor]:
    """All log-probabilities of both models."""
    logp = log_softmax(x.hidden_p @ x.weight_p.T, -1, dtype=torch.float32)
    with torch.no_grad():
        return logp, log_softmax(x.hidden_q @ x.weight_q.T, -1, dtype=torch.float32)


def naive_exact(x: Inputs) -> Tensor:
    logp, logq = naive(x)
    return kl_div(logq, logp, log_target=True, reduction="none").sum(-1).mean()


def naive_k3(x: Inputs) -> Tensor:
    logp, logq = (each.gather(-1, x.ids[:, None]) for each in naive(x))
    return phi(logp - logq).mean()


def cross_entropy(x: Inputs) -> Tensor:
    from torch.nn import LinearCrossEntropyOptions  # torch 2.13
    from torch.nn.functional import linear_cross_entropy

    return linear_cross_entropy(x.hidden_p, x.weight_p, x.ids, options=LinearCrossEntropyOptions())


METHODS: Mapping[str, Callable[[Inputs], Tensor]] = {
    "kleash": lambda x: kleash(x, LinearOptions(compile=False)),
    "kleash compiled": lambda x: kleash(x, LinearOptions(compile=True)),
    "trl": trl,
    "liger": liger,
    "torchtune": torchtune,
    "checkpointing": checkpointed,
    "naive exact": naive_exact,
    "naive k3": naive_k3,
    "cross entropy": cross_entropy,
}
OTHER_LOSSES = {"naive k3": "k3", "cross entropy": "cross_entropy"}
"""Methods that do not compute a KL, and what they compute."""
PACKAGES = [name for name in ("trl", "liger-kernel", "triton") if find_spec(name.replace("-", "_"))]
"""The packages that are installed."""


@torch.no_grad()
def expected(x: Inputs) -> dict[str, float]:
    """The expected value of each loss, from kleash's token statistics."""
    statistics = token_statistics(*x.models, x.ids)
    k3 = phi(statistics.token_logp - statistics.token_logq)
    means = {"kl": statistics.kl_pq, "k3": k3, "cross_entropy": -statistics.token_logp}
    return {name: float(of.mean()) for name, of in means.items()}


def gradients(x: Inputs, loss: Tensor) -> tuple[Tensor, ...]:
    """The gradients in the hidden states and the head of p."""
    return torch.autograd.grad(loss, (x.hidden_p, x.weight_p))


def cosine(a: Tensor, b: Tensor) -> float:
    return float(cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))
