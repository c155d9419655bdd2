"""``--set FIELD=VALUE``: values by the types of TRL's and PEFT's classes, refusals, and what a field does to a run."""

import json
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from documentation import ROOT
from safetensors import safe_open
from tiny_models import save_tiny
from trl_batches import TRL_MARKS

from kleash.cli import main
from kleash.cli.parsing import read_words
from kleash.errors import KleashError, OptionError, UnknownNameError
from kleash.records import DistillJob, DPOJob, GRPOJob, PPOJob, RLOOJob, read_samples, read_steps
from kleash.training.library_fields import (
    CONFIGURATIONS,
    LORA,
    OPTIONS,
    REFUSED,
    REFUSED_WITH,
    refused_fields,
    set_fields,
)
from kleash.training.run_log import RunLog

pytestmark = [*TRL_MARKS, pytest.mark.usefixtures("trl")]
DPO = DPOJob(pairs="p.jsonl")


@pytest.mark.parametrize(
    ("job", "assignment", "value"),
    [
        (GRPOJob(), "loss_type=dr_grpo", "dr_grpo"),
        (GRPOJob(), "epsilon=1e-2", 0.01),
        (GRPOJob(), "mask_truncated_completions=True", True),
        (GRPOJob(), "pad_to_multiple_of=8", 8),
        (GRPOJob(), 'lr_scheduler_kwargs={"num_cycles": 2}', {"num_cycles": 2}),
        (DPO, 'loss_type=["hinge", "sft"]', ["hinge", "sft"]),
        (DistillJob(), "top_k=50", 50),
        (PPOJob(lora_rank=4), "lora.lora_alpha=16", 16),
        (GRPOJob(lora_rank=4), 'lora.target_modules=["q_proj", "v_proj"]', ["q_proj", "v_proj"]),
        (GRPOJob(lora_rank=4), "lora.init_lora_weights=pissa_niter_4", "pissa_niter_4"),
        (GRPOJob(lora_rank=4), 'lora.kasa_config={"beta": 0.1}', {"beta": 0.1}),
        (PPOJob(lora_rank=4), 'lora.rank_pattern={"q_proj": 4}', {"q_proj": 4}),
    ],
)
def test_a_value_has_the_type_of_its_field(job: Any, assignment: str, value: Any) -> None:
    (found,) = set_fields(replace(job, set=(assignment,))).values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("job", "assignment", "error", "said"),
    [
        (GRPOJob(), "loss_typ=x", UnknownNameError, "of GRPOConfig is called 'loss_typ'; did you mean 'loss_type'?"),
        (RLOOJob(), "loss_type=grpo", UnknownNameError, "no field of RLOOConfig is called 'loss_type'"),
        (GRPOJob(), "epsilon", OptionError, "takes FIELD=VALUE, such as loss_type=dr_grpo; it is 'epsilon'"),
        (GRPOJob(), "epsilon=wide", OptionError, "--set epsilon takes a number; it is 'wide'"),
        (DPO, "loss_type=hinge", OptionError, "takes a list as JSON, such as [\"a\"]; it is 'hinge'"),
        (GRPOJob(), "beta=1", OptionError, "--set beta=1: --beta decides this; give that"),
        (GRPOJob(), "num_iterations=2", OptionError, "--epochs decides this"),
        (GRPOJob(), "sync_ref_model=true", OptionError, "it moves the reference"),
        (GRPOJob(), "run_name=a", OptionError, "--set run_name=a: --out decides this"),
        (DPO, "label_smoothing_factor=.1", OptionError, "=.1: no loss of TRL's trainers reads it; dpo has label_smoo"),
        (DistillJob(), "train_sampling_strategy=sequential", OptionError, "an order of its own, which follows from"),
        (GRPOJob(), "logging_first_step=true", OptionError, "a step of the run log is one log of the trainer"),
        (GRPOJob(), "use_liger_kernel=true", OptionError, "replaces layers of the policy and not of the reference"),
        (GRPOJob(), "eval_steps=2", OptionError, "nothing is held out to be evaluated; give --eval-prompts"),
        (DistillJob(), "eval_strategy=steps", OptionError, "=steps: nothing is held out to be evaluated"),
        (RLOOJob(), "top_p=.9", OptionError, "would not be samples of the policy"),
        (PPOJob(), "epsilon=1", OptionError, "a field of TRL, and ppo is kleash's own; it takes fields of its LoRA"),
        (GRPOJob(), "lora.lora_alpha=1", OptionError, "--set lora.lora_alpha needs an adapter: give --lora-rank"),
        (GRPOJob(lora_rank=4), "lora.r=1", OptionError, "--set lora.r=1: --lora-rank decides this"),
        (GRPOJob(lora_rank=4), "lora.lora_dropout=.1", OptionError, "with dropout, the policy that is trained is not"),
        (GRPOJob(lora_rank=4), "lora.bias=some", OptionError, "takes none, all, lora_only; it is 'some'"),
        (GRPOJob(lora_rank=4), "lora.init_lora_weights=eva", OptionError, "eva: PEFT takes its directions from data"),
        (GRPOJob(lora_rank=4), "lora.monteclora_config={}", OptionError, "with its draws, the policy that is trained"),
        (GRPOJob(lora_rank=4), "lora.inference_mode=true", OptionError, "true: the adapter would not be trained"),
        (DPO, "neftune_noise_alpha=5", OptionError, "with noise, the policy that is trained is not the one that"),
        (DPO, "disable_dropout=false", OptionError, "--set disable_dropout=false: with dropout, the policy that is"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_use(job: Any, assignment: str, error: type[KleashError], said: str) -> None:
    asked = replace(job, set=(assignment,))
    with pytest.raises(error) as refused:
        set_fields(asked)
    message = str(refused.value)
    assert said in message and "\n" not in message and len(message) < 250


def test_a_field_is_given_once_and_is_a_setting_that_resuming_compares() -> None:
    with pytest.raises(OptionError, match=r"--set epsilon is given twice: 0\.1 and \.2"):
        set_fields(GRPOJob(set=("epsilon=.1", "epsilon=.2")))
    assert GRPOJob(set=("epsilon=.1",)).settings()["set"] == ["epsilon=.1"]
    assert not any(set_fields(replace(DPO, set=("use_liger_kernel=false", "sync_ref_model=False"))).values())


def test_each_argument_of_the_trainers_can_be_set_or_names_its_option(trl: Any, monkeypatch: Any) -> None:
    """A field that kleash passes is a default, which --set replaces, or refused; no third."""
    defaults = {"lr_scheduler_type", "save_total_limit", "gradient_checkpointing"}
    evaluation = {"eval_strategy", "eval_steps", "per_device_eval_batch_size"}
    evaluation |= {"metric_for_best_model", "greater_is_better"}
    refused = {*OPTIONS, *REFUSED}
    job = GRPOJob(out="x", eval_prompts="held_out.jsonl")
    shared = set(trl.online.shared_arguments(job, rows=16, row_tokens=8))
    assert shared - refused == defaults
    for processes, prompts in (("1", 5), ("2", 8)):  # 8 fit: a divisor of 15, and of the larger half
        monkeypatch.setenv("WORLD_SIZE", processes)
        arguments = trl.online._arguments(job, 64, 15)
        assert set(arguments) - shared - refused == evaluation | {"scale_rewards"}
        assert arguments["per_device_eval_batch_size"] == prompts * job.samples_per_prompt
    known = {field.name for name in CONFIGURATIONS.values() for field in fields(getattr(trl.package, name))}
    named = refused.union(*REFUSED_WITH.values())
    listed = {name.partition("=")[0] for name in named if not name.startswith(LORA)}
    assert listed <= known, "a field that TRL does not have"
    kinds = (PPOJob(), GRPOJob(), RLOOJob(), DPO, DistillJob())
    assert all(any(hasattr(kind, option) for kind in kinds) for names in OPTIONS.values() for option in names)


def test_data_seed_orders_the_prompts(trl: Any) -> None:
    rows = trl.online.prompt_rows(map(str, range(9)))
    jobs = GRPOJob(seed=1), GRPOJob(seed=1, set=("data_seed=0",)), GRPOJob(seed=0)
    plain, other, expected = (trl.online.in_step_order(rows, job)["prompt"] for job in jobs)
    assert list(plain) != list(other) == list(expected)


COMMANDS = [
    words
    for page in ("explanation/algorithms.md", "reference/training.md")
    for words in re.findall(
        r"(?:`|kleash train )((?:ppo|grpo|rloo|dpo|distill) (?!--help)[^`#\n]*--\w[^`#\n]*)",
        (ROOT / "docs" / page).read_text(),
    )
]


@pytest.mark.parametrize("words", COMMANDS)
def test_the_commands_of_the_pages_are_accepted(words: str) -> None:
    """Of the page of training and of the table of algorithms by name; "…" stands for options that are left out."""
    left_out = ["--pairs", "p"] if words.startswith("dpo") and "--pairs" not in words else []
    job: Any = read_words(["train", *shlex.split(words.replace("…", "")), *left_out])
    set_fields(job)


def test_the_tests_that_the_table_of_algorithms_names_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "algorithms.md").read_text()
    named = re.findall(r"\| `(test_\w+\.py)` \|", page)
    assert len(named) >= 15 and all(list(ROOT.glob(f"tests/*/{name}")) for name in named)


def test_an_invalid_field_is_refused_before_the_folder_is_made(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    assert main(["train", "grpo", "--set", "epsilom=1", "--quiet", "--out", str(out)]) == 2
    assert "did you mean 'epsilon'?" in capsys.readouterr().err and not out.exists()


# ------------------------------------------------------------------ what fields do, by numbers that follow from them

LONGEST = 96
ONE_GROUP = {"limit": 1, "prompts_per_step": 1, "samples_per_prompt": 4, "max_new_tokens": 12, "beta": 0.0}


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward that differs between responses."""
    return [sum(response.count(letter) for letter in "aeiou") / 10 for response in responses]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    (root / "p.jsonl").write_text('{"prompt": "the sea was"}\n{"prompt": "she counted"}\n')
    return save_tiny(root)


@pytest.fixture(scope="module")
def steps(trl: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The metrics of each step of a run with fields of --set, and its folder as ``steps.out``."""

    def run(*assignments: str, **more: Any) -> list[Any]:
        out = run.out = tmp_path_factory.mktemp("run")
        settings = {"learning_rate": 1e-2, "steps": 1, "reward": (f"{__name__}:vowels",), **ONE_GROUP}
        settings |= {"policy": str(folder), "prompts": str(folder / "p.jsonl"), "seed": 3, **more}
        job = GRPOJob(**settings, out=str(out), set=assignments)
        refused_fields(job)(trl.train_online)(job, RunLog(out, job))
        return [step.metrics for step in read_steps(out)]

    return run


@pytest.fixture(scope="module")
def plain(steps: Any) -> Any:
    """One step of GRPO as it is by default."""
    (step,) = steps()
    return step


def test_dr_grpo_divides_by_the_longest_length_and_not_by_the_spread(steps: Any) -> None:
    """Its gradient is TRL's "dapo" times the group's standard deviation, and tokens over responses times length."""
    (plain,) = steps(max_new_tokens=LONGEST)
    (step,) = steps("loss_type=dr_grpo", "scale_rewards=none", max_new_tokens=LONGEST)
    assert step["reward/score_std"] == plain["reward/score_std"] > 0.01
    share = plain["response/length"] / LONGEST
    assert share < 0.99, "a response has ended by itself"
    expected = plain["policy/gradient_norm"] * (plain["reward/score_std"] + 1e-4) * share
    assert step["policy/gradient_norm"] == pytest.approx(expected, rel=1e-4)


def test_cispo_multiplies_by_its_capped_ratio(steps: Any, plain: Any) -> None:
    """On-policy the ratio is 1, and a cap of a quarter makes the gradient a quarter."""
    (step,) = steps("loss_type=cispo", "epsilon_high=0.25")
    assert step["policy/gradient_norm"] == pytest.approx(plain["policy/gradient_norm"] / 4, rel=1e-4)


def test_gspo_clips_whole_responses(steps: Any) -> None:
    """With nearly no room, the clipped tokens of the second update are those of whole responses."""
    (token,) = steps("epsilon=1e-6", epochs=2)
    (whole,) = steps("importance_sampling_level=sequence", "loss_type=grpo", "epsilon=1e-6", epochs=2)
    (entry,) = logged(steps.out, "loss")
    # the mean of two updates, one on-policy
    shares = [2 * entry[f"clip_ratio/{side}_mean"] for side in ("low", "high")]
    assert sum(shares) > 0 and all(4 * share == pytest.approx(round(4 * share)) for share in shares)
    assert 0 < token["policy/clip_share"] != whole["policy/clip_share"]


def test_clip_higher_leaves_the_good_responses_unclipped(steps: Any, plain: Any) -> None:
    (both,) = steps("epsilon=1e-6", epochs=2)
    (low,) = steps("epsilon_high=10", "epsilon=1e-6", epochs=2)
    assert 0 < low["policy/clip_share"] < both["policy/clip_share"]
    assert plain["policy/clip_share"] == 0


def logged(out: Path, name: str) -> list[Any]:
    """The entries with this number that TRL logged until the last checkpoint."""
    states = sorted(out.glob("checkpoints/*/trainer_state.json"))
    return [entry for entry in json.loads(states[-1].read_text())["log_history"] if name in entry]


def test_schedule_and_checkpointing(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up of two steps, then linear to 0 or constant; checkpointing recomputes each layer and changes no number."""
    kept = steps("lr_scheduler_type=linear", "warmup_steps=2", steps=4)
    assert [step["policy/learning_rate"] for step in kept] == pytest.approx([0, 5e-3, 1e-2, 5e-3])
    from torch.utils import checkpoint

    calls: list[int] = []
    original = checkpoint.checkpoint
    for place in ("transformers.modeling_utils.checkpoint", "torch.utils.checkpoint.checkpoint"):
        monkeypatch.setattr(place, lambda *args, **more: (calls.append(1), original(*args, **more))[1])
    recomputed = steps("gradient_checkpointing=true", "warmup_steps=2", steps=4)
    assert [step["policy/learning_rate"] for step in recomputed] == pytest.approx([0, 5e-3, 1e-2, 1e-2])
    assert len(calls) >= 4
    for one, other in zip(kept, recomputed, strict=True):
        assert one["policy/gradient_norm"] == pytest.approx(other["policy/gradient_norm"], rel=1e-4)


def test_lora_targets_and_alpha(steps: Any) -> None:
    """The product starts at 0 by one factor, whose gradient is proportional to alpha over rank."""
    targets = 'lora.target_modules=["q_proj"]'
    (first,) = steps(targets, "lora.lora_alpha=4", lora_rank=2)
    (second,) = steps("lora.lora_alpha=12", targets, lora_rank=2)
    ratio = second["policy/gradient_norm"] / first["policy/gradient_norm"]
    assert ratio == pytest.approx(3, rel=1e-4)
    saved = steps.out / "policy"
    assert json.loads((saved / "adapter_config.json").read_text())["lora_alpha"] == 12
    with safe_open(saved / "adapter_model.safetensors", "pt") as tensors:
        names = tensors.keys()
    assert names and all(".q_proj.lora_" in name for name in names)


def test_an_initialisation_out_of_the_base_has_another_reference(steps: Any) -> None:
    """PiSSA takes its matrices out of the base: the reference is the base before, from which a policy starts at 0."""
    (truncated,) = steps("lora.kasa_config={}", lora_rank=2)
    assert truncated["kl/exact_per_token"] > 1e-6, "KaSA leaves a part of its base out of the policy"
    first, second = steps("lora.init_lora_weights=pissa", lora_rank=2, steps=2)
    assert first["kl/exact_per_token"] == pytest.approx(0, abs=1e-8) and second["kl/exact_per_token"] > 1e-6
    with pytest.raises(OptionError, match=r"--set lora\.init_lora_weights=corda: .* was trained over a base"):
        steps("lora.init_lora_weights=corda", lora_rank=2)


def test_held_out_prompts_are_answered_and_measured(steps: Any, tmp_path: Path) -> None:
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"prompt": "a long road"}\n')
    more = {"eval_prompts": str(held_out), "steps": 2, "checkpoint_every": 1, "beta": 0.05}
    trained = steps("num_generations_eval=3", **more)
    first, second = logged(steps.out, "eval_reward")
    assert (first["step"], second["step"]) == (1, 2) and first["eval_reward"] >= 0
    assert 0 < first["eval_kl/per_token"] < second["eval_kl/per_token"]
    assert trained[0]["kl/exact_per_token"] == 0, "evaluation is after the update, and changes no step"
    assert {sample.sample.prompt for sample in read_samples(steps.out)} == {"the sea was"}
    more["eval_reward"] = (f"-2*{__name__}:vowels",)
    again = steps("num_generations_eval=3", "save_total_limit=1", **more)
    assert (steps.out / "checkpoints" / "checkpoint-2").is_dir(), "the last is kept beside the best"
    assert again[1]["policy/gradient_norm"] == trained[1]["policy/gradient_norm"]
    rewards = [entry["eval_reward"] for entry in logged(steps.out, "eval_reward")]
    assert rewards == [-2 * first["eval_reward"], -2 * second["eval_reward"]] != [0, 0]
    with pytest.raises(OptionError, match=r"--set eval_steps counts updates, and a step has 2 \(--epochs\)"):
        steps("eval_steps=3", epochs=2, **more)


def test_what_trl_refuses_is_one_sentence(steps: Any) -> None:
    for assignment, library, reason in (
        ("lr_scheduler_type=zigzag", "transformers", "not a valid SchedulerType"),
        ("lr_scheduler_type=cosine_with_min_lr", "transformers", "One of min_lr"),  # not before training
        ("scale_rewards=no", "TRL", "Invalid value for scale_rewards"),  # at the first batch
        ("push_to_hub=true", "huggingface_hub", "offline mode is enabled"),
        ("lora.init_lora_weights=loftq", "PEFT", "loftq_config"),
        ("lora.trainable_token_indices=[9999]", "PEFT", "out of bounds"),  # where the adapter is made
    ):
        with pytest.raises(
            OptionError, match=rf"^{library} refuses the values of --set {re.escape(assignment)}: .*{reason}"
        ):
            steps(assignment, lora_rank=2)
    for assignment, reason in (
        ("loss_type=ppo", "no loss type of TRL is called 'ppo'; there are grpo"),
        ('lora.target_modules=["q_proj", "v_prj"]', "no module of the policy .* did you mean 'v_proj'"),
        ("lora.target_modules=v_prj", "no module of the policy .* did you mean 'v_proj'"),
        ('lora.exclude_modules=["*.v_prj"]', "no module of the policy .* there are q_proj"),
        ('lora.rank_pattern={"layers.*.v_proj": 4, "v_prj": 1}', "policy .* did you mean 'v_proj'"),
        ('lora.target_parameters=["experts.down_proj"]', "no module of the policy .* 'experts.down_proj'"),
    ):
        with pytest.raises(UnknownNameError, match=reason):
            steps(assignment, lora_rank=2)
