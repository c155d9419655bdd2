"""What a run folder has besides the steps: the header, from files and options, and the result with its report."""

import shlex
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from kleash.checkpoints.resolution import GENERATION_CONFIG, find_checkpoint
from kleash.dotted import resolve_function, split_path
from kleash.jobs import DistillJob, DPOJob, TrainJob
from kleash.jobs.train import OnlineJob
from kleash.models import find_source
from kleash.models.keyed_draws import SAMPLER
from kleash.registry import options_given
from kleash.reports import write_training_report
from kleash.store import TrainingFolder, TrainingResult
from kleash.store.cache import cache_fingerprint
from kleash.store.job_folder import KIND_OF_FINGERPRINT, RunHeader
from kleash.store.steps import held_out
from kleash.store.training_folder import last_checkpoint
from kleash.training.hacking_monitor import drawing_steps
from kleash.training.rewards import is_function, weight_of
from kleash.training.run_log import RunLog
from kleash.version import __version__


def finish(folder: TrainingFolder, run_log: RunLog, result: TrainingResult) -> TrainingResult:
    """Write the result of a run and its report; returns the result with what the run log has of it."""
    result = replace(
        result,
        alerts=tuple(alert.sentence for record in run_log.history for alert in record.alerts),
        metrics=drawing_steps(run_log.history)[-1].metrics,
        held_out=held_out(run_log.history),
        target_per=run_log.monitor.target_per,
    )
    folder.write_result(result)
    write_training_report(folder.root)
    return result


def interrupted(root: Path, step: int) -> str:
    """The message at Ctrl-C: what was saved, and how to resume."""
    is_kept = last_checkpoint(root) is not None
    saved = (
        "; the last checkpoint is kept: go on" if is_kept else ", before the first checkpoint; begin again"
    )
    return f"interrupted after step {step}{saved} with --resume --out {shlex.quote(str(root))}"


def models_of(job: TrainJob) -> dict[str, str]:
    """The models of a job by role."""
    return options_given(
        policy=job.policy, reference=job.reference_name, teacher=getattr(job, "teacher_name", None)
    )


def header_of(job: OnlineJob | DPOJob) -> RunHeader:
    """The header of the run: options, source and models that determine its result.

    Raises:
        SourceError: if there are no prompts or pairs.
        ModelError: if there is no such model.
        OptionError, UnknownNameError, MissingExtraError, CannotRunError: if a reward function cannot be imported.
    """
    models = {role: find_checkpoint(name) for role, name in models_of(job).items()}
    fingerprints = {role: model.fingerprint() for role, model in models.items()}
    if isinstance(job, OnlineJob):
        fingerprints[f"policy {GENERATION_CONFIG}"] = models["policy"].fingerprint(of_generation=True)
    for kind in ("prompts", "pairs"):
        held_out_source = getattr(job, f"eval_{kind}", None)
        if held_out_source is not None:
            fingerprints[f"held-out {kind}"] = find_source(held_out_source, kind, job).sha256()
    if isinstance(job, DistillJob) and job.teacher_cache is not None:
        fingerprints["teacher cache"] = cache_fingerprint(Path(job.teacher_cache).expanduser())
    specs = (*getattr(job, "rewards", ()), *getattr(job, "eval_reward", ()))
    for _, reward in map(weight_of, specs):
        if is_function(reward):
            fingerprints[f"reward {reward}"] = source_fingerprint(reward)
        else:
            fingerprints[f"reward model {reward}"] = find_checkpoint(reward).fingerprint()
    return RunHeader(
        kleash=__version__,
        settings=job.settings(),
        source_sha256=find_source(job.source, job.source_kind, job).sha256(),
        fingerprints=fingerprints,
        sampler=SAMPLER,
    )


def source_fingerprint(path: str) -> str:
    """SHA-256 of the file that defines the reward ``package.module:function``, so that an edited one is noticed.

    Empty for a module without a readable file.

    Raises:
        OptionError, UnknownNameError, MissingExtraError, CannotRunError: if the function cannot be imported.
    """
    resolve_function(path, "a reward")
    file = Path(getattr(sys.modules.get(split_path(path)[0]), "__file__", None) or "")
    return f"{KIND_OF_FINGERPRINT}{sha256(file.read_bytes()).hexdigest()}" if file.is_file() else ""
