"""Packed weights of the formats' own packages, unpacked as the packages dequantise them."""

from pathlib import Path

import format_packages
import pytest
import torch
from packed_checkpoints import read_module
from safetensors.torch import load_file

from kleash.models.filling import unpack

NUM_CASES = {"compressed-tensors": 16, "bitsandbytes": 5, "mlx": 9}


@pytest.fixture(scope="module")
def cases(formats_path, tmp_path_factory, command_forks) -> list[Path]:
    """The folders that the packages have written."""
    folder = tmp_path_factory.mktemp("formats")
    done = command_forks.run_python([format_packages.__file__, str(folder), formats_path])
    assert done.returncode == 0, done.stderr[-2000:]
    return sorted(folder.iterdir())


@pytest.mark.parametrize("package", NUM_CASES)
def test_matrices_are_unpacked_as_their_package_dequantises_them(cases, package):
    folders = [folder for folder in cases if folder.name.startswith(package)]
    assert len(folders) == NUM_CASES[package]
    for folder in folders:
        weight = unpack(read_module(folder), torch.float32)
        expected = load_file(folder / "expected.safetensors")["weight"]
        # LLM.int8() multiplies by the scale and 1 / 127 in another order.
        rtol = 2e-7 if folder.name == "bitsandbytes-int8" else 0
        torch.testing.assert_close(weight, expected, rtol=rtol, atol=0, msg=folder.name)
