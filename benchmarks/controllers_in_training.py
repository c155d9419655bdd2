"""How near to its target each controller brings the KL in training.

python benchmarks/controllers_in_training.py                          # all of it: some twenty minutes on an idle core
python benchmarks/controllers_in_training.py --tasks sort --algorithms grpo --targets 0.4 --seeds 0

Three tasks. ``heroine`` is that of examples/leash_demonstration.py: the shipped reference, its 24 shortest prompts, 24
responses a step and a reward for "she" and "her". The others have one right answer, 64 responses a step, and reward the
share of tokens that are in their right place: a small network sorts four of eight letters (``sort``; in the answers
that its reference was trained on 40 % of the letters are random) or adds two digits (``sums``; 70 %). ``sums`` is
trained by kleash's plug-in for TRL, whose learning rate falls to 0. Figures are the mean KL of the second half of the
steps over the target, and the highest step over it. docs/reference/evidence.md sums them up from
``results/controllers_in_training.json``.
"""

import json
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pandas as pd
import torch
from datasets import Dataset
from harness import markdown_table, parser_of, write_result
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer.grpo_config import GRPOConfig

from kleash.integrations.trainer import BetaController
from kleash.integrations.trl import LeashedGRPOTrainer
from kleash.jobs import GRPOJob, PPOJob
from kleash.jobs.option_groups import SHIPPED_PROMPTS, SHIPPED_REFERENCE
from kleash.leash import Leash, beta_from_dict
from kleash.models import load_pair, read_prompts
from kleash.store import read_steps
from kleash.training import train

CONTROLLERS = ("pid", "ziegler", "dual", "fixed")
TARGETS = {"heroine": (8.0, 2.0), "sort": (1.0, 0.4), "sums": (1.0, 0.4)}
"""A loose and a binding target of each task, in nats per response."""
ALGORITHMS = {"heroine": ("ppo", "grpo"), "sort": ("ppo", "grpo"), "sums": ("plug-in",)}
STEPS = {"heroine": 50, "sort": 100, "sums": 60}
LETTERS, DIGITS = "abcdefgh", "0123456789"
PLACES = 4
"""Tokens of an answer."""
WRONG = {"sort": 0.4, "sums": 0.7}
"""The share of random tokens in the answers of the reference's training."""


class Case(NamedTuple):
    """One run."""

    task: str
    algorithm: str
    controller: str
    target: float
    seed: int
    beta: float
    """The initial beta."""


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Train one case; its figures."""
    out = folder / "-".join(map(str, case))
    steps, task = STEPS[case.task], options_of(case.task, folder)
    if case.algorithm == "plug-in":
        return figures(case, with_plug_in(case, folder, out), "kl/per_sequence", "reward")
    options: dict[str, Any] = {
        **task,
        "controller": case.controller,
        "beta": case.beta,
        "target_nats": case.target,
        "steps": steps,
        "checkpoint_every": steps,
        "seed": case.seed,
        "out": str(out),
    }
    if case.algorithm == "ppo":
        train(PPOJob(**options, minibatches=1, epochs=1))
    else:
        groups: dict[str, Any] = {
            "prompts_per_step": options["prompts_per_step"] // 4,
            "samples_per_prompt": 8,
        }
        train(GRPOJob(**options | groups))
    metrics = [record.metrics for record in read_steps(out)]
    return figures(case, metrics, "kl/exact_per_sequence", "reward/score")


def with_plug_in(case: Case, folder: Path, out: Path) -> list[dict[str, float]]:
    """Kleash's plug-in for TRL with a callback: 60 updates of 8 responses to 8 prompts; KL, error, reward, beta."""
    trainer = LeashedGRPOTrainer(
        model=str(folder / case.task),
        reward_funcs=lambda prompts, completions, **_: in_place(prompts, completions),
        args=GRPOConfig(
            output_dir=str(out),
            learning_rate=1e-3,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=PLACES,
            max_steps=STEPS[case.task],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            beta=case.beta,
            seed=case.seed,
        ),
        train_dataset=Dataset.from_json(str(folder / f"{case.task}.jsonl")),
    )
    BetaController(controller_of(case), metric="kl/per_sequence").attach(trainer)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "kl/per_sequence" in entry]


def controller_of(case: Case) -> Leash:
    """The library's controller of that kind."""
    return beta_from_dict({"kind": case.controller, "beta": case.beta, "target_nats": case.target})


def figures(case: Case, steps: list[Any], kl_name: str, reward_name: str) -> dict[str, Any]:
    """The figures of a run from the metrics of each step."""
    kl, error, reward = (
        [step[name] for step in steps] for name in (kl_name, f"{kl_name}_error", reward_name)
    )
    half = len(steps) // 2
    return {
        **case._asdict(),
        "settled": fmean(kl[half:]) / case.target,
        "highest": max(kl) / case.target,
        "error": fmean(error[half:]) / case.target,
        "reward": fmean(reward[half:]),
        "last_beta": steps[-1]["beta"],
        "kl": [round(x, 3) for x in kl],
    }


# --- the task of the example ---


