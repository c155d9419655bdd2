"""Weights sharded over processes: DTensors that FSDP gathers or not, and parameters as ZeRO-3 stores them."""

import os
import subprocess
import sys
from math import nan
from pathlib import Path

import forked_ranks
import pytest
import torch

from kleash.errors import CannotRunError
from kleash.linear import head_storage

WORKER = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from kleash.errors import CannotRunError
from kleash.linear import Head, linear_kl, linear_kl_loss, zero3_as_dtensor
from forked_ranks import fork_ranks

rank = fork_ranks(2, [sys.argv[1]])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
hidden_p, hidden_q = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
weight, other = torch.randn(21, 8, dtype=torch.float64), torch.randn(21, 8, dtype=torch.float64)
weights = torch.linspace(-1, 2, 6, dtype=torch.float64)

whole = weight.clone().requires_grad_()
right = linear_kl_loss(hidden_p, Head(whole), hidden_q, Head(other), weights=weights)
right.loss.backward()

mine = slice(3 * rank, 3 * rank + 3)
sharded = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
frozen = distribute_tensor(other, mesh, [Shard(0)])
given = hidden_p[mine], Head(sharded), hidden_q[mine], Head(frozen)
for run in (
    lambda: linear_kl_loss(*given, weights=weights[mine]).loss,
    lambda: (linear_kl(*given) * weights[mine]).sum(),
):
    sharded.grad = None
    loss = run()
    loss.backward()
    assert isinstance(sharded.grad, DTensor)
    torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)
    dist.all_reduce(loss.detach())
    torch.testing.assert_close(loss.detach(), right.loss.detach())

def loss_of(weight):
    return linear_kl_loss(hidden_p[mine], Head(weight), hidden_q[mine], Head(other), weights=weights[mine]).loss

sharded.grad = None
torch.compile(loss_of, backend="eager")(sharded).backward()
torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)

