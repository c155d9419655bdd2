"""OpenRLHF's own command on two ranks of DeepSpeed on a CPU, each with the driver and an actor of each kind.

OpenRLHF's are the command line, ``train``, ``PPOTrainer``, ``RayActorGroup``, ``RemoteExperienceMaker``, the actors of
policy and reference, ``DeepspeedStrategy`` with ZeRO-3, the replay buffer, losses and the files of checkpoints.
Replaced are Ray's messages (gloo), vLLM (responses and rewards are given, no weights are sent), CUDA, AdamW (SGD, whose
step is the gradient), bfloat16 (float32), the order of prompts, and a patch for a transformers that is not installed.
"""

import os
import runpy
import sys
from collections import namedtuple
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, partialmethod
from operator import attrgetter
from types import SimpleNamespace
from unittest import mock

import ray
import torch
import torch.distributed as dist
from datasets import Dataset
from ray import cloudpickle
from transformers import AutoModelForCausalLM

from kleash.auditing.targets.packages import quiet, stand_ins
from kleash.integrations.openrlhf import install
from kleash.leash import PIDBeta

COMMAND = "openrlhf.cli.train_ppo_ray"
ABSENT = ("flash_attn", "pylatexenc", "vllm", "uvicorn", "fastapi", "aiohttp")
SAMPLES = {"the sea": ((3, 1.0), (9, -0.5)), "two men": ((2, 0.25), (4, 2.0))}
"""Prompt -> length and reward of each response; some log ratios and weights exceed 10, where OpenRLHF's stop."""
RATE, TEMPERATURE, START = 1e-4, 0.25, 4
WORDS = (
    "--actor.model_name_or_path {0}/llama-policy --actor.num_nodes 2 --actor.num_gpus_per_node 1 --ref.num_nodes 2 "
    "--ref.num_gpus_per_node 1 --ds.zero_stage 3 --ds.attn_implementation eager --vllm.num_engines 0 "
    "--vllm.sync_backend gloo --reward.remote_url given --rollout.batch_size 2 --rollout.n_samples_per_prompt 2 "
    f"--rollout.micro_batch_size 2 --rollout.temperature {TEMPERATURE} --algo.advantage.estimator rloo "
    f"--train.batch_size 4 --actor.adam.lr {RATE} --actor.max_norm 0 --actor.lr_scheduler constant "
    "--algo.kl.init_coef 0.5 --ckpt.path {0}/checkpoints --ckpt.save_steps 1 --ckpt.output_dir {0}/"
)
STEPS = {
    "loss": "--algo.kl.target 4 --algo.kl.use_loss --algo.kl.unbiased_gradient --train.max_epochs 2",
    "reward": "--algo.kl.target 3 --ckpt.load_enable --train.num_episodes 2 --train.micro_batch_size 2 "
    "--actor.loss_agg_mode seq-mean-token-mean",
}
Remote = namedtuple("Remote", "rank value")
"""What an actor's method returned, on the rank that has the actor."""
actor_class = attrgetter("__ray_metadata__.modified_class")


def import_openrlhf():
    """Install kleash, then import what the command imports."""
    install(controller={"kind": "pid", "beta_max": 2.0})
    with stand_ins(ABSENT), quiet():
        for name in (COMMAND, "openrlhf.trainer.ppo_trainer"):
            __import__(name)


def responses_of(prompt):
    """What an engine of vLLM returns for a prompt of ``START`` tokens."""
    random = torch.Generator().manual_seed(4 + list(SAMPLES).index(prompt))
    made = []
    for length, reward in SAMPLES[prompt]:
        ids = torch.randint(3, 300, (START + length,), generator=random).tolist()
        made.append({"observation_tokens": ids, "action_ranges": [(START, len(ids))], "reward": reward})
        made[-1] |= {"prompt": prompt, "label": "", "rollout_log_probs": None}
    return made


def get(references):
    """``ray.get``, which all ranks call."""
    if isinstance(references, Remote):
        return get([references])[0]
    if not isinstance(references, list) or not all(isinstance(x, Remote) for x in references):
        return references
    dist.all_gather_object(values := [None] * 2, [x.value for x in references])
    return [values[x.rank][place] for place, x in enumerate(references)]


class Handle:
    """``ActorClass._remote``: of an actor on one rank, or of the driver, which is on both."""

    def __init__(self, kind, args=(), kwargs=None, **_):
        made = cloudpickle.loads(cloudpickle.dumps(actor_class(kind)))  # as Ray's worker gets it
        self.rank = args[1] if hasattr(made, "get_master_addr_port") else None
        self.actor = made(*args, **(kwargs or {})) if self.rank in (None, dist.get_rank()) else None

    def __getattr__(self, name):
        return SimpleNamespace(remote=partial(self.call, name))

    def call(self, name, *args, **kwargs):
        value = None if self.actor is None else getattr(self.actor, name)(*args, **kwargs)
        return value if self.rank is None else Remote(self.rank, value)


def with_sgd(initialize, *, config, model_parameters=None, **more):
    """``deepspeed.initialize`` with another optimizer, where there is one."""
    if "optimizer" in config:
        more["optimizer"] = torch.optim.SGD(model_parameters, lr=config.pop("optimizer")["params"]["lr"])
        config["zero_allow_untested_optimizer"] = True
    return initialize(config=config, **more)


