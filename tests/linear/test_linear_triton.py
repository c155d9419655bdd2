"""impl='triton': in triton's interpreter here, compiled for a GPU that need not be there, and on one that is."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from linear_cases import REFERENCE, head_case, in_float64, leaves_of, relative_rms

from kleash.errors import CannotRunError
from kleash.linear import Head, LinearOptions, linear_divergence, linear_kl, token_statistics
from kleash.linear.impl import choice

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
TRITON = LinearOptions(impl="triton")
HERE = Path(__file__).parent


@needs_triton
def test_in_the_interpreter(request, tmp_path):
    """The tests of interpreted_linear_triton.py, in a process that asks for the interpreter."""
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
    hook = request.config.getoption("--jaxtyping-packages", default=None)
    command += [f"--jaxtyping-packages={hook}"] if hook else []
    done = subprocess.run(
        [*command, str(HERE / "interpreted_linear_triton.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
