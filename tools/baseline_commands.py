"""The commands of the baseline: short measurements, training runs and audits.

The command's options stand at the top; nothing else of the package is known here.
"""

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kleash.cli import main as run_command

REWARD_OPTION = "baseline_reward:letters"
"""The reward of the training runs: a function in a module that is written next to the runs."""
MEASUREMENTS: Mapping[str, list[str]] = {
    "prompts": ["--limit", "6", "--samples-per-prompt", "2", "--max-new-tokens", "10", "--seed", "3"],
    "nucleus": ["--limit", "4", "--max-new-tokens", "8", "--top-p", "0.8", "--temperature", "0.7"],
    "text": ["--text", "text.txt", "--window", "48", "--stride", "24"],
    "responses": ["--responses", "responses.jsonl"],
    "cached": ["--text", "text.txt", "--reference-cache", "states"],
    "bfloat16": ["--text", "text.txt", "--dtype", "bfloat16"],
}
SHORT_RUN = ["--steps", "3", "--limit", "8", "--learning-rate", "1e-3", "--policy", "shipped:policy"]
ONLINE_RUN = [*SHORT_RUN, "--reference", "shipped:reference", "--prompts", "prompts.txt"]
ONLINE_RUN += ["--prompts-per-step", "4", "--max-new-tokens", "8"]
K1_REWARD = ["--kl", "k1", "--kl-place", "reward"]
STEERED = ["--controller", "ziegler", "--target-nats", "2.0"]
TRAINING: Mapping[str, list[str]] = {
    "ppo_exact": ["ppo", *ONLINE_RUN, "--reward", REWARD_OPTION],
    "ppo_k1": ["ppo", *ONLINE_RUN, "--reward", REWARD_OPTION, *K1_REWARD, *STEERED],
    "grpo": ["grpo", *ONLINE_RUN, "--reward", REWARD_OPTION, "--samples-per-prompt", "2"],
    "rloo": ["rloo", *ONLINE_RUN, "--reward", REWARD_OPTION, "--samples-per-prompt", "2", *K1_REWARD],
    "dpo": ["dpo", *SHORT_RUN, "--pairs", "pairs.jsonl", "--pairs-per-step", "2"],
    "distill": ["distill", *ONLINE_RUN, "--teacher", "shipped:reference"],
}
TRL_RUNS = ("grpo", "rloo", "dpo", "distill")
AUDITS: Mapping[str, str] = {
    "kleash:kl_loss": "kleash",
    "kleash:linear_kl": "kleash",
    "verl:low_var_kl": "verl",
    "openrlhf:reward_k1": "openrlhf",
    "trl:grpo_plain": "trl",
}
"""Audited cases, and the package that each of them needs."""


def command(*words: str) -> str:
    """Run the command in this process: what it prints to standard output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as complaints:
        code = run_command([*words])
    if code:
        raise RuntimeError(f"kleash {' '.join(words)}: exit code {code}\n{complaints.getvalue()}")
    return printed.getvalue()


def write_sources() -> None:
    """The files that the runs read, in the current folder."""
    names = (
        "Emma",
        "the harbour",
        "a letter",
        "Mr. Knightley",
        "the picture",
        "her uncle",
        "no one",
        "the carriage",
    )
    sentences = [
        f"It was {name} that came {n % 4 + 2} days later, and {names[(n + 3) % 8]} was not at all surprised."
        for n, name in enumerate(names * 4)
    ]
    documents = [" ".join(sentences[n : n + 3]) for n in range(0, len(sentences), 3)]
    Path("text.txt").write_text("\n\n".join(documents))
    Path("prompts.txt").write_text("\n".join(line[:30] for line in sentences[:8]))
    lines = [
        {"prompt": line[:24], "response": line[24:], "finish_reason": "stop"}
        for n, line in enumerate(sentences[:12])
    ]
    Path("responses.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pairs = [
        {"prompt": a[:20], "chosen": a[20:], "rejected": b[20:]}
        for a, b in zip(sentences, sentences[9:], strict=False)
    ]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs[:8])))
    Path("baseline_reward.py").write_text(
        "def letters(prompts, responses):\n    return [float(r.count('e')) + 0.1 * len(r) for r in responses]\n"
    )


def tables(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every column of every Parquet file in a folder."""
    import pyarrow.parquet as parquet

    for path in sorted(folder.rglob("*.parquet")):
        table = parquet.read_table(path)
        for name in table.column_names:
            yield f"{path.relative_to(folder)}/{name}", table[name].to_numpy()


def run_measure() -> Iterator[tuple[str, Any]]:
    """Measurements of the pair in the package: measurement.json and the tables."""
    command("cache", "--text", "text.txt", "--out", "states", "--quiet")
    for name, words in MEASUREMENTS.items():
        out = Path("measure") / name
        command("measure", *words, "--out", str(out), "--quiet")
        yield f"{name}/json", json.loads((out / "measurement.json").read_text())
        for path, column in tables(out):
            yield f"{name}/{path}", column


def run_train() -> Iterator[tuple[str, Any]]:
    """Short training runs: the numbers of every step, and the weights that come out."""
    from safetensors.numpy import load_file

    for name, words in TRAINING.items():
        if name in TRL_RUNS and find_spec("trl") is None:
            continue
        out = Path("train") / name
        command("train", *words, "--seed", "5", "--out", str(out), "--quiet")
        steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
        yield f"{name}/steps", steps
        samples = out / "samples.jsonl"
        if samples.exists():
            yield f"{name}/samples", [json.loads(line)["sample"] for line in samples.read_text().splitlines()]
        yield f"{name}/weights", load_file(out / "policy" / "model.safetensors")


def run_audit() -> Iterator[tuple[str, Any]]:
    """Audits as JSON."""
    for target, package in AUDITS.items():
        if find_spec(package) is not None:
            yield target, json.loads(command("audit", target, "--json", "--out", "audit.html"))
