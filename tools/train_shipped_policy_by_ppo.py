"""Make a policy for the shipped pair by PPO on a leash, in place of the one that was fine-tuned.

    python tools/train_shipped_policy_by_ppo.py --out build/ppo-policy

trains the shipped reference with kleash's PPO, every weight, on the shipped reward, the KL held at a target, and
leaves run/ with all its files and policy/ as it would be shipped: float16, tokenizer and all. Whoever ships it copies
policy/ to src/kleash/shipped/data/policy, and makes the figures of the card and of the pages that quote them again.
About half an hour on two cores.
"""

import argparse
import shutil
import sys
from pathlib import Path

from train_shipped_pair import save_model, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kleash.cli.steps import Steps
from kleash.records import PPOJob
from kleash.training import train

TARGET_NATS = 12.0
"""KL(policy || reference) per response of 48 tokens: a quarter of a nat per token, as far as the fine-tuned one is."""


def job_of(out: Path, steps: int) -> PPOJob:
    """How it is trained: large steps' worth of responses, small steps of the weights."""
    return PPOJob(
        steps=steps,
        prompts_per_step=32,
        samples_per_prompt=4,
        max_new_tokens=48,
        learning_rate=1e-4,
        minibatches=2,
        epochs=1,
        beta=0.1,
        controller="pid",
        target_nats=TARGET_NATS,
        watch="tighten",
        seed=20_180,
        out=str(out / "run"),
        resume=(out / "run").exists(),
    )


def main() -> int:
    """Train, and write the policy as it would be shipped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the run and the policy")
    parser.add_argument("--steps", type=int, default=200, help="steps of PPO")
    wanted = parser.parse_args()
    with Steps(wanted.steps) as shown:
        result = train(job_of(wanted.out, wanted.steps), shown)
    policy = wanted.out / "policy"
    shutil.rmtree(policy, ignore_errors=True)
    policy.mkdir(parents=True)
    save_model(AutoModelForCausalLM.from_pretrained(result.policy), policy)
    save_tokenizer(AutoTokenizer.from_pretrained(result.policy), policy)
    print(f"{policy}: after {result.steps} steps, reward {result.metrics['reward/score']:.3g}")
    return 0 if result.stopped is None else 1


if __name__ == "__main__":
    sys.exit(main())
