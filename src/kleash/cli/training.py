"""``kleash train``: its options, and what is said at its end."""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import tyro
from rich.console import Console
from rich.markup import escape

from kleash.cli.steps import Steps
from kleash.records import (
    DemonstrationJob,
    DistillJob,
    DPOJob,
    GRPOJob,
    PPOJob,
    RLOOJob,
    TrainingResult,
    TrainJob,
)


class Unchecked:
    """Options as they were typed."""

    def __post_init__(self) -> None:
        """Leave the checks to the job, whose errors are one line."""


@dataclass(frozen=True, kw_only=True)
class Demonstrate(Unchecked, DemonstrationJob):
    """See what a leash does: the shipped model and a reward that is easily hacked, three times.

    Once off the leash, once on a good one, once on one that is too tight. About two minutes on two cores.
    """


@dataclass(frozen=True, kw_only=True)
class PPO(Unchecked, PPOJob):
    """Train by PPO: the policy answers, is rewarded, and is kept near the reference.

    Without arguments: the model and the prompts that ship with kleash, and a reward that is easily hacked.
    """


@dataclass(frozen=True, kw_only=True)
class GRPO(Unchecked, GRPOJob):
    """Train by GRPO (TRL's): the answers to one prompt are compared with each other.

    Without arguments: the model and the prompts that ship with kleash, and a reward that is easily hacked.
    """


@dataclass(frozen=True, kw_only=True)
class RLOO(Unchecked, RLOOJob):
    """Train by RLOO (TRL's): each answer is compared with the others to the same prompt.

    Without arguments: the model and the prompts that ship with kleash, and a reward that is easily hacked.
    """


@dataclass(frozen=True, kw_only=True)
class DPO(Unchecked, DPOJob):
    """Train by DPO (TRL's): from pairs of a chosen and a rejected answer."""


@dataclass(frozen=True, kw_only=True)
class Distill(Unchecked, DistillJob):
    """Train a policy to say what a teacher would: it answers, and learns from the teacher's distributions.

    Without arguments: the two models that ship with kleash.
    """


Algorithm: TypeAlias = (
    Annotated[Demonstrate, tyro.conf.subcommand("demonstration")]
    | Annotated[PPO, tyro.conf.subcommand("ppo")]
    | Annotated[GRPO, tyro.conf.subcommand("grpo")]
    | Annotated[RLOO, tyro.conf.subcommand("rloo")]
    | Annotated[DPO, tyro.conf.subcommand("dpo")]
    | Annotated[Distill, tyro.conf.subcommand("distill")]
)
JOBS: dict[type, type[TrainJob]] = {
    PPO: PPOJob,
    GRPO: GRPOJob,
    RLOO: RLOOJob,
    DPO: DPOJob,
    Distill: DistillJob,
}


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a language model on a leash to its reference.

    Without an algorithm: a demonstration of what the leash does, in two minutes.
    """

    algorithm: tyro.conf.OmitSubcommandPrefixes[Algorithm] = Demonstrate()

    def job(self) -> Any:
        """The job that was asked for.

        Raises:
            OptionError: if it means nothing.
        """
        kind: Any = JOBS.get(type(self.algorithm), DemonstrationJob)
        return kind(**asdict(self.algorithm))


def run_train(command: Train) -> int:
    """Do what ``command`` says; 0 when it is done, 1 when the run was stopped before its last step.

    Raises:
        KleashError: if it cannot be done.
    """
    job = command.job()  # what means nothing is said before torch is loaded
    return _demonstrate(job) if isinstance(job, DemonstrationJob) else _train(job)


def _train(job: TrainJob) -> int:
    from kleash.training import train
    from kleash.training.running import is_first

    if job.quiet or not is_first():
        result = train(job)
    else:
        with Steps(job.steps) as steps:
            result = train(job, steps)
    if not is_first():
        return 0 if result.stopped is None else 1
    if job.json:
        sys.stdout.write(result.to_json())
    elif not job.quiet:
        print_result(result)
    return 0 if result.stopped is None else 1


def print_result(result: TrainingResult) -> None:
    """What a run came to, and where it lies."""
    console = Console(highlight=False)
    if result.stopped is not None:
        console.print(f"[yellow]stopped:[/yellow] {escape(result.stopped)}", soft_wrap=True)
    said = ", ".join(
        f"{what} {result.metrics[name]:.4g}{unit}"
        for what, name, unit in (
            ("reward", "reward/score", ""),
            ("KL(policy || reference)", "kl/exact_per_sequence", " nats per sequence"),
            ("beta", "beta", ""),
            ("accuracy", "pairs/accuracy", ""),
            ("divergence from the teacher", "teacher/divergence", " nats per token"),
        )
        if name in result.metrics
    )
    console.print(f"after step {result.steps}: {said}", soft_wrap=True)
    console.print(f"policy: {escape(result.policy)}", soft_wrap=True)
    console.print(f"report: {escape(str(Path(result.out) / 'report.html'))}", soft_wrap=True)


def _demonstrate(job: DemonstrationJob) -> int:
    from kleash.measuring import default_out
    from kleash.training.demonstration import Setting, demonstrate

    job = replace(job, out=job.out if job.out is not None else default_out())
    setting = Setting()
    if job.quiet:
        found = demonstrate(job, None, setting)
    else:
        with Steps(setting.steps) as steps:
            found = demonstrate(job, steps, setting)
    if job.json:
        sys.stdout.write(found.to_json())
    elif not job.quiet:
        Console(highlight=False).print(
            f"report: {escape(str(Path(str(job.out)) / 'report.html'))}", soft_wrap=True
        )
    return 0
