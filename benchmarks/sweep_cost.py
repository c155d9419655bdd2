"""Time of a candidate in `kleash sweep`, compared with its own forward pass and one matmul with the reference's head.

    python benchmarks/sweep_cost.py --shape qwen3-0.6b --tokens 512 --rounds 6
    python benchmarks/sweep_cost.py --shape shipped --tokens 20000 --rounds 6
    python benchmarks/sweep_cost.py --shape qwen3-0.6b --tokens 512 --rounds 6 --whole

The ways are interleaved in one process, after a warm-up, and timed in processor time, which other programs on the
machine disturb least. The results are the medians of the ratios within rounds with the smallest and the largest, which
enclose the median with 97 % confidence if there are 6 rounds, and with 75 % if there are 3. The candidate is scored and
written as a sweep does it: all columns of all tokens, against the reference's hidden states from the cache. The
bare work is done in two ways on the same batches: "network" calls the candidate's network, which returns the logits of
all positions at once, and "products" its body, and multiplies the scored positions with its head a few rows at a time,
which is the least that any way must do. Both then multiply as many hidden states with the reference's head. With
--whole all begin with loading the candidate and reading the text, and the candidate's run ends with its report.
Writes results/sweep_cost_SHAPE.json.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from harness import interleaved, write_result

from kleash.engines import LocalEngine
from kleash.jobs import SweepJob
from kleash.measuring import cache_reference, measure
from kleash.measuring.model_pair import load_models
from kleash.measuring.shards import plan_shards
from kleash.models import Pair
from kleash.models.scoring import pad_batch
from kleash.sources.sequences import batch_by_length
from kleash.store import RunFolder
from measuring import SHIPPED, documents, make_pair

CHUNK = 128
"""Rows of the bare product at once."""


def bare_work(pair: Pair, shards: list[Any], batch_tokens: int, *, by_network: bool) -> None:
    """The candidate's logits in the batches of a sweep, and one product with the reference's head."""
    own_head, head = pair.policy.head.weight, pair.reference.head.weight
    assert own_head is not None and head is not None
    for shard in shards:
        sequences = shard.sequences
        for batch in batch_by_length([sequence.num_input_tokens for sequence in sequences], batch_tokens):
            ids, rows, cols = pad_batch([sequences[index] for index in batch])
            with torch.inference_mode():
                if by_network:
                    assert pair.policy.network(input_ids=ids, use_cache=False).logits is not None
                else:
                    multiply(pair.policy.hidden_states(ids)[rows, cols], own_head)
                multiply(torch.ones(len(rows), head.shape[1], dtype=head.dtype), head)


def multiply(hidden: torch.Tensor, head: torch.Tensor) -> None:
    """The product of hidden states and a head, some rows at a time into one buffer."""
    buffer = torch.empty(CHUNK, len(head), dtype=head.dtype)
    for part in hidden.split(CHUNK):
        torch.mm(part, head.T, out=buffer[: len(part)])


def work_of(job: SweepJob, out: Path, *, whole: bool) -> dict[str, Callable[[], object]]:
    """The ways of a round."""
    cache_reference(job.cache_job(out))
    candidate = job.measure_job(1, out)
    if whole:
        runs = iter(range(10**6))

        def bare(by_network: bool) -> None:
            pair = load_models(candidate, None)
            shards = list(plan_shards(candidate, pair).shards)
            bare_work(pair, shards, job.batch_tokens, by_network=by_network)

        return {
            "network": lambda: bare(True),
            "products": lambda: bare(False),
            "kleash": lambda: measure(replace(candidate, out=str(out / f"run-{next(runs)}"))),
        }
    pair = load_models(candidate, None)
    shards = list(plan_shards(candidate, pair).shards)
    engine, folder = LocalEngine(pair=pair, job=candidate), RunFolder(out / "run")
    for name in ("tokens", "sequences"):
        (out / "run" / name).mkdir(parents=True)

    def scored() -> None:
        for shard in shards:
            result = engine.run(shard)
            folder.write_shard(shard.index, result.tokens, result.sequences)

    return {
        "network": lambda: bare_work(pair, shards, job.batch_tokens, by_network=True),
        "products": lambda: bare_work(pair, shards, job.batch_tokens, by_network=False),
        "kleash": scored,
    }


def main() -> None:
    """Run the rounds and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=("qwen3-0.6b", "shipped"), default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--whole", action="store_true", help="load the candidate and write its report as well"
    )
    parser.add_argument("--models", type=Path, help="folder in which the random models are kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        policy, reference = (
            SHIPPED if arguments.shape == "shipped" else make_pair(arguments.models or folder / "models")
        )
        job = SweepJob(
            candidates=(policy,),
            reference=reference,
            text=str(documents(folder / "text.jsonl", max(1, arguments.tokens // 256), 256)),
            window=256,
            batch_tokens=1024,
        )
        ways = work_of(job, folder / "sweep", whole=arguments.whole)
        for way in ways.values():
            way()
        times, loads = interleaved(ways, arguments.rounds, clock=process_time)
    figures: dict[str, Any] = {
        "shape": arguments.shape,
        "whole": arguments.whole,
        "tokens": arguments.tokens,
        "processor_seconds": {name: round(median(seconds), 3) for name, seconds in times.items()},
        "load_averages": [round(load, 1) for load in loads],
    }
    for name in ("network", "products"):
        ratios = [seconds / bare for seconds, bare in zip(times["kleash"], times[name], strict=True)]
        figures[f"ratio_to_{name}"] = {
            "median": round(median(ratios), 3),
            "smallest": round(min(ratios), 3),
            "largest": round(max(ratios), 3),
        }
    name = f"sweep_cost_{arguments.shape}{'_whole' if arguments.whole else ''}"
    print(f"{figures}\n{write_result(name, figures, packages=('transformers',))}, process {os.getpid()}")


if __name__ == "__main__":
    main()