class Student(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = (torch.nn.Linear(8, size, dtype=torch.float64) for size in (8, 21))

    def forward(self, x, hidden_q, weights):
        head = Head(self.head.weight, self.head.bias)
        return linear_kl_loss(self.body(x), head, hidden_q, Head(other), weights=weights).loss

students = []
for _ in range(2):
    torch.manual_seed(1)
    students.append(Student())
students[0](hidden_p, hidden_q, weights).backward()
fully_shard(students[1], mesh=mesh)
students[1](hidden_p[mine], hidden_q[mine], 2 * weights[mine]).backward()  # FSDP takes the mean of the ranks
for mine_, right_ in zip(students[1].parameters(), students[0].parameters(), strict=True):
    assert isinstance(mine_.grad, DTensor) and right_.grad.abs().max() > 0
    torch.testing.assert_close(mine_.grad.full_tensor(), right_.grad)

def zero3_parameter(whole):
    # As DeepSpeed stores it: empty, with half of the elements on each rank, the last ones padded.
    part = -(-whole.numel() // 2)
    padded = torch.cat([whole.flatten(), whole.new_full((2 * part - whole.numel(),), float("nan"))])
    parameter = torch.nn.Parameter(whole.new_empty(0))
    parameter.ds_id, parameter.ds_shape, parameter.ds_numel = 0, whole.shape, whole.numel()
    parameter.ds_tensor, parameter.ds_process_group = padded[part * rank :][:part].clone(), dist.group.WORLD
    return parameter

for shape in ((21, 8), (6, 4), (5, 3, 2), (7,), (6,), (1, 5), (1,), ()):
    right = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    stored = zero3_as_dtensor(zero3_parameter(right))
    assert torch.equal(stored.full_tensor().view(shape), right), shape
parameter = zero3_parameter(torch.randn(6, 4))
rows = zero3_as_dtensor(parameter).to_local()
assert rows.data_ptr() == parameter.ds_tensor.data_ptr() and rows.shape == (3, 4), "rows that lie here are not copied"

stored = zero3_parameter(weight)
stored.data = weight.clone()          # ZeRO-3 gathers a parameter for the forward pass of its module
own = (stored * (1 + rank)).sum()
gathered = stored.data
stored.data = weight.new_empty(0)
given = hidden_p[mine], Head(zero3_as_dtensor(stored)), hidden_q[mine], Head(frozen)
run = linear_kl_loss(*given, weights=weights[mine])
stored.data = gathered                # and again for its backward pass
(own + run.loss).backward()
dist.all_reduce(stored.grad)          # ZeRO-3 would take the mean
torch.testing.assert_close(stored.grad, whole.grad + 3)
stored.data = weight.new_empty(0)
try:
    linear_kl_loss(hidden_p, Head(zero3_as_dtensor(stored)), hidden_q, Head(other), weights=weights).loss.backward()
except CannotRunError as error:
    assert "let the loss depend on the module's output" in str(error), error
else:
    raise AssertionError("the gradient was lost")
for attributes, words in (({"ds_quant_scale": 1}, "quantised"), ({"data": torch.empty(0)}, "offloaded")):
    refused = zero3_parameter(weight)
    for name, value in attributes.items():
        setattr(refused.ds_tensor, name, value)
    try:
        zero3_as_dtensor(refused)
    except CannotRunError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")
dist.destroy_process_group()
print("equal", flush=True)
"""

RANK_WITHOUT_ROWS = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from kleash.linear import Head, linear_kl_loss, log_probabilities, token_statistics, token_statistics_and_top
from forked_ranks import fork_ranks

rank = fork_ranks(3, [sys.argv[1]])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=3)
torch.manual_seed(0)
hidden_p, hidden_q, weight, other = (torch.randn(n, 8, dtype=torch.float64) for n in (6, 6, 4, 4))
bias, weights, token_ids = torch.randn(4).double(), torch.linspace(-1, 2, 6).double(), torch.tensor([3, 0, 1, 2, 3, 1])
model = torch.nn.Linear(8, 4, dtype=torch.float64)
with torch.no_grad():
    model.weight.copy_(weight), model.bias.copy_(bias)
fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
assert len(model.weight.to_local()) == (2, 2, 0)[rank]
stored = Head(model.weight, model.bias)
whole = weight.clone().requires_grad_(), bias.clone().requires_grad_()

logp, logq = (hidden_p @ whole[0].T + whole[1]).log_softmax(-1), (hidden_q @ other.T).log_softmax(-1)
kl = (logp.exp() * (logp - logq)).sum(-1)
(kl * weights).sum().backward()
mine = (slice(0, 5), slice(5, 5), slice(5, 6))[rank]     # the second rank has no tokens, the third no rows
given = hidden_p[mine], stored, hidden_q[mine], Head(other)
linear_kl_loss(*given, weights=weights[mine]).loss.backward()
for parameter, right in ((model.weight, whole[0]), (model.bias, whole[1])):
    torch.testing.assert_close(parameter.grad.full_tensor(), right.grad)
torch.testing.assert_close(token_statistics(*given, token_ids[mine]).kl_pq, kl.detach()[mine])
top = token_statistics_and_top(*given, token_ids[mine], top=2).top_p.probability
torch.testing.assert_close(top, logp.detach().exp()[mine].topk(2).values)
torch.testing.assert_close(log_probabilities(hidden_p[mine], stored).detach(), logp.detach()[mine])
dist.barrier()
dist.destroy_process_group()
print("equal", flush=True)
"""


@pytest.mark.parametrize(("worker", "ranks"), [(WORKER, 2), (RANK_WITHOUT_ROWS, 3)])
def test_processes_with_a_sharded_weight_equal_one(tmp_path, worker, ranks):
    """Each process has a part of the tokens, as in data, sequence or context parallelism."""
    paths = os.pathsep.join([str(Path(forked_ranks.__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", worker, str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.count("equal")) == (0, ranks), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("factors", "are_refused"),
    [
        ([2.0, 2.0], False),
        ([2.0, 1.0], True),
        ([nan, 2.0, 2.0], False),
        ([2.0, nan], False),
        ([nan, 2.0, 1.0], True),
    ],
)
def test_ranks_that_multiply_their_losses_by_different_factors_are_refused(monkeypatch, factors, are_refused):
    """An overflow on one rank makes its factor NaN, which is no reason to stop, whichever rank it is."""
    monkeypatch.setattr(head_storage.dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(
        head_storage, "all_gather_single", lambda received, *_: received.copy_(torch.tensor(factors))
    )
    storage = head_storage.HeadStorage(None, [3] * len(factors), torch.device("cpu"))
    if are_refused:
        with pytest.raises(CannotRunError, match="multiply this loss by"):
            storage.require_equal_factor(torch.tensor(factors[0]))
    else:
        storage.require_equal_factor(torch.tensor(factors[0]))
