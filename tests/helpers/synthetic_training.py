"""Folders of training runs whose numbers look real and whose text is hostile, made without any model."""

from dataclasses import replace
from pathlib import Path

from histories import bent, healthy
from synthetic_run import HOSTILE

from kleash.records import (
    DPOJob,
    HackingAlert,
    PPOJob,
    Sample,
    StepRecord,
    TrainingFolder,
    TrainingResult,
    TrainJob,
)
from kleash.store.job_folder import RunHeader
from kleash.store.steps import append_step

EVIL = "<script>window.__pwned=1</script>"


def header_of(job: TrainJob) -> RunHeader:
    return RunHeader(
        kleash="0.1.0", settings=job.settings(), source_sha256="ab" * 32, fingerprints={"policy": "p"}
    )


def write_run(folder: Path, history: list[StepRecord], job: TrainJob, *, finished: bool = True) -> Path:
    files, drawn = TrainingFolder(folder), 4 if hasattr(job, "reward") else 0
    with files.writing(header_of(job), resume=False):
        for record in history:
            texts = [HOSTILE[(record.step + at) % len(HOSTILE)] for at in range(drawn)]
            samples = [Sample(prompt=f"{EVIL}{text}", response=text, reward=1.0, kl=2.5) for text in texts]
            samples[:1] = [replace(sample, kl=float("nan")) for sample in samples[:1]]  # which is not known
            append_step(folder, record, samples)
        if finished:
            end = {"steps": len(history), "metrics": history[-1].metrics, "beta": 0.1}
            where = {"policy": str(folder / "policy"), "out": str(folder)}
            files.write_result(TrainingResult(kleash="0.1.0", algorithm=job.algorithm, **end, **where))
    return folder


def write_hostile_run(folder: Path) -> Path:
    """A run that ends badly, told in hostile words."""
    rewards = {"reward/part/" + EVIL: 1.0, "eval/reward": 1.0}
    history = bent(healthy(60), 40, lambda at, _: {"policy/entropy": 2.0 * 0.8**at, **rewards})
    alert = HackingAlert(kind="entropy_collapse", sentence=f"KL(p ‖ q) is gone {EVIL}")
    warned = replace(history[-1], alerts=(alert,), events=(f"beta was bounded {EVIL}",))
    steering = {"controller": "pid", "target_nats": 6.0}
    job = PPOJob(policy=EVIL, prompts="x", reward=(f"a:b{EVIL}", "0.5*c:d"), **steering)
    return write_run(folder, [*history[:-1], warned], job)


def write_pairs_run(folder: Path) -> Path:
    """A run of another kind, not finished, with a number that is none."""
    history = [
        StepRecord(step=step, metrics={"pairs/accuracy": 0.5 + step / 100, "pairs/margin": float("nan")})
        for step in range(1, 4)
    ]
    return write_run(folder, history, DPOJob(pairs="p.jsonl"), finished=False)
