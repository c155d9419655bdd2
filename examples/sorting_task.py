"""A task with a right answer under five leashes: sort eight letters, with the answer in a column of the prompts.

    python examples/sorting_task.py --seeds 0 1 2 --target-nats 0.7 --out sorting/

For each seed the shipped model (2 M parameters) first learns some of the task by next-token prediction: that is the
reference. From it GRPO learns from a reward of 1 for a right answer: with the exact KL, with k1 or k3 in the loss,
without a KL penalty, and by TRL's own trainer with its KL at a fixed beta. Then ``kleash measure`` lets each policy
answer prompts that are held out. The table has the share of right answers and the KL over its target, with standard
errors over the prompts of all seeds. A seed is estimated at 20 minutes of processor time (five steps were timed). Needs
kleash[trl].
"""

import argparse
import json
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import torch

from kleash.extras import import_extra
from kleash.jobs import GRPOJob, MeasureJob
from kleash.measuring import measure
from kleash.shipped import shipped_folder
from kleash.training import train
from kleash.uncertainty import clustered_mean

LETTERS, LONGEST = "abcdefghjklmnopr", 12
"""Letters that are one token each, and the most tokens of a response."""
LEASHES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "exact": {"kl": "exact"},
        "k1": {"kl": "k1"},
        "k3": {"kl": "k3"},
        "no leash": {"beta": 0.0, "controller": "fixed"},
    }
)
"""Name of a run -> what it has besides the options of all."""
TRL = "TRL, beta .04"


def sorted_right(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """1 for a response that is the answer of the prompt's row, otherwise 0."""
    return [float(response.strip() == right) for response, right in zip(responses, answer, strict=True)]


def main() -> None:
    """Train and measure all runs, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("sorting"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target-nats", type=float, default=0.7, help="per response; 0.7 if not given")
    for name, default in (
        ("steps", 100),
        ("warm-up", 100),
        ("prompts", 256),
        ("held-out", 128),
        ("letters", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} if not given")
    args = parser.parse_args()
    trainers: dict[str, Callable[[Path, int, argparse.Namespace], Path]] = {
        **{
            name: lambda root, seed, args, more=more: by_kleash(root, seed, args, more)
            for name, more in LEASHES.items()
        },
        TRL: by_trl,
    }
    numbers: dict[str, list[np.ndarray]] = {name: [] for name in ("reference", *trainers)}
    for seed in args.seeds:
        root = args.out / f"seed-{seed}"
        root.mkdir(parents=True, exist_ok=True)
        write_prompts(root, seed, args)
        warm_up(root, seed, args)
        numbers["reference"].append(answered(root / "reference", root, "reference"))
        for name, trainer in trainers.items():
            numbers[name].append(answered(trainer(root / name.replace(" ", "-"), seed, args), root, name))
    print(f"{'':16} right, held out   KL over its target")
    for name, parts in numbers.items():
        right, kl = np.concatenate(parts, axis=1)
        prompts = np.repeat(np.arange(len(right) // SAMPLES), SAMPLES)
        accuracy, share = clustered_mean(right, prompts), clustered_mean(kl / args.target_nats, prompts)
        cells = (f"{each.value:6.3f} ± {each.standard_error:.3f}" for each in (accuracy, share))
        print(f"{name:16} {'     '.join(cells)}")


SAMPLES = 4
"""Answers to each prompt that is held out."""


def task(source: random.Random, letters: int) -> dict[str, str]:
    """A prompt and its answer."""
    drawn = source.sample(LETTERS, letters)
    return {"prompt": f"{' '.join(drawn)} :", "answer": " ".join(sorted(drawn))}


def write_prompts(root: Path, seed: int, args: argparse.Namespace) -> None:
    """Write prompts to train on and others that are held out, with their answers, to ``root``."""
    source = random.Random(seed)
    rows = list(
        {
            row["prompt"]: row
            for row in (task(source, args.letters) for _ in range(2 * (args.prompts + args.held_out)))
        }.values()
    )
    parts = {"train": rows[: args.prompts], "held_out": rows[args.prompts : args.prompts + args.held_out]}
    for name, part in parts.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def warm_up(root: Path, seed: int, args: argparse.Namespace) -> None:
    """Teach the shipped model the form of the task, and some of the task, and save it as ``root``/reference."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    source, base = random.Random(f"warm-up {seed}"), str(shipped_folder("reference"))
    tokenizer, network = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for _ in range(args.warm_up):
        rows = [task(source, args.letters) for _ in range(32)]
        texts = [f"{row['prompt']} {row['answer']}{tokenizer.eos_token}" for row in rows]
        ids = torch.tensor(tokenizer(texts)["input_ids"])
        optimiser.zero_grad()
        network(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    network.save_pretrained(root / "reference")
    tokenizer.save_pretrained(root / "reference")


def by_kleash(out: Path, seed: int, args: argparse.Namespace, more: Mapping[str, Any]) -> Path:
    """Train with kleash's GRPO; returns the folder of the policy."""
    leash = {"controller": "pid", "target_nats": args.target_nats, **more}
    job = GRPOJob(
        policy=str(out.parent / "reference"),
        prompts=str(out.parent / "train.jsonl"),
        reward=("sorting_task:sorted_right",),
        steps=args.steps,
        samples_per_prompt=8,
        max_new_tokens=LONGEST,
        learning_rate=1e-4,
        checkpoint_every=args.steps,
        seed=seed,
        out=str(out),
        quiet=True,
        **leash,
    )
    return Path(train(job).policy)


def by_trl(out: Path, seed: int, args: argparse.Namespace) -> Path:
    """Train with TRL's own GRPO and its KL; returns the folder of the policy."""
    datasets, trl = import_extra("datasets", "trl"), import_extra("trl", "trl")
    config = trl.GRPOConfig(
        output_dir=str(out),
        beta=0.04,
        max_steps=args.steps,
        num_generations=8,
        per_device_train_batch_size=128,
        max_completion_length=LONGEST,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=str(out.parent / "reference"),
        reward_funcs=lambda prompts, completions, answer, **_: sorted_right(prompts, completions, answer),
        args=config,
        train_dataset=datasets.load_dataset(
            "json", data_files=str(out.parent / "train.jsonl"), split="train"
        ),
    )
    trainer.train()
    trainer.save_model(str(out / "policy"))
    return out / "policy"


def answered(policy: Path, root: Path, name: str) -> np.ndarray:
    """For each answer of the policy to a prompt that is held out: whether it is right, and its KL, ``[2, answers]``."""
    out = root / f"measured-{name.replace(' ', '-')}"
    prompts = root / "held_out.jsonl"
    options = {"samples_per_prompt": SAMPLES, "max_new_tokens": LONGEST, "quiet": True, "out": str(out)}
    measure(
        MeasureJob(policy=str(policy), reference=str(root / "reference"), prompts=str(prompts), **options)
    )
    key = ["prompt_id", "sample_id"]
    kl = pd.read_parquet(out / "tokens").groupby(key)["kl_policy_reference"].sum()
    responses = pd.read_parquet(out / "sequences").set_index(key)["response"].sort_index()
    answers = [json.loads(line)["answer"] for line in prompts.read_text().splitlines()]
    prompt_ids = responses.index.get_level_values("prompt_id")
    right = sorted_right([], list(responses), [answers[prompt] for prompt in prompt_ids])
    return np.array([right, kl])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
