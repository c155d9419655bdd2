"""Time of scoring, compared with the two models' forward passes alone, and its peak memory.

    python benchmarks/measuring.py speed --shape qwen3-0.6b
    python benchmarks/measuring.py speed --shape shipped
    python benchmarks/measuring.py memory

"speed" interleaves, in one process, the two forward passes through transformers with logits for the scored positions,
and kleash's scoring and writing of the same documents; the result is the median of the ratios within rounds. "memory"
runs `kleash measure --text` over 250, 1000 and 4000 documents, each in a separate process, and compares the peak
resident memory with that of a process that loads the models and runs one batch of the same size.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from harness import write_result

QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
SHIPPED = ("shipped:policy", "shipped:reference")


def make_pair(folder: Path) -> tuple[str, str]:
    """Two randomly initialised models of Qwen3-0.6B's shape, with the shipped tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from kleash.shipped import shipped_folder

    names = []
    for seed, role in enumerate(("policy", "reference")):
        path = folder / role
        if not (path / "config.json").exists():
            torch.manual_seed(seed)
            network: Any = Qwen3ForCausalLM(Qwen3Config(**QWEN3))
            network.to(torch.bfloat16).save_pretrained(path)
            AutoTokenizer.from_pretrained(shipped_folder("policy")).save_pretrained(path)
        names.append(str(path))
    return names[0], names[1]


def documents(path: Path, count: int, tokens: int) -> Path:
    """Write ``count`` documents of about ``tokens`` tokens each, from the shipped text, repeated as needed."""
    from kleash.shipped import shipped_text

    texts = [json.loads(line)["text"] for line in shipped_text().read_text().splitlines()]
    whole = " ".join(texts)
    size = 4 * tokens
    with path.open("w") as file:
        for number in range(count):
            start = number * size % max(1, len(whole) - size)
            file.write(json.dumps({"text": f"{number} " + whole[start : start + size]}) + "\n")
    return path


def speed(shape: str, rounds: int, tokens: int, work: Path) -> dict[str, Any]:
    """The ratio of the time to score and write a shard to that of the two forward passes over the same batches."""
    from kleash.engines import LocalEngine, Shard
    from kleash.jobs import MeasureJob
    from kleash.models import load_pair, read_text
    from kleash.models.scoring import pad_batch
    from kleash.sources.sequences import batch_by_length
    from kleash.store import RunFolder

    policy, reference = SHIPPED if shape == "shipped" else make_pair(work)
    pair = load_pair(policy, reference)
    window = 256
    source = documents(work / "text.jsonl", max(1, tokens // window), window)
    job = MeasureJob(policy=policy, reference=reference, text=str(source), batch_tokens=1024)
    sequences = list(read_text(str(source), pair, window=window))
    engine, folder = LocalEngine(pair=pair, job=job), RunFolder(work)
    for name in ("tokens", "sequences"):
        (work / name).mkdir(exist_ok=True)

    def run_bare() -> None:
        for batch in batch_by_length([sequence.num_input_tokens for sequence in sequences], job.batch_tokens):
            ids, _, _ = pad_batch([sequences[place] for place in batch])
            for model in (pair.policy, pair.reference):
                with torch.inference_mode():
                    assert model.network(input_ids=ids, use_cache=False).logits is not None

    def run_kleash() -> None:
        result = engine.run(Shard(index=0, sequences=tuple(sequences)))
        folder.write_shard(0, result.tokens, result.sequences)

    times = interleaved({"bare": run_bare, "kleash": run_kleash}, rounds)
    ratios = [
        kleash_seconds / bare_seconds
        for kleash_seconds, bare_seconds in zip(times["kleash"], times["bare"], strict=True)
    ]
    return {
        "shape": shape,
        "scored_tokens": sum(len(sequence.response_ids) for sequence in sequences),
        "rounds": rounds,
        "bare_seconds": median(times["bare"]),
        "kleash_seconds": median(times["kleash"]),
        "ratio": median(ratios),
        "ratios": ratios,
    }


def interleaved(jobs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each job in each round, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name, job in jobs.items():
            began = perf_counter()
            job()
            if number:
                times[name].append(perf_counter() - began)
    return times


BARE = """
import sys
from kleash.models import load_pair
pair = load_pair("shipped:policy", "shipped:reference")
import torch
ids = torch.zeros({rows}, {window}, dtype=torch.long)
for model in (pair.policy, pair.reference):
    with torch.inference_mode():
        model.hidden(ids)
"""


def memory(work: Path) -> dict[str, Any]:
    """Peak resident memory by number of documents, and that of the models with one batch."""
    window, batch = 256, 4096
    bare = peak([sys.executable, "-c", BARE.format(rows=batch // window, window=window)])
    peaks = {}
    for count in (250, 1000, 4000):
        source = documents(work / f"{count}.jsonl", count, window)
        out = work / f"run-{count}"
        arguments = ["measure", "--text", str(source), "--window", str(window), "--batch-tokens", str(batch)]
        peaks[count] = peak([sys.executable, "-m", "kleash", *arguments, "--out", str(out), "--quiet"])
    return {
        "window": window,
        "batch_tokens": batch,
        "models_and_one_batch_mb": bare,
        "documents_peak_mb": peaks,
        "extra_mb": {count: value - bare for count, value in peaks.items()},
    }


def peak(command: list[str]) -> float:
    """Peak resident memory of a process, in MB of a million bytes."""
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_maxrss * 1024 / 1e6


def main() -> None:
    """Run the benchmark, print the result and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "memory"])
    parser.add_argument("--shape", choices=["shipped", "qwen3-0.6b"], default="shipped")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if options.what == "speed":
            result = speed(options.shape, options.rounds, options.tokens, work)
            name = f"measuring_speed_{options.shape}"
        else:
            result, name = memory(work), "measuring_memory"
    print(json.dumps(result, indent=2))
    write_result(name, result)


if __name__ == "__main__":
    main()
