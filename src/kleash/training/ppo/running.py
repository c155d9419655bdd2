"""PPO on a leash: the loop over steps, from whatever checkpoint there is."""

import os
import shutil
from pathlib import Path

from kleash.models import Prompt, read_prompts
from kleash.records import PPOJob, TrainingResult
from kleash.records.atomic import cannot_write, remove_folder, temporary_name
from kleash.records.training_folder import CHECKPOINTS
from kleash.training.leashes import leash_of
from kleash.training.ppo.checkpoints import (
    POLICY,
    Progress,
    last_checkpoint,
    load_progress,
    restore,
    save,
    tidy_checkpoints,
)
from kleash.training.ppo.setting import Setting, set_up
from kleash.training.ppo.step import one_step
from kleash.training.rewards import check_rewards
from kleash.training.run_log import RunLog
from kleash.version import __version__


def train_ppo(job: PPOJob, run_log: RunLog | None = None) -> TrainingResult:
    """Train a policy by PPO on a leash to its reference.

    Each step draws responses, has them rewarded, scores them with policy, critic and reference, makes advantages of
    that, learns from them in epochs of minibatches, and lets the controller move beta. Killed at any moment, a
    run goes on with ``resume=True`` from its last checkpoint; on a CPU in float32 its every number is
    then that of a run that was never stopped.

    Under ``accelerate launch`` every process calls this with the same job; the first one writes.

    Args:
        job: what to train, and how; ``out`` is given.
        run_log: keeps the steps, on the first process. Left out there, this is ``kleash.training.train(job)``,
            which keeps them in ``job.out``, with all that a run's folder has.

    Raises:
        SourceError, ModelError, OptionError, UnknownNameError: if the job asks for what is not there.
        NonFiniteError: if a loss, a gradient, a reward or a model's numbers are NaN or infinite.
        RunFolderError: if a checkpoint cannot be written or read.
        CannotRunError, MissingExtraError: if something the job needs cannot run here.
    """
    from kleash.training.running import is_first, train

    if run_log is None and is_first():
        return train(job)
    root = Path(str(job.out))
    check_rewards(job.rewards, job.source, job.limit)  # before any model is loaded
    setting = set_up(job)
    prompts = read_prompts(job.source, setting.trainee.pair, limit=job.limit, columns=True)
    if not setting.ranks.first:
        run_log = None
    progress = _begun(setting, root, run_log)
    progress = _train(setting, prompts, root, progress, run_log)
    if setting.ranks.first:
        _put_policy(root, progress.step)
    setting.ranks.wait()
    return TrainingResult(
        kleash=__version__,
        algorithm=job.algorithm,
        steps=progress.step,
        stopped=progress.stopped,
        metrics=progress.metrics,
        beta=progress.controller.beta,
        policy=str(root / POLICY),
        out=str(root),
        dtypes=setting.trainee.dtypes,
        alerts=progress.alerts,
    )


def _begun(setting: Setting, root: Path, run_log: RunLog | None) -> Progress:
    """Where the run starts: at the last checkpoint, if it goes on and there is one."""
    job = setting.job
    checkpoint = last_checkpoint(root) if job.resume else None
    notes = list(setting.trainee.pair.notes)
    if checkpoint is None:
        leash = leash_of(job)
        progress = Progress(leash=leash.to_dict(), learning_rate=job.learning_rate, metrics={})
    else:
        progress = load_progress(checkpoint)
        said = restore(setting, checkpoint)
        if setting.ranks.first:
            tidy_checkpoints(root)
        notes += [f"going on after step {progress.step}, from {checkpoint}", *([said] if said else [])]
    if run_log is not None:
        run_log.begin(progress.step)
        for note in notes:
            run_log.said(note)
    return progress


def _train(
    setting: Setting, prompts: list[Prompt], root: Path, progress: Progress, run_log: RunLog | None
) -> Progress:
    job = setting.job
    while progress.step < job.steps and progress.stopped is None:
        progress = one_step(setting, prompts, root, progress, run_log)
        ended = progress.step == job.steps or progress.stopped is not None
        if ended or progress.step % job.checkpoint_every == 0:
            save(setting, root, progress)
    return progress


def _put_policy(root: Path, step: int) -> None:
    """The last checkpoint's model as ``policy/``: the same files under another name, where the disk can do that."""
    found = root / CHECKPOINTS / f"step-{step:06d}" / POLICY
    unfinished, final = root / temporary_name(), root / POLICY
    try:
        shutil.copytree(found, unfinished, copy_function=_link)
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
