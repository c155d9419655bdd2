"""Small PPO runs for tests: tiny models and prompts on disk, and what a run works with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import SENTENCES, save_tiny

from kleash.models import read_prompts
from kleash.records import PPOJob
from kleash.training.ppo import Rollout, Run, roll_out, set_up


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward with some spread: vowels less consonants, over ten."""
    return [sum((c in "aeiou") - (c in "rstln") for c in response) / 10 for response in responses]


def moody(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward that draws from numpy's and torch's generators, which a resumed run has to seed as before."""
    moods = np.random.random(len(responses)) + torch.rand(len(responses)).numpy()  # noqa: NPY002
    return (np.array(vowels(prompts, responses)) + moods).tolist()


def write_prompts(folder: Path) -> Path:
    """Prompts of different lengths, a line each."""
    path = folder / "prompts.txt"
    words = [sentence.split() for sentence in SENTENCES]
    path.write_text("".join(" ".join(line[: 2 + 2 * n]) + "\n" for n, line in enumerate(words)))
    return path


def tiny_job(folder: Path, architecture: str = "llama", **more: Any) -> PPOJob:
    """A run of seconds: a random model that has moved away from its reference; ``more`` are fields of the job."""
    if not (folder / "prompts.txt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_prompts(folder)
    for name, apart in (("policy", 0.2), ("reference", 0.0)):
        if not (folder / f"{architecture}-{name}").exists():
            _end_often(save_tiny(folder / f"{architecture}-{name}", architecture, apart=apart))
    settings: dict[str, Any] = {
        "policy": str(folder / f"{architecture}-policy"),
        "reference": str(folder / f"{architecture}-reference"),
        "prompts": str(folder / "prompts.txt"),
        "reward": ("ppo_cases:vowels",),
        "prompts_per_step": 4,
        "max_new_tokens": 8,
        "batch_tokens": 40,
        "learning_rate": 1e-3,
        "steps": 2,
        "out": str(folder / "out"),
    }
    return PPOJob(**{**settings, **more})


def _end_often(folder: Path) -> None:
    """Let one token in seven end a response, so that responses differ in length."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": list(range(1, 320, 7))}))


def ready(job: PPOJob) -> tuple[Run, list[Any]]:
    """What a run works with, and its prompts."""
    run = set_up(job)
    return run, read_prompts(job.source, run.networks.pair)


def rollout_of(run: Run, prompts: list[Any], step: int = 1) -> Rollout:
    """The rollout of a step."""
    return roll_out(run, prompts, step)
