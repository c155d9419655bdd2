"""Writes the table of training options beside TRL's, verl's and OpenRLHF's names into docs/train.md.

python tools/make_option_table.py            write it
python tools/make_option_table.py --check    exit 1 if it is not what would be written
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from made_files import between_marks, write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "train.md"
BEGIN, END = "<!-- options: written by tools/make_option_table.py -->\n", "<!-- end of options -->\n"


@dataclass(frozen=True, kw_only=True)
class OptionNames:
    """An option of ``kleash train`` and its names in other frameworks; None if a framework has no such option."""

    option: str
    """The field of kleash's job record."""
    trl: str | None = None
    """The field of TRL's ``GRPOConfig``."""
    verl: str | None = None
    """The path in verl's PPO configuration."""
    openrlhf: str | None = None
    """The option of ``openrlhf.cli.train_ppo_ray``."""


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OPTIONS = (
    OptionNames(option="policy", verl="actor_rollout_ref.model.path", openrlhf="actor.model_name_or_path"),
    OptionNames(option="prompts", verl="data.train_files", openrlhf="data.prompt_dataset"),
    OptionNames(option="reward", verl="reward.custom_reward_function.path", openrlhf="reward.remote_url"),
    OptionNames(option="steps", trl="max_steps", verl="trainer.total_training_steps"),
    OptionNames(option="out", trl="output_dir", verl="trainer.default_local_dir", openrlhf="ckpt.output_dir"),
    OptionNames(option="prompts_per_step", verl="data.train_batch_size", openrlhf="rollout.batch_size"),
    OptionNames(
        option="samples_per_prompt",
        trl="num_generations",
        verl=f"{ROLLOUT}.n",
        openrlhf="rollout.n_samples_per_prompt",
    ),
    OptionNames(
        option="max_new_tokens",
        trl="max_completion_length",
        verl="data.max_response_length",
        openrlhf="rollout.max_new_tokens",
    ),
    OptionNames(
        option="temperature",
        trl="temperature",
        verl=f"{ROLLOUT}.temperature",
        openrlhf="rollout.temperature",
    ),
    OptionNames(option="kl", verl="algorithm.kl_penalty", openrlhf="algo.kl.estimator"),
    OptionNames(option="kl_place", verl="algorithm.use_kl_in_reward", openrlhf="algo.kl.use_loss"),
    OptionNames(option="beta", trl="beta", verl="algorithm.kl_ctrl.kl_coef", openrlhf="algo.kl.init_coef"),
    OptionNames(option="controller", verl="algorithm.kl_ctrl.type"),
    OptionNames(option="target_nats", verl="algorithm.kl_ctrl.target_kl", openrlhf="algo.kl.target"),
    OptionNames(option="horizon", verl="algorithm.kl_ctrl.horizon", openrlhf="algo.kl.horizon"),
    OptionNames(
        option="epochs", trl="num_iterations", verl=f"{ACTOR}.ppo_epochs", openrlhf="train.max_epochs"
    ),
    OptionNames(option="gamma", verl="algorithm.gamma", openrlhf="algo.advantage.gamma"),
    OptionNames(option="gae_lambda", verl="algorithm.lam", openrlhf="algo.advantage.lambd"),
    OptionNames(option="clip_range", trl="epsilon", verl=f"{ACTOR}.clip_ratio", openrlhf="actor.eps_clip"),
    OptionNames(option="clip_range_value", verl="critic.cliprange_value", openrlhf="critic.value_clip"),
    OptionNames(
        option="ent_coef", trl="entropy_coef", verl=f"{ACTOR}.entropy_coeff", openrlhf="actor.entropy_coef"
    ),
    OptionNames(
        option="learning_rate", trl="learning_rate", verl=f"{ACTOR}.optim.lr", openrlhf="actor.adam.lr"
    ),
    OptionNames(
        option="max_gradient_norm",
        trl="max_grad_norm",
        verl=f"{ACTOR}.optim.clip_grad",
        openrlhf="actor.max_norm",
    ),
    OptionNames(option="lora_rank", verl="actor_rollout_ref.model.lora_rank", openrlhf="ds.lora.rank"),
    OptionNames(
        option="checkpoint_every", trl="save_steps", verl="trainer.save_freq", openrlhf="ckpt.save_steps"
    ),
    OptionNames(
        option="resume", trl="resume_from_checkpoint", verl="trainer.resume_mode", openrlhf="ckpt.load_enable"
    ),
    OptionNames(option="report_to", trl="report_to", verl="trainer.logger"),
    OptionNames(option="seed", trl="seed", verl=f"{ROLLOUT}.seed", openrlhf="train.seed"),
)
"""``vf_coef`` has no counterpart: these three train the critic by an optimiser of its own."""


def table() -> str:
    """A row for each option."""
    head = ["| `kleash train` | TRL `GRPOConfig` | verl | OpenRLHF |", "|---|---|---|---|"]
    rows = [
        f"| `--{names.option.replace('_', '-')}` | {_code(names.trl)} | {_code(names.verl)} | "
        f"{_code(None if names.openrlhf is None else '--' + names.openrlhf)} |"
        for names in OPTIONS
    ]
    return "\n".join([*head, *rows]) + "\n"


def _code(name: str | None) -> str:
    return "" if name is None else f"`{name}`"


def page(text: str) -> str:
    """The page with the table between its marks."""
    return between_marks(text, BEGIN, END, table())


def main() -> int:
    """Write the page, or check that it is up to date."""
    files = {PAGE: page(PAGE.read_text(encoding="utf-8"))}
    return write_or_check(files, check="--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
