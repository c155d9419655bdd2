"""The runs of leash_spread.py: plan, training and measurement."""

import json
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kleash.jobs import PPOJob
from kleash.jobs.option_groups import SHIPPED_PROMPTS, SHIPPED_REFERENCE
from kleash.jobs.train import SHIPPED_REWARD
from kleash.models import Pair, Prompt, Sampling, generate, load_pair, read_prompts, score
from kleash.store import read_steps
from kleash.training.ppo import train_ppo
from kleash.training.rewards import load_rewards


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting of all runs; chosen by a few runs with seed 1000 (and decay 0.95), which are not in the study."""

    prompts: int = 24
    """Number of prompts: the shortest of the shipped ones; each step uses all."""
    max_new_tokens: int = 12
    steps: int = 16
    learning_rate: float = 5e-4
    lora_rank: int = 0
    """0: every weight."""
    decay: float = 1.0
    """GAE lambda; with 1, all estimators have the same expected gradient, also if the KL is in the reward."""
    held_out: int = 24
    """Number of held-out prompts, the next longer ones; the last policy is evaluated on them."""
    held_out_samples: int = 8
    reward: str = SHIPPED_REWARD
    beta: float = 0.3
    """Beta of the runs that compare estimators."""
    betas: tuple[float, ...] = (0.15, 0.3, 0.6, 1.2)
    """Betas of the frontier."""
    window: int = 5
    """Steps over which a path is averaged."""
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
        """The fields that identify it."""
        return (self.kl, self.place, self.scope, self.beta, self.seed)


def plan_runs(setting: Setting, seeds: int, frontier_seeds: int, only: str | None = None) -> list[Run]:
    """The runs in order of seeds, so that an interrupted study has equally many seeds of each kind."""
    turns: dict[tuple[Any, ...], tuple[float, Run]] = {}
    rows: list[tuple[float, Run]] = []
    if only != "frontier":
        for seed in range(seeds):
            for place, (kl, where) in enumerate((("exact", "loss"), ("k1", "reward"), ("k3", "loss"))):
                run = Run(kl=kl, place=where, scope="sequence", beta=setting.beta, seed=seed)
                rows.append((seed + place / 10, run))
    if only != "estimators":
        spacing = seeds / max(frontier_seeds, 1)
        cells = [(scope, beta) for beta in setting.betas for scope in ("sequence", "token")]
        for seed in range(frontier_seeds):
            for place, (scope, beta) in enumerate(cells):
                run = Run(kl="exact", place="loss", scope=scope, beta=beta, seed=seed)
                rows.append((spacing * (seed + place / len(cells)), run))
    for turn, run in sorted(rows, key=lambda row: row[0]):
        turns.setdefault(run.key, (turn, run))
    return [run for _, run in turns.values()]


def job_of(run: Run, setting: Setting, prompts: Path, out: Path) -> PPOJob:
    """The PPO job of a run."""
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
    """The training prompts and the held-out prompts."""
    pair = load_pair(SHIPPED_REFERENCE, SHIPPED_REFERENCE, device="cpu")
    by_length = sorted(read_prompts(SHIPPED_PROMPTS, pair), key=lambda prompt: len(prompt.token_ids))
    return by_length[: setting.prompts], by_length[setting.prompts : setting.prompts + setting.held_out]


def execute(run: Run, setting: Setting, trained: list[Prompt], held_out: list[Prompt]) -> dict[str, Any]:
    """Train; each step's reward and KL, and the figures of the last policy on held-out prompts."""
    began, cpu = time.monotonic(), time.process_time()
    with TemporaryDirectory() as folder:
        prompts, out = Path(folder) / "prompts.jsonl", Path(folder) / "run"
        prompts.write_text("".join(json.dumps({"prompt": prompt.text}) + "\n" for prompt in trained))
        result = train_ppo(job_of(run, setting, prompts, out))
        steps = [record.metrics for record in read_steps(out)]
        pair = load_pair(result.policy, SHIPPED_REFERENCE, device="cpu")
        last = held_out_figures(pair, held_out, setting, run.seed)
    return {
        **asdict(run),
        "setting": json.loads(json.dumps(asdict(setting))),
        "rewards": [round(metrics["reward/score"], 6) for metrics in steps],
        "kls": [round(metrics["kl/exact_per_sequence"], 6) for metrics in steps],
        "held_out": last,
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "seconds": round(time.monotonic() - began, 1),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def held_out_figures(pair: Pair, prompts: list[Prompt], setting: Setting, seed: int) -> dict[str, float]:
    """Mean reward and mean exact KL(policy || reference) per response, with their standard errors from sampling.

    All runs have the same prompts, so the standard errors are within prompts.
    """
    sampling = Sampling(
        samples_per_prompt=setting.held_out_samples, max_new_tokens=setting.max_new_tokens, seed=seed
    )
    answers = generate(pair.policy, prompts, sampling)
    rewards = load_rewards([setting.reward], tokenizer=pair.tokenizer).of(answers).total
    token_kl = score(pair, answers)["kl_policy_reference"]
    ends = np.cumsum([len(answer.response_ids) for answer in answers])
    kls = np.array([part.sum(dtype=np.float64) for part in np.split(token_kl, ends[:-1])])
    figures: dict[str, float] = {}
    for name, values in (("reward", rewards), ("kl", kls)):
        by_prompt = np.asarray(values, np.float64).reshape(len(prompts), setting.held_out_samples)
        within = by_prompt.var(1, ddof=1).mean() / by_prompt.size
        figures |= {name: round(float(by_prompt.mean()), 6), f"{name}_error": round(float(within**0.5), 6)}
    return figures
