"""Every candidate of the benchmarks computes the right gradient; the benchmarks run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compiling import OF_TORCH_ITSELF
from scipy.special import log_softmax, rel_entr

NAMES = ["kleash", "kleash compiled", "trl", "liger", "torchtune", "checkpointing", "naive exact", "naive k3"]
NAMES += ["cross entropy"]
MODULES = ["methods", "training", "peers", "accuracy", "peaks", "step", "memory", "speed", "all"]
pytestmark = [
    pytest.mark.filterwarnings(*OF_TORCH_ITSELF),
    pytest.mark.skipif(
        not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="this torch lacks what is compared with"
    ),
]
on_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux' /proc"
)


@pytest.fixture(scope="module")
def benchmarks(root: Path) -> Iterator[SimpleNamespace]:
    """The modules of the benchmarks by the last word of their name; nothing is compiled, and one thread is enough."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.syspath_prepend(root / "benchmarks")
        actual = {name: import_module(f"linear_{name}") for name in MODULES}
        yield SimpleNamespace(harness=import_module("harness"), **actual)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def inputs(benchmarks: SimpleNamespace):
    return benchmarks.methods.make_inputs(37, 24, 301)


@pytest.fixture(scope="module")
def right(inputs) -> dict[str, tuple[float, np.ndarray, np.ndarray]]:
    """Value and gradients of each loss in float64, by their formulas."""
    p, wp, q, wq = (
        x.detach().double().numpy()
        for x in (inputs.hidden_p, inputs.weight_p, inputs.hidden_q, inputs.weight_q)
    )
    logp, logq = log_softmax(p @ wp.T, -1), log_softmax(q @ wq.T, -1)
    rows, ids = np.arange(len(p)), inputs.ids.numpy()
    mass, chosen = np.exp(logp), np.eye(len(wp))[ids]
    kl = rel_entr(mass, np.exp(logq)).sum(-1)
    ratio = (logp - logq)[rows, ids]
    actual = {
        "kl": (kl, mass * (logp - logq - kl[:, None])),
        "k3": (np.expm1(-ratio) + ratio, -np.expm1(-ratio)[:, None] * (chosen - mass)),
        "cross_entropy": (-logp[rows, ids], mass - chosen),
    }
    return {
        what: (value.mean(), in_logits @ wp / len(p), in_logits.T @ p / len(p))
        for what, (value, in_logits) in actual.items()
    }


def assert_right(actual, expected: tuple[float, np.ndarray, np.ndarray], value: float | None = None) -> None:
    for ours, other in zip(actual, expected[1:], strict=True):
        np.testing.assert_allclose(ours.numpy(), other, atol=1e-4 * np.abs(other).max())
    if value is not None:
        np.testing.assert_allclose(value, expected[0], rtol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.compiler if n == "kleash compiled" else ()) for n in NAMES]
)
def test_every_candidate_computes_the_right_gradient(benchmarks, inputs, right, name):
    method = benchmarks.methods.METHODS[name]
    if method.package:
        pytest.importorskip(method.package.replace("-", "_"))
    loss = method.compute_loss(inputs)
    value = loss.item()
    assert_right(benchmarks.methods.gradients(inputs, loss), right[method.what], value)


def test_every_candidate_is_tested(benchmarks):
    assert list(benchmarks.methods.METHODS) == NAMES


