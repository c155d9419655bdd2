"""Steps of verl's own v1 trainer on two ranks of a CPU, each with the driver and the workers of actor and reference.

verl's are its configuration, ``PPOTrainerSync.step``, ``ActorRolloutRefWorker``, ``TrainingWorker``, the FSDP2 engine,
losses, advantages, and the padding and balancing of batches. Replaced are TransferQueue (a dictionary on each rank),
Ray's messages (gloo), the rollout (responses and scores are given, no weights are sent), CUDA, AdamW (SGD, whose step
is the gradient), and a patch for a TRL that is not installed. Nothing is said of the loop around the steps.
"""

import os
import sys
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from kleash.auditing.targets.packages import quiet, stand_ins
from kleash.integrations.verl import install
from kleash.leash import PIDBeta, ZieglerBeta

LENGTHS = ((3, 7), (5, 2), (9, 4), (6,))
"""Lengths of the responses of each prompt; the eighth failed, for which verl pads the batch."""
RATE, TEMPERATURE, COEFFICIENT, BETA, TARGET, MINI_BATCH = 0.05, 0.8, 0.3, 0.1, 70.0, 4
WORDS = {
    "data.": "train_batch_size=4",
    "algorithm.": "adv_estimator=reinforce_plus_plus use_kl_in_reward=True kl_penalty=k3",
    "algorithm.kl_ctrl.": f"kl_coef={BETA} target_kl={TARGET} horizon=50",
    "actor_rollout_ref.rollout.": f"n=2 temperature={TEMPERATURE} calculate_log_probs=False",
    "actor_rollout_ref.actor.": f"strategy=fsdp2 use_kl_loss=True kl_loss_type=exact kl_loss_coef={COEFFICIENT} "
    "ppo_mini_batch_size=2 fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.optim.": f"optimizer=SGD lr={RATE} weight_decay=0 clip_grad=1e9",
    "actor_rollout_ref.ref.": "fsdp_config.use_torch_compile=False",
    "+actor_rollout_ref.": "actor.fsdp_config.mixed_precision.param_dtype=fp32 "
    "ref.fsdp_config.mixed_precision.param_dtype=fp32 model.override_config.attn_implementation=eager",
}
STATIC = "actor.ppo_micro_batch_size_per_gpu=1 rollout.log_prob_micro_batch_size_per_gpu=2 "
STATIC += "ref.log_prob_micro_batch_size_per_gpu=1 model.use_remove_padding=False"
DYNAMIC = "actor.use_dynamic_bsz=True actor.ppo_max_token_len_per_gpu=140 rollout.log_prob_max_token_len_per_gpu=200 "
DYNAMIC += "ref.log_prob_max_token_len_per_gpu=130 model.use_remove_padding=True actor.calculate_entropy=True"
CASES = {
    "token-mean": (STATIC, "pid", PIDBeta(beta=BETA, target_nats=TARGET, per="token")),
    "seq-mean-token-mean": (
        DYNAMIC,
        "adaptive",
        ZieglerBeta(beta=BETA, target_nats=TARGET, per="token", horizon=50),
    ),
}
"""How the loss is averaged -> the micro-batches, the type of controller and what it must be."""


@dataclass
class KVBatchMeta:
    """TransferQueue's class of this name."""

    keys: list
    tags: list
    partition_id: str = "train"
    fields: list | None = None
    extra_info: dict = field(default_factory=dict)

    def __len__(self):
        return len(self.keys)

    def reorder(self, order):
        self.keys, self.tags = ([column[i] for i in order] for column in (self.keys, self.tags))


class Queue:
    """The module ``transfer_queue``; what is stored of each key is the same on both ranks."""

    KVBatchMeta, BatchMeta = KVBatchMeta, type("BatchMeta", (), {})
    rows, tags = {}, {}

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        names = [x for x in select_fields or self.rows[keys[0]] if x in self.rows[keys[0]]]
        return list_of_dict_to_tensordict([{name: self.rows[key][name] for name in names} for key in keys])

    def kv_batch_put(self, keys, partition_id, fields, tags=()):
        self.tags |= dict(zip(keys, tags, strict=False))
        for name, column in fields.items():
            for key, value in zip(keys, column.unbind(0), strict=True):
                self.rows.setdefault(key, {})[name] = getattr(value, "data", value)
        return KVBatchMeta(list(keys), [self.tags[key] for key in keys])


