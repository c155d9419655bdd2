"""KL of the shipped reference with its weights rounded to 8, 6, 4 and 3 bits: anchors in docs/explanation/kl.md.

    python benchmarks/rounded_weights.py

Every matrix is rounded to the nearest of 2^bits - 1 levels, symmetric about 0, with one scale for 32 weights of a row.
The rounded model is the policy: on shipped:prompts it answers, on shipped:text both read. Prints a line each. About
three minutes of processor time.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kleash.shipped.paths import DATA

GROUP = 32
SOURCES = {
    "--prompts": ("shipped:prompts", "kl_policy_reference"),
    "--text": ("shipped:text", "kl_reference_policy"),
}


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """A matrix whose weights, in groups of a row, are the nearest multiples of a scale; a vector as it is."""
    if weight.ndim != 2:
        return weight
    groups = weight.reshape(-1, GROUP)
    scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.where(scale > 0, (groups / scale).round() * scale, groups).reshape(weight.shape)


def measured(policy: Path, option: str, out: Path) -> tuple[float, float]:
    """The KL of a policy from the shipped reference in nats per token, and its standard error."""
    source, name = SOURCES[option]
    command = [
        sys.executable,
        "-m",
        "kleash",
        "measure",
        "--policy",
        str(policy),
        option,
        source,
        "--out",
        str(out),
    ]
    subprocess.run([*command, "--reference", "shipped:reference", "--quiet"], check=True)
    number = json.loads((out / "measurement.json").read_text(encoding="utf-8"))["per_token"][name]
    return number["value"], number["standard_error"]


def main() -> None:
    """Print the KL of each width of weights on each source."""
    weights = load_file(DATA / "reference" / "model.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        for bits in (8, 6, 4, 3):
            policy = Path(folder) / f"{bits}-bits"
            shutil.copytree(DATA / "reference", policy)
            rounded_weights = {name: rounded(weight, bits).contiguous() for name, weight in weights.items()}
            save_file(rounded_weights, policy / "model.safetensors", metadata={"format": "pt"})
            for option, (source, name) in SOURCES.items():
                value, error = measured(policy, option, Path(folder) / f"{bits}{option}")
                print(
                    f"{bits} bits  {source:<15}  {name}  {value:.6f} ± {error:.6f} nats per token", flush=True
                )


if __name__ == "__main__":
    main()
