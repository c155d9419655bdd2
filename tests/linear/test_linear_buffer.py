"""The memory for the chunks of a call where ``buffer_bytes`` is None."""

import pytest
import torch
from linear_cases import head_case

from kleash.linear import Head, LinearOptions, linear_kl, linear_kl_loss
from kleash.linear.impl import choice
from kleash.linear.impl.base import HeadInputs, HeadPair
from kleash.linear.impl.chunk_loop import plan_chunks

pytestmark = pytest.mark.usefixtures("unhooked")  # a stand-in for a GPU is no tensor

GIB = 2**30


class Cuda:
    """A tensor whose device is a GPU."""

    def __init__(self, tensor):
        self.tensor, self.device, self.shape, self.dtype = (
            tensor,
            torch.device("cuda", 0),
            tensor.shape,
            tensor.dtype,
        )

    def __len__(self):
        return len(self.tensor)


def pair_of(vocab_size, dim=64, dtype=torch.bfloat16, tokens=8192):
    hidden = Cuda(torch.empty(tokens, dim, dtype=dtype, device="meta"))
    head = Head(torch.empty(vocab_size, dim, dtype=dtype, device="meta"))
    model = HeadInputs(hidden=hidden, head=head, temperature=1.0, dtype=torch.float32)
    return HeadPair(p=model, q=model)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with chosen free and allocatable memory, which counts the queries."""
    state = {"free": 60 * GIB, "there": 60 * GIB, "asked": 0}

    def free(device):
        state["asked"] += 1
        return state["free"]

    monkeypatch.setattr(choice, "free_bytes", free)
    monkeypatch.setattr(choice, "allocatable", lambda nbytes, device: nbytes <= state["there"])
    return state


@pytest.mark.parametrize("vocab_size", [32_768, 128_256, 151_936, 262_144])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("buffers", [1, 6, 20])
def test_a_gpu_gets_1024_tokens_a_chunk(gpu, vocab_size, dtype, buffers):
    """With 128 MiB, a chunk would have 110 tokens of 151 936 logits, and each chunk reads all weights."""
    pair = pair_of(vocab_size, 4096, dtype)
    options = choice.with_buffer(LinearOptions(), pair)
    assert plan_chunks(pair, options, buffers).chunk_tokens == 1024
    assert options.chunk_bytes <= 60 * GIB // 8 and gpu["asked"] == 1


def test_less_free_memory_halves_the_chunk_and_a_little_changes_nothing(gpu):
    pair, sizes = pair_of(151_936), []
    for free in (60 * GIB, 59 * GIB, 14 * GIB, 13 * GIB, 6 * GIB, 2 * GIB, GIB, 0):
        gpu["free"] = free
        options = choice.with_buffer(LinearOptions(), pair)
        sizes.append(plan_chunks(pair, options, 1).chunk_tokens)
        assert options.chunk_bytes <= max(free // 8, choice.bytes_for(1, pair))
    assert sizes[:4] == [1024, 1024, 1024, 512 if sizes[3] == 512 else 1024]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] >= 1


def test_memory_that_another_process_takes_meanwhile_is_not_allocated(gpu):
    gpu["there"] = GIB
    options = choice.with_buffer(LinearOptions(), pair_of(151_936))
    assert options.chunk_bytes <= GIB


def test_an_unknown_free_memory_gives_the_default_of_a_cpu(monkeypatch):
    def refuse(device):
        raise RuntimeError("no CUDA here")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    assert choice.free_bytes(torch.device("cuda", 0)) is None
    assert choice.with_buffer(LinearOptions(), pair_of(1000)).buffer_bytes == 128 * 2**20


def test_a_given_buffer_is_used_and_a_cpu_takes_128_mib(gpu):
    pair = pair_of(32_768)
    assert choice.with_buffer(LinearOptions(buffer_bytes=7), pair).buffer_bytes == 7
    case = head_case(tokens=(5,), vocab_size=11)
    model = HeadInputs(hidden=case.hidden_p, head=case.head_p, temperature=1.0, dtype=torch.float32)
    assert choice.with_buffer(LinearOptions(), HeadPair(p=model, q=model)).buffer_bytes == 128 * 2**20
    assert gpu["asked"] == 0


def test_a_call_and_its_backward_pass_choose_the_memory_once(monkeypatch):
    """The free memory may differ in the backward pass, which has to use the chunks of the forward pass."""
    calls = []
    monkeypatch.setattr(
        "kleash.linear.impl.choice.with_buffer",
        lambda options, pair: calls.append(1) or LinearOptions(buffer_bytes=3000),
    )
    case = head_case(tokens=(9,), vocab_size=11)
    case.head_p.weight.requires_grad_()
    linear_kl(*case.models).sum().backward()
    linear_kl_loss(*case.models, weights=torch.ones(9)).loss.backward()
    assert len(calls) == 2


def test_a_compiled_call_chooses_its_memory_when_it_runs(monkeypatch):
    case = head_case(tokens=(5,), vocab_size=11)
    eager = linear_kl(*case.models)
    seen = []
    monkeypatch.setattr(
        choice, "with_buffer", lambda options, pair: seen.append(options.buffer_bytes) or options
    )
    compiled = torch.compile(lambda h: linear_kl(h, *case.models[1:]), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(case.hidden_p), eager)
    assert seen == [None]
