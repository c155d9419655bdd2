"""OpenRLHF's own command on two ranks of DeepSpeed on a CPU, each with the driver and an actor of each kind.

OpenRLHF's are: the command line, ``train``, ``PPOTrainer``, ``RayActorGroup``, ``RemoteExperienceMaker``, the actors of
policy and reference, ``DeepspeedStrategy`` with ZeRO-3, the replay buffer, the loss, the files of checkpoints.
Replaced are: Ray's messages (gloo), vLLM (responses and rewards are given, weights go nowhere), CUDA, AdamW (SGD, whose
step is the gradient), bfloat16 (float32), the sampler of prompts (their order), a patch of a transformers before 5.23.
"""

import json
import os
import runpy
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import ray
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from kleash.auditing.targets.packages import quiet, stand_ins
from kleash.integrations.openrlhf import install
from kleash.leash import PIDBeta

COMMAND = "openrlhf.cli.train_ppo_ray"
ABSENT = ("flash_attn", "pylatexenc", "vllm", "uvicorn", "fastapi", "aiohttp")
CONTROLLER = {"kind": "pid", "beta_max": 2.0}
RATE, TEMPERATURE, START = 2e-3, 0.5, 4
SAMPLES = {"the sea": ((3, 1.0), (9, -0.5)), "two men": ((2, 0.25), (4, 2.0))}
"""Prompt -> length and reward of each response."""


def import_openrlhf() -> None:
    """Install kleash and import what OpenRLHF's command imports, before the ranks fork."""
    install(controller=CONTROLLER)
    with stand_ins(ABSENT), quiet():
        for name in (COMMAND, "openrlhf.trainer.ppo_trainer"):
            __import__(name)


def responses_of(prompt: str) -> list[dict[str, Any]]:
    """What an engine of vLLM returns for a prompt; all prompts have ``START`` tokens."""
    random = torch.Generator().manual_seed(len(prompt))
    made = []
    for length, reward in SAMPLES[prompt]:
        ids = torch.randint(3, 300, (START + length,), generator=random).tolist()
        made.append({"prompt": prompt, "label": "", "observation_tokens": ids, "reward": reward})
        made[-1] |= {"action_ranges": [(START, len(ids))], "rollout_log_probs": None}
    return made


class Remote(NamedTuple):
    """What a method of an actor returned, on the rank that has the actor."""

    rank: int
    value: Any


def get(references: Any) -> Any:
    """``ray.get``, called by all ranks."""
    if isinstance(references, Remote):
        return get([references])[0]
    if not isinstance(references, list) or not all(isinstance(x, Remote) for x in references):
        return references
    dist.all_gather_object(values := [None] * 2, [x.value for x in references])
    return [values[x.rank][place] for place, x in enumerate(references)]


class Handle:
    """``ActorClass._remote``: a handle of an actor on one rank, or of the driver, which all ranks have."""

    def __init__(self, kind: Any, args: Any = (), kwargs: Any = None, **_: Any) -> None:
        made = kind.__ray_metadata__.modified_class
        self.rank = args[1] if hasattr(made, "get_master_addr_port") else None
        here = self.rank in (None, dist.get_rank())
        self.actor = made(*args, **(kwargs or {})) if here else None

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self.call, name))

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        value = None if self.actor is None else getattr(self.actor, name)(*args, **kwargs)
        return value if self.rank is None else Remote(self.rank, value)


class Processor(str):
    """A device, which is a number where OpenRLHF writes ``cuda:`` before it."""

    def __format__(self, _: str) -> str:
        return "0"


def with_sgd(initialize: Any, *, config: Any, model_parameters: Any = None, **more: Any) -> Any:
    """``deepspeed.initialize`` with an optimizer whose step is the gradient, and that needs no compiler."""
    if "optimizer" in config:
        rate = config.pop("optimizer")["params"]["lr"]
        more["optimizer"] = torch.optim.SGD(model_parameters, lr=rate)
        config["zero_allow_untested_optimizer"] = True
    return initialize(config=config, **more)


def run(words: list[str], reference: str) -> tuple[Any, list[Any]]:
    """OpenRLHF's controller after one step of its command, and the experience of the step."""
    import deepspeed
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer, RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.trainer.ray import launcher
    from openrlhf.utils.deepspeed import deepspeed as engines

    referee, strategy = launcher.ReferenceModelActor.__ray_metadata__.modified_class, engines.DeepspeedStrategy
    load, score, mesh = referee.init_model_from_pretrained, referee.forward, engines.init_device_mesh
    advantages = RemoteExperienceMaker.compute_advantages_and_returns

    def with_nan(self: Any, sequences: Any, action_mask: Any, **more: Any) -> Any:
        """NaN where tokens do not count, which nothing may hear."""
        found = score(self, sequences, action_mask, **more)
        return torch.where(action_mask.bool(), found, torch.nan)

    replaced = (
        (sys, "argv", [COMMAND, *words]),
        (torch.cuda, "current_device", lambda: Processor("cpu")),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "set_device", lambda _: None),
        (ray, "is_initialized", lambda: True),
        (ray, "get", get),
        (ray, "put", lambda value: value),
        (ray, "wait", lambda waiting, **_: (waiting[:1], waiting[1:])),
        (ray.actor.ActorClass, "_remote", lambda *args, **more: Handle(*args, **more)),
        (launcher, "placement_group", mock.Mock()),
        (referee, "init_model_from_pretrained", lambda self, given, _: load(self, given, reference)),
        (referee, "forward", with_nan),
        (deepspeed, "initialize", partial(with_sgd, deepspeed.initialize)),
        (engines, "init_device_mesh", lambda _, *args, **more: mesh("cpu", *args, **more)),
        (strategy, "setup_dataloader", partialmethod(strategy.setup_dataloader, sampler=range(2))),
        (sys.modules["openrlhf.utils.utils"], "convert_to_torch_dtype", lambda _: torch.float32),
        (sys.modules["openrlhf.models.actor"], "_patch_zero3_weight_mapping", lambda: None),
        (SamplesGenerator, "_dispatch_prompts_to_vllm", lambda _, x, *__, **___: [*map(responses_of, x)]),
        (BasePPOTrainer, "broadcast_to_vllm", lambda _: None),
    )
    dtype = mock.PropertyMock(return_value="float32")
    with mock.patch.dict(os.environ), quiet(), ExitStack() as stack:
        for patch in replaced:
            stack.enter_context(mock.patch.object(*patch))
        stack.enter_context(mock.patch.object(strategy, "param_dtype", dtype, create=True))
        spied = stack.enter_context(
            mock.patch.object(RemoteExperienceMaker, advantages.__name__, autospec=True, side_effect=advantages)
        )
        runpy.run_module(COMMAND, run_name="__main__")
    ((maker, experiences),) = (call.args for call in spied.call_args_list)
    return maker.kl_ctl, experiences


