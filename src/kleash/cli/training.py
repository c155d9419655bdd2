"""Running ``kleash train`` and printing its result."""

import sys
from pathlib import Path

from kleash.cli.steps import Steps
from kleash.cli.terminal import Terminal, remark, say, trackers_as_sentences
from kleash.jobs import TrainJob
from kleash.jobs.option_groups import SHIPPED_REFERENCE
from kleash.store import TrainingResult


def run_train(job: TrainJob) -> int:
    """Run a training job and return its exit code: 0, or 1 if it stopped before its last step.

    It is 0 for all ranks but the first: torchrun ends all ranks when one ends with another code, and the first may
    still be writing and printing.

    Raises:
        KleashError: if the job fails.
    """
    from kleash.launch_environment import launched_rank
    from kleash.training import train

    if job.quiet or launched_rank() != 0:
        with trackers_as_sentences():
            result = train(job)
    else:
        with trackers_as_sentences(), Steps(job.steps) as steps:
            for sentence in job.without_effect():
                steps.note(sentence)
            if job.policy == SHIPPED_REFERENCE:
                steps.note("no --policy was given: this trains the small model that ships with kleash")
            result = train(job, steps)
    if launched_rank() != 0:
        return 0
    if job.json:
        sys.stdout.write(result.to_json())
    elif not job.quiet:
        print_result(result)
    return 0 if result.stopped is None else 1


def print_result(result: TrainingResult) -> None:
    """Print the metrics of a run's last step and the paths of its policy and report."""
    console = Terminal()
    if result.stopped is not None:
        remark(console, "stopped", result.stopped)
    metrics_text = ", ".join(
        f"{label} {result.metrics[name]:.4g}{unit}"
        for label, name, unit in (
            ("reward", "reward/score", ""),
            ("KL(policy ‖ reference)", "kl/exact_per_sequence", " nats per sequence"),
            ("beta", "beta", ""),
            ("accuracy", "pairs/accuracy", ""),
            ("divergence from the teacher", "teacher/divergence", " nats per token"),
        )
        if name in result.metrics
    )
    say(console, f"after step {result.steps}: {metrics_text}")
    if result.dtypes:
        weights = ", ".join(f"{role} {dtype}" for role, dtype in result.dtypes.items())
        say(console, f"weights in memory: {weights}")
    say(console, f"policy: {result.policy}")
    say(console, f"report: {Path(result.out) / 'report.html'}")
