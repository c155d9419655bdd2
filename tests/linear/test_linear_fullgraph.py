"""Callers compiled with fullgraph=True: the same numbers, and no chunk loop in their graph."""

import subprocess
import sys

from compiling import compiles

CALLERS = """
import torch
from kleash.linear import *

torch.manual_seed(0)
ids, weights = torch.randint(101, (2, 12)), torch.rand(2, 12)
weights[0, 0] = 0

def data():
    torch.manual_seed(1)
    shapes = (2, 12, 16), (101, 16), (101,), (2, 12, 19), (101, 19)
    return [torch.randn(shape).requires_grad_(n < 3) for n, shape in enumerate(shapes)]

def values(h, w, b, hq, wq):
    return (linear_kl(h * 2, Head(w, b), hq, Head(wq), temperature=1.3) * weights).sum()

def loss(h, w, b, hq, wq):
    options = LinearOptions(buffer_bytes=20_000)
    found = linear_divergence_loss(
        h * 2, Head(w, b, softcap=3.0), hq, Head(wq), weights=weights, divergence="hellinger", options=options
    )
    return found.loss * 3 + found.per_token.sum()

def objective(h, w, b, hq, wq):
    def each(terms, rows):
        ratio = torch.exp(terms.token_logp - terms.token_logq)
        return weights.reshape(-1)[rows] * ratio + 0.1 * terms.kl - 0.01 * terms.entropy
    found, terms = linear_objective(h * 2, Head(w, b), ids, hq, Head(wq), each, temperature=weights + 1)
    return found + terms.kl.sum()

def statistics(h, w, b, hq, wq):
    found = token_statistics(h * 2, Head(w, b), hq, Head(wq), ids)
    return h.sum() * found.kl_pq.mean() + found.rank_q.sum()

def tied(w, b, h, hq, way, options=None):
    head = Head(w, b)
    kind = {"temperature": 1.3, "options": options}
    if way == "objective":
        each = lambda terms, rows: weights.reshape(-1)[rows] * (terms.kl + terms.token_logp)
        return linear_objective(h * 2, head, ids, hq, head, each, **kind)[0]
    if way == "loss":
        return linear_divergence_loss(h * 2, head, hq, head, weights=weights, divergence="reverse_kl", **kind).loss
    return (linear_divergence(h * 2, head, hq, head, divergence=way, **kind) * weights).sum()

for way in ("kl", "reverse_kl", "loss", "objective"):
    for options in (None, LinearOptions(impl="reference")):
        results = []
        for call in (tied, torch.compile(tied, fullgraph=True, backend="aot_eager")):
            h, w, b, _, _ = data()
            hq = (h.detach() + 1).requires_grad_()
            value = call(w, b, h, hq, way, options)
            results.append((value.detach(), *torch.autograd.grad(value, (w, b, h, hq))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        assert all(x.abs().sum() > 0 for x in results[0][1:])

for function in (values, loss, objective, statistics):
    results, graphs = [], []
    def backend(graph, inputs):
        graphs.append(len(list(graph.graph.nodes)))
        return graph
    for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
        given = data()
        value = call(*given)
        results.append((value.detach(), *torch.autograd.grad(value, given[:3], allow_unused=True)))
    for a, b in zip(*results, strict=True):
        if a is not None or b is not None:
            torch.testing.assert_close(a, b)
    assert results[0][1].abs().sum() > 0 and len(graphs) == 1 and graphs[0] < 90, graphs

from kleash.divergences import skew_kl_record
record = skew_kl_record(0.1)
def with_a_record(h, w, b, hq, wq): return linear_divergence(h, Head(w), hq, Head(wq), divergence=record)
try:
    torch.compile(with_a_record, fullgraph=True, backend="aot_eager")(*data())
except Exception as error:
    assert "by a name of DIVERGENCES" in str(error), error
else:
    raise SystemExit("a record went through a whole graph")
torch._dynamo.reset()
torch.testing.assert_close(torch.compile(with_a_record, backend="aot_eager")(*data()), with_a_record(*data()))
h, w, b, hq, wq = data()
compiled = torch.compile(values, fullgraph=True)
torch.testing.assert_close(compiled(h, w, b, hq, wq), values(h, w, b, hq, wq))
compiled(h, w, b, hq, wq).backward()
assert w.grad.abs().sum() > 0
print("all the same")
"""


@compiles
def test_compiled_callers_see_one_operation_and_the_same_numbers(compiler):
    done = subprocess.run([sys.executable, "-c", CALLERS], capture_output=True, text=True)
    assert done.stdout.strip() == "all the same", done.stderr[-3000:]