def run(words, reference):
    """OpenRLHF's controller after a step of the command, and the experience of the step."""
    import deepspeed
    from openrlhf.trainer.ppo_trainer import PPOTrainer, RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.trainer.ray import launcher
    from openrlhf.utils.deepspeed import deepspeed as engines

    strategy, referee = engines.DeepspeedStrategy, actor_class(launcher.ReferenceModelActor)
    load, score, mesh = referee.init_model_from_pretrained, referee.forward, engines.init_device_mesh
    advantages = RemoteExperienceMaker.compute_advantages_and_returns
    spied = mock.create_autospec(advantages, side_effect=advantages)
    processor = type("Processor", (str,), {"__format__": lambda *_: "0"})("cpu")  # as in "cuda:0"

    def with_nan(self, sequences, action_mask, **more):
        found = score(self, sequences, action_mask, **more)
        return torch.where(action_mask.bool(), found, torch.nan)  # no masked token may be heard

    replaced = (
        (sys, "argv", [COMMAND, *words]),
        (torch.cuda, "current_device", lambda: processor),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "set_device", lambda _: None),
        (ray, "is_initialized", lambda: True),
        (ray, "get", get),
        (ray, "put", lambda value: value),
        (ray, "wait", lambda waiting, **_: (waiting[:1], waiting[1:])),
        (ray.actor.ActorClass, "_remote", lambda *args, **more: Handle(*args, **more)),
        (referee, "init_model_from_pretrained", lambda self, given, _: load(self, given, reference)),
        (referee, "forward", with_nan),
        (deepspeed, "initialize", partial(with_sgd, deepspeed.initialize)),
        (engines, "init_device_mesh", lambda _, *args, **more: mesh("cpu", *args, **more)),
        (strategy, "setup_dataloader", partialmethod(strategy.setup_dataloader, sampler=range(2))),
        (strategy, "param_dtype", mock.PropertyMock(return_value="float32")),
        (sys.modules["openrlhf.utils.utils"], "convert_to_torch_dtype", lambda _: torch.float32),
        (sys.modules["openrlhf.models.actor"], "_patch_zero3_weight_mapping", lambda: None),
        (RemoteExperienceMaker, advantages.__name__, spied),
        (SamplesGenerator, "_dispatch_prompts_to_vllm", lambda _, x, *__, **___: [*map(responses_of, x)]),
        (actor_class(PPOTrainer), "broadcast_to_vllm", lambda _: None),
    )
    with mock.patch.dict(os.environ), quiet(), ExitStack() as stack:
        for patch in replaced:
            stack.enter_context(mock.patch.object(*patch, create=patch[1] == "param_dtype"))
        runpy.run_module(COMMAND, run_name="__main__")
    ((maker, experiences),) = (call.args for call in spied.call_args_list)
    return maker.kl_ctl, experiences


def expected(policy, reference, beta, *, in_loss):
    """The mean KL of a step and the returns of its tokens; ``policy`` is trained, on one response after the other."""

    def token_logp(network, ids):
        logits = network(input_ids=torch.tensor([ids])).logits[0, START - 1 : -1] / TEMPERATURE
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids[START:])[:, None])[:, 0]

    rows, kl = [], 0.0
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
            share = 1 / count if in_loss else 1 / len(rows) / len(logp)
            ((loss + in_loss * beta * weight.detach() * ahead * logp).sum() * share).backward()
            kl += ahead.sum().item() / 2 / count if in_loss else ahead.mean().item() / 4
        torch.optim.SGD(policy.parameters(), lr=RATE).step()
    return kl, torch.cat([returns for *_, returns in rows])


def check_command(folder):
    """Two steps equal those in float64: of two updates with the KL in the loss, averaged over tokens; resumed, with the
    KL in the reward, over responses."""
    prompts = str(folder / f"prompts-{dist.get_rank()}")
    Dataset.from_dict({"input": list(SAMPLES)}).save_to_disk(prompts)

    def network(name):
        return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()

    policy, start, reference = map(network, ("llama-policy", "llama-policy", "llama-reference"))
    controller = PIDBeta(beta=0.5, target_nats=4.0, per="token", beta_max=2.0)
    for step, words in STEPS.items():
        kl, returns = expected(policy, reference, controller.beta, in_loss=step == "loss")
        controller = replace(controller, target_nats=float(words.split()[1])).after(kl)
        command = f"{WORDS.format(folder)}{step} --data.prompt_dataset {prompts} {words}"
        found, experiences = run(command.split(), str(folder / "llama-reference"))
        bound = 2e-6 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2e-5  # sums round more
        assert abs(found.value / controller.beta - 1) < bound, (found.leash, controller)
        own = torch.cat([x.returns[x.action_mask.bool()] for x in experiences])
        assert (own - returns).abs().max() < 1e-4, (own, returns)
        trained = network(step)
        for name, right in policy.named_parameters():
            error, update = ((x.get_parameter(name) - right).abs().max() for x in (trained, start))
            assert error < 3e-7 < 2e-4 < update, (step, name, error, update)
