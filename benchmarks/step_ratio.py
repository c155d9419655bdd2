"""What a step of GRPO takes with kleash's KL, and with its run log, over a step of TRL's own trainer.

python benchmarks/step_ratio.py                                        # 16 prompts x 8 responses x 12 tokens
python benchmarks/step_ratio.py --prompts 16 --samples 4 --tokens 32 --rounds 40
python benchmarks/step_ratio.py --shape 50m --prompts 4 --samples 4 --tokens 32 --rounds 10

Three trainers of the shipped reference, or of a random model of ``commands.py``, take turns, a step each, in one
process: TRL's ``GRPOTrainer`` with a beta, ``LeashedGRPOTrainer``, and that with ``kleash.attach``, whose callbacks are
those of ``kleash train grpo``. A step is all from one beginning to the next: generation, reward, loss, update, log.
Seconds are those of the thread's processor, which other processes disturb less than the clock. The ratio is that of two
steps of one round, the median over rounds.
"""

import argparse
import json
import statistics
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from time import thread_time
from typing import Any

import torch
from commands import SHAPES, make_pair
from datasets import Dataset
from harness import parser_of
from transformers import TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import kleash
from kleash.integrations.trl import LeashedGRPOTrainer
from kleash.shipped import shipped_folder, shipped_prompts

NAMES = ("TRL", "LeashedGRPOTrainer", "LeashedGRPOTrainer with attach")
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
    """One of the three trainers."""
    rows = size.prompts * size.samples
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        beta=0.05,
        max_steps=size.rounds + WARM_UP + 1,
        num_generations=size.samples,
        max_completion_length=size.tokens,
        per_device_train_batch_size=rows,
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


def seconds_of_steps(size: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """The seconds of each counted step, by trainer; the steps of one round have one place."""
    turns = Turns(len(NAMES))
    watches = [Stopwatch(turns, number) for number in range(len(NAMES))]
    model = str(shipped_folder("reference")) if size.shape == "shipped" else make_pair(folder, size.shape)[1]
    trainers = [trainer_of(name, model, folder, size) for name in NAMES]

    def run(number: int) -> None:
        trainers[number].add_callback(watches[number])
        turns.wait(number)
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
        quartiles = statistics.quantiles(ratios, n=4)
        print(
            f"{name:32} {statistics.median(values):.3f} s   {statistics.median(ratios):.3f} x TRL "
            f"(quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f})"
        )


if __name__ == "__main__":
    main()
