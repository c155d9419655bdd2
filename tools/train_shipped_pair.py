"""Make the pair of models that ships with kleash, from Debian's package of Jane Austen's novels.

    OMP_NUM_THREADS=2 python tools/train_shipped_pair.py --out src/kleash/shipped/data

The reference is trained on all six novels, without the held-out chapters; the policy is the reference after kleash's
PPO on openings of paragraphs from the training chapters, with a target for its KL. Needs apt-get and dpkg, and kleash's
extra "train". Some twenty minutes on two cores; --keep-reference makes the policy alone, in four. An interrupted PPO
goes on from its last checkpoint in --run.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from peft import AutoPeftModelForCausalLM
from shipped_training import austen, card, figures, language_model
from shipped_training.language_model import Schedule
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from kleash.cli.progress import Steps
from kleash.jobs import PPOJob
from kleash.jobs.train import SHIPPED_REWARD
from kleash.training import train

SEED = 20_180
REFERENCE = Schedule(steps=1800, warmup=100, peak=3e-3)
SHIPPED_PER_NOVEL, PROMPTS_PER_NOVEL = 16, 64
"""Prompts: those that ship, and those that PPO answers, from other chapters."""
SHORTEST, LONGEST = 200, 1400
"""Characters after which a document may end: drawn anew for every document and epoch."""

POLICY: dict[str, Any] = {
    "steps": 80,
    "prompts_per_step": 32,
    "samples_per_prompt": 4,
    "max_new_tokens": 48,
    "learning_rate": 2e-3,
    "lora_rank": 8,
    "epochs": 1,
    "minibatches": 2,
    "gae_lambda": 0.95,
    "kl": "exact",
    "kl_place": "loss",
    "kl_scope": "sequence",
    "beta": 0.25,
    "controller": "pid",
    "target_nats": 12.0,
}
"""Options of PPO, which the card has, too; the target is a quarter of a nat per token of a full response."""

KEPT = (
    "bos_token",
    "eos_token",
    "pad_token",
    "padding_side",
    "model_max_length",
    "clean_up_tokenization_spaces",
)
"""Settings of the tokenizer that are stored; the others depend on the version of transformers."""


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Save the weights in float16, with a configuration that loads them as float32."""
    model.half().save_pretrained(folder)
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the tokenizer under the class name that every version of transformers has."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **{name: settings[name] for name in KEPT}}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def make_reference(chapters: list[list[str]], folder: Path) -> None:
    """Train the tokenizer and the reference on the chapters of all novels."""
    tokenizer = language_model.learn_tokenizer("\n".join(chapter) for chapter in chapters)

    def epoch(number: int) -> list[list[int]]:
        draw = Random(f"reference/{SEED}/{number}")
        cut = [text for chapter in chapters for text in austen.documents(chapter, draw, SHORTEST, LONGEST)]
        return language_model.encode(tokenizer, cut)

    torch.manual_seed(SEED)
    model = language_model.new_model(tokenizer)
    language_model.train(model, epoch, REFERENCE, f"reference/{SEED}")
    save_model(model, folder)
    save_tokenizer(tokenizer, folder)


def make_policy(
    chapters: dict[str, list[list[str]]], reference: Path, folder: Path, run: Path
) -> dict[str, Any]:
    """Train the policy from the stored reference by PPO on openings of its training text; details for the card."""
    run.mkdir(parents=True, exist_ok=True)
    prompts, out = austen.prompts(chapters, f"{SEED}/policy", PROMPTS_PER_NOVEL), run / "ppo"
    write_lines(run / "prompts.jsonl", "prompt", prompts)
    job = PPOJob(
        policy=str(reference),
        prompts=str(run / "prompts.jsonl"),
        reward=(SHIPPED_REWARD,),
        seed=SEED,
        out=str(out),
        resume=out.exists(),
        **POLICY,
    )
    result = train(job, Steps(job.steps))
    model = AutoPeftModelForCausalLM.from_pretrained(result.policy, dtype=torch.float32)
    save_model(model.merge_and_unload(), folder)
    save_tokenizer(cast("Any", AutoTokenizer).from_pretrained(reference), folder)
    last = {name: result.metrics[name] for name in ("reward/score", "kl/exact_per_sequence", "beta")}
    return {"prompts": len(prompts), "reward": SHIPPED_REWARD, **POLICY, "last": last}


def write_lines(path: Path, field: str, values: list[str]) -> None:
    """Write a JSONL file with one field."""
    lines = (json.dumps({field: value}, ensure_ascii=False) + "\n" for value in values)
    path.write_text("".join(lines), encoding="utf-8")


def make_sources_and_card(held_out: dict[str, list[list[str]]], folder: Path, policy: dict[str, Any]) -> None:
    """Write the prompts and the documents, measure the stored pair on them, and write the card."""
    prompts = austen.prompts(held_out, str(SEED), SHIPPED_PER_NOVEL)
    texts = austen.texts(held_out, str(SEED), SHORTEST, LONGEST)
    write_lines(folder / "prompts.jsonl", "prompt", prompts)
    write_lines(folder / "text.jsonl", "text", texts)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "reference")
    models: dict[str, Any] = {
        name: AutoModelForCausalLM.from_pretrained(folder / name) for name in ("policy", "reference")
    }
    measurements = {
        "parameters": models["reference"].num_parameters(),
        "vocabulary": len(tokenizer),
        "new_tokens": figures.NEW_TOKENS,
        **figures.measure_pair(models, tokenizer, prompts, texts, SEED),
    }
    training = {"seed": SEED, "reference": asdict(REFERENCE), "policy": policy}
    card.write(folder, prompts, texts, **training, figures=measurements)


def main() -> None:
    """Download, train, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the pair into")
    parser.add_argument("--keep-reference", action="store_true", help="make only the policy and the card")
    parser.add_argument(
        "--run", type=Path, default=Path("build/shipped-policy"), help="folder for the run of PPO"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = austen.novels(austen.download(Path(folder)).read_bytes())
    split = {name: austen.split(austen.chapters(of)) for name, of in lines.items()}
    if not options.keep_reference:
        make_reference(
            [chapter for training, _ in split.values() for chapter in training], options.out / "reference"
        )
    training, held_out = ({name: parts[part] for name, parts in split.items()} for part in (0, 1))
    policy_details = make_policy(training, options.out / "reference", options.out / "policy", options.run)
    make_sources_and_card(held_out, options.out, policy_details)


if __name__ == "__main__":
    main()