def heroine(folder: Path) -> dict[str, Any]:
    """The options of the task ``heroine``; its prompts are written on the first call."""
    path, count = folder / "heroine.jsonl", 24
    if not path.exists():
        pair = load_pair(SHIPPED_REFERENCE, SHIPPED_REFERENCE)
        prompts = sorted(read_prompts(SHIPPED_PROMPTS, pair), key=lambda prompt: len(prompt.token_ids))
        write_prompts(path, [prompt.text for prompt in prompts[:count]])
    return {
        "prompts": str(path),
        "lora_rank": 8,
        "prompts_per_step": count,
        "samples_per_prompt": 1,
        "max_new_tokens": 24,
        "learning_rate": 5e-3,
    }


def write_prompts(path: Path, prompts: list[str]) -> None:
    """Write prompts as JSON lines."""
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts]
    path.write_text("".join(lines), encoding="utf-8")


# --- the tasks with a right answer ---


def options_of(task: str, folder: Path) -> dict[str, Any]:
    """The options of a task; its prompts and its reference are made on the first call."""
    if task == "heroine":
        return heroine(folder)
    reference, path = folder / task, folder / f"{task}.jsonl"
    if not path.exists():
        draw = random.Random(0)
        train_reference(task, reference, draw)
        write_prompts(path, [draw_prompt(task, draw) for _ in range(512)])
    return {
        "policy": str(reference),
        "prompts": str(path),
        "reward": ("controllers_in_training:in_place",),
        "prompts_per_step": 32,
        "samples_per_prompt": 2,
        "max_new_tokens": PLACES,
        "learning_rate": 1e-3,
        "lora_rank": 0,
    }


def draw_prompt(task: str, draw: random.Random) -> str:
    """A random prompt: letters to sort or two digits to add."""
    if task == "sort":
        return " ".join([*draw.sample(LETTERS, PLACES), "="])
    return f"{draw.choice(DIGITS)} + {draw.choice(DIGITS)} ="


def answer_of(prompt: str) -> str:
    """The right answer to a prompt."""
    words = prompt.split()
    if "+" in words:
        return " ".join(f"{int(words[0]) + int(words[2]):0{PLACES}d}")
    return " ".join(sorted(words[:-1]))


def in_place(prompts: list[str], responses: list[str]) -> list[float]:
    """The reward of each response: the share of the answer's tokens that it has in their place."""
    pairs = [
        (answer_of(prompt).split(), response.split())
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return [sum(a == b for a, b in zip(*pair, strict=False)) / PLACES for pair in pairs]


def train_reference(task: str, folder: Path, draw: random.Random) -> None:
    """Train a small network on answers with ``WRONG`` of the tokens at random, and save it."""
    symbols = LETTERS if task == "sort" else DIGITS
    words = ["<pad>", "</s>", "=", *symbols, *([] if task == "sort" else "+")]
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(600):
        rows = []
        for _ in range(64):
            prompt = draw_prompt(task, draw)
            answer = [
                draw.choice(symbols) if draw.random() < WRONG[task] else x for x in answer_of(prompt).split()
            ]
            rows.append([words.index(x) for x in [*prompt.split(), *answer]])
        tokens = torch.tensor(rows)
        labels = tokens.clone()
        labels[:, :-PLACES] = -100
        loss = network(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- tables ---


def table(runs: list[dict[str, Any]]) -> str:
    """The figures in Markdown: a row for each task, algorithm, controller and target."""
    seeds = sorted({record["seed"] for record in runs})
    names = ["task", "algorithm", "controller", "target"]
    rows = []
    for key, group in pd.DataFrame(runs).groupby(names, sort=False):
        settled = dict(zip(group["seed"], group["settled"], strict=True))
        cells = [f"{settled[seed]:.2f}" if seed in settled else "–" for seed in seeds]
        setting: Any = key
        cells += [f"{group['highest'].max():.1f}", f"{100 * group['error'].mean():.0f} %"]
        rows.append([*map(str, setting), *cells])
    return markdown_table([*names, *(f"seed {x}" for x in seeds), "highest step", "error of a step"], rows)


def main() -> None:
    """Train, write the figures and print the table."""
    parser = parser_of(__doc__, beta=0.05, processes=1)
    parser.add_argument("--tasks", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--algorithms", nargs="+", default=[], help="ppo, grpo, plug-in; those of the task")
    parser.add_argument("--controllers", nargs="+", default=["pid"], choices=CONTROLLERS)
    parser.add_argument("--targets", nargs="+", type=float, help="nats per response; those of the task")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        cases = [
            Case(task, algorithm, controller, target, seed, options.beta)
            for task in options.tasks
            for algorithm in options.algorithms or ALGORITHMS[task]
            for controller in options.controllers
            for target in options.targets or TARGETS[task]
            for seed in options.seeds
        ]
        for task in options.tasks:  # written once, before several processes read them
            options_of(task, folder)
        with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
            for result in pool.map(run, cases, [folder] * len(cases)):
                runs.append(result)
                print(table([result]).splitlines()[-1], flush=True)
                write_result("controllers_in_training", {"runs": runs})
    print(table(runs))


if __name__ == "__main__":
    main()
