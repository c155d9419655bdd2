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
from ray import cloudpickle
from transformers import AutoModelForCausalLM

from kleash.auditing.targets.packages import quiet, stand_ins
from kleash.integrations.openrlhf import install
from kleash.leash import PIDBeta

COMMAND = "openrlhf.cli.train_ppo_ray"
ABSENT = ("flash_attn", "pylatexenc", "vllm", "uvicorn", "fastapi", "aiohttp")
CONTROLLER = {"kind": "pid", "beta_max": 2.0}
RATE, TEMPERATURE, START = 1e-4, 0.25, 4
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
    random = torch.Generator().manual_seed(4 + (prompt == "two men"))
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


def actor_class(kind: Any) -> Any:
    """The class that Ray makes of a decorated one."""
    return kind.__ray_metadata__.modified_class


class Handle:
    """``ActorClass._remote``: a handle of an actor on one rank, or of the driver, which all ranks have."""

    def __init__(self, kind: Any, args: Any = (), kwargs: Any = None, **_: Any) -> None:
        made = cloudpickle.loads(cloudpickle.dumps(actor_class(kind)))  # as a worker has it
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
    from openrlhf.trainer.ppo_trainer import PPOTrainer, RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.trainer.ray import launcher
    from openrlhf.utils.deepspeed import deepspeed as engines

    referee, strategy = (
        actor_class(launcher.ReferenceModelActor),
        engines.DeepspeedStrategy,
    )
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
        (actor_class(PPOTrainer), "broadcast_to_vllm", lambda _: None),
    )
    dtype = mock.PropertyMock(return_value="float32")
    with mock.patch.dict(os.environ), quiet(), ExitStack() as stack:
        for patch in replaced:
            stack.enter_context(mock.patch.object(*patch))
        stack.enter_context(mock.patch.object(strategy, "param_dtype", dtype, create=True))
        spied = stack.enter_context(
            mock.patch.object(
                RemoteExperienceMaker, advantages.__name__, autospec=True, side_effect=advantages
            )
        )
        runpy.run_module(COMMAND, run_name="__main__")
    ((maker, experiences),) = (call.args for call in spied.call_args_list)
    return maker.kl_ctl, experiences


def expected(policy: Any, reference: Any, beta: float, *, in_loss: bool) -> tuple[float, torch.Tensor]:
    """The KL of a step and the returns of its tokens; ``policy`` is trained, on one response after the other."""

    def token_logp(network: Any, ids: list[int]) -> torch.Tensor:
        logits = network(input_ids=torch.tensor([ids])).logits[0, START - 1 : -1] / TEMPERATURE
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids[START:])[:, None])[:, 0]

    rows, kls = [], []
    for first, second in map(responses_of, SAMPLES):
        for mine, other in ((first, second), (second, first)):
            ids = mine["observation_tokens"]
            with torch.no_grad():
                old, base = token_logp(policy, ids), token_logp(reference, ids)
            rewards = torch.zeros_like(old) if in_loss else beta * (base - old)
            rewards[-1] += mine["reward"] - other["reward"]
            rows.append((ids, old, base, rewards.flip(0).cumsum(0).flip(0)))
    count = sum(len(old) for _, old, _, _ in rows)
    for _ in range(1 + in_loss):
        policy.zero_grad()
        for ids, old, base, returns in rows:
            logp = token_logp(policy, ids)
            weight, ahead = (logp - old).exp(), (logp - base).detach()
            loss = -torch.minimum(weight * returns, weight.clamp(0.8, 1.2) * returns)
            ((loss + in_loss * beta * weight.detach() * ahead * logp).sum() / count).backward()
            kls.append(ahead.sum().item() / 2 / count if in_loss else ahead.mean().item() / 4)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= RATE * parameter.grad
    return sum(kls), torch.cat([returns for *_, returns in rows])


def check_command(folder: Path) -> None:
    """Two steps of the command equal those in float64: with the KL in the loss, then, resumed, in the reward.

    The first step has two updates, of which the second is off-policy; responses have different lengths.
    """
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": x}) + "\n" for x in SAMPLES))
    common = (
        f"--actor.model_name_or_path {folder}/llama-policy --data.prompt_dataset {folder}/prompts.jsonl "
        "--actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 --ds.zero_stage 3 --ds.attn_implementation eager "
        "--vllm.num_engines 0 --vllm.sync_backend gloo --reward.remote_url given --rollout.batch_size 2 "
        f"--rollout.n_samples_per_prompt 2 --rollout.micro_batch_size 2 --rollout.temperature {TEMPERATURE} "
        f"--algo.advantage.estimator rloo --train.batch_size 4 --actor.adam.lr {RATE} --actor.max_norm 0 "
        f"--actor.lr_scheduler constant --ckpt.path {folder}/checkpoints --ckpt.save_steps 1 --algo.kl.init_coef 0.5"
    )
    steps = {
        "loss": "--algo.kl.target 4 --algo.kl.use_loss --algo.kl.unbiased_gradient --train.max_epochs 2",
        "reward": "--algo.kl.target 3 --ckpt.load_enable --train.num_episodes 2 --train.micro_batch_size 2",
    }

    def network(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()

    policy, reference = network("llama-policy"), network("llama-reference")
    controller = PIDBeta(beta=0.5, target_nats=4.0, per="token", beta_max=2.0)
    for name, words in steps.items():
        kl, returns = expected(policy, reference, controller.beta, in_loss=name == "loss")
        controller = replace(controller, target_nats=4.0 if name == "loss" else 3.0).after(kl)
        command = f"{common} --ckpt.output_dir {folder}/{name} {words}".split()
        found, experiences = run(command, str(folder / "llama-reference"))
        print(controller, kl, found.leash)
        assert abs(found.value / controller.beta - 1) < 1e-6, (found.leash, controller)
        own = torch.cat([x.returns[x.action_mask.bool()] for x in experiences])
        assert (own - returns).abs().max() < 1e-4, (own, returns)
        trained, before = network(name), network("llama-policy")
        for parameter, value in policy.named_parameters():
            error = (trained.get_parameter(parameter) - value).abs().max()
            update = (before.get_parameter(parameter) - value).abs().max()
            assert error < 3e-7 < 2e-4 < update, (name, parameter, error, update)
