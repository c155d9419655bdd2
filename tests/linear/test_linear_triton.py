"""impl='triton': in triton's interpreter, compiled for a GPU, and on a GPU if there is one."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from linear_cases import REFERENCE, Case, head_case, in_float64, leaves_of, relative_rms

from kleash.divergences import DIVERGENCES
from kleash.errors import CannotRunError
from kleash.linear import Head, LinearOptions, TokenStatistics, linear_kl_loss
from kleash.linear.checks import checked_pair
from kleash.linear.impl import choice
from kleash.linear.impl.base import KL, Request
from kleash.linear.impl.triton import backend

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
TRITON = LinearOptions(impl="triton")
HERE = Path(__file__).parent


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kleash.linear.impl.triton import fused, kernels

FLAGS = {"q_is_delta": False, "height": 1, "width": 2048, "depth": 64, "widen": False}
TYPES = {"tokens": "*i64", "integers": "*i32", "in_p": "*bf16", "in_q": "*bf16", "inner_p": "fp32", "inner_q": "fp32"}
SIZES = ("rows", "vocab_size", "share", "shares", "dim_p", "dim_q")
COUNTS = (*SIZES, "row_stride", "fields_stride", "stride_p", "stride_q")

def of(name, kernel, absent):
    if name in FLAGS or name in absent:
        return "constexpr"
    if name in COUNTS or "_stride_" in name:
        return "i32"
    return TYPES.get(name, "*bf16" if name[:6] in ("hidden", "weight") or name.startswith("bias") else "*fp32")

def build(kernel, absent=(), **flags):
    signature = {name: of(name, kernel, absent) for name in kernel.arg_names}
    chosen = FLAGS | flags | dict.fromkeys(absent)
    constants = {(kernel.arg_names.index(n),): chosen[n] for n, t in signature.items() if t == "constexpr"}
    made = compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "enable_fp_fusion": False},
    )
    print(kernel.__name__, len(made.asm["cubin"]))

build(kernels.summary_kernel, ("tokens", "inner_p", "inner_q", "bias_p", "bias_q"), q_is_delta=True)
build(kernels.statistics_kernel)
build(kernels.gradient_kernel)
build(kernels.gradient_kernel, ("tokens", "c_logp", "c_logq", "c_entropy", "in_q", "inner_p", "inner_q", "bias_p"))
build(fused.share_kernel, height=128, width=64)
build(fused.combine_kernel, height=128)
"""


@needs_triton
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """The compiler rejects some code that the interpreter accepts; compiling needs no GPU."""
    settings = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    sizes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(sizes) == 6 and min(sizes) > 1000


@needs_triton
def test_the_kernels_in_the_interpreter():
    """Run interpreted_linear_triton.py in a process with the interpreter enabled.

    Never with checked shapes: what checks them would stand between triton and the text of a kernel.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(HERE.parent.parent),
    ]
    done = subprocess.run(
        [*command, str(HERE / "interpreted_linear_triton.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


class OnAGpu:
    """The attributes of a pair on a GPU that decide the backend."""

    def __init__(self, case: Case):
        pair = checked_pair(case.models[:2], case.models[2:], 1.0)
        self.dtype, self.head = pair.p.dtype, pair.p.head
        self.is_sharded, self.storage = pair.is_sharded, pair.storage
        self.hidden, self.device, self.type = self, self, "cuda"
        self.p = self.q = self


def backend_name(options, pair, divergence=KL):
    """The name of the backend that is selected."""
    selected = choice.select_backend(Request(pair=pair, options=options, divergence=divergence))
    (name,) = (name for name, each in choice.BACKENDS.items() if each is selected)
    return name


@needs_triton
@pytest.mark.usefixtures("unhooked")
def test_auto_selects_triton_for_supported_calls_on_a_gpu():
    auto, kl, js = LinearOptions(), DIVERGENCES["kl"], DIVERGENCES["jensen_shannon"]
    half, wide = OnAGpu(head_case(torch.bfloat16)), OnAGpu(head_case(torch.float64))
    assert backend_name(auto, half) == "triton"
    assert backend_name(auto, half, DIVERGENCES["reverse_kl"]) == "triton"
    assert backend_name(auto, half, js) == backend_name(auto, wide, kl) == "chunked"
    assert backend_name(LinearOptions(impl="chunked"), half, kl) == "chunked"
    for pair, divergence, says in (
        (half, js, "no other divergence; ask for"),
        (wide, kl, "a tensor is torch.float64; ask for"),
    ):
        with pytest.raises(CannotRunError, match=says):
            backend_name(TRITON, pair, divergence)


@pytest.mark.usefixtures("unhooked")
def test_without_triton_auto_selects_chunked_and_triton_raises(monkeypatch):
    pair = OnAGpu(head_case(torch.bfloat16))
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert backend_name(LinearOptions(), pair) == "chunked"
    with pytest.raises(
        CannotRunError, match="impl='triton' needs triton, which is not installed; ask for 'chunked'"
    ):
        backend_name(TRITON, pair)


def test_on_a_cpu_auto_selects_chunked_and_triton_raises(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = head_case(torch.float32, tokens=(2,))
    assert torch.equal(case.kl(), case.kl(LinearOptions(impl="chunked")))
    says = "needs triton" if find_spec("triton") is None else "runs on CUDA tensors and these are on cpu"
    for call in (
        case.kl,
        case.statistics,
        lambda o: linear_kl_loss(*case.models, weights=torch.ones(2), options=o),
    ):
        with pytest.raises(CannotRunError, match=f"{says}.*; ask for 'chunked'"):
            call(TRITON)


def on_gpu(case: Case) -> Case:
    """The same on a GPU; skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    def head(h):
        return Head(
            h.weight.cuda(), None if h.bias is None else h.bias.cuda(), scale=h.scale, softcap=h.softcap
        )

    p, head_p, q, head_q = case.models
    return Case(p.cuda(), head(head_p), q.cuda(), head(head_q), case.tokens.cuda(), case.temperature)


