"""What several processes check: groups of ranks, models whose heads they have between them, and the textbook's truth.

Each writes ``FOLDER/rankN.json``. Every check runs in groups of two, and some in the group of all four. The truth is
computed by each process for itself, in float64 from the same rounded inputs: log_softmax, the textbook's sums, and
autograd.
"""

import json
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from kleash.errors import KleashError
from kleash.linear import Head, LinearOptions

WORDS, TOKENS = 37, 11
CUTS = {2: (0, 24, 37), 4: (0, 9, 10, 24, 37)}
REFERENCE = LinearOptions(impl="reference")
CHUNKS = LinearOptions(buffer_bytes=16_000)
"""A few tokens at a time: the smallest number that any rank has memory for."""
CHECKS: dict[str, Callable[["Split"], object]] = {}


SIZES: dict[str, tuple[int, ...]] = {}
"""The groups that a check runs in."""


def check(*sizes):
    """Register a check of groups of these sizes."""

    def register(function):
        CHECKS[function.__name__], SIZES[function.__name__] = function, sizes
        return function

    return register


class Split:
    """A group, and which rows of a vocabulary this process has there."""

    def __init__(self, group, cuts=None):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        cuts = CUTS[self.size] if cuts is None else cuts
        self.rows = slice(cuts[self.rank], cuts[self.rank + 1])

    def same(self, x: Tensor):
        """To the bit, on every rank."""
        all_of_them = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(all_of_them, x.contiguous(), group=self.group)
        assert all(torch.equal(x, other) or x.isnan().any() for other in all_of_them), all_of_them


def made(distance=2.0, dtype=torch.float64, tokens=TOKENS, words=WORDS, shared=False, forbidden=False):
    """Hidden states, weight and bias of p and of q."""
    random = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    hidden, weight, bias = normal(tokens, 5), normal(words, 5), normal(words)
    extra = 0 if shared else 2
    hidden_q = torch.cat([hidden + distance * normal(tokens, 5), normal(tokens, extra)], -1)
    weight_q = weight if shared else torch.cat([weight, 0.1 * distance * normal(words, extra)], -1)
    bias_q = bias if shared else bias + 0.1 * distance * normal(words)
    if forbidden:
        bias[3], bias_q[3], bias[12] = -torch.inf, -torch.inf, -torch.inf
    return [x.to(dtype) for x in (hidden, weight, bias, hidden_q, weight_q, bias_q)]


def local_rows(tensors, rows):
    """Leaves of what a rank is given."""
    return [x.clone().requires_grad_() if n % 3 == 0 else x[rows].clone().requires_grad_()
            for n, x in enumerate(tensors)]  # fmt: skip


def models(x, group=None, **traits):
    """Hidden states and head of p, and of q."""
    head_q = {name: value for name, value in traits.items() if name == "scale"}
    return (
        (x[0], Head(x[1], x[2], vocabulary_group=group, **traits)),
        (x[3], Head(x[4], x[5], vocabulary_group=group, **head_q)),
    )


def logp(side, temperature=1.0):
    """The textbook's head."""
    hidden, head = side
    z = head.scale * (hidden @ head.weight.T + head.bias)
    z = head.softcap * torch.tanh(z / head.softcap) if head.softcap else z
    return torch.log_softmax(
        z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature), -1
    )


def between(a, b, weight=0.5):
    return torch.log(weight * a.exp() + (1 - weight) * b.exp())


TEXTBOOK = {
    "kl": lambda a, b: (a.exp() * (a - b)).sum(-1),
    "reverse_kl": lambda a, b: (b.exp() * (b - a)).sum(-1),
    "jeffreys": lambda a, b: ((a.exp() - b.exp()) * (a - b)).sum(-1),
    "jensen_shannon": lambda a, b: (a.exp() * (a - between(a, b)) + b.exp() * (b - between(a, b))).sum(-1) / 2,
    "chi_squared": lambda a, b: ((a.exp() - b.exp()).square() / b.exp()).sum(-1),
    "total_variation": lambda a, b: (a.exp() - b.exp()).abs().sum(-1) / 2,
    "hellinger": lambda a, b: (1 - ((a + b) / 2).exp().sum(-1)).sqrt(),
    "skew": lambda a, b: (a.exp() * (a - between(a, b, 0.1))).sum(-1),
}  # fmt: skip


def gradients_agree(actual, truth, rows, **tolerance):
    for n, (x, right) in enumerate(zip(actual, truth, strict=True)):
        assert right.grad is not None and right.grad.abs().max() > 0, n
        expected = right.grad if n % 3 == 0 else right.grad[rows]
        assert_close(x.grad, expected.to(x.dtype), msg=lambda m, n=n: f"tensor {n}: {m}", **tolerance)


@contextmanager
def refused(says):
    try:
        yield
    except KleashError as error:
        assert says in str(error), f"{error} does not say: {says}"
    else:
        raise AssertionError(f"nobody said: {says}")


GROUPS: dict[int, dist.ProcessGroup] = {}


def main(rank: int, store: str, out: str, only: list[str]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    GROUPS[4] = dist.new_group([0, 1, 2, 3])
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    GROUPS[2] = pairs[rank // 2]
    results = {}
    for name, function in CHECKS.items():
        if only and name not in only:
            continue
        try:
            results[name] = {str(size): function(Split(GROUPS[size])) for size in SIZES[name]}
        except Exception:
            results[name] = traceback.format_exc()
            break
    Path(out).write_text(json.dumps(results))
    if not any(isinstance(x, str) for x in results.values()):
        dist.destroy_process_group()
