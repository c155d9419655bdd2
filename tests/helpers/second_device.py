"""python second_device.py FOLDER [LIBRARY]: the numbers of jobs on the CPU, or on the device of second_device.cpp."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths
from transformers import GenerationMixin
from undrawn_charts import draw_charts

from kleash.jobs import CacheJob, DistillJob, DPOJob, GRPOJob, MeasureJob, PPOJob, RLOOJob
from kleash.measuring import cache_reference, measure
from kleash.store import read_steps
from kleash.training import train

NAME = "second"
JOBS = ("measure", "ppo", "ppo-adapter", "grpo", "grpo-adapter", "rloo", "dpo", "distil", "distil-cache")


def build(compiler: str, folder: Path) -> Path:
    """The device's library."""
    library, root = folder / "second_device.so", Path(torch.__file__).parent
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", *(f"-I{path}" for path in include_paths())]
    links = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([compiler, *options, str(source), "-o", str(library), *links], check=True)
    return library


def register(library: Path) -> None:
    """Make the device known to torch and Accelerate, which takes it."""
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(f"torch.{NAME}")
    generator = torch.Generator(NAME)
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        manual_seed=generator.manual_seed,
        manual_seed_all=generator.manual_seed,
        get_rng_state=lambda *_: generator.get_state(),
        set_rng_state=lambda state, *_: generator.set_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16],
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else tied weights come apart
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{NAME}:0"


def jobs_on(device: str, folder: Path) -> Iterator[Any]:
    """The jobs called ``JOBS``, on a device; they write into ``folder``."""
    given, held_out, cache = folder / "given.jsonl", folder / "held_out.txt", folder / "cache"
    lengths = [
        {"prompt": f"The {end}", "response": " was calm" * n, "chosen": " sea", "rejected": " was" * n}
        for n, end in enumerate("abcd", 1)
    ]
    given.write_text("".join(json.dumps(row) + "\n" for row in lengths))
    held_out.write_text("She said\nThe sea")
    loading: dict[str, Any] = {"device": device, "dtype": "float32"}
    cache_reference(CacheJob(**loading, reference="shipped:policy", responses=str(given), out=str(cache)))
    drawn: dict[str, Any] = {**loading, "prompts": "shipped:prompts", "limit": 4, "max_new_tokens": 6}
    steps: dict[str, Any] = {"steps": 2, "learning_rate": 1e-4, "quiet": True}
    rewarded: dict[str, Any] = {**drawn, **steps, "prompts_per_step": 2, "reward": ("ppo_cases:vowels",)}
    grouped = {**rewarded, "samples_per_prompt": 3}
    yield MeasureJob(**drawn)
    yield PPOJob(**rewarded)
    yield PPOJob(**rewarded, lora_rank=2, epochs=2)
    yield GRPOJob(**grouped, eval_prompts=str(held_out), set=("eval_steps=1",))
    yield GRPOJob(**grouped, lora_rank=2, epochs=2)
    yield RLOOJob(**grouped, kl="k3")
    yield DPOJob(**loading, **steps, pairs=str(given))
    yield DistillJob(**drawn, **steps, divergence="jensen_shannon")
    yield DistillJob(**loading, **steps, responses=str(given), teacher_cache=str(cache))


def numbers(device: str, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Job -> its metrics, of each step."""
    folder.mkdir()
    logged = {}
    for name, job in zip(JOBS, jobs_on(device, folder), strict=True):
        out = folder / name
        if name == "measure":
            tokens = measure(replace(job, out=str(out))).to_pandas().tokens
            logged[name] = [tokens.filter(like="kl_").sum().to_dict()]
        else:
            train(replace(job, out=str(out)))
            logged[name] = [record.metrics for record in read_steps(out)]
    return logged


def seeded(generate: Any) -> Any:
    """transformers' ``generate`` that draws the same on all devices."""

    def again(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return generate(*args, **kwargs)

    return again


if __name__ == "__main__":
    folder, *library = map(Path, sys.argv[1:])
    draw_charts(False)
    GenerationMixin.generate = seeded(GenerationMixin.generate)
    if library:
        register(*library)
    found = numbers(NAME if library else "cpu", folder)
    (folder / "numbers.json").write_text(json.dumps(found))
