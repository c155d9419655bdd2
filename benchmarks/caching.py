"""What a reference cache costs and saves.

    python benchmarks/caching.py rounding
    python benchmarks/caching.py speed --shape shipped
    python benchmarks/caching.py speed --shape qwen3-0.6b --rounds 3 --tokens 512
    python benchmarks/caching.py memory

"rounding" measures the shipped text with the reference's float32 hidden states rounded to what they might be
stored in, for the shipped policy and for policies that lie nearer to the reference: a hundredth and a
thousandth of the way. "speed" interleaves, in one process, a shard scored by both models and the same shard
scored with the reference read from its cache; the median of the rounds' ratios is the result. "memory" takes
the peak resident memory of processes: `kleash cache` over more and more documents, then `kleash measure` with
and without the cache.
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


class Rounded:
    """Hidden states as they would come out of a cache in another dtype."""

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
        sides = zip(pair.policy.network.parameters(), pair.reference.network.parameters(), strict=True)
        with torch.no_grad():
            for ours, theirs in sides:
                ours.copy_(theirs + share * (ours - theirs))
        sequences = list(read_text("shipped:text", pair, limit=12))
        exact = score(pair, sequences)["kl_policy_reference"].astype(float)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            stored = replace(pair.reference, stored=Rounded(pair.reference, dtype), network=None)
            found = score(replace(pair, reference=stored), sequences)["kl_policy_reference"].astype(float)
            table.append(
                {
                    "share_of_the_way": share,
                    "dtype": str(dtype).removeprefix("torch."),
                    "exact_nats": exact.mean(),
                    "stored_nats": found.mean(),
                    "error_of_the_mean": found.mean() / exact.mean() - 1,
                    "median_error_of_a_token": float(np.median(np.abs(found / exact - 1))),
                }
            )
    return {"tokens": len(exact), "table": table}


def speed(shape: str, rounds: int, tokens: int, work: Path) -> dict[str, Any]:
    """The ratio of scoring with the cache to scoring without it."""
    from kleash.jobs import MeasureJob
    from kleash.measuring import CacheJob, cache_reference
    from kleash.measuring.shards import plan_shards
    from kleash.models import Loading, StoredReference, load_beside, load_pair, score

    policy, reference = SHIPPED if shape == "shipped" else make_pair(work)
    source = documents(work / "text.jsonl", max(1, tokens // 256), 256)
    cache = str(work / "cache")
    kept = cache_reference(
        CacheJob(reference=reference, text=str(source), window=256, batch_tokens=1024, out=cache)
    )
    whole = load_pair(policy, reference)
    stored = StoredReference(Path(cache))
    beside = load_beside(
        stored, policy, reference, revision_policy=None, revision_reference=None, loading=Loading()
    )
    beside = replace(beside, policy=whole.policy)  # one copy in memory is enough
    job = MeasureJob(policy=policy, reference=reference, text=str(source), window=256, batch_tokens=1024)
    shards = list(plan_shards(job, whole).shards)
    found: dict[str, Any] = {}

    def scored(name: str, pair: Any) -> None:
        columns = [score(pair, shard.sequences, batch_tokens=1024) for shard in shards]
        found[name] = np.concatenate([part["kl_policy_reference"] for part in columns])

    jobs = {"without": lambda: scored("without", whole), "with": lambda: scored("with", beside)}
    times = interleaved(jobs, rounds)
    assert (found["with"] == found["without"]).all()
    ratios = [ours / theirs for ours, theirs in zip(times["with"], times["without"], strict=True)]
    return {
        "shape": shape,
        "scored_tokens": kept.tokens,
        "rounds": rounds,
        "without_seconds": median(times["without"]),
        "with_seconds": median(times["with"]),
        "ratio": median(ratios),
        "hidden_bytes_per_token": kept.hidden_bytes / kept.tokens,
        "logits_bytes_per_token": kept.logits_bytes / kept.tokens,
        "head_bytes": kept.head_bytes,
        "reference_parameters": whole.reference.parameters,
    }


def memory(work: Path) -> dict[str, Any]:
    """Peak resident memory of caching over more and more documents, and of measuring with and without."""
    same = ["--window", "256", "--quiet"]
    peaks: dict[str, float] = {}
    for count in (25, 100, 400):
        text = ["--text", str(documents(work / f"{count}.jsonl", count, 256))]
        out = ["--out", str(work / f"cache-{count}")]
        peaks[f"cache {count}"] = peak([sys.executable, "-m", "kleash", "cache", *text, *same, *out])
    cached = ["--reference-cache", str(work / "cache-100")]
    text = ["--text", str(work / "100.jsonl")]
    for name, more in (("measure without", []), ("measure with", cached)):
        out = ["--out", str(work / name.replace(" ", "-"))]
        peaks[name] = peak([sys.executable, "-m", "kleash", "measure", *text, *same, *more, *out])
    return {"peak_mb": peaks}


def main() -> None:
    """Run what the command line asks for, print it and write it beside the other results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["rounding", "speed", "memory"])
    parser.add_argument("--shape", choices=["shipped", "qwen3-0.6b"], default="shipped")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    given = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        name = f"caching_{given.what}"
        if given.what == "speed":
            result = speed(given.shape, given.rounds, given.tokens, work)
            name = f"{name}_{given.shape}"
        else:
            result = rounding() if given.what == "rounding" else memory(work)
    print(json.dumps(result, indent=2))
    write_result(name, result)


if __name__ == "__main__":
    main()
