"""One run of leash_spread.py: what it is, how it is trained, and what is measured of it."""

import json
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kleash.jobs import SHIPPED_PROMPTS, SHIPPED_REFERENCE, PPOJob
from kleash.jobs.train import SHIPPED_REWARD
from kleash.models import Pair, Prompt, Sampling, generate, load_pair, read_prompts, score
from kleash.store import read_steps
from kleash.training.ppo import train_ppo
from kleash.training.rewards import load_rewards


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs share; chosen by a few runs of seed 1000 (of decay 0.95), which is none of the study's."""

    prompts: int = 24
    """The shortest of the shipped ones; each step takes all of them."""
    max_new_tokens: int = 12
    steps: int = 16
    learning_rate: float = 5e-4
    lora_rank: int = 0
    """0: every weight."""
    decay: float = 1.0
    """Of GAE: with 1, later KL counts in full where it is rewarded too: one expected gradient for all estimates."""
    held_out: int = 24
    """The next longer prompts: the last policy answers them."""
    held_out_samples: int = 8
    reward: str = SHIPPED_REWARD
    beta: float = 0.3
    """Of the runs that compare estimators."""
    betas: tuple[float, ...] = (0.15, 0.3, 0.6, 1.2)
    """Of the frontier."""
    window: int = 5
    """Steps that a path is averaged over."""
    equal_reward: float = 0.9
    """The reward at which the KLs of paths are compared."""
    equal_kl: float = 1.5
    """The KL, in nats per response, at which the rewards of the frontiers are compared."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    kl: str
    place: str
    scope: str
    beta: float
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is known by."""
        return (self.kl, self.place, self.scope, self.beta, self.seed)


def planned(setting: Setting, seeds: int, frontier_seeds: int, only: str | None = None) -> list[Run]:
    """The runs in their order: seeds come one after the other, so that wherever it stops all have as many."""
    turns: dict[tuple[Any, ...], tuple[float, Run]] = {}
    rows: list[tuple[float, Run]] = []
    if only != "frontier":
        for seed in range(seeds):
            for place, (kl, where) in enumerate((("exact", "loss"), ("k1", "reward"), ("k3", "loss"))):
                run = Run(kl=kl, place=where, scope="sequence", beta=setting.beta, seed=seed)
                rows.append((seed + place / 10, run))
    if only != "estimators":
        apart = seeds / max(frontier_seeds, 1)
        each = [(scope, beta) for beta in setting.betas for scope in ("sequence", "token")]
        for seed in range(frontier_seeds):
            for place, (scope, beta) in enumerate(each):
                run = Run(kl="exact", place="loss", scope=scope, beta=beta, seed=seed)
                rows.append((apart * (seed + place / len(each)), run))
    for turn, run in sorted(rows, key=lambda row: row[0]):
        turns.setdefault(run.key, (turn, run))
    return [run for _, run in turns.values()]


def job_of(run: Run, setting: Setting, prompts: Path, out: Path) -> PPOJob:
    """The run as kleash's PPO takes it."""
    return PPOJob(
        prompts=str(prompts),
        prompts_per_step=setting.prompts,
        max_new_tokens=setting.max_new_tokens,
        steps=setting.steps,
        learning_rate=setting.learning_rate,
        lora_rank=setting.lora_rank,
        gae_lambda=setting.decay,
        epochs=1,
        minibatches=1,
        checkpoint_every=setting.steps,
        reward=(setting.reward,),
        kl=run.kl,
        kl_place=run.place,
        kl_scope=run.scope,
        beta=run.beta,
        seed=run.seed,
        device="cpu",
        out=str(out),
    )


def prompts_of(setting: Setting) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts that are trained on, and those that are held out."""
    pair = load_pair(SHIPPED_REFERENCE, SHIPPED_REFERENCE, device="cpu")
    by_length = sorted(read_prompts(SHIPPED_PROMPTS, pair), key=lambda prompt: len(prompt.token_ids))
    return by_length[: setting.prompts], by_length[setting.prompts : setting.prompts + setting.held_out]


def carry_out(run: Run, setting: Setting, trained: list[Prompt], held_out: list[Prompt]) -> dict[str, Any]:
    """Train, and see what came out: each step's reward and KL, and the last policy on prompts it has not seen."""
    began, cpu = time.monotonic(), time.process_time()
    with TemporaryDirectory() as folder:
        prompts, out = Path(folder) / "prompts.jsonl", Path(folder) / "run"
        prompts.write_text("".join(json.dumps({"prompt": one.text}) + "\n" for one in trained))
        result = train_ppo(job_of(run, setting, prompts, out))
        steps = [record.metrics for record in read_steps(out)]
        pair = load_pair(result.policy, SHIPPED_REFERENCE, device="cpu")
        last = held_out_figures(pair, held_out, setting, run.seed)
    return {
        **asdict(run),
        "setting": json.loads(json.dumps(asdict(setting))),
        "rewards": [round(one["reward/score"], 6) for one in steps],
        "kls": [round(one["kl/exact_per_sequence"], 6) for one in steps],
        "held_out": last,
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "seconds": round(time.monotonic() - began, 1),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def held_out_figures(pair: Pair, prompts: list[Prompt], setting: Setting, seed: int) -> dict[str, float]:
    """Mean reward and mean exact KL(policy || reference) per response, with what sampling adds to each.

    The prompts are the same for all runs, so the errors are those of the samples within prompts.
    """
    sampling = Sampling(
        samples_per_prompt=setting.held_out_samples, max_new_tokens=setting.max_new_tokens, seed=seed
    )
    answers = generate(pair.policy, prompts, sampling)
    rewards = load_rewards([setting.reward], tokenizer=pair.tokenizer).of(answers).total
    token_kl = score(pair, answers)["kl_policy_reference"]
    ends = np.cumsum([len(one.response_ids) for one in answers])
    kls = np.array([part.sum(dtype=np.float64) for part in np.split(token_kl, ends[:-1])])
    found: dict[str, float] = {}
    for name, values in (("reward", rewards), ("kl", kls)):
        by_prompt = np.asarray(values, np.float64).reshape(len(prompts), setting.held_out_samples)
        within = by_prompt.var(1, ddof=1).mean() / by_prompt.size
        found |= {name: round(float(by_prompt.mean()), 6), f"{name}_error": round(float(within**0.5), 6)}
    return found