@pytest.mark.parametrize("name", ["bare", "bare_by_onednn"])
def test_the_bare_matmuls_are_the_four_of_the_gradient(benchmarks, inputs, name):
    p, w = (x.detach().double() for x in (inputs.hidden_p, inputs.weight_p))
    in_hidden, in_weight = getattr(benchmarks.methods, name)(inputs, size=16)()
    torch.testing.assert_close(in_hidden.double(), (p @ w.T) @ w, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(in_weight.double(), (p @ w.T).T @ p, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("compiler")
def test_the_processors_peak_is_of_as_many_multiplications_as_the_four_matmuls(benchmarks):
    x, chains = benchmarks.methods.make_inputs(96, 64, 500), 12
    total = benchmarks.methods.at_peak(x)()
    # Each of the chains begins at a lane's addend and goes on as s * factor + addend: a geometric series.
    factor, addends = float(np.float32(0.9999999)), 1e-7 * np.arange(16)
    in_a_thread = 4 * 96 * 64 * 500 / torch.get_num_threads()
    terms = in_a_thread / (chains * len(addends)) + 1
    right = torch.get_num_threads() * chains * addends.sum() * (1 - factor**terms) / (1 - factor)
    assert total == pytest.approx(right, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "what"),
    [("exact eager", "kl"), ("exact recomputed", "kl"), ("k3 eager", "k3"), ("k3 recomputed", "k3")],
)
def test_the_candidates_of_kleash_compute_the_right_gradient(
    benchmarks, inputs, right, name, what, monkeypatch
):
    monkeypatch.setattr(benchmarks.training, "make_inputs", lambda *_: inputs)
    args = SimpleNamespace(hidden=24, vocabulary=301, compile=False)
    benchmarks.training.candidates(args, 37)[name]()
    actual = inputs.hidden_p.grad, inputs.weight_p.grad
    inputs.forget()
    assert_right(actual, right[what])


@pytest.mark.usefixtures("compiler")
def test_k3_in_c_computes_the_right_gradient(benchmarks, inputs, right):
    values = benchmarks.training.k3_compiled(inputs, benchmarks.methods.build_library("k3_rows.c"))
    actual = inputs.hidden_p.grad, inputs.weight_p.grad
    inputs.forget()
    assert_right(actual, right["k3"], values.mean().item())


def test_a_candidate_with_wrong_results_is_not_timed(benchmarks, inputs, monkeypatch):
    methods = dict(benchmarks.methods.METHODS)
    wrong = benchmarks.methods.Method(
        compute_loss=lambda x: 1.01 * benchmarks.methods.naive_exact(x), words="wrong"
    )
    backwards = benchmarks.methods.Method(
        compute_loss=lambda x: (
            2 * benchmarks.methods.naive_exact(x).detach() - benchmarks.methods.naive_exact(x)
        ),
        words="",
    )
    monkeypatch.setattr(benchmarks.peers, "METHODS", {**methods, "wrong": wrong, "backwards": backwards})
    benchmarks.peers.check_methods(["kleash", "naive exact"], inputs)
    for name in ("wrong", "backwards"):
        with pytest.raises(AssertionError, match=name):
            benchmarks.peers.check_methods(["kleash", name], inputs)
        inputs.forget()


def test_inputs_have_the_requested_distance(benchmarks):
    x = benchmarks.accuracy.at_distance(2.6e-4, (16, 64, 512))
    p, q = (
        log_softmax(h.detach().double().numpy() @ w.detach().double().numpy().T, -1)
        for h, w in ((x.hidden_p, x.weight_p), (x.hidden_q, x.weight_q))
    )
    assert x.hidden_p.dtype == x.weight_q.dtype == torch.bfloat16
    assert 0.9 < rel_entr(np.exp(p), np.exp(q)).sum(-1).mean() / 2.6e-4 < 1.1


def test_rounds_are_interleaved_and_end_in_time(benchmarks):
    calls: list[str] = []
    seconds = iter(range(100))
    jobs = {name: lambda n=name: calls.append(n) for name in "ab"}
    times, loads = benchmarks.harness.interleaved(jobs, 3, clock=lambda: next(seconds) ** 2)
    assert calls == list("ababab") and len(loads) == 3
    assert times == {"a": [1, 9, 17], "b": [5, 13, 21]}
    assert len(benchmarks.harness.interleaved(jobs, 3, minutes=0.0)[1]) == 1
    assert benchmarks.harness.ratio([2.0, 3.0, 40.0], [1.0, 1.0, 10.0]) == 3.0


def run_peers(benchmarks, monkeypatch, folder, *more):
    """The figures after a run of two candidates at the smallest shape."""
    arguments = ["--shape", "tiny", "--only", "matmuls", "kleash", "--threads", "1", "--out", str(folder)]
    monkeypatch.setattr("sys.argv", ["linear_peers.py", *arguments, *more])
    benchmarks.peers.main()
    return json.loads((folder / "linear_peers_tiny.json").read_text())["figures"]


def test_rounds_are_added_to_those_of_an_earlier_run(benchmarks, tmp_path, monkeypatch):
    first = run_peers(benchmarks, monkeypatch, tmp_path, "--rounds", "1")
    both = run_peers(benchmarks, monkeypatch, tmp_path, "--rounds", "4", "--resume")
    assert first["rounds"] == 1 and both["rounds"] == len(both["load"]) == 4
    assert both["checks"] == first["checks"]
    for name, seconds in both["all_seconds"].items():
        assert len(seconds) == 4 and seconds[:1] == first["all_seconds"][name]
        assert both["results"][name]["seconds"] == pytest.approx(np.median(seconds), abs=1e-6)
    again = run_peers(benchmarks, monkeypatch, tmp_path, "--rounds", "4", "--resume")
    assert again["all_seconds"] == both["all_seconds"], "there are enough of them"


@pytest.mark.parametrize("key", ["commit", "versions"])
def test_rounds_of_another_commit_or_package_are_not_added_to(benchmarks, tmp_path, monkeypatch, key):
    run_peers(benchmarks, monkeypatch, tmp_path, "--rounds", "1")
    path = tmp_path / "linear_peers_tiny.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, key: "another"}))
    with pytest.raises(ValueError, match=key):
        run_peers(benchmarks, monkeypatch, tmp_path, "--rounds", "2", "--resume")


PEAK = """
import ctypes, mmap, sys
from pathlib import Path
from harness import files_stay_resident, peak_of

def touched(megabytes):
    memory = mmap.mmap(-1, megabytes * 1_000_000)
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1
    return memory

def page_out():
    for line in Path("/proc/self/maps").read_text().splitlines():
        (begin, end), inode = (int(x, 16) for x in line.split()[0].split("-")), line.split()[4]
        if inode != "0":
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 21)

kept = []
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
    sum(mapped[page] for page in range(0, len(mapped), mmap.PAGESIZE))

def job(pressure):
    if pressure:
        page_out()
    touched(60).close()
    kept.append(touched(20))
    if pressure:
        page_out()

job(False)
with files_stay_resident() as stay:
    print(int(stay))
print(peak_of(lambda: job(False)))
print(peak_of(lambda: job(True)))
"""
"""A process's own peaks of anonymous memory, which cannot be reclaimed where there is no swap; the second time its
files are dropped from memory meanwhile (MADV_PAGEOUT), as under pressure."""


@on_linux
def test_the_peak_is_the_most_memory_in_use(root, tmp_path):
    paths = os.pathsep.join([str(root / "benchmarks"), str(root / "src")])
    file = tmp_path / "mapped"
    file.write_bytes(bytes(30_000_000))
    os.sync()  # a page that is still to be written is not dropped
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(file)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stay, undisturbed, under_pressure = map(float, done.stdout.split())
    assert 59 < undisturbed < 65  # the kernel counts pages to within some tens
    assert not stay or 59 < under_pressure < 65


RUNS = {
    "peers": ["--shape", "tiny", "--only", "matmuls", *(name for name in NAMES if name != "kleash compiled")],
    "accuracy": ["--tokens", "8", "--hidden", "64", "--vocabulary", "512", "--single", "4", "--only", "kleash",
                 "naive exact", "naive upcast"],
    "step": ["--sequences", "2", "--length", "16", "--hidden", "64", "--layers", "1", "--vocabulary", "512",
             "--rounds", "1"],
    "peaks": ["--tiny", "--part", "main", "--only", "kleash"],
    "memory": ["--tokens", "64", "--hidden", "16", "--vocabulary", "512", "--what", "both", "--compile", "never"],
    "speed": ["--tokens", "16", "--hidden", "16", "--vocabulary", "512", "--rounds", "2", "--no-compile"],
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=on_linux if n in ("peaks", "memory") else ()) for n in RUNS]
)
def test_benchmarks_run_and_write(benchmarks, name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", [f"linear_{name}.py", "--threads", "1", "--out", str(tmp_path), *RUNS[name]]
    )
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    if name == "peers":
        pytest.importorskip("trl")
        pytest.importorskip("liger_kernel")
    getattr(benchmarks, name).main()
    (path,) = tmp_path.glob("*.json")
    written = json.loads(path.read_text())
    assert {"figures", "command", "date", "commit", "machine", "versions"} == set(written)
    assert str(path) in capsys.readouterr().out
    figures = written["figures"]
    if name == "peers":
        rows = figures["results"]
        assert set(rows) == {"matmuls", *NAMES} - {"kleash compiled"}
        ratios = np.divide(figures["all_seconds"]["kleash"], figures["all_seconds"]["matmuls"])
        assert len(ratios) == figures["rounds"] == 2
        expected = pytest.approx(np.median(ratios), abs=1e-3)
        assert rows["kleash"]["of_matmuls"] == expected and rows["matmuls"]["kleash of it"] == expected
        assert written["versions"].keys() >= {"trl", "liger-kernel"}
    elif name == "accuracy":
        ours, naive = (next(r for r in figures["rows"] if r["name"] == n) for n in ("kleash", "naive exact"))
        assert ours["nats"] == 1e-6 and ours["relative_error"] < 1e-3 < naive["relative_error"]
    elif name == "step":
        row = figures["results"]["exact"]
        assert row["loss_share"] == pytest.approx(row["loss"] / row["step"], rel=0.02)
    elif name == "memory":
        assert figures["kl"]["mean_kl_nats"] == pytest.approx(figures["statistics"]["mean_kl_nats"], rel=1e-4)
        assert figures["budget_megabytes"] == 128 * 2**20 / 1e6
    elif name == "speed":
        ratio = np.divide(figures["seconds"]["kl eager"], figures["seconds"]["matmuls"])
        assert figures["ratios"]["kl eager"]["of the matmuls"] == pytest.approx(np.median(ratio), abs=1e-3)
        assert set(figures["ratios"]) == {"k3 eager", "kl eager", "statistics eager"}
    else:
        assert figures["rows"][0]["gradient_megabytes"] == pytest.approx(8 * 4 * (64 + 512) / 1e6, abs=0.06)
