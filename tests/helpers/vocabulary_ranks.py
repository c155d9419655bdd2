"""What four processes check about heads whose rows they share; ``vocabulary_ranks.py STORE FOLDER [CHECK …]``.

Each writes ``FOLDER/rankN.json``.

Every check runs in groups of two and of four; the longest with fewer cases in groups of four, where a message costs
twice as much. The truth is computed by each process for itself, in float64 from the same rounded inputs: log_softmax,
the textbook's sums, and autograd.
"""

import json
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch._dynamo  # what torch imports when it is needed first, once for all ranks
import torch.distributed as dist
from forked_ranks import fork_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

from kleash.divergences import skew_kl_record
from kleash.errors import KleashError
from kleash.linear import (
    Head,
    LinearOptions,
    TokenStatistics,
    linear_divergence,
    linear_divergence_loss,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    log_probabilities,
    token_statistics,
)
from kleash.linear.api import token_statistics_and_top
from kleash.masking import mean_of

WORDS, TOKENS = 37, 11
CUTS = {2: (0, 24, 37), 4: (0, 9, 10, 24, 37)}
REFERENCE = LinearOptions(impl="reference")
CHUNKS = LinearOptions(buffer_bytes=16_000)
"""A few tokens at a time: the smallest number that any rank has memory for."""
CHECKS: dict[str, Callable[["Split"], object]] = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


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
RECORDS = {"skew": skew_kl_record(0.1)}


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


@check
def every_divergence_equals_the_textbook(split):
    temperature, weights = torch.linspace(0.5, 1.5, TOKENS).double(), torch.linspace(-1, 2, TOKENS).double()
    weights[4] = 0
    traits = {"softcap": 4.0, "scale": 1.3}
    names = tuple(TEXTBOOK) if split.size == 2 else ("kl", "jensen_shannon", "total_variation")
    for name in names:
        textbook, right = TEXTBOOK[name], local_rows(made(), slice(None))
        value = textbook(*(logp(side, temperature) for side in models(right, **traits)))
        (value * weights).sum().backward()
        every_option = split.size == 2 and name in ("kl", "hellinger")
        for options in (None, REFERENCE, CHUNKS) if every_option else (CHUNKS,):
            arguments = {
                "divergence": RECORDS.get(name, name),
                "temperature": temperature,
                "options": options,
            }
            for at_once in (False, True):
                mine = local_rows(made(), split.rows)
                p, q = models(mine, split.group, **traits)
                if at_once:
                    loss, actual = linear_divergence_loss(*p, *q, weights=weights, **arguments)
                    value_ = torch.where(weights != 0, value, 0.0)
                else:
                    actual, value_ = linear_divergence(*p, *q, **arguments), value
                    loss = (actual * weights).sum()
                assert_close(actual.detach(), value_.detach(), msg=lambda m, name=name: f"{name}: {m}")
                loss.backward()
                split.same(actual.detach())
                split.same(mine[0].grad)
                gradients_agree(mine, right, split.rows)


@check
def statistics_are_of_the_whole_vocabulary(split):
    for forbidden in (False, True):
        tensors = made(forbidden=forbidden)
        tensors[1][[5, 30]], tensors[2][[5, 30]] = (
            0.0,
            4.0,
        )  # twins on different ranks, some of them the likeliest
        tokens = torch.tensor([5, 30, 0, 8, 9, 10, 23, 24, 36, 12, 3])
        lp, lq = (logp(side) for side in models(tensors))
        ids = tokens[:, None]
        kl_pq, kl_qp = (
            torch.where(x.exp() > 0, x.exp() * (x - y).nan_to_num(), 0.0).sum(-1)
            for x, y in ((lp, lq), (lq, lp))
        )
        entropy_p, entropy_q = (-(x.exp() * x.nan_to_num(neginf=0.0)).sum(-1) for x in (lp, lq))
        expected = TokenStatistics(
            token_logp=lp.gather(-1, ids)[:, 0],
            token_logq=lq.gather(-1, ids)[:, 0],
            kl_pq=kl_pq,
            kl_qp=kl_qp,
            jensen_shannon=TEXTBOOK["jensen_shannon"](lp, lq),
            total_variation=TEXTBOOK["total_variation"](lp, lq),
            entropy_p=entropy_p,
            entropy_q=entropy_q,
            top1_p=lp.argmax(-1),
            top1_q=lq.argmax(-1),
            top1_probability_p=lp.amax(-1).exp(),
            top1_probability_q=lq.amax(-1).exp(),
            rank_q=(lq > lq.gather(-1, ids)).sum(-1),
        )
        if forbidden:  # p forbids a word that q allows, and both forbid one
            m = torch.log((lp.exp() + lq.exp()) / 2)
            terms = [torch.where(x.exp() > 0, x.exp() * (x - m), 0.0).nan_to_num().sum(-1) for x in (lp, lq)]
            expected = expected._replace(
                kl_qp=torch.full_like(kl_qp, torch.inf), jensen_shannon=sum(terms) / 2
            )
        assert 1 < (expected.top1_p == 5).sum() < TOKENS - 1
        for options in (None, CHUNKS, REFERENCE):
            (hp, p), (hq, q) = models(
                [x if n % 3 == 0 else x[split.rows] for n, x in enumerate(tensors)], split.group
            )
            actual = token_statistics(hp, p, hq, q, tokens, options=options)
            for name, ours, other in zip(TokenStatistics._fields, actual, expected, strict=True):
                assert_close(ours, other, msg=lambda m, name=name: f"{name}: {m}")
                split.same(ours)