@pytest.mark.gpu
@pytest.mark.parametrize("distance", [2.0, 0.01], ids=["far", "near"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_results_equal_the_reference(dtype, distance):
    case = head_case(
        dtype, distance, tokens=(700,), vocab_size=5003, bias=True, softcap=20.0, temperature=0.9
    )
    there, weights = on_gpu(case), torch.linspace(-1, 2, 700)
    exact, plain = in_float64(case).statistics(REFERENCE), case.statistics(REFERENCE)
    for options in (TRITON, LinearOptions(impl="triton", buffer_bytes=2**22)):
        for name, right, cheap, ours in zip(
            TokenStatistics._fields, exact, plain, there.statistics(options), strict=True
        ):
            if right.is_floating_point():
                assert relative_rms(ours.cpu(), right) <= 1.5 * relative_rms(cheap, right) + 1e-6, name
        budget = 1.5 * relative_rms(plain.kl_pq, exact.kl_pq) + 1e-6
        assert relative_rms(there.kl(options).cpu(), exact.kl_pq) <= budget
        results = []
        for each, token_weights, how in (
            (in_float64(case), weights.double(), REFERENCE),
            (there, weights.cuda(), options),
        ):
            tensors, of = leaves_of(each, weights=token_weights)
            results.append([x.cpu().double() for x in torch.autograd.grad(of(how)(*tensors).loss, tensors)])
        for right, ours in zip(*results, strict=True):
            assert relative_rms(ours, right) < (3e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [4096, 5003], ids=["aligned", "odd"])
def test_on_a_gpu_a_bfloat16_gradient_overwrites_only_what_was_read(vocab_size):
    """Many rows at once, each written over its logits while others are read."""
    case = on_gpu(head_case(torch.bfloat16, 0.5, tokens=(2000,), vocab_size=vocab_size, bias=True))
    weights = torch.ones(2000, device="cuda")
    actual = []
    for options in (TRITON, TRITON, LinearOptions(impl="chunked", compile="never")):
        tensors, of = leaves_of(case, weights=weights)
        actual.append(torch.autograd.grad(of(options)(*tensors).loss, tensors))
    for first, again, right in zip(*actual, strict=True):
        assert torch.equal(first, again)
        assert relative_rms(first, right.double()) < 8e-3


@pytest.mark.gpu
def test_on_a_gpu_a_model_against_itself_is_exactly_zero():
    case = on_gpu(head_case(torch.bfloat16, bias=True, softcap=3.0, scale=1.3, temperature=0.7))
    p, head, _, _ = case.models
    other = Case(
        p, head, p.clone(), Head(head.weight.clone(), head.bias, scale=1.3, softcap=3.0), case.tokens, 0.7
    )
    for options in (TRITON, LinearOptions(impl="triton", buffer_bytes=2**12)):
        assert (other.kl(options) == 0).all() and (other.statistics(options).total_variation == 0).all()
