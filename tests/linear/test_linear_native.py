"""The library in C: when it is built, when it is used, and its accuracy."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from linear_cases import (
    CHUNKED,
    NATIVE,
    REFERENCE,
    head_case,
    in_float64,
    relative_rms,
    statistics_by_numpy,
)

from kleash.errors import CannotRunError
from kleash.linear import (
    Head,
    LinearOptions,
    TokenStatistics,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    token_statistics,
)
from kleash.linear.checks import checked_pair
from kleash.linear.impl import compiling
from kleash.linear.impl.chunk_loop import plan_chunks
from kleash.linear.impl.native import building, row_functions
from kleash.user_cache import is_private_file

pytestmark = pytest.mark.usefixtures("compiler")


def unoptimised(flags):
    """Flags with which the library is built in a fraction of the time."""
    return tuple("-O0" if flag == "-O3" else flag for flag in flags)


@pytest.fixture
def anew(monkeypatch):
    """Clear the caches about compilers, before and after the test; in it, build without optimisation."""
    monkeypatch.setattr(building, "FLAGS", unoptimised(building.FLAGS))
    known = building.library, compiling.missing_for_native, compiling.missing_for
    for process in known:
        process.cache_clear()
    yield
    for process in known:
        process.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """The functions of the library that were called."""
    seen, call = [], row_functions.call

    def noted(name, *arguments):
        seen.append(name)
        call(name, *arguments)

    monkeypatch.setattr(row_functions, "call", noted)
    return seen


def row_pair(kind, rows=6, vocab_size=2500):
    """Logits of p, and the difference of q's logits: float64 numbers that float32 represents exactly."""
    torch.manual_seed(3)
    zp = 3 * torch.randn(rows, vocab_size)
    more = {"near": 1e-4, "faint": 1e-8, "usual": 0.5, "far": 6.0}[kind] * torch.randn(rows, vocab_size)
    if kind != "faint":
        more = (zp + more) - zp
    return zp.double(), more.double()


def scratch_for(vocab_size):
    return row_functions.new_scratch(vocab_size, torch.get_num_threads())


def row_logits(rows=6):
    zp, more = row_pair("usual", rows)
    return zp.float(), (zp + more).float()


@pytest.mark.parametrize(
    ("kind", "distance"),
    [("near", False), ("usual", False), ("far", False), ("near", True), ("faint", True), ("far", True)],
)
def test_the_summary_of_rows(kind, distance):
    zp, more = row_pair(kind)
    zq = zp + more
    # Differences of log-probabilities whose digits are not those of the logits' sum: the KL of "faint" is 5e-17.
    shift = torch.log1p((zp.softmax(-1) * torch.expm1(more)).sum(-1, keepdim=True))
    u = shift - more
    right = (
        (zp.softmax(-1) * (torch.expm1(-u) + u)).sum(-1),
        zp.logsumexp(-1),
        shift[:, 0],
        -(zp.softmax(-1) * zp.log_softmax(-1)).sum(-1),
    )
    second = more if distance else zq
    actual = row_functions.row_summary(
        zp.float(), second.float(), scratch_for(zp.shape[1]), q_is_delta=distance
    )
    assert (right[0] > 0).all() and ((right[0] < 1e-15).all() == (kind == "faint"))
    for number, (exact, ours) in enumerate(zip(right, actual.unbind(1), strict=True)):
        # KL is of second order in what rounding leaves of phi near 0.
        torch.testing.assert_close(ours, exact, rtol=2e-6, atol=1e-7 if number == 2 else 0.0)


@pytest.mark.parametrize("by", [0.1, -7.3, 1e-4, 33.3])
def test_logits_that_differ_by_a_constant_have_a_kl_of_0(by):
    """The computed mean of a constant is off by a rounding, and KL is of second order in it."""
    zp, _ = row_logits(rows=40)
    actual = row_functions.row_summary(zp, torch.full_like(zp, by), scratch_for(2500), q_is_delta=True)
    assert (actual[:, 0] >= 0).all() and (actual[:, 0] < 1e-20).all()
    torch.testing.assert_close(actual[:, 2], torch.full((40,), by, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "elsewhere"])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)], ids=["both", "p", "q"])
@pytest.mark.parametrize("kind", ["near", "usual", "far"])
def test_gradients_of_rows(kind, needed, in_place):
    zp, more = row_pair(kind)
    zq = zp + more
    weight = torch.linspace(-1, 2, 6, dtype=torch.float64)
    leaves = zp.clone().requires_grad_(), zq.clone().requires_grad_()
    logp, logq = (z.log_softmax(-1) for z in leaves)
    value = (logp.exp() * (logp - logq)).sum(-1)
    right = torch.autograd.grad((weight * value).sum(), leaves)
    z = zp.float(), zq.float()
    outs = tuple(
        (x if in_place else torch.full_like(x, 7.0)) if w else None for x, w in zip(z, needed, strict=True)
    )
    kl = row_functions.kl_gradient_(*z, weight.float(), outs, scratch_for(2500), q_is_delta=False)
    torch.testing.assert_close(kl.double(), value.detach(), rtol=1e-6, atol=0)
    for ours, exact in zip(outs, right, strict=True):
        if ours is not None:
            assert relative_rms(ours, exact) < 3e-7