QUEUE = Queue()


def import_verl():
    """Install kleash with the exact KL, then import verl's driver, workers and engine."""
    sys.modules["transfer_queue"] = QUEUE
    with quiet(), stand_ins(("uvicorn", "fastapi", "aiohttp", "vllm")):
        install(exact=True)
        for name in ("trainer.ppo.v1.trainer_sync", "workers.engine.fsdp.transformer_impl"):
            __import__(f"verl.{name}")


class Group:
    """A group of workers, one on each rank, each of which gets a part of the batch."""

    def __init__(self, worker):
        self.worker, self._dispatch_info = worker, {"actor": [0, 1]}

    def __getattr__(self, name):
        return partial(self.call, name)

    def call(self, name, batch):
        from verl.utils.tensordict_utils import assign_non_tensor

        half = len(batch) // 2
        data = QUEUE.kv_batch_get(batch.keys[half * dist.get_rank() :][:half], "train")
        assign_non_tensor(data, **batch.extra_info)
        output = getattr(self.worker, name)(data)
        columns = {name: list(x.unbind(0)) for name, x in output.items() if isinstance(x, torch.Tensor)}
        dist.all_gather_object(parts := [None] * 2, columns)
        for column in columns:
            for key, value in zip(batch.keys, parts[0][column] + parts[1][column], strict=True):
                QUEUE.rows[key][column] = value
        return output if name == "update_actor" else batch


def sampled(step):
    """What a rollout has put into the queue; in the middle of short responses are two tokens of a tool."""
    random, keys = torch.Generator().manual_seed(step), []
    for prompt, lengths in enumerate(LENGTHS):
        for session, length in enumerate(lengths):
            ids = torch.randint(3, 300, (2 + prompt + length,), generator=random)
            mask, scores = torch.ones(length, dtype=torch.long), torch.zeros(length)
            mask[2:4], scores[-1] = length > 5, torch.randn((), generator=random)
            keys.append(f"{step}.{prompt}_{session}_0")
            QUEUE.rows[keys[-1]] = {"uid": f"{step}.{prompt}", "input_ids": ids, "rm_scores": scores}
            QUEUE.rows[keys[-1]] |= {"prompts": ids[:-length], "responses": ids[-length:]}
            QUEUE.rows[keys[-1]] |= {
                "position_ids": torch.arange(len(ids)),
                "response_mask": mask,
                "loss_mask": mask,
            }
            QUEUE.tags[keys[-1]] = {"seq_len": len(ids)}
    return KVBatchMeta(keys, [QUEUE.tags[key] for key in keys])