def words_of(folder: Path, words: str) -> list[str]:
    """The command line: what both runs share, and ``words``."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": x}) + "\n" for x in SAMPLES))
    common = (
        f"--actor.model_name_or_path {folder}/llama-policy --data.prompt_dataset {folder}/prompts.jsonl "
        f"--actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 --ds.zero_stage 3 --ds.attn_implementation eager "
        f"--vllm.num_engines 0 --vllm.sync_backend gloo --reward.remote_url given --rollout.batch_size 2 "
        f"--rollout.n_samples_per_prompt 2 --rollout.micro_batch_size 2 --rollout.temperature {TEMPERATURE} "
        f"--algo.advantage.estimator rloo --train.batch_size 4 --actor.adam.lr {RATE} --actor.max_norm 0 "
        f"--actor.lr_scheduler constant --ckpt.path {folder}/checkpoints --ckpt.save_steps 1 "
    )
    return (common + words).split()


def expected(policy: Any, reference: Any, beta: float, *, in_loss: bool, epochs: int) -> tuple[float, Any]:
    """Trains ``policy`` in float64, on one response after the other; the KL that is logged, and returns by tokens."""

    def token_logp(network: Any, ids: list[int]) -> torch.Tensor:
        logits = network(input_ids=torch.tensor([ids])).logits[0, START - 1 : -1] / TEMPERATURE
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids[START:])[:, None])[:, 0]

    rows, returns, kls = [], {}, []
    for first, second in map(responses_of, SAMPLES):
        for mine, other in ((first, second), (second, first)):
            ids = mine["observation_tokens"]
            with torch.no_grad():
                old, base = token_logp(policy, ids), token_logp(reference, ids)
            rewards = torch.zeros_like(old) if in_loss else -beta * (old - base)
            rewards[-1] += mine["reward"] - other["reward"]
            returns[tuple(ids)] = rewards.flip(0).cumsum(0).flip(0)
            rows.append((ids, old, base, returns[tuple(ids)]))
    count = sum(len(old) for _, old, _, _ in rows)
    for _ in range(epochs):
        loss = torch.zeros((), dtype=torch.float64)
        for ids, old, base, gains in rows:
            logp = token_logp(policy, ids)
            weight, ahead = (logp - old).exp(), logp - base
            loss -= torch.minimum(weight * gains, weight.clamp(0.8, 1.2) * gains).sum() / count
            loss += in_loss * beta * ((weight * ahead).detach() * logp).sum() / count
            kls.append((ahead**2).sum().item() / 2 / count / epochs if in_loss else ahead.mean().item() / 4)
        policy.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in policy.parameters():
                weight -= RATE * weight.grad
    return sum(kls), returns


def check_command(folder: Path) -> dict[str, float]:
    """Two steps of OpenRLHF's command equal those of one process: with the KL in the loss, then, resumed, in the reward.

    The first step has two updates, of which the second is off-policy.
    """
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": x}) + "\n" for x in SAMPLES))

    def network(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()

    policy, reference, errors = network("llama-policy"), network("llama-reference"), {}
    controller = PIDBeta(beta=0.5, target_nats=20.0, per="token", beta_max=2.0)
    loss = "--algo.kl.use_loss --algo.kl.unbiased_gradient --algo.kl.estimator k2 --train.max_epochs 2"
    reward = "--ckpt.load_enable --train.num_episodes 2 --train.micro_batch_size 2"
    for step, words, target in ((1, loss, 20.0), (2, reward, 1.0)):
        controller = replace(controller, target_nats=target)
        given = f"--algo.kl.init_coef 0.5 --algo.kl.target {target} --ckpt.output_dir {folder}/step-{step} "
        before = {name: x.detach().clone() for name, x in policy.named_parameters()}
        kl, returns = expected(policy, reference, controller.beta, in_loss=step == 1, epochs=3 - step)
        found, experiences = run(words_of(folder, given + words), str(folder / "llama-reference"))
        print(step, kl, controller.after(kl), found.leash)
        for experience in experiences:
            for ids, counts, mask, mine in zip(
                experience.sequences, experience.attention_mask, experience.action_mask, experience.returns, strict=True
            ):
                right = returns[tuple(ids[counts.bool()].tolist())]
                print("returns", (mine[mask.bool()] - right).abs().max(), right)
        for name, x in network(f"step-{step}").named_parameters():
            right = policy.get_parameter(name)
            print(name, (x-right).abs().max().item()/RATE, (right-before[name]).abs().max().item()/RATE)
    return errors