def test_tokens_of_negligible_probability_get_a_gradient_of_exactly_0():
    """Not a denormal number, which would be slow to multiply."""
    zp, zq = row_logits()
    zp[:, 7] = zp.amax(-1) - 120
    zq[:, 7] = zq.amax(-1) - 110
    row_functions.kl_gradient_(zp, zq, torch.ones(6), (zp, zq), scratch_for(2500), q_is_delta=False)
    assert (zp[:, 7] == 0).all() and (zq[:, 7] == 0).all() and (zp[:, 8] != 0).all()


def test_rows_that_cannot_be_computed_are_unchanged():
    zp, zq = row_logits(rows=7)
    zp[0, 3], zq[1, 4] = torch.nan, torch.nan
    zp[2, 5], zq[3, 6] = torch.inf, -torch.inf
    zp[4, 7] = zq[4, 7] = -torch.inf
    zq[5, 8] = zp[5].max() + 300  # q is all there, where p has next to nothing
    before = zp.clone(), zq.clone()
    kl = row_functions.kl_gradient_(zp, zq, torch.ones(7), (zp, zq), scratch_for(2500), q_is_delta=False)
    assert kl[:6].isnan().all() and kl[6].isfinite()
    for old, new in zip(before, (zp, zq), strict=True):
        torch.testing.assert_close(new[:6], old[:6], rtol=0, atol=0, equal_nan=True)
        assert not torch.equal(new[6], old[6])


@pytest.mark.parametrize(
    "traits", [{}, {"bias": True, "scale": 0.4}, {"softcap": 3.0, "temperature": 1.3}], ids=str
)
@pytest.mark.parametrize("distance", [1.0, 1e-3, 60.0])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_and_its_gradients(calls, dtype, distance, traits, reverse):
    case = head_case(dtype, distance, tokens=(67,), vocab_size=701, **traits)
    weights = torch.linspace(-0.5, 2.0, 67)
    weights[5] = 0.0
    actual = []
    for each, options in ((in_float64(case), REFERENCE), (case, CHUNKED), (case, NATIVE)):
        each = each.swapped() if reverse else each
        leaves = [each.hidden_p.requires_grad_(), each.hidden_q.requires_grad_()]
        loss, values = linear_kl_loss(
            *each.models,
            weights=weights.double() if each.hidden_p.dtype == torch.float64 else weights,
            temperature=each.temperature,
            options=options,
        )
        actual.append([values.detach(), *torch.autograd.grad(loss, leaves)])
    assert "kleash_kl_gradient" in calls
    for exact, plain, ours in zip(*actual, strict=True):
        error = relative_rms(ours, exact)
        assert error <= 1.5 * relative_rms(plain, exact) + 1e-6 and error < 1e-2


@pytest.mark.parametrize("both", [False, True], ids=["frozen reference", "both trained"])
@pytest.mark.parametrize("one_head", [False, True], ids=["two heads", "one head"])
@pytest.mark.parametrize("distance", [1.0, 1e-3])
def test_an_objective_and_its_gradients(calls, distance, one_head, both):
    torch.manual_seed(0)
    case = head_case(torch.float32, distance, tokens=(67,), vocab_size=701, bias=True)
    if one_head:
        case.hidden_q, case.head_q = case.hidden_p + distance * torch.randn(67, 13), case.head_p
    weights = torch.linspace(-1, 2.2, 67, dtype=torch.float64)
    weights[7] = 0.0

    def objective(terms, at):
        by = weights[at].to(terms.kl.dtype)
        return by * (terms.kl - 0.7 * terms.token_logp - 0.3 * terms.entropy + 0.2 * terms.token_logq)

    actual = []
    for each, options in ((in_float64(case), REFERENCE), (case, CHUNKED), (case, NATIVE)):
        leaves = [each.hidden_p.requires_grad_(), *([each.hidden_q.requires_grad_()] if both else [])]
        loss, terms = linear_objective(
            *each.models[:2], each.tokens, *each.models[2:], objective, options=options
        )
        actual.append([x.detach() for x in terms] + list(torch.autograd.grad(loss, leaves)))
    assert {"kleash_summary", "kleash_objective_gradient"} <= set(calls)
    for exact, plain, ours in zip(*actual, strict=True):
        error = relative_rms(ours, exact)
        assert error <= 1.5 * relative_rms(plain, exact) + 1e-6 and error < 1e-3


