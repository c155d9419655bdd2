"""Accuracy, time and memory of measurements with a reference cache.

    python benchmarks/caching.py rounding
    python benchmarks/caching.py speed --shape shipped
    python benchmarks/caching.py speed --shape qwen3-0.6b --rounds 3 --tokens 512
    python benchmarks/caching.py memory

"rounding" measures the shipped text with the reference's float32 hidden states rounded to a storage dtype, for the
shipped policy and for policies nearer to the reference (a hundredth and a thousandth of the distance in weights).
"speed" interleaves, in one process, scoring a shard with both models and scoring it with the cached reference; the
result is the median of the ratios within rounds. "memory" measures the peak resident memory of processes: `kleash
cache` over an increasing number of documents, then `kleash measure` with and without the cache.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import write_result

from measuring import SHIPPED, documents, interleaved, make_pair, peak


class RoundedStates:
    """Hidden states as read from a cache with another dtype."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        from kleash.models.scoring import hidden_state_reader

        self._read, self._dtype = hidden_state_reader(model), dtype

    def read(self, batch: Any) -> torch.Tensor:
        return self._read(batch).to(self._dtype).to(torch.float32)

    def rounding(self, what: str, temperature: float) -> None:
        return None


def rounding() -> dict[str, Any]:
    """Mean and per-token error of KL(policy || reference) for each dtype and distance."""
    from kleash.models import load_pair, read_text, score

    table = []
    for share in (1.0, 0.01, 0.001):
        pair = load_pair(*SHIPPED)
        weight_pairs = zip(pair.policy.network.parameters(), pair.reference.network.parameters(), strict=True)
        with torch.no_grad():
            for policy_weight, reference_weight in weight_pairs:
                policy_weight.copy_(reference_weight + share * (policy_weight - reference_weight))
        sequences = list(read_text("shipped:text", pair, limit=12))
        exact = score(pair, sequences)["kl_policy_reference"].astype(float)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            stored = replace(pair.reference, stored=RoundedStates(pair.reference, dtype), network=None)
            rounded = score(replace(pair, reference=stored), sequences)["kl_policy_reference"].astype(float)
            table.append(
                {
                    "share_of_the_way": share,
                    "dtype": str(dtype).removeprefix("torch."),
                    "exact_nats": exact.mean(),
                    "stored_nats": rounded.mean(),
                    "error_of_the_mean": rounded.mean() / exact.mean() - 1,
                    "median_error_of_a_token": float(np.median(np.abs(rounded / exact - 1))),
                }
            )
    return {"tokens": len(exact), "table": table}


def speed(shape: str, rounds: int, tokens: int, work: Path) -> dict[str, Any]:
    """The ratio of scoring with the cache to scoring without it."""
    from kleash.jobs import MeasureJob
    from kleash.measuring import CacheJob, cache_reference
    from kleash.measuring.shards import plan_shards
    from kleash.models import Loading, StoredReference, load_beside, load_pair, score
    from kleash.store.cache import CacheContents

    policy, reference = SHIPPED if shape == "shipped" else make_pair(work)
    source = documents(work / "text.jsonl", max(1, tokens // 256), 256)
    cache = str(work / "cache")
    cached = cache_reference(
        CacheJob(reference=reference, text=str(source), window=256, batch_tokens=1024, out=cache)
    )
    assert isinstance(cached, CacheContents)
    whole = load_pair(policy, reference)
    stored = StoredReference(Path(cache))
    beside = load_beside(
        stored, policy, reference, revision_policy=None, revision_reference=None, loading=Loading()
    )
    beside = replace(beside, policy=whole.policy)  # one copy in memory is enough
    job = MeasureJob(policy=policy, reference=reference, text=str(source), window=256, batch_tokens=1024)
    shards = list(plan_shards(job, whole).shards)
    token_kl: dict[str, Any] = {}

    def score_shards(name: str, pair: Any) -> None:
        parts = [score(pair, shard.sequences, batch_tokens=1024) for shard in shards]
        token_kl[name] = np.concatenate([part["kl_policy_reference"] for part in parts])

    jobs = {"without": lambda: score_shards("without", whole), "with": lambda: score_shards("with", beside)}
    times = interleaved(jobs, rounds)
    assert (token_kl["with"] == token_kl["without"]).all()
    ratios = [
        with_cache / without_cache
        for with_cache, without_cache in zip(times["with"], times["without"], strict=True)
    ]
    return {
        "shape": shape,
        "scored_tokens": cached.tokens,
        "rounds": rounds,
        "without_seconds": median(times["without"]),
        "with_seconds": median(times["with"]),
        "ratio": median(ratios),
        "hidden_bytes_per_token": cached.hidden_bytes / cached.tokens,
        "logits_bytes_per_token": cached.logits_bytes / cached.tokens,
        "head_bytes": cached.head_bytes,
        "reference_parameters": whole.reference.parameters,
    }


def memory(work: Path) -> dict[str, Any]:
    """Peak resident memory of caching by number of documents, and of measuring with and without a cache."""
    shared_options = ["--window", "256", "--quiet"]
    peaks: dict[str, float] = {}
    for count in (25, 100, 400):
        text = ["--text", str(documents(work / f"{count}.jsonl", count, 256))]
        out = ["--out", str(work / f"cache-{count}")]
        peaks[f"cache {count}"] = peak(
            [sys.executable, "-m", "kleash", "cache", *text, *shared_options, *out]
        )
    cache_options = ["--reference-cache", str(work / "cache-100")]
    text = ["--text", str(work / "100.jsonl")]
    for name, extra_options in (("measure without", []), ("measure with", cache_options)):
        out = ["--out", str(work / name.replace(" ", "-"))]
        peaks[name] = peak(
            [sys.executable, "-m", "kleash", "measure", *text, *shared_options, *extra_options, *out]
        )
    return {"peak_mb": peaks}


def main() -> None:
    """Run the benchmark, print the result and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["rounding", "speed", "memory"])
    parser.add_argument("--shape", choices=["shipped", "qwen3-0.6b"], default="shipped")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        name = f"caching_{options.what}"
        if options.what == "speed":
            result = speed(options.shape, options.rounds, options.tokens, work)
            name = f"{name}_{options.shape}"
        else:
            result = rounding() if options.what == "rounding" else memory(work)
    print(json.dumps(result, indent=2))
    write_result(name, result)


if __name__ == "__main__":
    main()