def trainer_of(config, reference):
    """verl's trainer with workers on this rank and the other."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.workers.engine_workers import ActorRolloutRefWorker

    made, groups = PPOTrainerSync(config), []
    for role, more in (("actor", {}), ("ref", {"path": reference})):
        own = deepcopy(config.actor_rollout_ref)
        own.model.update(more)
        groups.append(Group(ActorRolloutRefWorker(own, role=role)))
        groups[-1].worker.init_model()
    made.actor_rollout_wg, made.ref_policy_wg = groups
    made.replay_buffer = SimpleNamespace(sample=lambda global_steps, **_: (sampled(global_steps), {}))
    made.reward_loop_manager = made.checkpoint_manager = mock.MagicMock()
    made.tokenizer = SimpleNamespace(eos_token_id=1)
    made.parameter_sync_step, made.ref_in_actor, made.curr_step_profile, made.prepare_step = (
        1,
        False,
        False,
        dict,
    )
    return made


def response_logp(network, row):
    """log p of every word at each counted place of a response, and of its tokens."""
    prompt, mask = len(row["prompts"]), row["response_mask"].bool()
    logp = (network(input_ids=row["input_ids"][None]).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(
        -1
    )
    return logp[mask], logp.gather(-1, row["responses"][:, None])[mask, 0]


def expected_step(policy, reference, keys, beta, mode):
    """Rewards, the KL of each response and that of the loss; ``policy`` is trained, one response after the other."""
    rows = [QUEUE.rows[key] for key in keys]
    is_read = [bool(row["response_mask"].any()) for row in rows]
    olds, rewards, kls = [], [], []
    for row in rows:
        with torch.no_grad():
            (_, old), (_, base) = (response_logp(network, row) for network in (policy, reference))
        olds.append(old)
        kls.append((base - old).exp() - 1 - (base - old))
        rewards.append(row["rm_scores"][row["response_mask"].bool()] - beta * kls[-1])
    returns = [x.flip(0).cumsum(0).flip(0) for x in rewards]
    every, losses = torch.cat(returns), []
    half, part = len(rows) // 2, MINI_BATCH // 2  # of a rank
    for start in range(0, half, part):
        batch = [n for first in (start, half + start) for n in range(first, first + part) if is_read[n]]
        tokens, nats = sum(len(olds[n]) for n in batch), 0.0
        policy.zero_grad()
        for n in batch:
            (logp, own), (logq, _) = (response_logp(network, rows[n]) for network in (policy, reference))
            kl = (logp.exp() * (logp - logq.detach())).sum(-1)
            ratio, gain = (own - olds[n]).exp(), (returns[n] - every.mean()) / every.std()
            loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            loss = torch.where(gain < 0, loss.minimum(-3 * gain), loss)
            share = 1 / tokens if mode == "token-mean" else 1 / MINI_BATCH / len(own)
            ((loss + COEFFICIENT * kl).sum() * share).backward()
            nats += kl.sum().item() * share
        torch.optim.SGD(policy.parameters(), lr=RATE).step()
        losses.append(nats)
    return rewards, [kl.mean().item() for kl in kls if len(kl)], sum(losses) / len(losses)


def check_driver(folder, mode):
    """Two steps of two updates equal those in float64: rewards, the KL of the loss, the controller and the weights."""
    from verl.plugin.platform import get_platform

    micro_batches, kind, controller = CASES[mode]
    words = {**WORDS, "actor_rollout_ref.": f"{micro_batches} model.path={folder}/llama-policy"}
    words["algorithm.kl_ctrl."] += f" type={kind}"
    words["actor_rollout_ref.actor."] += f" loss_agg_mode={mode}"
    platform = type(get_platform())
    replaced = (
        (platform, "current_device", lambda self: "cpu"),
        (platform, "device_name", "cpu"),
        (torch.cuda, "mem_get_info", lambda: (0, 0)),
        (torch.cuda, "get_device_name", lambda: "CPU"),
        (torch.Tensor, "pin_memory", lambda self: self),
        (sys.modules["verl.models.transformers.monkey_patch"], "is_trl_available", bool),
    )
    with quiet(), ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, VERL_ENGINE_DEVICE="cuda"))
        for patch in replaced:
            stack.enter_context(mock.patch.object(*patch))
        with initialize_config_module("verl.trainer.config", version_base=None):
            given = [place + word for place, each in words.items() for word in each.split()]
            OmegaConf.resolve(config := compose("ppo_trainer", given))
        trainer = trainer_of(config, f"{folder}/llama-reference")
        policy, start, reference = (
            AutoModelForCausalLM.from_pretrained(folder / f"llama-{role}", dtype=torch.float64).eval()
            for role in ("policy", "policy", "reference")
        )
        for step in (1, 2):
            trainer.global_steps = step
            keys = trainer.step(metrics := {}, {}).keys
            rewards, kls, loss_kl = expected_step(policy, reference, keys, controller.beta, mode)
            controller = controller.after(sum(kls) / len(kls), sequences=len(kls))
            assert len(keys) == 8 and len(kls) == 7, "a response was added, and was not measured"
            torch.testing.assert_close(trainer.kl_ctrl_in_reward.value, controller.beta, rtol=1e-5, atol=0)
            torch.testing.assert_close(metrics["actor/kl_loss"], loss_kl, rtol=1e-5, atol=0)
            for key, right in zip(keys, rewards, strict=True):
                own = QUEUE.rows[key]["token_level_rewards"][QUEUE.rows[key]["response_mask"].bool()]
                torch.testing.assert_close(own, right.float(), rtol=1e-4, atol=1e-5)
            for name, parameter in trainer.actor_rollout_wg.worker.actor.engine.module.named_parameters():
                right, begun = policy.get_parameter(name), start.get_parameter(name)
                error, update = ((x - right).abs().max() for x in (parameter.full_tensor(), begun))
                assert len(parameter.to_local()) < len(parameter), "a shard"
                assert error < 5e-5 * update and update > 1e-3, (step, name, error, update)