@pytest.mark.parametrize(
    "traits", [{}, {"bias": True, "scale": 0.4}, {"softcap": 30.0, "temperature": 1.3}], ids=str
)
@pytest.mark.parametrize("distance", [5.0, 0.5, 1e-3])
def test_the_statistics_of_tokens(calls, distance, traits):
    case = head_case(torch.float32, distance, tokens=(67,), vocab_size=2701, **traits)
    case.hidden_p[3] = case.hidden_p[4]
    case.tokens[5] = case.statistics(REFERENCE).top1_q[5]
    exact, plain, ours = (
        statistics_by_numpy(in_float64(case)),
        case.statistics(CHUNKED),
        case.statistics(NATIVE),
    )
    assert set(calls) == {"kleash_statistics"} and ours.rank_q[5] == 0
    for name, right, eager, actual in zip(TokenStatistics._fields, exact, plain, ours, strict=True):
        assert actual.dtype == eager.dtype
        if actual.is_floating_point():
            error = relative_rms(actual, right)
            assert error <= 1.5 * relative_rms(eager, right) + 1e-6 and error < 1e-2, name
        else:
            assert torch.equal(actual, right), name


def test_statistics_of_near_models_use_the_shift_in_two_floats(unhooked):
    """q's logits are larger by 3, one in eight by 2^-20 more: a rounded shift would change KL by a seventh."""
    torch.manual_seed(5)
    zp = torch.randint(-1024, 1024, (6, 4000)).double() / 256
    more = 2.0**-20 * (torch.rand(6, 4000) < 1 / 8).double()
    zq = zp + 3 + more
    assert torch.equal(zq, zq.float().double())
    p, shift = zp.softmax(-1), torch.log1p((zp.softmax(-1) * torch.expm1(more)).sum(-1, keepdim=True))
    u = shift - more
    right = (p * (torch.expm1(-u) + u)).sum(-1)
    assert (right < 1e-13).all()
    tokens = torch.zeros(6, dtype=torch.int64)
    actual = row_functions.statistics_rows(zp.float(), zq.float(), tokens, scratch=scratch_for(4000))
    for divergence, number in zip(actual[2:5], (right, right, right / 4), strict=True):
        torch.testing.assert_close(divergence.double(), number, rtol=5e-2, atol=0)


def test_the_first_of_equally_likely_tokens_and_the_fallback_for_infinite_logits(calls):
    zp, zq = row_logits()
    zp[0, [9, 40, 2400]] = zp[0].max() + 1
    zq[1, [2499, 1025]] = zq[1].max() + 1
    zq[2, 7], zp[3, 8], zp[4, 9] = -torch.inf, -torch.inf, torch.nan
    tokens = torch.tensor([40, 1025, 0, 1, 2, 3])
    actual = token_statistics(zp, Head(None), zq, Head(None), tokens, options=NATIVE)
    assert actual.top1_p[0] == 9 and actual.top1_q[1] == 1025 and actual.rank_q[1] == 0
    assert actual.kl_pq[2] == torch.inf and actual.kl_qp[2].isfinite()
    assert actual.kl_qp[3] == torch.inf and actual.kl_pq[3].isfinite()
    assert actual.kl_pq[4].isnan() and actual.kl_pq[5].isfinite()
    assert calls == ["kleash_statistics"] * len(calls) and calls


def test_numbers_do_not_depend_on_threads_or_chunks():
    case = head_case(torch.float32, tokens=(67,), vocab_size=3001)
    threads, actual = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            logits = case.hidden_p @ case.head_p.weight.T, case.hidden_q @ case.head_q.weight.T
            for options in (NATIVE, LinearOptions()):
                actual += [linear_kl(logits[0], Head(None), logits[1], Head(None), options=options)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(actual[0], other) for other in actual[1:])


