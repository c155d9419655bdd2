"""A task with a right answer under several leashes: sort eight letters, with the answer in a column of the prompts.

    python examples/sorting_task.py --seeds 0 1 2 --target-nats 0.7 1.2 2 --out sorting/

For each seed the shipped model (2 M parameters) first learns some of the task by next-token prediction: that is the
reference. From it GRPO learns from a reward of 1 for a right answer: for each target with the exact KL, and with k3 in
the loss (whose gradient is that of the KL, as k1's is: the two runs would be equal); without a KL penalty; and by TRL's
own trainer with its KL at a fixed beta. Then ``kleash measure`` lets each policy answer prompts that are held out. The
table has the share of right answers and the KL, with standard errors over the prompts of all seeds, and the mean KL of
the second half of the steps over its target, for each seed. Runs that are there already are not repeated. A run takes
some three minutes of processor time. Needs kleash[trl].
"""

import argparse
import json
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch

import kleash
from kleash.extras import import_extra
from kleash.jobs import GRPOJob
from kleash.shipped import shipped_folder
from kleash.store import read_steps
from kleash.training import train
from kleash.uncertainty import clustered_mean

LETTERS, LONGEST = "abcdefghjklmnopr", 12
"""Letters that are one token each, and the most tokens of a response."""
LISTS = {"seeds": [0, 1, 2], "target-nats": [0.7, 1.2, 2.0], "beta": [0.3, 0.1, 0.05]}
NUMBERS = {"steps": 100, "warm-up": 100, "prompts": 256, "held-out": 128, "letters": 8}
"""The options; a beta at first for each target, in nats per response."""
KINDS, NO_LEASH, TRL = ("exact", "k3"), "no leash", "TRL, beta .04"
"""The KL terms that a controller keeps at a target, and the other runs."""


def sorted_right(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """1 for a response that is the answer of the prompt's row, otherwise 0."""
    return [float(response.strip() == right) for response, right in zip(responses, answer, strict=True)]


def main() -> None:
    """Train and measure all runs, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("sorting"))
    for name, default in (LISTS | NUMBERS).items():
        kind, nargs = (type(default[0]), "+") if isinstance(default, list) else (int, None)
        parser.add_argument(f"--{name}", type=kind, nargs=nargs, default=default, help="%(default)s")
    args = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {
        f"{kind}, {target:g} nats": {"kl": kind, "target_nats": target, "beta": beta, "controller": "pid"}
        for target, beta in zip(args.target_nats, args.beta, strict=True)
        for kind in KINDS
    }
    runs |= {NO_LEASH: {"beta": 0.0}, TRL: {}}
    numbers: dict[str, list[np.ndarray]] = {name: [] for name in ("reference", *runs)}
    settled: dict[str, list[float]] = {name: [] for name in numbers}
    for seed in args.seeds:
        root = args.out / f"seed-{seed}"
        root.mkdir(parents=True, exist_ok=True)
        write_prompts(root, seed, args)
        if not (root / "reference").exists():
            warm_up(root, seed, args)
        numbers["reference"].append(answered(root / "reference", root, "reference"))
        for name, options in runs.items():
            out = root / name.replace(", ", "-").replace(" ", "-")
            if not (out / "policy").exists():
                by_trl(out, seed, args) if name == TRL else by_kleash(out, seed, args, options)
            numbers[name].append(answered(out / "policy", root, out.name))
            if "target_nats" in options:
                settled[name].append(second_half(out) / options["target_nats"])
    print(f"{'':16} right, held out   KL, held out        KL of training over its target")
    for name, parts in numbers.items():
        columns = np.concatenate(parts, axis=1)
        prompts = np.repeat(np.arange(columns.shape[1] // SAMPLES), SAMPLES)
        means = (clustered_mean(column, prompts) for column in columns)
        cells = [f"{each.value:6.3f} ± {each.standard_error:.3f}" for each in means]
        print(f"{name:16} {'     '.join([*cells, ' '.join(f'{share:.2f}' for share in settled[name])])}")


def second_half(out: Path) -> float:
    """The mean KL per response, in nats, of the second half of a run's steps."""
    kl = [record.metrics["kl/exact_per_sequence"] for record in read_steps(out)]
    return float(np.mean(kl[len(kl) // 2 :]))


SAMPLES = 4
"""Answers to each prompt that is held out."""


def task(source: random.Random, letters: int) -> dict[str, str]:
    """A prompt and its answer."""
    drawn = source.sample(LETTERS, letters)
    return {"prompt": f"{' '.join(drawn)} :", "answer": " ".join(sorted(drawn))}


def write_prompts(root: Path, seed: int, args: argparse.Namespace) -> None:
    """Write prompts to train on and others that are held out, with their answers, to ``root``."""
    source = random.Random(seed)
    drawn = (task(source, args.letters) for _ in range(2 * (args.prompts + args.held_out)))
    rows = list({row["prompt"]: row for row in drawn}.values())
    parts = {"train": rows[: args.prompts], "held_out": rows[args.prompts : args.prompts + args.held_out]}
    for name, part in parts.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def warm_up(root: Path, seed: int, args: argparse.Namespace) -> None:
    """Teach the shipped model the form of the task, and some of the task, and save it as ``root``/reference."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    source, base = random.Random(f"warm-up {seed}"), str(shipped_folder("reference"))
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    network = AutoModelForCausalLM.from_pretrained(base)
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


def by_kleash(out: Path, seed: int, args: argparse.Namespace, more: Mapping[str, Any]) -> None:
    """Train with kleash's GRPO; the policy is in ``out``/policy."""
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
        **more,
    )
    train(job)


def by_trl(out: Path, seed: int, args: argparse.Namespace) -> None:
    """Train with TRL's own GRPO and its KL; the policy is in ``out``/policy."""
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
        train_dataset=datasets.Dataset.from_json(str(out.parent / "train.jsonl")),
    )
    trainer.train()
    trainer.save_model(str(out / "policy"))


def answered(policy: Path, root: Path, name: str) -> np.ndarray:
    """For each answer of the policy to a prompt that is held out: whether it is right, and its KL, ``[2, answers]``."""
    from transformers import AutoTokenizer

    out, prompts = root / f"measured-{name}", root / "held_out.jsonl"
    kleash.measure(
        policy=str(policy),
        reference=str(root / "reference"),
        prompts=str(prompts),
        samples_per_prompt=SAMPLES,
        max_new_tokens=LONGEST,
        out=str(out),
        resume=out.exists(),
    )
    key = ["prompt_id", "sample_id"]
    kl = pd.read_parquet(out / "tokens").groupby(key)["kl_policy_reference"].sum()
    responses = pd.read_parquet(out / "sequences").set_index(key)["response"].sort_index()
    responses = responses.str.removesuffix(cast("Any", AutoTokenizer).from_pretrained(policy).eos_token)
    answers = [json.loads(line)["answer"] for line in prompts.read_text().splitlines()]
    prompt_ids = responses.index.get_level_values("prompt_id")
    right = sorted_right([], list(responses), [answers[prompt] for prompt in prompt_ids])
    return np.array([right, kl])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
