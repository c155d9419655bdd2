"""What a leash does: one reward that is easily hacked, trained with three values of beta, beside best-of-n.

    python examples/leash_demonstration.py --out leashes/

trains the shipped model by PPO on the number of times that a response says "she" or "her", with beta 0, 0.3 and 5, in
about four minutes of processor time. Each run has a report of its own; leashes.png shows the reward of all of them
against their KL, with best-of-n sampling from the reference. Needs kleash[train].
"""

import argparse
import json
from math import comb
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from kleash.jobs import PPOJob
from kleash.jobs.option_groups import SHIPPED_PROMPTS, SHIPPED_REFERENCE
from kleash.jobs.train import SHIPPED_REWARD
from kleash.leash import best_of_n_bound
from kleash.models import Sampling, generate, load_pair, read_prompts
from kleash.store import StepRecord, read_steps
from kleash.training import train
from kleash.training.rewards import load_rewards
from kleash.uncertainty import Estimate, clustered_mean

BETAS = {"off": 0.0, "good": 0.3, "tight": 5.0}
"""Name of a run -> the reward that a nat of KL costs."""
BEST_OF = (1, 2, 4, 8, 16)
KL, REWARD = "kl/exact_per_sequence", "reward/score"


class BestOf(NamedTuple):
    """Best-of-n sampling from the reference."""

    n: int
    reward: Estimate
    bound: float
    """log n - (n - 1)/n nats per response, which the KL to the reference does not exceed."""


def main() -> None:
    """Run all parts, and print the last step of each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("leashes"), help="folder of the runs and the picture"
    )
    for name, default in (("steps", 28), ("prompts", 24), ("draws", 32), ("tokens", 24)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} if not given")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    best_of = sample_reference(args.out / "prompts.jsonl", args.prompts, args.draws, args.tokens)
    runs = {}
    for name, beta in BETAS.items():
        print(f"beta {beta}: {args.steps} steps into {args.out / name}", flush=True)
        train(job_of(args.out, name, args.steps, args.prompts, args.tokens))
        runs[name] = read_steps(args.out / name)
    for point in best_of:
        print(
            f"best of {point.n:2}: reward {point.reward.value:5.2f}, KL at most {point.bound:6.2f} nats a response"
        )
    for name, history in runs.items():
        last = history[-1].metrics
        print(f"beta {BETAS[name]:7}: reward {last[REWARD]:5.2f}, KL {last[KL]:6.2f} nats a response")
    draw(runs, best_of, args.out / "leashes.png")


def job_of(root: Path, name: str, steps: int, prompts: int, tokens: int) -> PPOJob:
    """The job of a run: each step uses all prompts and makes one update.

    The rank of the adapter is small, so that little KL comes from noise in the gradient.
    """
    return PPOJob(
        prompts=str(root / "prompts.jsonl"),
        out=str(root / name),
        beta=BETAS[name],
        lora_rank=8,
        minibatches=1,
        epochs=1,
        steps=steps,
        prompts_per_step=prompts,
        samples_per_prompt=2,
        max_new_tokens=tokens,
        learning_rate=5e-3,
        checkpoint_every=steps,
    )


def sample_reference(path: Path, prompts: int, draws: int, tokens: int) -> list[BestOf]:
    """Write the shortest shipped prompts to a file; the reward of best-of-n among draws of the reference."""
    pair = load_pair(SHIPPED_REFERENCE, SHIPPED_REFERENCE)
    shortest = sorted(read_prompts(SHIPPED_PROMPTS, pair), key=lambda prompt: len(prompt.token_ids))[:prompts]
    path.write_text("".join(json.dumps({"prompt": prompt.text}) + "\n" for prompt in shortest))
    responses = generate(pair.policy, shortest, Sampling(samples_per_prompt=draws, max_new_tokens=tokens))
    scores = load_rewards([SHIPPED_REWARD], tokenizer=pair.tokenizer).of(responses).total
    rewards = scores.reshape(len(shortest), draws)
    return [BestOf(n, best_of_n_reward(rewards, n), best_of_n_bound(n)) for n in BEST_OF if n <= draws]


def best_of_n_reward(rewards: Float64[np.ndarray, "prompts draws"], n: int) -> Estimate:
    """Mean reward of the best of ``n`` responses, averaged over all subsets of n among the draws of each prompt.

        sum over k of r_(k) C(k - 1, n - 1) / C(draws, n),    r_(1) <= r_(2) <= …

    Unbiased for n up to the number of draws; prompts are the clusters.
    """
    draws = rewards.shape[1]
    weights = np.array([comb(k, n - 1) / comb(draws, n) for k in range(draws)])
    return clustered_mean(np.sort(rewards, axis=1) @ weights, np.arange(len(rewards)), unit="none")


def draw(runs: dict[str, tuple[StepRecord, ...]], best_of: list[BestOf], path: Path) -> None:
    """Reward against KL, both on logarithmic axes; the first step, whose KL is 0, has no place there."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, history in runs.items():
        points = [(record.metrics[KL], record.metrics[REWARD]) for record in history[1:]]
        axes.plot(*zip(*points, strict=True), marker=".", label=f"beta {BETAS[name]:g}")
    for point in best_of[1:]:
        place = point.bound, point.reward.value
        axes.plot(*place, "kd", fillstyle="none", label="best of n" if point.n == 2 else None)
        axes.annotate(str(point.n), place, textcoords="offset points", xytext=(-10, 5))
    axes.set(xscale="log", yscale="log", xlabel="KL(policy ‖ reference), nats per response")
    axes.set_ylabel("reward per response")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
