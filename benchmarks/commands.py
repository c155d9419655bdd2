"""Time and memory of whole commands, compared with a plain script or with the same command done another way.

    python benchmarks/commands.py text --documents 24      # kleash measure --text, and plain_script.py
    python benchmarks/commands.py prompts --documents 64   # kleash measure --prompts, and plain_script.py
    python benchmarks/commands.py cache                    # kleash measure with a reference cache, and without
    python benchmarks/commands.py sweep                    # kleash sweep of three candidates, and three measurements

Whole processes are timed, with imports and loading of models, one after the other in every round. Both read documents
of 1 030 tokens of the shipped text (the script --at-once of them at once), or generate responses of up to 128 tokens to
beginnings of it, with two random models of Qwen3's shape and a vocabulary of 32 768, or the shipped pair (--shape
shipped). The result is the median of the ratios within rounds, of wall time and of processor time, and the largest
resident memory of a process. Both ways must report the same KL, except of the responses that each draws.
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
from harness import parser_of, ratio, write_result

SHAPES = {"20m": (256, 14), "42m": (512, 8), "50m": (512, 11)}
"""Hidden size and layers."""
TOKENS, SHIPPED_TOKENS, WORDS = 1030, 250, 32_768
"""Tokens of a document, also for the shipped pair; and the vocabulary of the random models."""
NEW_TOKENS = 128
PLAIN = Path(__file__).with_name("plain_script.py")
KLEASH = (sys.executable, "-m", "kleash")
Commands = list[list[str]]
"""Processes that run one after the other."""


def make_pair(folder: Path, shape: str) -> tuple[str, str]:
    """The folders of two models: one with random weights, and one with noise added to them; policy first."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from kleash.shipped import shipped_folder

    if shape == "shipped":
        return str(shipped_folder("policy")), str(shipped_folder("reference"))
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
        save_tokenizer(folder / role)
        names.append(str(folder / role))
        with torch.no_grad():
            for weight in network.parameters():
                if weight.dim() > 1:
                    weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    print(f"{sum(weight.numel() for weight in network.parameters()):,} parameters", file=sys.stderr)
    return names[1], names[0]


def save_tokenizer(folder: Path) -> None:
    """The shipped tokenizer with as many tokens as the random models have, so that every row of a head is one."""
    from transformers import AutoTokenizer

    from kleash.shipped import shipped_folder

    shipped: Any = AutoTokenizer.from_pretrained(shipped_folder("policy"))
    shipped.save_pretrained(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first = 1 + max([*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])])
    vocabulary |= {f"<never {number}>": number for number in range(first, WORDS)}
    path.write_text(json.dumps(tokenizer))


