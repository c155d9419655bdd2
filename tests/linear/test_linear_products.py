"""Matrix products by the library in C: accuracy in every shape, and when they are used."""

import subprocess
import sys

import pytest
import torch
from linear_cases import REFERENCE, head_case, in_float64, relative_rms

from kleash.linear import Head, LinearOptions, linear_divergence_loss, linear_kl, linear_objective
from kleash.linear.checks import checked_pair
from kleash.linear.impl import chunk_loop, compiling
from kleash.linear.impl.native import building, products

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(
        compiling.missing_for_native() is not None or not hasattr(building.library(), "kleash_logits"),
        reason="this processor has no AVX-512",
    ),
]
SHAPES = [
    (1, 1, 1), (1, 33, 1), (3, 5, 7), (13, 31, 113), (16, 512, 112), (37, 45, 301), (127, 257, 97),
    (256, 64, 111), (257, 32, 225), (600, 300, 130), (700, 8, 40),
]  # fmt: skip
"""Tokens, hidden size, vocabulary: below, at and beyond the sizes of tiles, panels, blocks and depths."""
ROOM = LinearOptions(impl="chunked", buffer_bytes=8 * 2**20)
"""Enough for the workspace of the products, and a chunk of 32 tokens of 20 000 logits."""


@pytest.fixture
def calls(monkeypatch):
    """The products that were computed, on a processor where they are used."""
    seen, call = [], products.call

    def recorded(name, *tensors):
        seen.append((name, len(tensors[0])))
        call(name, *tensors)

    monkeypatch.setattr(products, "call", recorded)
    monkeypatch.setattr(products, "is_faster_on_this_machine", lambda: True)
    return seen


def matrix(rows, columns, seed, padding=0):
    """A random matrix with ``padding`` unused columns between its rows."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns + padding, generator=random)[:, :columns]


@pytest.mark.parametrize("padding", [0, 3], ids=["contiguous", "strided"])
@pytest.mark.parametrize(("tokens", "dim", "vocab_size"), SHAPES)
def test_products_of_any_shape(tokens, dim, vocab_size, padding):
    hidden, weight = matrix(tokens, dim, 1, padding), matrix(vocab_size, dim, 2, padding)
    gradient = matrix(tokens, vocab_size, 3, padding)
    factors = {
        "logits": (hidden.double(), weight.T.double()),
        "weight": (gradient.T.double(), hidden.double()),
        "hidden": (gradient.double(), weight.double()),
    }
    for name, (a, b) in factors.items():
        whole = matrix(len(a) + 1, b.shape[1] + padding, 4)
        whole[-1], whole[:, b.shape[1] :] = -0.0, -0.0  # even adding 0 to these would change their sign
        out, before = whole[:-1, : b.shape[1]], whole[:-1, : b.shape[1]].clone()
        exact = a @ b
        if name == "logits":
            products.write_logits_(out, hidden, weight)
        elif name == "weight":
            products.add_weight_gradient_(out, gradient, hidden)
            exact += before
        else:
            products.add_hidden_gradient_(out, gradient, weight)
            exact += before
        bound = 2**-24 * (a.shape[1] + 2) * (a.abs() @ b.abs() + before.abs())  # any order of the sum
        assert ((out - exact).abs() <= bound).all(), name
        beside = torch.cat([whole[-1], whole[:, b.shape[1] :].flatten()])
        assert (beside == 0).all() and beside.signbit().all(), f"{name}: written beside its rows"


GUARDED = """
import ctypes, torch
from kleash.linear.impl.native import products
libc, page = ctypes.CDLL(None), 4096
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

