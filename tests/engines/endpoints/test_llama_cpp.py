"""llama-cpp-python itself serves the shipped policy; skipped without it.

It may be in an environment of its own, whose python is named by KLEASH_LLAMA_PYTHON and has the packages
"llama-cpp-python[server]", gguf and safetensors.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

from kleash.jobs import MeasureJob
from kleash.measuring import measure
from kleash.shipped import shipped_folder

PYTHON = os.environ.get("KLEASH_LLAMA_PYTHON", sys.executable)
WRITER = Path(__file__).parents[2] / "helpers" / "gguf_file.py"
ENGINE_NATS = 1e-5
"""Largest difference that comes from llama.cpp computing the same weights in another order."""

pytestmark = pytest.mark.skipif(
    "KLEASH_LLAMA_PYTHON" not in os.environ and not (find_spec("llama_cpp") and find_spec("gguf")),
    reason="llama-cpp-python or gguf is not installed",
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of llama-cpp-python's server."""
    path = tmp_path_factory.mktemp("gguf") / "policy.gguf"
    subprocess.run([PYTHON, str(WRITER), str(shipped_folder("policy")), str(path)], check=True, timeout=120)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--model", path, "--port", port, "--n_ctx", 512, "--logits_all", "true", "--n_threads", 1]
    options += ["--type_k", 0, "--type_v", 0]  # its cache in float32
    process = subprocess.Popen(
        [PYTHON, "-m", "llama_cpp.server", *map(str, options)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the server did not start"
                time.sleep(0.25)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_the_bounds_hold_the_exact_divergences(address: str, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text(
        "She was not unhappy, and had the evening been fine she would have gone out.\n\n"
        "Mr. Weston, who had been there before dinner, said that it would rain; and it did."
    )
    options = {"text": str(source), "reference": "shipped:reference", "quiet": True}
    served = measure(MeasureJob(policy=address, out=str(tmp_path / "served"), **options))
    measure(MeasureJob(policy="shipped:policy", out=str(tmp_path / "local"), **options))
    tokens, exact = (
        parquet.read_table(tmp_path / name / "tokens", partitioning=None).to_pydict()
        for name in ("served", "local")
    )
    is_scored = np.array(exact["position"]) > 0  # llama-cpp-python gives nothing for the first token
    np.testing.assert_array_equal(tokens["token_id"], np.array(exact["token_id"])[is_scored])
    np.testing.assert_allclose(
        tokens["logp_policy"], np.array(exact["logp_policy"])[is_scored], atol=ENGINE_NATS
    )
    for name in ("kl_policy_reference", "kl_reference_policy", "jensen_shannon", "total_variation"):
        value = np.array(exact[name])[is_scored]
        assert (np.array(tokens[f"{name}_lower"]) <= value + ENGINE_NATS).all()
        assert (np.array(tokens[f"{name}_upper"]) >= value - ENGINE_NATS).all()
    assert served.per_token["kl_policy_reference_lower"].value > 0.05