@check
def an_objective_gets_the_terms_and_gives_the_gradients(split):
    tokens, weights = (
        torch.tensor([5, 30, 0, 8, 9, 10, 23, 24, 36, 12, 3]),
        torch.linspace(-1, 2, TOKENS).double(),
    )

    def loss_of(token_logp, token_logq, kl, entropy, rows=slice(None)):
        w = weights[rows]
        losses = w * torch.exp(token_logp - token_logq) + (w + 2) * kl - 0.3 * entropy * w
        return torch.where(torch.arange(TOKENS)[rows] == 6, 0.0, losses)

    for shared, forbidden in ((False, False), (True, False), (False, True)):
        tensors = made(0.7, shared=shared, forbidden=forbidden)
        tensors[2][12] = tensors[5][12]  # what p forbids, q does, too
        tokens[[9, 10]] = torch.tensor([12, 3] if not forbidden else [7, 8])
        right = local_rows(tensors, slice(None))
        p, q = models(right)
        lp, lq = (x[:, tensors[2] > -torch.inf] for x in (logp(p), logp(q)))
        picked = [logp(x).gather(-1, tokens[:, None])[:, 0] for x in (p, q)]
        terms = [*picked, TEXTBOOK["kl"](lp, lq), -(lp.exp() * lp).sum(-1)]
        loss_of(*terms).sum().backward()
        for options in (None, CHUNKS, REFERENCE):
            mine = local_rows(tensors, split.rows)
            (hp, head_p), (hq, head_q) = models(mine, split.group)
            loss, actual = linear_objective(
                hp, head_p, tokens, hq, head_q, lambda t, rows: loss_of(*t, rows), options=options
            )
            for ours, other in zip(actual, terms, strict=True):
                assert_close(ours, other.detach())
            loss.backward()
            split.same(hp.grad)
            gradients_agree(mine, right, split.rows)


@check
def near_models_keep_their_digits(split):
    cases = (
        (torch.float32, False, 1e-3),
        (torch.float32, True, 1e-3),
        (torch.bfloat16, True, 0.02),
    )
    for dtype, shared, distance in cases:
        tensors = made(distance, dtype, shared=shared)
        right = local_rows([x.double() for x in tensors], slice(None))
        p, q = models(right)
        lp, ahead = logp(p), logp(q) - logp(p)
        value = (lp.exp() * (torch.expm1(ahead) - ahead)).sum(
            -1
        )  # the textbook's cancels here, in float64 too
        value.sum().backward()
        assert value.max() < (1e-2 if dtype == torch.bfloat16 else 10 * distance**2)
        mine = local_rows(tensors, split.rows)
        mine[4], mine[5] = (mine[1], mine[2]) if shared else (mine[4], mine[5])
        (hp, head_p), (hq, head_q) = models(mine, split.group)
        actual, _ = linear_kl_loss(hp, head_p, hq, head_q, weights=torch.ones(TOKENS))
        actual.backward()
        values = linear_kl(hp.detach(), head_p, hq.detach(), head_q)
        assert ((values - value).abs() <= 1e-3 * value).all(), (dtype, shared, values / value)
        assert (values > 0).all()
        cosine = torch.cosine_similarity(hp.grad.double().flatten(), right[0].grad.flatten(), dim=0)
        assert cosine > (0.999 if dtype == torch.float32 else 0.9999), cosine
        assert_close(hp.grad.double(), right[0].grad, rtol=0.02, atol=0.01 * float(right[0].grad.abs().max()))