def guarded(rows, columns):
    size = 4 * rows * columns
    pages = -(-size // page) + 2
    start = libc.mmap(None, pages * page, 3, 0x22, -1, 0)
    end = start + (pages - 1) * page
    assert libc.mprotect(start, page, 0) == libc.mprotect(end, page, 0) == 0
    numbers = (ctypes.c_char * size).from_address(start + page if first else end - size)
    return torch.frombuffer(numbers, dtype=torch.float32).view(rows, columns).fill_(1.0)

empty = torch.empty
for first in (False, True):
    for tokens, dim, words in SHAPES:
        hidden, weight, gradient = guarded(tokens, dim), guarded(words, dim), guarded(tokens, words)
        out, total, into = guarded(tokens, words), guarded(words, dim), guarded(tokens, dim)
        torch.empty = lambda count: guarded(1, count)
        products.write_logits_(out, hidden, weight)
        products.add_weight_gradient_(total, gradient, hidden)
        products.add_hidden_gradient_(into, gradient, weight)
        torch.empty = empty
        assert (out == dim).all() and (total == tokens + 1).all() and (into == words + 1).all()
print("nothing outside")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is guarded by Linux' mmap and mprotect")
def test_no_memory_outside_the_matrices_is_touched():
    """Each matrix, and the workspace, starts or ends next to a protected page."""
    program = GUARDED.replace("SHAPES", repr(SHAPES))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout == "nothing outside\n", (result.returncode, result.stderr)


@pytest.mark.parametrize("empty", ["tokens", "words"])
def test_products_of_empty_matrices(empty):
    tokens, vocab_size = (0, 40) if empty == "tokens" else (5, 0)
    hidden, weight, gradient = matrix(tokens, 6, 1), matrix(vocab_size, 6, 2), matrix(tokens, vocab_size, 3)
    products.write_logits_(gradient, hidden, weight)
    total, into = torch.ones(vocab_size, 6), torch.ones(tokens, 6)
    products.add_weight_gradient_(total, gradient, hidden)
    products.add_hidden_gradient_(into, gradient, weight)
    assert (total == 1).all() and (into == 1).all()
    out = torch.full((3, 4), torch.nan)
    products.write_logits_(out, torch.empty(3, 0), torch.empty(4, 0))
    assert (out == 0).all()


def test_factors_whose_rows_are_not_contiguous_are_copied():
    hidden, weight = matrix(12, 20, 1).T, matrix(12, 50, 2).T
    out = torch.empty(20, 50)
    products.write_logits_(out, hidden, weight)
    assert relative_rms(out, hidden.double() @ weight.double().T) < 1e-6


def test_products_do_not_depend_on_the_number_of_threads():
    hidden, weight, gradient = matrix(300, 130, 1), matrix(1000, 130, 2), matrix(300, 1000, 3)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            out, total, into = torch.empty(300, 1000), torch.zeros(1000, 130), torch.zeros(300, 130)
            products.write_logits_(out, hidden, weight)
            products.add_weight_gradient_(total, gradient, hidden)
            products.add_hidden_gradient_(into, gradient, weight)
            results.append((out, total, into))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_nan_token_does_not_affect_other_tokens():
    hidden, weight, gradient = matrix(35, 40, 1), matrix(300, 40, 2), matrix(35, 300, 3)
    hidden[17], gradient[17] = torch.nan, torch.inf
    out, into = torch.empty(35, 300), torch.zeros(35, 40)
    products.write_logits_(out, hidden, weight)
    products.add_hidden_gradient_(into, gradient, weight)
    unaffected = torch.arange(35) != 17
    for result in (out, into):
        assert result[unaffected].isfinite().all() and not result[17].isfinite().any()


@pytest.mark.parametrize("threads", [1, 2, 64])
def test_the_bound_on_the_workspace(threads):
    for dim in (1, 33, 1024, 4096):
        per_token, more = products.workspace_floats(dim, threads)
        for tokens in (1, 16, 31, 112, 257, 1024):
            exact = products.exact_workspace_floats(tokens, dim, threads)
            assert 0 < exact <= tokens * per_token + more


def large_case(dtype=torch.float32, **traits):
    return head_case(dtype, 0.5, tokens=(70,), vocab_size=20_000, **traits)


def results_of(case, what, options):
    """A value, and the gradients of hidden states and heads."""
    leaves = case.hidden_p, case.head_p.weight, case.hidden_q, case.head_q.weight
    for leaf in leaves:
        leaf.requires_grad_()
    weights = torch.linspace(-1, 2.1, 70, dtype=torch.float64).to(case.hidden_p)
    traits = {"temperature": case.temperature, "options": options}
    if what == "values":
        loss = (linear_kl(*case.models, **traits) * weights).sum()
    elif what == "objective":
        p, q = (case.hidden_p, case.head_p), (case.hidden_q, case.head_q)
        objective = lambda t, rows: weights[rows] * (t.kl - t.token_logp + t.entropy)  # noqa: E731
        loss, _ = linear_objective(*p, case.tokens, *q, objective, **traits)
    else:
        loss = linear_divergence_loss(*case.models, weights=weights, divergence=what, **traits).loss
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(
    "traits", [{}, {"softcap": 2.5, "bias": True, "scale": 1.7}], ids=["plain", "softcap"]
)
@pytest.mark.parametrize("what", ["kl", "reverse_kl", "jensen_shannon", "values", "objective"])
def test_values_and_gradients(calls, what, traits, unhooked):
    case = large_case(**traits)
    exact = results_of(in_float64(case), what, REFERENCE)
    ours = results_of(case, what, ROOM)
    assert {name for name, _ in calls} == {
        "kleash_logits",
        "kleash_weight_gradient",
        "kleash_hidden_gradient",
    }
    assert len({tokens for _, tokens in calls}) > 1 or len(calls) > 6, "more than one chunk"
    for right, result in zip(exact, ours, strict=True):
        assert relative_rms(result, right) < 5e-6


def test_which_calls_use_the_products_in_c(calls):
    case = large_case()
    for options in (LinearOptions(compile="never"), LinearOptions(buffer_bytes=60_000)):
        linear_kl(*case.models, options=options)
        assert not calls, options
    narrow = large_case(torch.bfloat16)
    linear_kl(*narrow.models, options=ROOM)
    assert not calls
    weight = case.head_p.weight
    assert weight is not None
    transposed = Head(weight.T.contiguous().T)
    linear_kl(case.hidden_p, transposed, case.hidden_q, case.head_q, options=ROOM)
    assert not calls
    linear_kl(*case.models, options=ROOM)
    assert calls


def test_other_processors_do_not_use_the_products_in_c(monkeypatch):
    monkeypatch.setattr(products.onednn, "is_amd_with_avx512", lambda: False)
    products.is_faster_on_this_machine.cache_clear()
    case = large_case()
    assert not products.supports(checked_pair(case.models[:2], case.models[2:], 1.0))
    products.is_faster_on_this_machine.cache_clear()


@pytest.mark.parametrize(
    ("tokens", "chunk"), [(1024, 112), (1024, 96), (4096, 64), (100, 112), (17, 16), (1, 16)]
)
def test_chunks_differ_by_at_most_one_vector(tokens, chunk):
    slices = list(chunk_loop.chunk_slices(tokens, chunk_loop.ChunkPlan(chunk, 8, 0, 0)))
    assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
    assert slices[-1].stop == tokens and len(slices) == -(-tokens // chunk)
    sizes = [-(-(part.stop - part.start) // 16) for part in slices]
    assert min(sizes) > 0 and max(sizes) * 16 <= max(chunk, 16) and max(sizes) - min(sizes) <= 1


def test_the_plan_is_within_the_budget(monkeypatch):
    monkeypatch.setattr(products, "is_faster_on_this_machine", lambda: True)
    for tokens, dim, vocab_size in [(1024, 1024, 151_936), (4096, 4096, 32_768), (4096, 64, 2000)]:
        hidden, weight = torch.empty(tokens, dim), torch.empty(vocab_size, dim)
        pair = checked_pair((hidden, Head(weight)), (hidden, Head(weight)), 1.0)
        options = LinearOptions(buffer_bytes=(budget := 128 << 20))
        plan = chunk_loop.plan_chunks(pair, options, 0, native=True)
        assert plan.tile_rows == 0
        workspace = products.exact_workspace_floats(plan.chunk_tokens, dim, torch.get_num_threads())
        scratch = 2 * plan.threads * vocab_size
        assert (
            4 * (2 * plan.chunk_tokens * vocab_size + plan.chunk_tokens * dim + scratch + workspace) <= budget
        )
        if plan.chunk_tokens < tokens:
            assert plan.chunk_tokens % products.LANES == 0
