"""The demonstration: one reward trained with three values of beta, compared with best-of-n."""

import json
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from kleash.errors import CannotRunError, Interrupted, RunFolderError
from kleash.jobs import PPOJob
from kleash.jobs.demonstration import DemonstrationJob
from kleash.jobs.option_groups import SHIPPED_PROMPTS, SHIPPED_REFERENCE
from kleash.jobs.train import SHIPPED_REWARD
from kleash.launch_environment import launched_world_size
from kleash.leash import best_of_n_bound, best_of_n_kl_from_rewards
from kleash.measuring.run import default_out
from kleash.models import Sampling, generate, load_pair, read_prompts
from kleash.models.threads import threads_for
from kleash.reports.demonstration import write_demonstration
from kleash.store import Number, Sample
from kleash.store.atomic import write_atomically
from kleash.store.checksums import file_checksum, write_checked
from kleash.store.demonstration import DEMONSTRATION, BestOf, Demonstration, LeashSetting
from kleash.store.steps import STEPS
from kleash.training.algorithms import train
from kleash.training.rewards import load_rewards
from kleash.training.run_log import Display
from kleash.uncertainty import Estimate, clustered_mean
from kleash.version import __version__

MEANT = 'how often a response says "she", "her" or "herself", meant to keep the story with its heroine'
PROMPTS = "prompts.jsonl"
BEST_OF = (1, 2, 4, 8, 16)
SAMPLES = 4


@dataclass(frozen=True, kw_only=True)
class DemonstrationSettings:
    """Size of the demonstration; tests use smaller ones."""

    steps: int = 28
    prompts: int = 24
    """Number of prompts: the shortest of the shipped ones."""
    draws: int = 32
    """Responses of the reference to each prompt, for best-of-n."""
    samples_per_prompt: int = 2
    max_new_tokens: int = 24
    learning_rate: float = 5e-3

    def job(self, demonstration_job: DemonstrationJob, root: Path, **leash: Any) -> PPOJob:
        """The job of a run: each step uses all prompts and makes one update.

        The rank of the adapter is small, so that little KL comes from noise in the gradient.
        """
        return PPOJob(
            prompts=str(root / PROMPTS),
            lora_rank=8,
            minibatches=1,
            epochs=1,
            steps=self.steps,
            prompts_per_step=self.prompts,
            samples_per_prompt=self.samples_per_prompt,
            max_new_tokens=self.max_new_tokens,
            learning_rate=self.learning_rate,
            checkpoint_every=self.steps,
            seed=demonstration_job.seed,
            device=demonstration_job.device,
            **leash,
        )


def demonstrate(
    demonstration_job: DemonstrationJob,
    display: Display | None = None,
    settings: DemonstrationSettings | None = None,
) -> Demonstration:
    """Train the shipped reference three times on a reward that is easily hacked, and write a report.

    Args:
        demonstration_job: output folder, seed and device.
        display: shows the steps.
        settings: size of the demonstration.

    Returns:
        The runs and the figures of best-of-n; the metrics of each step are in the folders of the runs.

    Raises:
        RunFolderError: if the folder is not empty, or cannot be written.
        CannotRunError: if several processes were launched.
        Interrupted: at Ctrl-C; finished runs are kept.
    """
    if launched_world_size() > 1:
        raise CannotRunError(
            f"the demonstration takes one process and was launched with {launched_world_size()}; start one"
        )
    settings = settings if settings is not None else DemonstrationSettings()
    root = Path(demonstration_job.out if demonstration_job.out is not None else default_out())
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise RunFolderError(f"{root} holds something already; give another --out")
    root.mkdir(parents=True, exist_ok=True)
    with threads_for([SHIPPED_REFERENCE], device=demonstration_job.device) as note:
        if note is not None and display is not None:
            display.note(note)
        return _run(demonstration_job, settings, root, display)


