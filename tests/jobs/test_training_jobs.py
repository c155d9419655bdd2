"""What may be asked of a training run, and how a request that means nothing is refused."""

import itertools
import json
from dataclasses import fields, replace

import pytest

from kleash.errors import OptionError
from kleash.records import DistillJob, DPOJob, GRPOJob, MeasureJob, PPOJob, RLOOJob
from kleash.store.codec import decode, to_json
from kleash.store.job_folder import RunHeader


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": float("nan")}, "--learning-rate must be a number above 0; it is nan"),
        ({"lora_rank": -1}, "--lora-rank must be at least 0; it is -1"),
        ({"policy": "mine", "reward": ("a:b",)}, "say what mine should answer: --prompts"),
        ({"policy": "mine", "prompts": "p.txt"}, "say what mine is rewarded for: --reward"),
        ({"kl": "k4"}, "--kl must be one of exact, k1, k2, k3; it is 'k4'"),
        ({"beta": -0.1}, "--beta must be a number of 0 or more; it is -0.1"),
        ({"beta": 0.0, "on_hacking": "tighten"}, "doubles beta up to --beta-max 10, and --beta is 0;"),
        ({"beta": 10, "on_hacking": "tighten"}, "doubles beta up to --beta-max 10, and --beta is 10;"),
        ({"controller": "pid"}, "the controller pid steers to a target; give --target-nats"),
        ({"controller": "pid", "target_nats": 1.0, "beta": 20.0}, "controller pid begins with it"),
        ({"gamma": 1.5}, "--gamma must be from 0 to 1; it is 1.5"),
        ({"minibatches": 17}, "--minibatches 17 cannot be made of 16 responses"),
    ],
)
def test_what_means_nothing_is_refused_in_a_sentence(options, said):
    with pytest.raises(OptionError) as error:
        PPOJob(**options)
    assert said in str(error.value)
    assert "\n" not in str(error.value) and not str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: GRPOJob(samples_per_prompt=1), "must be at least 2"),
        (lambda: RLOOJob(eval_reward=("a:b",)), "--eval-reward is of the answers to held-out prompts"),
        (lambda: DPOJob(), "say what is preferred to what: --pairs"),
        (lambda: DPOJob(pairs="p", on_hacking="tighten"), "dpo has no beta that could be tightened"),
        (lambda: DPOJob(pairs="p", beta=0.0), "--beta must be a number above 0; it is 0.0"),
        (lambda: DistillJob(divergence="k3"), "--divergence must be one of policy_teacher, teacher_policy"),
        (lambda: DistillJob(policy="mine", prompts="p"), "say which model mine learns from: --teacher"),
        (lambda: DistillJob(on_hacking="tighten"), "distill has no beta that could be tightened"),
    ],
)
def test_each_algorithm_refuses_what_it_cannot_do(ask, said):
    with pytest.raises(OptionError, match=said.replace("(", "\\(")):
        ask()


def test_a_fixed_beta_may_lie_beyond_the_bounds_of_controllers():
    assert (PPOJob(beta=20.0).beta, PPOJob(beta=0.0).beta) == (20.0, 0.0)
    assert PPOJob(on_hacking="tighten").on_hacking == "tighten"


KL_OPTIONS = (("exact", "k1", "k2", "k3"), ("loss", "reward"), ("token", "sequence"))
LOSSES = {("exact", "token"), ("exact", "sequence"), ("k1", "token"), ("k1", "sequence"), ("k2", "token")}
LOSSES |= {("k3", "token"), ("k3", "sequence")}


@pytest.mark.parametrize("job", [PPOJob, GRPOJob, RLOOJob])
@pytest.mark.parametrize(("kl", "place", "scope"), list(itertools.product(*KL_OPTIONS)))
def test_a_kl_is_accepted_if_its_gradient_is_the_named_one(job, kl, place, scope):
    """An exact KL in the reward is right only with its own gradient in the loss, which PPO adds and TRL does not."""
    rewards = {("k1", "sequence"), *([("exact", "sequence")] if job is PPOJob else [])}
    is_right = (kl, scope) in (LOSSES if place == "loss" else rewards)
    try:
        job(kl=kl, kl_place=place, kl_scope=scope)
        is_accepted = True
    except OptionError:
        is_accepted = False
    assert is_accepted == is_right


def test_a_refused_kl_names_the_options_to_take_instead():
    with pytest.raises(OptionError, match=r"its mean is not .* take --kl exact, k1 or k3"):
        PPOJob(kl="k2", kl_scope="sequence")
    with pytest.raises(OptionError, match="take --kl-scope sequence, or --kl-place loss"):
        PPOJob(kl_place="reward", kl_scope="token")
    with pytest.raises(OptionError, match="take --kl k1, or --kl-place loss"):
        PPOJob(kl="k3", kl_place="reward")


@pytest.mark.parametrize(("place", "kl", "scope"), [("loss", "exact", "token"), ("reward", "k1", "sequence")])
def test_an_unset_scope_of_grpo_is_token_in_a_loss_and_sequence_in_a_reward(place, kl, scope):
    """The settings on disk name the scope, so that a folder of a run that named it is resumed without naming it."""
    unset = GRPOJob(kl=kl, kl_place=place)
    assert unset.kl_scope is None
    assert unset.settings() == GRPOJob(kl=kl, kl_place=place, kl_scope=scope).settings()
    assert unset.settings()["kl_scope"] == scope


@pytest.mark.parametrize("job", [PPOJob, RLOOJob])
def test_the_default_scope_of_ppo_and_rloo_is_sequence(job):
    assert job().kl_scope == job(kl="k1", kl_place="reward").settings()["kl_scope"] == "sequence"


def test_two_runs_are_one_if_all_that_decides_the_result_agrees():
    job = PPOJob(reward=("a:b",), out="x")
    same = replace(job, out="y", resume=True, quiet=True, json=True, checkpoint_every=1)
    same = replace(same, report_to=("wandb",), metric_names="trl")
    assert same.settings() == job.settings()
    others = {"beta": 0.1, "reward": ("a:c",), "on_hacking": "stop", "seed": 1, "clip_range": 0.1}
    for name, value in others.items():
        assert replace(job, **{name: value}).settings() != job.settings()
    assert set(job.settings()) - {"algorithm"} < {field.name for field in fields(job)}


def test_settings_come_back_from_disk_as_they_were():
    settings = PPOJob(reward=("a:b", "0.5*c:d")).settings()
    header = RunHeader(kleash="1", settings=settings, source_sha256="a", fingerprints={})
    again = decode(RunHeader, json.loads(to_json(header)))
    assert header.differences(again) == []
    other = replace(header, settings=PPOJob(reward=("a:b",)).settings())
    assert header.differences(other) == ["--reward was ['a:b', '0.5*c:d'] and is now ['a:b']"]


def test_a_resumed_run_must_be_of_the_same_algorithm():
    one = RunHeader(kleash="1", settings=GRPOJob().settings(), source_sha256="", fingerprints={})
    other = replace(one, settings={**GRPOJob().settings(), "algorithm": "rloo"})
    assert one.differences(other) == ["--algorithm was 'grpo' and is now 'rloo'"]


def test_an_option_means_the_same_in_measuring_and_in_training():
    measuring, training = (
        {field.name: field.default for field in fields(job)} for job in (MeasureJob, PPOJob)
    )
    differing = {name for name in measuring.keys() & training.keys() if measuring[name] != training[name]}
    assert differing == {"policy", "reference", "max_new_tokens"}
