"""The PPO training loop, from the last checkpoint if there is one."""

import os
import shutil
from pathlib import Path

from kleash.jobs import PPOJob
from kleash.launch_environment import launched_rank
from kleash.models import Prompt, read_prompts
from kleash.store import TrainingResult
from kleash.store.atomic import cannot_write, remove_folder, temporary_name
from kleash.store.training_folder import CHECKPOINTS
from kleash.training.job_controllers import leash_of
from kleash.training.ppo.checkpointing import (
    POLICY,
    TrainingState,
    last_checkpoint,
    load_progress,
    restore,
    save,
    tidy_checkpoints,
)
from kleash.training.ppo.setup import TrainingSetup, set_up
from kleash.training.ppo.step import one_step
from kleash.training.rewards import check_rewards
from kleash.training.run_log import RunLog
from kleash.training.runner import run_job
from kleash.version import __version__


def train_ppo(job: PPOJob, run_log: RunLog | None = None) -> TrainingResult:
    """Train a policy by PPO with a KL penalty to its reference.

    Each step generates responses, rewards them, scores them with policy, critic and reference, computes advantages,
    updates the policy in epochs of minibatches, and updates beta. An interrupted run continues with ``resume=True``
    from its last checkpoint; on a CPU in float32 with the numbers of an uninterrupted run.

    Under ``accelerate launch`` every process calls this with the same job; rank 0 writes.

    Args:
        job: the training job; ``out`` is set.
        run_log: records the steps, on rank 0. Without it there, ``kleash.training.train(job)`` is called, which
            writes the whole run folder.

    Raises:
        SourceError, ModelError, OptionError, UnknownNameError: if an input or an option of the job is invalid.
        NonFiniteError: if a loss, a gradient, a reward or a model's numbers are NaN or infinite.
        RunFolderError: if a checkpoint cannot be written or read.
        CannotRunError, MissingExtraError: if an option is unsupported here or a dependency is missing.
    """
    if run_log is None and launched_rank() == 0:
        return run_job(job, train_ppo)
    root = Path(str(job.out))
    check_rewards(job.rewards, job.source, job.limit, job)  # before any model is loaded
    setting = set_up(job)
    prompts = read_prompts(job.source, setting.actor_critic.pair, limit=job.limit, columns=True, reading=job)
    if not setting.group.is_first:
        run_log = None
    progress = _initial_state(setting, root, run_log)
    progress = _train(setting, prompts, root, progress, run_log)
    if setting.group.is_first:
        _publish_policy(root, progress.step)
    setting.group.barrier()
    return TrainingResult(
        kleash=__version__,
        algorithm=job.algorithm,
        steps=progress.step,
        stopped=progress.stopped,
        metrics=progress.metrics,
        beta=progress.controller.beta,
        policy=str(root / POLICY),
        out=str(root),
        dtypes=setting.actor_critic.dtypes,
        alerts=progress.alerts,
    )


def _initial_state(setting: TrainingSetup, root: Path, run_log: RunLog | None) -> TrainingState:
    """The state to start from: that of the last checkpoint when resuming, else the initial one."""
    job = setting.job
    checkpoint = last_checkpoint(root) if job.resume else None
    notes = list(setting.actor_critic.pair.notes)
    if checkpoint is None:
        leash = leash_of(job)
        progress = TrainingState(leash=leash.to_dict(), learning_rate=job.learning_rate, metrics={})
    else:
        progress = load_progress(checkpoint)
        note_of_restore = restore(setting, checkpoint)
        if setting.group.is_first:
            tidy_checkpoints(root)
        notes += [
            f"going on after step {progress.step}, from {checkpoint}",
            *([note_of_restore] if note_of_restore else []),
        ]
    if run_log is not None:
        run_log.begin(progress.step)
        for note in notes:
            run_log.note(note)
    return progress


def _train(
    setting: TrainingSetup, prompts: list[Prompt], root: Path, progress: TrainingState, run_log: RunLog | None
) -> TrainingState:
    job = setting.job
    while progress.step < job.steps and progress.stopped is None:
        progress = one_step(setting, prompts, root, progress, run_log)
        ended = progress.step == job.steps or progress.stopped is not None
        if ended or progress.step % job.checkpoint_every == 0:
            save(setting, root, progress)
    return progress


def _publish_policy(root: Path, step: int) -> None:
    """Publish the last checkpoint's model as ``policy/``, by hard links if possible."""
    checkpoint_policy = root / CHECKPOINTS / f"step-{step:06d}" / POLICY
    unfinished, final = root / temporary_name(), root / POLICY
    try:
        shutil.copytree(checkpoint_policy, unfinished, copy_function=_link)
        if final.exists():
            remove_folder(final)
        unfinished.rename(final)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise cannot_write(final, error) from error


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