@check
def a_row_that_overlaps_nowhere_is_infinite_and_harms_no_other(split):
    tensors = made(forbidden=True)
    p, q = models(tensors)
    p[1].bias[12] = (
        0.0  # q forbids word 3 with p; it will forbid word 12, which p allows, in no row but those below
    )
    lp, lq = logp(p), logp(q)
    lp[2], lq[2] = -torch.inf, -torch.inf
    lp[2, 8], lq[2, 30] = 0.0, 0.0  # no overlap, on different ranks
    lq[5, 12] = -torch.inf
    lp[7] = torch.nan
    lq[9], lp[9] = -60.0 * torch.arange(WORDS), -60.0 * torch.arange(WORDS).flip(0)  # far: inf nowhere
    lp, lq = (x.log_softmax(-1) for x in (lp, lq))
    value = torch.where(lp.exp() > 0, lp.exp() * (lp - lq).nan_to_num(nan=0.0, posinf=torch.inf), 0.0).sum(-1)
    value[7] = torch.nan
    assert value[2] == torch.inf and value[5] == torch.inf and value.isfinite().sum() == TOKENS - 3
    weights = torch.where(value.isfinite(), 1.0, 0.0).double()
    right = [x.clone().requires_grad_() for x in (lp[:, :], lq[:, :])]
    fine = value.isfinite()
    a, b = (x[fine].log_softmax(-1) for x in right)
    both = (a > -torch.inf) & (b > -torch.inf)
    a_, b_ = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
    torch.where(both, a_.exp() * (a_ - b_), 0.0).sum().backward()
    for dtype, tolerance in ((torch.float64, {}), (torch.float32, {"rtol": 1e-5, "atol": 1e-5})):
        for options in (None, CHUNKS, REFERENCE) if dtype is torch.float64 else (CHUNKS,):
            mine = [x[:, split.rows].to(dtype).clone().requires_grad_() for x in (lp, lq)]
            heads = [Head(None, vocabulary_group=split.group) for _ in "pq"]
            for arguments in (mine, [x.detach() for x in mine]):
                actual = linear_kl(arguments[0], heads[0], arguments[1], heads[1], options=options).detach()
                assert_close(actual, value.to(dtype), equal_nan=True, **tolerance)
                split.same(actual.nan_to_num())
            loss, per_token = linear_kl_loss(
                mine[0], heads[0], mine[1], heads[1], weights=weights.to(dtype), options=options
            )
            assert_close(per_token, torch.where(fine, value, 0.0).to(dtype), **tolerance)
            loss.backward()
            for x, y in zip(mine, right, strict=True):
                assert_close(x.grad, y.grad[:, split.rows].nan_to_num().to(dtype), **tolerance)


@check
def local_logits_get_their_own_gradient(split):
    tensors = made()
    right = [(tensors[0] @ tensors[1].T).requires_grad_(), *local_rows(tensors, slice(None))[3:]]
    TEXTBOOK["kl"](right[0].log_softmax(-1), logp((right[1], Head(right[2], right[3])))).sum().backward()
    hidden = right[0].detach()[:, split.rows].clone().requires_grad_()
    mine = local_rows(tensors, split.rows)[3:]
    head = Head(mine[1], mine[2], vocabulary_group=split.group)
    linear_kl(hidden, Head(None, vocabulary_group=split.group), mine[0], head).sum().backward()
    assert_close(hidden.grad, right[0].grad[:, split.rows])
    assert_close(mine[0].grad, right[1].grad)
    assert_close(mine[1].grad, right[2].grad[split.rows])


@check
def one_side_may_be_whole_if_its_head_is_frozen(split):
    tensors = made()
    right = local_rows(tensors, slice(None))
    p, q = models(right)
    TEXTBOOK["kl"](logp(p), logp(q)).sum().backward()
    mine = local_rows(tensors, split.rows)
    teacher = Head(tensors[4], tensors[5])
    arguments = mine[0], Head(mine[1], mine[2], vocabulary_group=split.group), mine[3], teacher
    linear_kl_loss(*arguments, weights=torch.ones(TOKENS).double()).loss.backward()
    for n in (0, 1, 2, 3):
        assert_close(mine[n].grad, right[n].grad if n % 3 == 0 else right[n].grad[split.rows])
    logits = (tensors[3] @ tensors[4].T + tensors[5]).detach()
    actual = linear_kl(*arguments[:2], logits, Head(None))
    assert_close(actual, linear_kl(*arguments))


