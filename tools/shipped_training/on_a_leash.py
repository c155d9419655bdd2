"""The policy: the reference after PPO on a leash."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kleash.cli.progress import Steps
from kleash.jobs import PPOJob
from kleash.jobs.train import SHIPPED_REWARD
from kleash.training import train

ON_THE_CARD = (
    "steps",
    "prompts_per_step",
    "samples_per_prompt",
    "max_new_tokens",
    "learning_rate",
    "lora_rank",
    "epochs",
    "minibatches",
    "kl",
    "kl_place",
    "kl_scope",
    "beta",
    "controller",
    "target_nats",
)
"""Fields of the job that the card has."""


def job_of(reference: Path, prompts: Path, run: Path, seed: int) -> PPOJob:
    """The PPO job of the policy; its target is a quarter of a nat per token of a full response."""
    return PPOJob(
        policy=str(reference),
        prompts=str(prompts),
        reward=(SHIPPED_REWARD,),
        steps=80,
        prompts_per_step=32,
        samples_per_prompt=4,
        max_new_tokens=48,
        learning_rate=2e-3,
        lora_rank=8,
        minibatches=2,
        epochs=1,
        beta=0.25,
        controller="pid",
        target_nats=12.0,
        seed=seed,
        out=str(run),
        resume=run.exists(),
    )


def train_policy(reference: Path, prompts: list[str], run: Path, seed: int) -> tuple[Path, dict[str, Any]]:
    """Train the policy, or resume the training in ``run``.

    Returns:
        The trained model's folder, and the details for the card: settings, and the last step's metrics.
    """
    run.mkdir(parents=True, exist_ok=True)
    source = run / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    job = job_of(reference, source, run / "ppo", seed)
    shown = Steps(job.steps)
    result = train(job, shown)
    settings = {name: asdict(job)[name] for name in ON_THE_CARD}
    last = {name: result.metrics[name] for name in ("reward/score", "kl/exact_per_sequence", "beta")}
    return Path(result.policy), {"prompts": len(prompts), "reward": SHIPPED_REWARD, **settings, "last": last}
