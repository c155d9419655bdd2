"""Time of the command ``kleash measure``, compared with a plain script that computes two of its numbers.

    python benchmarks/commands.py text --documents 24
    python benchmarks/commands.py prompts --documents 64

Whole processes are timed, with imports and loading of models, one after the other in every round. The command and
``benchmarks/plain_script.py`` read the same documents of 1 030 tokens, or generate responses of up to 128 tokens to the
same prompts, with the same two random models of Qwen3's shape and a vocabulary of 32 768. The result is the median of
the ratios within rounds, of wall time and of processor time. On text, both must report the same KL.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from harness import ratio, write_result

SHAPES = {"20m": (256, 14), "42m": (512, 8), "50m": (512, 11)}
"""Hidden size and layers."""
TOKENS, WORDS = 1030, 32_768
NEW_TOKENS = 128
PLAIN = Path(__file__).with_name("plain_script.py")


def make_pair(folder: Path, shape: str) -> tuple[str, str]:
    """The folders of two models: one with random weights, and one with noise added to them; policy first."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from kleash.shipped import shipped_folder

    width, layers = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        vocab_size=WORDS,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    network = Qwen3ForCausalLM(config)
    names = []
    for role in ("reference", "policy"):
        network.save_pretrained(folder / role)
        AutoTokenizer.from_pretrained(shipped_folder("policy")).save_pretrained(folder / role)
        names.append(str(folder / role))
        with torch.no_grad():
            for weight in network.parameters():
                if weight.dim() > 1:
                    weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    print(f"{sum(weight.numel() for weight in network.parameters()):,} parameters", file=sys.stderr)
    return names[1], names[0]


def make_source(folder: Path, what: str, documents: int) -> Path:
    """A JSONL file of texts, or of prompts, which are beginnings of texts."""
    from transformers import AutoTokenizer

    from kleash.shipped import shipped_folder, shipped_text

    tokenizer = AutoTokenizer.from_pretrained(shipped_folder("policy"))
    texts = [json.loads(line)["text"] for line in shipped_text().read_text().splitlines()]
    ids = tokenizer(" ".join(texts), verbose=False)["input_ids"]
    path = folder / f"{what}.jsonl"
    with path.open("w") as file:
        for number in range(documents):
            start = number * 997 % (len(ids) - TOKENS)
            length = TOKENS if what == "text" else 24 + number % 40
            text = tokenizer.decode(ids[start : start + length])
            file.write(json.dumps({"text" if what == "text" else "prompt": text}) + "\n")
    return path


def time_command(command: Sequence[str]) -> tuple[float, float, str]:
    """Wall seconds, processor seconds and output of a process."""
    began = perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, command
        output.seek(0)
        return perf_counter() - began, usage.ru_utime + usage.ru_stime, output.read()


def compare(what: str, shape: str, documents: int, rounds: int, at_once: int, work: Path) -> dict[str, Any]:
    """Seconds of the command and the script in each round, and the median ratio."""
    policy, reference = make_pair(work, shape)
    source, out = make_source(work, what, documents), work / "run"
    extra_options = ["--max-new-tokens", str(NEW_TOKENS)] if what == "prompts" else []
    commands = {
        "kleash": [
            *(sys.executable, "-m", "kleash", "measure", "--policy", policy, "--reference", reference),
            *(f"--{what}", str(source), "--out", str(out), "--quiet", *extra_options),
        ],
        "plain": [
            *(sys.executable, str(PLAIN), policy, reference, f"--{what}", str(source)),
            *("--at-once", str(at_once), *extra_options),
        ],
    }
    wall: dict[str, list[float]] = {name: [] for name in commands}
    processor: dict[str, list[float]] = {name: [] for name in commands}
    numbers: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    for _ in range(rounds):
        shutil.rmtree(out, ignore_errors=True)
        for name, command in commands.items():
            seconds, processor_time, printed = time_command(command)
            wall[name].append(round(seconds, 2))
            processor[name].append(round(processor_time, 2))
            if name == "plain":
                numbers = json.loads(printed)
        measured = json.loads((out / "measurement.json").read_text())
        ours = measured["per_token"]["kl_policy_reference"]["value"]
        if what == "text":
            assert abs(ours - numbers["kl_policy_reference"]) <= 1e-3 * ours, (ours, numbers)
            assert measured["counts"]["tokens"] == numbers["tokens"]
        print(f"kleash {wall['kleash'][-1]} s, plain {wall['plain'][-1]} s", file=sys.stderr, flush=True)
    return {
        "shape": shape,
        "documents": documents,
        "tokens": measured["counts"]["tokens"],
        "plain_at_once": at_once,
        "wall_seconds": wall,
        "processor_seconds": processor,
        "median_wall_seconds": {name: median(times) for name, times in wall.items()},
        "ratio": ratio(wall["kleash"], wall["plain"]),
        "processor_ratio": ratio(processor["kleash"], processor["plain"]),
    }


def main() -> None:
    """Run the comparison, print the result and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["text", "prompts"])
    parser.add_argument("--shape", choices=list(SHAPES), default="42m")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(
            options.what, options.shape, options.documents, options.rounds, options.at_once, Path(folder)
        )
    print(json.dumps(result, indent=2))
    write_result(
        f"commands_{options.what}_{options.shape}_{options.documents}", result, packages=["transformers"]
    )


if __name__ == "__main__":
    main()
