"""Time of ``kl_loss``, compared with the plain k3 expression of TRL.

    python benchmarks/losses_speed.py
    python benchmarks/losses_speed.py --threads 1 --clock cpu

One forward and backward pass over a million tokens: the k3 expression with its masked mean, as in TRL's GRPO trainer,
against ``kl_loss`` with ``masked_mean``, with a bool mask and with an int64 mask. Runs are interleaved after a warm-up:
in each round every candidate runs once; the medians of the ratios within rounds are printed and written. On a shared
machine wall time is noisy; use one thread and its processor time.
"""

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
from harness import write_result
from torch import Tensor

from kleash.losses import future_kl_loss, kl_loss
from kleash.masking import masked_mean

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def plain_k3(token_logp: Tensor, token_logq: Tensor, mask: Tensor) -> Tensor:
    per_token = torch.exp(token_logq - token_logp) - (token_logq - token_logp) - 1
    return (per_token * mask).sum() / mask.sum()


def ours(token_logp: Tensor, token_logq: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(kl_loss(token_logp, token_logq, mask), mask)


def ours_between_responses(token_logp: Tensor, token_logq: Tensor, mask: Tensor) -> Tensor:
    per_token = kl_loss(token_logp, token_logq, mask)
    return masked_mean(per_token + future_kl_loss(token_logp, per_token, mask), mask)


CANDIDATES = {"plain k3": plain_k3, "kl_loss": ours, "kl_loss + future_kl_loss": ours_between_responses}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock, shape = CLOCKS[args.clock], (args.sequences, args.steps)
    token_logp = -3 * torch.rand(shape)
    token_logq = token_logp + 0.3 * torch.randn(shape)
    lengths = torch.randint(args.steps // 5, args.steps + 1, (args.sequences, 1))
    mask = torch.arange(args.steps) < lengths
    figures: dict[str, Any] = vars(args) | {"load": os.getloadavg()[0]}
    for kind, typed_mask in (("bool", mask), ("int64", mask.long())):
        times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
        for _ in range(args.rounds + 3):
            for name, loss in CANDIDATES.items():
                leaf = token_logp.detach().requires_grad_()
                start = clock()
                loss(leaf, token_logq, typed_mask).backward()
                times[name].append(clock() - start)
        timed = {name: seconds[3:] for name, seconds in times.items()}
        ratios = {
            name: round(median(a / b for a, b in zip(seconds, timed["plain k3"], strict=True)), 3)
            for name, seconds in timed.items()
        }
        milliseconds = {name: round(1000 * median(seconds), 2) for name, seconds in timed.items()}
        figures[kind] = {"ratio to plain k3": ratios, "milliseconds": milliseconds}
        print(f"mask of {kind}: {milliseconds} ms, ratios {ratios}")
    name = "losses_speed" if args.clock == "wall" else "losses_speed_one_thread"
    print(f"written to {write_result(name, figures)}")


if __name__ == "__main__":
    main()