@check
def a_dtensor_keeps_its_rows_with_a_group_and_is_gathered_without(split):
    mesh, most = DeviceMesh.from_group(split.group, "cpu"), -(-WORDS // split.size)
    split = Split(
        split.group, [min(n * most, WORDS) for n in range(split.size + 1)]
    )  # as DTensor spreads rows
    tensors = made()
    right = local_rows(tensors, slice(None))
    p, q = models(right)
    TEXTBOOK["kl"](logp(p), logp(q)).sum().backward()
    sharded = [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in (tensors[1], tensors[2])]
    mine = local_rows(tensors, split.rows)
    for group in (mesh, split.group, None):
        for x in sharded:
            x.grad = None
        head, other = Head(*sharded, vocabulary_group=group), Head(tensors[4], tensors[5])
        linear_kl(mine[0].detach(), head, mine[3].detach(), other).sum().backward()
        for x, y in zip(sharded, right[1:3], strict=True):
            # Gathered, each rank's tokens count, and all ranks have the same ones here.
            times = split.size if group is None else 1
            assert isinstance(x.grad, DTensor)
            assert_close(x.grad.to_local(), times * y.grad[split.rows])
    whole = distribute_tensor(tensors[1], mesh, [Replicate()])
    with refused("is not split by rows over the vocabulary_group"):
        linear_kl(mine[0], Head(whole, vocabulary_group=mesh), mine[3], Head(tensors[4]))


def stored(x, split):
    """A tensor of which each rank stores some rows, as FSDP2 shards it."""
    return distribute_tensor(x, DeviceMesh.from_group(split.group, "cpu"), [Shard(0)]).requires_grad_()


def own_tokens(split, tokens):
    """As many tokens as the rank has, and one more; the last rank has what is left, which may be nothing."""
    ends = [min(tokens, 3 * n * (n + 1) // 2) for n in range(split.size)]
    return slice(ends[split.rank], tokens if split.rank == split.size - 1 else ends[split.rank + 1])


def objective_of(weights):
    return lambda terms, rows: (
        terms.kl * weights[rows] - 0.1 * terms.entropy + terms.token_logp * weights[rows].square()
    )


def stored_calls(weights, ids, temperature, options):
    """Functions of p, q and the tokens that are this rank's, each to a scalar."""
    return {
        "loss": lambda p, q, n: (
            linear_kl_loss(*p, *q, weights=weights[n], temperature=temperature[n], options=options).loss
        ),
        "values": lambda p, q, n: (
            linear_divergence(*p, *q, divergence="hellinger", options=options) * weights[n]
        ).sum(),
        "objective": lambda p, q, n: linear_objective(
            *p, ids[n], *q, objective_of(weights[n]), options=options
        )[0],
    }


@check
def stored_rows_with_different_tokens_equal_one_process(split):
    """Values, statistics and gradients; moving tokens (few of them) and gathering rows (of a small vocabulary)."""
    cases = ((11, None), (11, CHUNKS), (11, REFERENCE), (300, None), (2, CHUNKS))
    for tokens, options in cases if split.size == 2 else cases[1::2]:
        tensors = made(tokens=tokens, dtype=torch.float64)
        weights = torch.linspace(-1, 2, tokens).double()
        weights[1], ids, temperature = (
            0,
            torch.arange(tokens) % WORDS,
            torch.linspace(0.5, 1.5, tokens).double(),
        )
        mine = own_tokens(split, tokens)
        traits = {"softcap": 4.0, "scale": 1.3}
        calls = stored_calls(weights, ids, temperature, options)
        for name, call in calls.items():
            right = local_rows(tensors, slice(None))
            expected = call(*models(right, **traits), slice(None))
            expected.backward()
            for trains_q in (True, False) if options is CHUNKS else (True,):
                ours = [
                    x[mine].clone().requires_grad_() if n % 3 == 0 else stored(x, split)
                    for n, x in enumerate(tensors)
                ]
                if not trains_q:  # q's head whole and frozen on each rank
                    ours[4], ours[5] = tensors[4], tensors[5]
                actual = call(*models(ours, **traits), mine)
                actual.backward()
                total = actual.detach().clone()
                dist.all_reduce(total, group=split.group)
                assert_close(total, expected.detach(), msg=lambda m, name=name: f"{name}: {m}")
                for n, x in enumerate(ours[: 6 if trains_q else 4]):
                    grad = x.grad if n % 3 == 0 else x.grad.full_tensor()
                    assert_close(
                        grad,
                        right[n].grad[mine] if n % 3 == 0 else right[n].grad,
                        msg=lambda m, name=name, n=n: f"{name} {n}: {m}",
                    )
        p, q = models(tensors, **traits)
        (hp, head_p), (hq, head_q) = models(
            [x[mine] if n % 3 == 0 else stored(x, split) for n, x in enumerate(tensors)], **traits
        )
        statistics = token_statistics(*p, *q, ids, options=options)
        for column, truth in zip(
            token_statistics(hp, head_p, hq, head_q, ids[mine], options=options), statistics, strict=True
        ):
            assert_close(column, truth[mine])
        tops = token_statistics_and_top(hp, head_p, hq, head_q, ids[mine], top=3, options=options)
        assert_close(tops.top_q.probability, log_probabilities(*q).exp().topk(3).values[mine])
        with torch.no_grad():
            assert_close(log_probabilities(hp, head_p), log_probabilities(*p)[mine])
            shared = Head(
                head_p.weight.detach(), head_p.bias.detach(), vocabulary_group=split.group, **traits
            )
            assert_close(log_probabilities(p[0], shared), log_probabilities(*p))
        assert (linear_kl(hp, head_p, hp, head_p, options=options) == 0).all()
    one = stored(tensors[1], split)
    hidden, other = tensors[0][mine].clone().requires_grad_(), tensors[0][mine] * 1.1
    linear_kl_loss(
        hidden, Head(one), other, Head(one), weights=torch.ones(len(hidden)).double()
    ).loss.backward()
    whole = tensors[1].clone().requires_grad_()
    every = torch.ones(tokens).double()
    linear_kl_loss(tensors[0], Head(whole), tensors[0] * 1.1, Head(whole), weights=every).loss.backward()
    assert_close(one.grad.full_tensor(), whole.grad)


@check
def hidden_states_of_both_models_have_one_rounded_gradient(split):
    """With nearly equal stored heads the two parts of the gradient nearly cancel; moved tokens and gathered rows."""
    for tokens in (11, 300):
        hidden, weight, _, _, _, _ = made(tokens=tokens, dtype=torch.bfloat16)
        factors = torch.linspace(0.97, 1.03, weight.numel()).view_as(weight)
        near = (weight.float() * factors).bfloat16()
        whole = hidden.double().requires_grad_()
        TEXTBOOK["kl"](*((whole @ x.double().T).log_softmax(-1) for x in (weight, near))).sum().backward()
        mine = own_tokens(split, tokens)
        ours, head_p, head_q = (
            hidden[mine].clone().requires_grad_(),
            *(Head(stored(x, split)) for x in (weight, near)),
        )
        linear_kl(ours, head_p, ours, head_q).sum().backward()
        error = (ours.grad.double() - whole.grad[mine]).norm() / whole.grad[mine].norm().clamp(min=1e-30)
        assert error < 0.005, f"{tokens} tokens: {error}"


@check
def what_does_not_fit_stored_rows_is_refused_on_every_rank(split):
    tensors = made(dtype=torch.float32)
    hp, wp, bp, hq, wq, bq = [x if n % 3 == 0 else stored(x, split).detach() for n, x in enumerate(tensors)]
    first, wrong_ids = split.rank == 0, torch.full((TOKENS,), 37)
    other = f"rank {dist.get_global_rank(split.group, 0)} among the ranks that store the head refuses"
    p, q = Head(wp, bp), Head(wq, bq)
    refusals = {
        other if not first else "p have 4 dimensions": lambda: linear_kl(
            hp[:, :4] if first else hp, p, hq, q
        ),
        other + " its arguments" if not first else "ids run from 37": lambda: token_statistics(
            hp, p, hq, q, wrong_ids if first else wrong_ids - 1
        ),
        "disagree on the tensors that require": lambda: linear_kl(hp.requires_grad_(first), p, hq, q),
        "head of p covers 36": lambda: linear_kl(hp, Head(tensors[1][:36]), hq, Head(wq)),
        "and its bias is whole": lambda: linear_kl(hp, Head(wp, tensors[2]), hq, q),
        "compile=True cannot": lambda: linear_kl(hp, p, hq, q, options=LinearOptions(compile=True)),
    }
    for says, call in refusals.items():
        with refused(says):
            call()
        hp.requires_grad_(False)


@check
def one_weight_trained_on_both_sides(split):
    tensors = made(shared=True)
    right = local_rows(tensors, slice(None))
    TEXTBOOK["kl"](*(logp((right[n], Head(right[1], right[2]))) for n in (0, 3))).sum().backward()
    for options in (None, CHUNKS, REFERENCE):
        mine = local_rows(tensors, split.rows)
        head = Head(mine[1], mine[2], vocabulary_group=split.group)
        weights = torch.ones(TOKENS).double()
        linear_kl_loss(mine[0], head, mine[3], head, weights=weights, options=options).loss.backward()
        for n in (0, 1, 2, 3):
            assert_close(mine[n].grad, right[n].grad if n % 3 == 0 else right[n].grad[split.rows])
        assert (linear_kl(mine[0], head, mine[0], head) == 0).all()


@check
def rows_that_are_not_read_and_tokens_that_are_not_there(split):
    tensors = made()
    exact = TEXTBOOK["kl"](*(logp(side) for side in models(tensors)))
    tensors[0][3] = torch.nan
    mine = local_rows(tensors, split.rows)
    (hp, p), (hq, q) = models(mine, split.group)
    weights = torch.ones(TOKENS).double()
    weights[3] = 0
    loss, per_token = linear_kl_loss(hp, p, hq, q, weights=weights)
    loss.backward()
    assert per_token[3] == 0 and all(x.grad.isfinite().all() for x in mine)
    actual = linear_kl(hp, p, hq, q)
    assert actual[3].isnan() and actual.isfinite().sum() == TOKENS - 1
    weights.requires_grad_(False)
    torch.where(weights != 0, actual, 0.0).sum().backward()
    assert all(x.grad.isfinite().all() for x in mine)
    for tokens in (0, 1):
        few = linear_kl(hp[:tokens], p, hq[:tokens], q)
        assert_close(few.detach(), exact[:tokens])
        actual = token_statistics(hp[:tokens], p, hq[:tokens], q, torch.arange(36, 36 + tokens))
        assert actual.rank_q.shape == (tokens,)


@check
def ranks_with_unequal_memory_agree(split):
    exact = TEXTBOOK["kl"](*(logp(side) for side in models(made())))
    p, q = models(local_rows(made(), split.rows), split.group)
    options = LinearOptions(buffer_bytes=(10**9, 9_000, 10**6, 20_000)[split.rank])
    assert_close(linear_kl(*p, *q, options=options).detach(), exact)


@check
def batches_keep_their_shape(split):
    x = made()
    mine = [x[n] if n % 3 == 0 else x[n][split.rows] for n in range(6)]
    (hp, p), (hq, q) = models(mine, split.group)
    hp, hq = hp[:10].reshape(2, 5, -1), hq[:10].reshape(2, 5, -1)
    exact = TEXTBOOK["kl"](*(logp(side) for side in models(x)))[:10].reshape(2, 5)
    with torch.autocast("cpu"):
        assert_close(linear_kl(hp, p, hq, q), exact)
    with torch.inference_mode():
        assert_close(linear_kl(hp, p, hq, q), exact)


@check
def a_compiled_caller_gets_the_same(split):
    if split.size == 4 or dist.get_rank() > 1:  # one group is enough of what takes seconds
        return
    weights = torch.linspace(-1, 2, TOKENS).double()
    group = split.group

    def loss(hp, wp, bp, hq, wq, bq):
        p, q = Head(wp, bp, vocabulary_group=group), Head(wq, bq, vocabulary_group=group)
        both = linear_kl(hp * 2, p, hq, q).sum()
        return both + linear_kl_loss(hp, p, hq, q, weights=weights).loss

    right = local_rows(made(), slice(None))
    p, q = models(right)
    doubled = logp((2 * p[0], p[1]))
    truth = TEXTBOOK["kl"](doubled, logp(q)).sum() + (weights * TEXTBOOK["kl"](logp(p), logp(q))).sum()
    truth.backward()
    mine = local_rows(made(), split.rows)
    actual = torch.compile(loss, backend="aot_eager")(*mine)
    actual.backward()
    assert_close(actual.detach(), truth.detach())
    gradients_agree(mine, right, split.rows)


@contextmanager
def counted():
    """The messages that are sent: their elements for each rank, and bytes."""
    sent = []

    def counts(function, place):
        def call(*args, **kwargs):
            sent.append((args[place].numel(), args[place].nbytes))
            return function(*args, **kwargs)

        return call

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with pytest.MonkeyPatch.context() as patch:
        for name, place in (("all_reduce", 0), ("all_gather", 1), (gather, 1)):
            patch.setattr(dist, name, counts(getattr(dist, name), place))
        yield sent


def calls(mine, group, tokens):
    """The functions whose messages are counted."""
    frozen = [x.detach() for x in mine]
    (fp, p), (fq, q) = models(frozen, group)
    hp, head_p = models(mine, group)[0]
    weights = torch.ones(len(hp))

    def each(terms, rows):
        return terms.kl + terms.token_logp - terms.entropy

    def of_values():
        linear_kl(hp, head_p, fq, q).sum().backward()

    return {
        "`linear_kl`": lambda: linear_kl(fp, p, fq, q),
        "`linear_kl` and its gradient": of_values,
        "`linear_divergence`, other than KL": lambda: linear_divergence(fp, p, fq, q, divergence="hellinger"),
        "`linear_kl_loss`": lambda: linear_kl_loss(hp, head_p, fq, q, weights=weights),
        "`linear_divergence_loss`, other than KL": lambda: linear_divergence_loss(
            hp, head_p, fq, q, weights=weights, divergence="hellinger"
        ),
        "`linear_objective`": lambda: linear_objective(hp, head_p, tokens, fq, q, each),
        "`token_statistics`": lambda: token_statistics(fp, p, fq, q, tokens),
    }


@check
def messages(split):
    """Numbers for each token and messages for each chunk: what is left when constants are taken away."""
    actual = {}
    for words in (37, 74):
        cuts = [c * words // 37 for c in CUTS[split.size]]
        rows = slice(cuts[split.rank], cuts[split.rank + 1])
        for size in (16, 32):
            mine = local_rows(made(dtype=torch.float32, tokens=size, words=words), rows)
            for name, call in calls(mine, split.group, torch.arange(size)).items():
                with counted() as sent:
                    call()
                large = [numbers for numbers, _ in sent if numbers >= size]
                small = [numbers for numbers, _ in sent if numbers < size]
                assert max(small) <= 6 and all(numbers % size == 0 for numbers in large), (name, sent)
                table = {
                    "numbers a token": sum(large) // size,
                    "bytes a token": sum(b for n, b in sent if n >= size) // size,
                    "messages a chunk": len(large),
                    "messages a call": len(small),
                }
                assert actual.setdefault(name, table) == table, (name, words, size, actual[name], table)
    return actual


@check
def what_does_not_fit_is_refused_on_every_rank(split):
    tensors = made(dtype=torch.float32)
    mine = [x if n % 3 == 0 else x[split.rows] for n, x in enumerate(tensors)]
    hp, wp, bp, hq, wq, bq = mine
    group, first = split.group, split.rank == 0
    p, q = Head(wp, bp, vocabulary_group=group), Head(wq, bq, vocabulary_group=group)
    moved = tensors[4][max(0, split.rows.start - 1) : split.rows.stop - (split.rank < split.size - 1)]
    sizes = [b - a for a, b in zip(CUTS[split.size], CUTS[split.size][1:], strict=False)]
    other = GROUPS[4] if split.size == 2 else GROUPS[2]
    ids, some = torch.full((TOKENS,), 37), 0 if first else None

    def trained(x):
        return x.clone().requires_grad_()

    refusals = {
        f"hold {sizes} rows of p's head and ": lambda: linear_kl(hp, p, hq, Head(moved, vocabulary_group=group)),
        "p have 5 dimensions and its head 4"
        if first
        else "of the vocabulary_group refuses its arguments": lambda: linear_kl(
            hp, Head(wp[:, :4] if first else wp, vocabulary_group=group), hq, q
        ),
        "disagree on the tokens: [10, 11": lambda: linear_kl(hp[first:], p, hq[first:], q),
        "disagree on the tensors that require a gradient: [1, 0": lambda: linear_kl(
            trained(hp) if first else hp, p, hq, q
        ),
        "disagree on the bytes a logit: [8, 4": lambda: linear_kl(hp.double() if first else hp, p, hq, q),
        "leave one that has none out of the group": lambda: linear_kl(
            *(hp, Head(wp[:some], vocabulary_group=group), hq, Head(wq[:some], vocabulary_group=group))
        ),
        "head of q is whole and covers 36 tokens": lambda: linear_kl(hp, p, hq, Head(tensors[4][:36])),
        "hold 37 rows together": lambda: linear_kl(hp, p, hq, Head(wq)),
        f"would compute {sizes[split.rank]} of 37 rows": lambda: linear_kl(hp, p, hq, Head(trained(tensors[4]))),
        "is a head without the group": lambda: linear_kl(hp, p, hq, Head(tensors[4]) if first else q),
        "10 tokens to do and another 11": lambda: linear_kl_loss(
            hp, p, hq, q, weights=torch.where((torch.arange(TOKENS) == 0) & first, 0.0, 1.0)
        ),
        "ids run from 37 to 37 and the heads cover 37": lambda: token_statistics(hp, p, hq, q, ids),
        "split over a vocabulary_group has no gradient": lambda: log_probabilities(trained(hp), p),
        "cannot compile the collectives of a head": lambda: linear_kl(
            hp, p, hq, q, options=LinearOptions(compile=True)
        ),
        "of one dimension and this one has 2": lambda: Head(
            wp, vocabulary_group=DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        ),
        "and q's over [": lambda: linear_kl(hp, p, hq, Head(wq, vocabulary_group=other)),
        "this process is not in the vocabulary_group": lambda: Head(
            wp, vocabulary_group=dist.GroupMember.NON_GROUP_MEMBER
        ),
    }  # fmt: skip
    for says, call in refusals.items():
        with refused(says):
            call()


@check
def tokens_spread_over_ranks_need_nothing_special(split):
    """Sequence and context parallel: every rank has some of the tokens and a whole head."""
    tensors = made(tokens=12)
    right = local_rows(tensors, slice(None))
    p, q = models(right)
    exact = TEXTBOOK["kl"](logp(p), logp(q))
    mask = torch.arange(12) % 5 != 0
    (torch.where(mask, exact, 0.0).sum() / mask.sum()).backward()
    share = 12 // split.size
    tokens = slice(split.rank * share, (split.rank + 1) * share)
    mine = [
        x.clone().requires_grad_() if n % 3 else x[tokens].clone().requires_grad_()
        for n, x in enumerate(tensors)
    ]
    (hp, head_p), (hq, head_q) = models(mine)
    weights = mask[tokens] / mask.sum()
    loss, per_token = linear_kl_loss(hp, head_p, hq, head_q, weights=weights)
    parts = [torch.empty_like(per_token) for _ in range(split.size)]
    dist.all_gather(parts, per_token, group=split.group)
    assert_close(torch.cat(parts), torch.where(mask, exact.detach(), 0.0))
    mean = mean_of(per_token, mask[tokens]).across_ranks(split.group)
    assert_close(mean.value, exact[mask].mean().detach())
    loss.backward()
    for n, (x, y) in enumerate(zip(mine, right, strict=True)):
        if n % 3:
            dist.all_reduce(x.grad, group=split.group)
        assert_close(x.grad, y.grad if n % 3 else y.grad[tokens])


@check
def tokens_and_words_may_both_be_spread(split):
    """Two data-parallel ranks of two tensor-parallel ranks each; the world's groups of two have the words."""
    if split.size == 4:
        return
    tensors = made(tokens=12)
    right = local_rows(tensors, slice(None))
    p, q = models(right)
    exact = TEXTBOOK["kl"](logp(p), logp(q))
    exact.mean().backward()
    half = dist.get_rank() // 2
    tokens = slice(6 * half, 6 * half + 6)
    mine = local_rows([x[tokens] if n % 3 == 0 else x for n, x in enumerate(tensors)], split.rows)
    (hp, head_p), (hq, head_q) = models(mine, split.group)
    loss, per_token = linear_kl_loss(hp, head_p, hq, head_q, weights=torch.full((6,), 1 / 12).double())
    assert_close(per_token, exact[tokens].detach())
    loss.backward()
    for n in (1, 2, 4, 5):
        dist.all_reduce(mine[n].grad, group=ACROSS[dist.get_rank() % 2])
        assert_close(mine[n].grad, right[n].grad[split.rows])
    assert_close(mine[0].grad, right[0].grad[tokens])


GROUPS: dict[int, dist.ProcessGroup] = {}
ACROSS: list[dist.ProcessGroup] = []


def main(rank: int, store: str, out: str, only: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    GROUPS[4] = dist.new_group([0, 1, 2, 3])
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    GROUPS[2] = pairs[rank // 2]
    ACROSS.extend([dist.new_group([0, 2]), dist.new_group([1, 3])])
    results = {}
    for name, function in CHECKS.items():
        if only and name not in only:
            continue
        try:
            results[name] = {str(size): function(Split(GROUPS[size])) for size in (2, 4)}
        except Exception:
            results[name] = traceback.format_exc()
            break
    Path(out).write_text(json.dumps(results))
    if not any(isinstance(x, str) for x in results.values()):
        dist.destroy_process_group()


if __name__ == "__main__":
    store, folder, *only = sys.argv[1:]
    own_rank = fork_ranks(4, [store])
    main(own_rank, store, f"{folder}/rank{own_rank}.json", only)
