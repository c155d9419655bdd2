"""What several processes check about heads that they store between them, each with tokens of its own."""

import torch
import torch.distributed as dist
from rank_checks import CHUNKS, TEXTBOOK, TOKENS, WORDS, Split, check, local_rows, logp, made, models, refused
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

from kleash.linear import (
    Head,
    linear_divergence,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    log_probabilities,
    token_statistics,
    token_statistics_and_top,
    zero3_as_dtensor,
)


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


@check(2)
def a_dtensor_keeps_its_rows_with_a_group_and_is_gathered_without(split):
    mesh, most = DeviceMesh.from_group(split.group, "cpu"), -(-WORDS // split.size)
    # as DTensor spreads rows
    split = Split(split.group, [min(n * most, WORDS) for n in range(split.size + 1)])
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


@check(2, 4)
def stored_rows_equal_one_process(split):
    """Values, statistics and gradients; moving tokens (few of them) and gathering rows (of a small vocabulary)."""
    cases = (
        (300, None, WORDS),
        (11, CHUNKS, WORDS),
        (2, CHUNKS, 5),
    )  # 5 words: the last of four ranks has none
    for tokens, options, words in cases if split.size == 2 else cases[2:]:
        tensors = made(tokens=tokens, words=words, dtype=torch.float64)
        weights = torch.linspace(-1, 2, tokens).double()
        weights[1], ids, temperature = (
            0,
            torch.arange(tokens) % words,
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


@check(2)
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


@check(2)
def a_network_sharded_by_fsdp_trains_as_a_whole_one(split):
    """FSDP2 takes the mean over the ranks; inside of a forward pass it has gathered the weight."""

    class Student(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = (torch.nn.Linear(8, size, dtype=torch.float64) for size in (8, 21))

        def forward(self, x, hidden_q, weights):
            head = Head(self.head.weight, self.head.bias)
            return linear_kl_loss(self.body(x), head, hidden_q, Head(other), weights=weights).loss

    random = torch.Generator().manual_seed(0)
    hidden_p, hidden_q, other = (torch.randn(n, 8, generator=random, dtype=torch.float64) for n in (6, 6, 21))
    weights, mine = torch.linspace(-1, 2, 6).double(), slice(3 * split.rank, 3 * split.rank + 3)
    students = []
    for _ in range(2):
        torch.manual_seed(1)
        students.append(Student())
    students[0](hidden_p, hidden_q, weights).backward()
    fully_shard(students[1], mesh=DeviceMesh.from_group(split.group, "cpu"))
    students[1](hidden_p[mine], hidden_q[mine], 2 * weights[mine]).backward()
    for ours, right in zip(students[1].parameters(), students[0].parameters(), strict=True):
        assert isinstance(ours.grad, DTensor) and right.grad.abs().max() > 0
        assert_close(ours.grad.full_tensor(), right.grad)


def zero3_parameter(whole, split):
    """A parameter as DeepSpeed stores it: empty, with a part of the elements on each rank, the last ones padded."""
    part = -(-whole.numel() // split.size)
    padded = torch.cat([whole.flatten(), whole.new_full((split.size * part - whole.numel(),), float("nan"))])
    parameter = torch.nn.Parameter(whole.new_empty(0))
    parameter.ds_id, parameter.ds_shape, parameter.ds_numel = 0, whole.shape, whole.numel()
    parameter.ds_tensor, parameter.ds_process_group = padded[part * split.rank :][:part].clone(), split.group
    return parameter


@check(4)
def parameters_of_zero3_are_rows(split):
    for shape in ((21, 8), (8, 4), (5, 3, 2), (7,), (8,), (1, 5), (1,), ()):
        right = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        rows = zero3_as_dtensor(zero3_parameter(right, split))
        assert torch.equal(rows.full_tensor().view(shape), right), shape
    parameter = zero3_parameter(torch.randn(8, 4), split)
    rows = zero3_as_dtensor(parameter).to_local()
    assert rows.data_ptr() == parameter.ds_tensor.data_ptr() and rows.shape == (2, 4), "they are not copied"


@check(4)
def the_gradient_of_zero3_is_added_to_the_modules(split):
    tensors = made(shared=True)
    hidden_p, weight, _, hidden_q, _, _ = tensors
    weights, mine = torch.linspace(-1, 2, TOKENS).double(), own_tokens(split, TOKENS)
    whole, other = weight.clone().requires_grad_(), Head(weight.flip(0))
    linear_kl_loss(hidden_p, Head(whole), hidden_q, other, weights=weights).loss.backward()
    held = zero3_parameter(weight, split)
    held.data = weight.clone()  # ZeRO-3 gathers a parameter for the forward pass of its module
    own = (held * (1 + split.rank)).sum()
    gathered, held.data = held.data, weight.new_empty(0)
    rows = Head(zero3_as_dtensor(held))
    loss = linear_kl_loss(hidden_p[mine], rows, hidden_q[mine], other, weights=weights[mine]).loss
    held.data = gathered  # and again for its backward pass
    (own + loss).backward()
    dist.all_reduce(held.grad)  # ZeRO-3 would take the mean
    assert_close(held.grad, whole.grad + 10)
    held.data = weight.new_empty(0)
    with refused("let the loss depend on the module's output"):
        rows = Head(zero3_as_dtensor(held))
        linear_kl_loss(hidden_p, rows, hidden_q, other, weights=weights).loss.backward()
    for attributes, says in (({"ds_quant_scale": 1}, "quantised"), ({"data": torch.empty(0)}, "offloaded")):
        parameter = zero3_parameter(weight, split)
        for name, value in attributes.items():
            setattr(parameter.ds_tensor, name, value)
        with refused(says):
            zero3_as_dtensor(parameter)