def _run(
    demonstration_job: DemonstrationJob, settings: DemonstrationSettings, root: Path, display: Display | None
) -> Demonstration:
    """Run best-of-n and the three trainings in an empty folder."""
    best_of, samples = sample_reference(demonstration_job, settings, root)
    result = Demonstration(
        kleash=__version__,
        reward=SHIPPED_REWARD,
        meant=MEANT,
        runs=(),
        best_of=best_of,
        samples=samples,
    )
    for leash, job in leashes(demonstration_job, settings, root):
        if display is not None:
            display.note(f"{leash.title}: {leash.description}")
        try:
            train(replace(job, out=str(root / leash.name)), display)
        except Interrupted as stop:
            raise Interrupted(f"interrupted; the runs that had finished are kept in {root}") from stop
        leash = replace(leash, steps_sha256=file_checksum(root / leash.name / STEPS).sha256)
        result = replace(result, runs=(*result.runs, leash))
        write_checked(root, root / DEMONSTRATION, result.to_json())
        write_demonstration(root)
    return result


def leashes(
    demonstration_job: DemonstrationJob, settings: DemonstrationSettings, root: Path
) -> list[tuple[LeashSetting, PPOJob]]:
    """The three settings of beta with their jobs."""
    return [
        (
            LeashSetting(name="off", title="off the leash", description="beta is 0: KL costs nothing"),
            settings.job(demonstration_job, root, beta=0.0),
        ),
        (
            LeashSetting(
                name="good",
                title="a good leash",
                description="beta is 0.3: a nat of KL costs a third of a word",
            ),
            settings.job(demonstration_job, root, beta=0.3),
        ),
        (
            LeashSetting(
                name="tight", title="too tight a leash", description="beta is 5: a nat of KL costs five words"
            ),
            settings.job(demonstration_job, root, beta=5.0),
        ),
    ]


def sample_reference(
    demonstration_job: DemonstrationJob, settings: DemonstrationSettings, root: Path
) -> tuple[tuple[BestOf, ...], tuple[Sample, ...]]:
    """Choose and write the prompts; returns rewards and KLs of best-of-n, and some responses, of the reference."""
    pair = load_pair(SHIPPED_REFERENCE, SHIPPED_REFERENCE, device=demonstration_job.device)
    shipped = read_prompts(SHIPPED_PROMPTS, pair)
    shortest = sorted(shipped, key=lambda prompt: len(prompt.token_ids))[: settings.prompts]
    lines = [json.dumps({"prompt": prompt.text}, ensure_ascii=False) + "\n" for prompt in shortest]
    write_atomically(root / PROMPTS, "".join(lines))
    sampling = Sampling(
        samples_per_prompt=settings.draws, max_new_tokens=settings.max_new_tokens, seed=demonstration_job.seed
    )
    responses = generate(pair.policy, shortest, sampling)
    scores = load_rewards([SHIPPED_REWARD], tokenizer=pair.tokenizer).of(responses).total
    rewards = scores.reshape(len(shortest), settings.draws)
    samples = tuple(
        Sample(prompt=sequence.prompt_text, response=sequence.response_text, reward=float(scores[at]), kl=0.0)
        for at, sequence in enumerate(responses)
        if at % settings.draws == 0
    )
    points = tuple(
        BestOf(
            n=n,
            reward=Number.of(best_of_n_reward(rewards, n)),
            kl=Number.of(best_of_n_kl_from_rewards(rewards, n)),
            bound=best_of_n_bound(n),
        )
        for n in BEST_OF
        if n <= settings.draws
    )
    return points, samples[:SAMPLES]


def best_of_n_reward(rewards: Float64[np.ndarray, "prompts draws"], n: int) -> Estimate:
    """Mean reward of the best of ``n`` responses, averaged over all subsets of n among the draws of each prompt.

        sum over k of r_(k) C(k - 1, n - 1) / C(draws, n),    r_(1) <= r_(2) <= …

    Unbiased for n up to the number of draws; prompts are the clusters.
    """
    draws = rewards.shape[1]
    weights = np.array([comb(k, n - 1) / comb(draws, n) for k in range(draws)])
    best = np.sort(rewards, axis=1) @ weights
    return clustered_mean(best, np.arange(len(best)), unit="none")
