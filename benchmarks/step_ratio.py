"""What a step of GRPO takes with kleash's KL, and with its run log, over a step of TRL's own trainer.

python benchmarks/step_ratio.py                                        # 16 prompts x 8 responses x 12 tokens
python benchmarks/step_ratio.py --prompts 16 --samples 4 --tokens 32 --rounds 40
python benchmarks/step_ratio.py --shape 50m --prompts 4 --samples 4 --tokens 32 --rounds 10

Four trainers of the shipped reference, or of a random model of ``commands.py``, take turns, a step each, in one
process: TRL's ``GRPOTrainer`` with a beta, ``LeashedGRPOTrainer``, that with ``kleash.attach``, and the trainer of
``kleash train grpo``. A step is all from one beginning to the next: generation, reward, loss, update, log. Seconds are
those of the thread's processor, which other processes disturb less. The ratio is the median over rounds.
"""

import argparse
import json
import statistics
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from time import thread_time
from typing import Any
from unittest import mock

import torch
from commands import SHAPES, make_pair
from datasets import Dataset
from harness import parser_of
from transformers import TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import kleash
from kleash.integrations.trl import LeashedGRPOTrainer
from kleash.jobs import GRPOJob
from kleash.shipped import shipped_folder, shipped_prompts
from kleash.training import train
from kleash.training.with_trl import online

COMMAND = "kleash train grpo"
NAMES = ("TRL", "LeashedGRPOTrainer", "LeashedGRPOTrainer with attach", COMMAND)
WARM_UP = 1
"""Steps that are not counted."""


class Turns:
    """Whose turn it is, among trainers that run in threads."""

    def __init__(self, count: int) -> None:
        """Begin with the first."""
        self.count, self.at, self.changed = count, 0, threading.Condition()
        self.left: set[int] = set()

    def wait(self, number: int) -> None:
        """Wait for the turn of a trainer."""
        with self.changed:
            self.changed.wait_for(lambda: self.at == number)

    def give(self, number: int, *, leaves: bool = False) -> None:
        """Give the turn to the next trainer that has not left."""
        with self.changed:
            self.left |= {number} if leaves else set()
            following = [(number + step) % self.count for step in range(1, self.count + 1)]
            self.at = next((place for place in following if place not in self.left), number)
            self.changed.notify_all()


class Stopwatch(TrainerCallback):
    """Measures each step, and hands the turn on between steps."""

    def __init__(self, turns: Turns, number: int) -> None:
        """Measure the trainer of this number."""
        self.turns, self.number, self.start = turns, number, 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the step before, and begin one when it is the trainer's turn."""
        if state.global_step:
            self.seconds.append(thread_time() - self.start)
            self.turns.give(self.number)
        self.turns.wait(self.number)
        self.start = thread_time()


def reward(completions: list[str], **_: Any) -> list[float | None]:
    """The share of the letter e."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def trainer_of(name: str, model: str, folder: Path, size: argparse.Namespace) -> Any:
    """One of the trainers that are made before their turn."""
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        beta=0.05,
        max_steps=size.rounds + WARM_UP + 1,
        num_generations=size.samples,
        max_completion_length=size.tokens,
        per_device_train_batch_size=size.prompts * size.samples,
        learning_rate=1e-5,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    prompts = [json.loads(line)["prompt"] for line in shipped_prompts().read_text().splitlines()]
    trainer = (GRPOTrainer if name == "TRL" else LeashedGRPOTrainer)(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )
    if name.endswith("attach"):
        kleash.attach(trainer, target_nats=1.0, out=folder / "run")
    return trainer


def train_by_command(watch: Stopwatch, model: str, folder: Path, size: argparse.Namespace) -> None:
    """``kleash train grpo`` with the settings of ``trainer_of``; the watch is called before kleash's callbacks."""
    run_trainer = online.run_trainer

    def run(trainer: Any, *arguments: Any, **options: Any) -> Any:
        trainer.add_callback(watch)
        return run_trainer(trainer, *arguments, **options)

    job = GRPOJob(
        policy=model,
        prompts=str(shipped_prompts()),
        reward=("step_ratio:reward",),
        prompts_per_step=size.prompts,
        samples_per_prompt=size.samples,
        max_new_tokens=size.tokens,
        batch_tokens=10**6,
        steps=size.rounds + WARM_UP + 1,
        controller="pid",
        target_nats=1.0,
        out=str(folder / "command"),
    )
    with mock.patch.object(online, "run_trainer", run):
        train(job)


def seconds_of_steps(size: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """The seconds of each counted step, by trainer; the steps of one round have one place."""
    turns = Turns(len(NAMES))
    watches = [Stopwatch(turns, number) for number in range(len(NAMES))]
    model = str(shipped_folder("reference")) if size.shape == "shipped" else make_pair(folder, size.shape)[1]
    trainers = [trainer_of(name, model, folder, size) for name in NAMES if name != COMMAND]

    def run(number: int) -> None:
        turns.wait(number)
        if NAMES[number] == COMMAND:
            train_by_command(watches[number], model, folder, size)
        else:
            trainers[number].add_callback(watches[number])
            trainers[number].train()
        turns.give(number, leaves=True)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(NAMES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        name: watch.seconds[WARM_UP : WARM_UP + size.rounds]
        for name, watch in zip(NAMES, watches, strict=True)
    }


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, prompts=16, samples=8, tokens=12, rounds=30)
    parser.add_argument("--shape", choices=[*SHAPES, "shipped"], default="shipped")
    size = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        seconds = seconds_of_steps(size, Path(folder))
    print(f"{size.prompts} prompts x {size.samples} responses x {size.tokens} tokens, {size.rounds} rounds")
    for name, values in seconds.items():
        ratios = [mine / base for mine, base in zip(values, seconds["TRL"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        seconds_of_one = statistics.median(values)
        print(f"{name:32} {seconds_of_one:.3f} s   {middle:.3f} x TRL (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