def test_scratch_memory_of_the_threads_is_part_of_the_buffer(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    case = head_case(torch.float32, tokens=(3000,), vocab_size=5000)
    both = checked_pair(case.models[:2], case.models[2:], 1.0)
    for nbytes in (2**20, 2**24, 2**27):
        plan = plan_chunks(both, LinearOptions(buffer_bytes=nbytes), 0, native=True)
        assert plan.threads == max(1, min(64, nbytes // 8 // (2 * 5000 * 4)))
        taken = 4 * 5000 * (2 * plan.chunk_tokens + 2 * plan.threads)
        assert taken <= nbytes and plan.block_rows >= min(plan.threads, plan.chunk_tokens)


def test_the_library_is_used_for_large_calls_in_float32_unless_compile_is_never(calls, monkeypatch):
    case = head_case(torch.float32, tokens=(37,), vocab_size=101)
    for size, options, taken in (
        (37 * 101, LinearOptions(), True),
        (37 * 101 + 1, LinearOptions(), False),
        (37 * 101 + 1, LinearOptions(compile="always"), True),
        (37 * 101, LinearOptions(compile="never"), False),
    ):
        monkeypatch.setattr(compiling, "NATIVE_PAYS_FROM", size)
        calls.clear()
        case.kl(options)
        assert bool(calls) == taken, (size, options.compile)
    head_case(torch.float64, tokens=(37,), vocab_size=101).kl()
    assert not calls


def test_without_a_compiler_auto_uses_torch_and_always_raises(anew, calls, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -v")
    monkeypatch.setenv("CXX", "no-such-compiler")
    case = head_case(torch.float32)
    assert torch.equal(case.kl(), case.kl(CHUNKED)) and not calls
    assert compiling.missing_for_native() == "a C compiler, and no-such-compiler is not there"
    with pytest.raises(CannotRunError, match="and no-such-compiler is not there"):
        case.kl(LinearOptions(compile="always"))


def test_the_message_of_a_failing_compiler_is_quoted(anew, tmp_path, monkeypatch):
    refuses = tmp_path / "cc"
    refuses.write_text("#!/bin/sh\necho 'no OpenMP here' >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("CC", str(refuses))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert (
        compiling.missing_for_native() == f"a C compiler with OpenMP, and {refuses} refused: no OpenMP here"
    )
    assert list((tmp_path / "cache" / "kleash").iterdir()) == []


def test_a_compiler_that_cannot_be_run_is_named(anew, tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_bytes(b"\x00 no program")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert compiling.missing_for_native().startswith(f"a C compiler, and {broken} cannot be run: ")


def test_without_a_home_folder_the_library_is_built_for_the_process(anew, calls, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(building.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert building.cache_folder() is None
    head_case(torch.float32).kl(NATIVE)
    assert calls


def test_the_library_is_built_once_in_a_private_folder(anew, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    building.library()
    (library,) = (tmp_path / "kleash").iterdir()
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    written = library.stat().st_mtime_ns
    building.library.cache_clear()
    monkeypatch.setattr(building, "build", lambda *_: pytest.fail("built again"))
    building.library()
    assert library.stat().st_mtime_ns == written


def test_the_fingerprint_depends_on_compiler_and_processor(monkeypatch):
    command = building.compiler()
    fingerprint = building.fingerprint(command)
    assert building.fingerprint((*command, "-g")) != fingerprint
    monkeypatch.setattr(building, "processor", lambda: b"another")
    assert building.fingerprint(command) != fingerprint


@pytest.mark.parametrize("spoilt", ["half written", "no folder"])
def test_an_unusable_cache_is_ignored(anew, calls, tmp_path, monkeypatch, spoilt):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if spoilt == "half written":
        building.library()
        (library,) = (tmp_path / "kleash").iterdir()
        whole = library.read_bytes()
        library.unlink()  # written over, it would change under whoever has it loaded
        library.write_bytes(whole[:100])
        building.library.cache_clear()
    else:
        (tmp_path / "kleash").write_text("a file where the folder should be")
    case = head_case(torch.float32)
    actual = case.kl(NATIVE)
    assert calls and relative_rms(actual, in_float64(case).kl(REFERENCE)) < 1e-6


def test_two_processes_build_at_once(tmp_path):
    program = (
        "from kleash.linear.impl.native import building\n"
        f"building.FLAGS = {unoptimised(building.FLAGS)}\n"
        "building.library(); print('built')"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == ["built", "built"]
    assert len(list((tmp_path / "kleash").iterdir())) == 1


@pytest.mark.parametrize("spoilt", ["folder", "file", "link"])
def test_a_library_that_another_user_could_have_written_is_not_loaded(anew, tmp_path, monkeypatch, spoilt):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    building.library()
    (library,) = (tmp_path / "kleash").iterdir()
    loaded = []
    genuine = building.ctypes.CDLL
    monkeypatch.setattr(building.ctypes, "CDLL", lambda path: loaded.append(Path(path)) or genuine(path))
    if spoilt == "folder":
        library.parent.chmod(0o777)
    elif spoilt == "file":
        library.chmod(0o777)
    else:
        library.rename(tmp_path / "planted.so")
        library.symlink_to(tmp_path / "planted.so")
    built = []
    genuine_build = building.build
    monkeypatch.setattr(
        building, "build", lambda *arguments: built.append(arguments) or genuine_build(*arguments)
    )
    building.library.cache_clear()
    building.library()
    assert len(built) == 1, "it is built anew"
    assert (library in loaded) == (spoilt != "folder"), "and apart where the folder is not the user's alone"
    assert spoilt == "folder" or is_private_file(library)
