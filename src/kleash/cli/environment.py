"""What ``kleash env`` prints: versions and the machine, without names of people, folders or files."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from kleash.jobs.reading_jobs import EnvJob
from kleash.version import __version__

PACKAGES = (
    *(
        "torch",
        "numpy",
        "jaxtyping",
        "transformers",
        "tokenizers",
        "safetensors",
        "peft",
        "accelerate",
        "gguf",
    ),
    *("pyarrow", "jinja2", "matplotlib", "rich", "datasets", "pandas", "trl", "verl", "openrlhf"),
    *("liger-kernel", "ray", "vllm", "deepspeed"),
)
"""Packages that kleash uses or works inside of."""
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "WORLD_SIZE")
"""Environment variables that change what is computed where."""


def run(_: EnvJob) -> int:
    """Run ``kleash env`` and return its exit code, 0."""
    print("\n".join(f"{name}: {value}" for name, value in environment().items()))
    return 0


def environment() -> dict[str, str]:
    """What a report of a bug needs, by name; packages that are not installed are left out."""
    import torch

    # With a driver that is too old torch counts the GPUs, and refuses to name them.
    usable = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    values = {
        "kleash": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": f"{os.cpu_count()}, of which torch uses {torch.get_num_threads()}",
        "GPUs": f"{', '.join(map(torch.cuda.get_device_name, usable)) or 'none that torch can use'} "
        f"(CUDA {torch.version.cuda})",
    }
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            values[name] = version(name)
    return values | {name: os.environ[name] for name in VARIABLES if name in os.environ}
