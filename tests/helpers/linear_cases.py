"""Test cases of hidden states and heads, and their expected results by numpy in float64."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr
from torch import Tensor

from kleash.linear import (
    Head,
    LinearOptions,
    TokenStatistics,
    linear_divergence,
    linear_divergence_loss,
    linear_kl,
    token_statistics,
)
from kleash.precision import at_least_float32

REFERENCE = LinearOptions(impl="reference")
CHUNKED = LinearOptions(impl="chunked", compile=False)
TINY = LinearOptions(impl="chunked", compile=False, buffer_bytes=1)
SMALL = LinearOptions(impl="chunked", compile=False, buffer_bytes=60_000)
PLAIN = object()
"""In place of options: float32 logits by torch, and the reference from there; the budget of a rounding error."""
EVERY = pytest.mark.parametrize("options", [REFERENCE, SMALL], ids=["reference", "small"])
CHUNKS = pytest.mark.parametrize("options", [SMALL, TINY], ids=["small", "tiny"])
TRAITS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3, "bias": True},
    "softcap": {"softcap": 2.5, "bias": True, "scale": 1.7},
    "temperature": {"temperature": 0.6, "softcap": 5.0},
}


@dataclass
class Case:
    """Arguments of the linear functions. No size divides another."""

    hidden_p: Tensor
    head_p: Head
    hidden_q: Tensor
    head_q: Head
    tokens: Tensor
    temperature: float = 1.0

    @property
    def models(self):
        return self.hidden_p, self.head_p, self.hidden_q, self.head_q

    def kl(self, options=None):
        models, options = chosen(self.models, options)
        return linear_kl(*models, temperature=self.temperature, options=options)

    def statistics(self, options=None) -> TokenStatistics:
        models, options = chosen(self.models, options)
        return token_statistics(*models, self.tokens, temperature=self.temperature, options=options)


def chosen(models, options):
    """The models and options of a call; with ``PLAIN``, logits in place of hidden states."""
    if options is not PLAIN:
        return models, options
    hp, head_p, hq, head_q = models
    zp, zq = (
        head.logits_of_product(at_least_float32(h) @ at_least_float32(head.weight).T)
        for h, head in ((hp, head_p), (hq, head_q))
    )
    return (zp, Head(None), zq, Head(None)), REFERENCE


def head_case(
    dtype=torch.float32, distance=2.0, tokens=(37,), vocab_size=101, seed=0, temperature=1.0, **traits
) -> Case:
    """Two models at a ``distance``; their hidden sizes differ, and their heads have the given traits."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    hidden, weight, bias = normal(*tokens, 13), 0.6 * normal(vocab_size, 13), normal(vocab_size)
    extra = normal(*tokens, 4)
    hidden_q = torch.cat([hidden + distance * normal(*tokens, 13), extra], -1)
    weight_q = torch.cat([weight, 0.1 * distance * normal(vocab_size, 4)], -1)
    with_bias = traits.pop("bias", False)

    def head(matrix, shift):
        offset = (bias + shift * normal(vocab_size)).to(dtype) if with_bias else None
        return Head(matrix.to(dtype), offset, **traits)

    ids = torch.randint(vocab_size, tokens, generator=random)
    sides = (hidden.to(dtype), head(weight, 0.0), hidden_q.to(dtype), head(weight_q, distance / 10))
    return Case(*sides, ids, temperature)


def logp_by_numpy(hidden: Tensor, head: Head, temperature: float) -> np.ndarray:
    """All log-probabilities, by numpy and scipy in float64 from the same rounded inputs."""
    z = hidden.detach().double().numpy()
    if head.weight is not None:
        z = z @ head.weight.detach().double().numpy().T
    if head.bias is not None:
        z = z + head.bias.detach().double().numpy()
    z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * np.tanh(z / head.softcap)
    return log_softmax(z / temperature, axis=-1)


def statistics_by_numpy(case: Case) -> TokenStatistics:
    """Every statistic from the probabilities, by scipy's relative entropy."""
    logp = logp_by_numpy(case.hidden_p, case.head_p, case.temperature)
    logq = logp_by_numpy(case.hidden_q, case.head_q, case.temperature)
    p, q, ids = np.exp(logp), np.exp(logq), case.tokens.numpy()[..., None]
    middle = np.maximum((p + q) / 2, 5e-324)  # half the smallest number would be 0

    def of_token(x):
        return np.take_along_axis(x, ids, -1)[..., 0]

    numbers = {
        "token_logp": of_token(logp),
        "token_logq": of_token(logq),
        "kl_pq": rel_entr(p, q).sum(-1),
        "kl_qp": rel_entr(q, p).sum(-1),
        "jensen_shannon": (rel_entr(p, middle) + rel_entr(q, middle)).sum(-1) / 2,
        "total_variation": abs(p - q).sum(-1) / 2,
        "entropy_p": -(p * np.where(p > 0, logp, 0)).sum(-1),
        "entropy_q": -(q * np.where(q > 0, logq, 0)).sum(-1),
        "top1_p": p.argmax(-1),
        "top1_q": q.argmax(-1),
        "top1_probability_p": p.max(-1),
        "top1_probability_q": q.max(-1),
        "rank_q": (logq > np.take_along_axis(logq, ids, -1)).sum(-1),
    }
    return TokenStatistics(**{name: torch.as_tensor(x) for name, x in numbers.items()})


def in_float64(case: Case) -> Case:
    """The same rounded inputs in float64."""

    def wide(head):
        bias = None if head.bias is None else head.bias.double()
        return Head(head.weight.double(), bias, scale=head.scale, softcap=head.softcap)

    return Case(
        case.hidden_p.double(), wide(case.head_p), case.hidden_q.double(), wide(case.head_q),
        case.tokens, case.temperature,
    )  # fmt: skip


def relative_rms(actual: Tensor, exact: Tensor) -> float:
    """Root mean square of the error, relative to that of the exact numbers."""
    return float((actual.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def leaves_of(case: Case, divergence="kl", *, weights=None):
    """The six tensors of a case as leaves, and a function from options to the function of the tensors."""
    p, q = case.head_p, case.head_q
    tensors = [case.hidden_p, p.weight, p.bias, case.hidden_q, q.weight, q.bias]
    tensors = [x.detach().clone().requires_grad_() for x in tensors]

    def of(options):
        def function(hp, wp, bp, hq, wq, bq):
            head_p = Head(wp, bp, scale=p.scale, softcap=p.softcap)
            head_q = Head(wq, bq, scale=q.scale, softcap=q.softcap)
            models, given = chosen((hp, head_p, hq, head_q), options)
            arguments = {"divergence": divergence, "temperature": case.temperature, "options": given}
            if weights is None:
                return linear_divergence(*models, **arguments)
            return linear_divergence_loss(*models, weights=weights, **arguments)

        return function

    return tensors, of


def peak(call) -> int:
    """The most memory that a call has in use at one time."""
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        call()
    events = (e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())))
