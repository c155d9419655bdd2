"""Time of kleash's sampling, compared with softmax and multinomial; and how many samples change with the logits.

    python benchmarks/drawing.py speed
    python benchmarks/drawing.py turned

"speed": from 32 rows of logits to tokens and their log-probabilities, at each vocabulary size, interleaved with
``torch.multinomial(logits.softmax(-1), 1)``; the result is the median of the ratios within rounds. "turned": the share
of samples that change when noise is added to the logits, for kleash's sampling, for plain Gumbel-max with the same
keyed noise for each token, and for the inverse of the cumulative distribution.
"""

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

import torch
from harness import interleaved, ratio, write_result

from kleash.linear import Head, log_probabilities
from kleash.models import draw
from kleash.models.keyed_draws import exponentials

VOCABULARIES = (32_768, 151_936, 262_144)
ROWS = 32
NOISES = (1e-6, 4e-3)
VOCAB_SIZE, BLOCK = 4096, 500


def speed(rounds: int, device: str) -> dict[str, Any]:
    """Milliseconds and their ratio at each vocabulary size."""
    keys = [(f"{row:016x}", row, 3) for row in range(ROWS)]
    head = Head(weight=None)
    figures: dict[str, Any] = {"rows": ROWS, "rounds": rounds}
    for vocab_size in VOCABULARIES:
        logits = 3 * torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)

        def ours(logits: torch.Tensor = logits) -> list[int]:
            return draw(log_probabilities(logits, head), 7, keys)[0].tolist()

        def peer(logits: torch.Tensor = logits) -> list[int]:
            return torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()

        jobs = {"kleash": ours, "multinomial": peer}
        interleaved(jobs, 2)
        times, _ = interleaved(jobs, rounds, clock=perf_counter)
        figures[str(vocab_size)] = {
            **{f"{name}_ms": round(1e3 * median(seconds), 2) for name, seconds in times.items()},
            "ratio": ratio(times["kleash"], times["multinomial"]),
        }
    return figures


def changed_shares(draws: int) -> dict[str, Any]:
    """Shares of samples that change, for some shapes of distribution and sizes of noise."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(VOCAB_SIZE, generator=generator, dtype=torch.float64)
    ranks = torch.randperm(VOCAB_SIZE, generator=generator).double()
    shapes = {
        "flat": torch.zeros(VOCAB_SIZE, dtype=torch.float64),
        "normal, deviation 1": normal,
        "normal, deviation 4": 4 * normal,
        "Zipf, exponent 1.2": -1.2 * torch.log1p(ranks),
    }
    return {
        name: {f"{noise:g}": _changed_share(logits, noise, draws, generator) for noise in NOISES}
        for name, logits in shapes.items()
    }


def _changed_share(
    logits: torch.Tensor, noise: float, draws: int, generator: torch.Generator
) -> dict[str, float]:
    counts: dict[str, int] = dict.fromkeys(("kleash", "gumbel_max", "inverse_cdf"), 0)
    before = logits.log_softmax(-1).expand(BLOCK, -1)
    for start in range(0, draws, BLOCK):
        keys = [("prompt", number, 0) for number in range(start, start + BLOCK)]
        gumbel = -exponentials(3, keys, VOCAB_SIZE).log()
        uniform = torch.rand(BLOCK, 1, generator=generator, dtype=torch.float64)
        noisy_logits = logits + noise * torch.randn(
            BLOCK, VOCAB_SIZE, generator=generator, dtype=torch.float64
        )
        after = noisy_logits.log_softmax(-1)
        for name, (tokens_before, tokens_after) in {
            "kleash": (draw(logp, 3, keys)[0] for logp in (before, after)),
            "gumbel_max": ((logp + gumbel).argmax(-1) for logp in (before, after)),
            "inverse_cdf": (
                torch.searchsorted(logp.exp().cumsum(-1), uniform)[:, 0] for logp in (before, after)
            ),
        }.items():
            counts[name] += int((tokens_before != tokens_after).sum())
    return {name: count / draws for name, count in counts.items()}


def main() -> None:
    """Run the benchmark, print the result and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "turned"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    result = (
        speed(options.rounds, options.device) if options.what == "speed" else changed_shares(options.draws)
    )
    print(json.dumps(result, indent=2))
    write_result(f"drawing_{options.what}", result)


if __name__ == "__main__":
    main()