def make_source(folder: Path, what: str, documents: int, tokens: int) -> Path:
    """A JSONL file of texts of some tokens, or of prompts, which are beginnings of texts."""
    from transformers import AutoTokenizer

    from kleash.shipped import shipped_folder, shipped_text

    tokenizer: Any = AutoTokenizer.from_pretrained(shipped_folder("policy"))
    texts = [json.loads(line)["text"] for line in shipped_text().read_text().splitlines()]
    ids = tokenizer(" ".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    path = folder / f"{what}.jsonl"
    with path.open("w") as file:
        for number in range(documents):
            start = number * 997 % (len(ids) - tokens)
            length = 24 + number % 40 if what == "prompts" else tokens
            text = tokenizer.decode(ids[start : start + length])
            file.write(json.dumps({"prompt" if what == "prompts" else "text": text}) + "\n")
    return path


def ways_of(options: argparse.Namespace, work: Path) -> dict[str, Commands]:
    """Both ways; what they write is in ``work/kleash`` and ``work/other``."""
    policy, reference = make_pair(work, options.shape)
    tokens = SHIPPED_TOKENS if options.shape == "shipped" else TOKENS
    source = make_source(work, options.what, options.documents, tokens)
    ours, other = str(work / "kleash"), str(work / "other")
    models = ["--policy", policy, "--reference", reference]
    if options.what in ("text", "prompts"):
        more = ["--max-new-tokens", str(NEW_TOKENS)] if options.what == "prompts" else []
        read = [f"--{options.what}", str(source), *more]
        plain = [sys.executable, str(PLAIN), policy, reference, "--at-once", str(options.at_once)]
        return {
            "kleash": [[*KLEASH, "measure", *models, *read, "--out", ours, "--quiet"]],
            "other": [[*plain, *read]],
        }
    text = ["--text", str(source), "--quiet"]
    measured = [*KLEASH, "measure", *models, *text, "--out"]
    if options.what == "cache":
        cache = str(work / "cache")
        subprocess.run([*KLEASH, "cache", "--reference", reference, *text, "--out", cache], check=True)
        return {
            "kleash": [[*measured, ours, "--reference-cache", cache]],
            "other": [[*measured, other]],
        }
    names = ("first", "second", "third")
    candidates = {name: str(shutil.copytree(policy, work / name)) for name in names}
    swept = [
        *KLEASH,
        "sweep",
        "--candidates",
        *candidates.values(),
        "--reference",
        reference,
        *text,
        "--out",
        ours,
    ]
    return {
        "kleash": [swept],
        "other": [[*measured, f"{other}/{name}", "--policy", policy] for name, policy in candidates.items()],
    }


def time_command(command: Sequence[str]) -> tuple[float, float, float, str]:
    """Wall seconds, processor seconds, peak resident memory in MB of a million bytes, and output of a process."""
    began = perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, command
        output.seek(0)
        seconds = perf_counter() - began
        return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6, output.read()


def kl_of(folder: Path) -> float:
    """KL(policy || reference) per token of the first measurement below a folder."""
    path = min(folder.rglob("measurement.json"))
    return json.loads(path.read_text())["per_token"]["kl_policy_reference"]["value"]


def compare(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Seconds and memory of both ways in each round, and the median ratios."""
    ways = ways_of(options, work)
    wall: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = dict.fromkeys(ways, 0.0)
    for _ in range(options.rounds):
        printed = ""
        for name, commands in ways.items():
            shutil.rmtree(work / name, ignore_errors=True)
            timed = [time_command(command) for command in commands]
            wall[name].append(round(sum(seconds for seconds, _, _, _ in timed), 2))
            processor[name].append(round(sum(seconds for _, seconds, _, _ in timed), 2))
            peaks[name] = max(peaks[name], *(peak for _, _, peak, _ in timed))
            printed = timed[0][-1]
        ours = kl_of(work / "kleash")
        if options.what != "prompts":
            is_plain = options.what == "text"
            other_kl = json.loads(printed)["kl_policy_reference"] if is_plain else kl_of(work / "other")
            assert abs(ours - other_kl) <= 1e-3 * ours, (ours, other_kl)
        print(f"kleash {wall['kleash'][-1]} s, other {wall['other'][-1]} s", file=sys.stderr, flush=True)
    return {
        "what": options.what,
        "shape": options.shape,
        "documents": options.documents,
        "wall_seconds": wall,
        "processor_seconds": processor,
        "median_wall_seconds": {name: median(times) for name, times in wall.items()},
        "peak_mb": {name: round(peak) for name, peak in peaks.items()},
        "ratio": ratio(wall["kleash"], wall["other"]),
        "processor_ratio": ratio(processor["kleash"], processor["other"]),
    }


def main() -> None:
    """Run the comparison, print the result and write it to benchmarks/results."""
    parser = parser_of(__doc__, documents=24, rounds=3, at_once=4)
    parser.add_argument("what", choices=["text", "prompts", "cache", "sweep"])
    parser.add_argument("--shape", choices=[*SHAPES, "shipped"], default="42m")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options, Path(folder))
    print(json.dumps(result, indent=2))
    name = f"commands_{options.what}_{options.shape}_{options.documents}"
    write_result(name, result, packages=["transformers"])


if __name__ == "__main__":
    main()
