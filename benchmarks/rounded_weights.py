"""KL of the shipped reference with its weights rounded to 8, 6, 4 and 3 bits: anchors in docs/explanation/kl.md.

    python benchmarks/rounded_weights.py

Every matrix is rounded to the nearest of 2^bits - 1 levels, symmetric about 0, with one scale for 32 weights of a row.
The rounded model is the policy: on shipped:prompts it answers, on shipped:text both read. Prints a line each. About
three minutes of processor time.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import kleash
from kleash.shipped.paths import DATA

GROUP = 32
SOURCES = {"prompts": "kl_policy_reference", "text": "kl_reference_policy"}


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """A matrix whose weights, in groups of a row, are the nearest multiples of a scale; a vector as it is."""
    if weight.ndim != 2:
        return weight
    groups = weight.reshape(-1, GROUP)
    scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.where(scale > 0, (groups / scale).round() * scale, groups).reshape(weight.shape)


def main() -> None:
    """Print the KL of each width of weights on each source."""
    weights = load_file(DATA / "reference" / "model.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        for bits in (8, 6, 4, 3):
            policy = Path(folder) / f"{bits}-bits"
            shutil.copytree(DATA / "reference", policy)
            rounded_weights = {name: rounded(weight, bits).contiguous() for name, weight in weights.items()}
            save_file(rounded_weights, policy / "model.safetensors", metadata={"format": "pt"})
            for source, name in SOURCES.items():
                options: dict[str, Any] = {source: f"shipped:{source}", "out": f"{policy}-{source}"}
                measurement = kleash.measure(policy=str(policy), reference="shipped:reference", **options)
                kl = measurement.per_token[name]
                number = f"{kl.value:.6f} ± {kl.standard_error:.6f} nats per token"
                print(f"{bits} bits  shipped:{source:<7}  {name}  {number}", flush=True)


if __name__ == "__main__":
    main()
