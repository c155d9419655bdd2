"""Steps of verl's own v1 trainer on two ranks of a CPU, each with the driver and the workers of actor and reference.

verl's are its configuration, ``PPOTrainerSync.step``, ``ActorRolloutRefWorker``, ``TrainingWorker``, the FSDP2 engine,
losses, advantages, and the padding and balancing of batches. Replaced are TransferQueue (a dictionary on each rank),
Ray's messages (gloo), the rollout (responses and scores are given, no weights are sent), CUDA, AdamW (SGD, whose step
is the gradient), and a patch for a TRL that is not installed. Nothing is said of the loop around the steps.
"""

import os
import re
import sys
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from kleash.auditing.targets.packages import quiet, stand_ins
from kleash.integrations.verl import install
from kleash.leash import PIDBeta, ZieglerBeta

RESPONSES = ((0, 3), (0, 7), (1, 5), (1, 2), (2, 9), (2, 4), (3, 6))
"""Prompt and length of each; the eighth failed, for which verl pads the batch."""
RATE, TEMPERATURE, COEFFICIENT, MINI_BATCH = 0.05, 0.8, 0.3, 4
WORDS = (
    "data.train_batch_size=4 algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True "
    "algorithm.kl_penalty=k3 algorithm.kl_ctrl.kl_coef=0.1 algorithm.kl_ctrl.target_kl=90 algorithm.kl_ctrl.horizon=50 "
    f"rollout.n=2 rollout.temperature={TEMPERATURE} rollout.calculate_log_probs=False actor.strategy=fsdp2 "
    f"actor.use_kl_loss=True actor.kl_loss_type=exact actor.kl_loss_coef={COEFFICIENT} actor.ppo_mini_batch_size=2 "
    f"actor.optim.optimizer=SGD actor.optim.lr={RATE} actor.optim.weight_decay=0 actor.optim.clip_grad=1e9 "
    "actor.fsdp_config.use_torch_compile=False ref.fsdp_config.use_torch_compile=False "
    "+actor.fsdp_config.mixed_precision.param_dtype=fp32 +ref.fsdp_config.mixed_precision.param_dtype=fp32 "
    "+model.override_config.attn_implementation=eager"
)
STATIC = "algorithm.kl_ctrl.type=pid model.use_remove_padding=False actor.ppo_micro_batch_size_per_gpu=1 "
STATIC += "rollout.log_prob_micro_batch_size_per_gpu=2 ref.log_prob_micro_batch_size_per_gpu=1"
DYNAMIC = "algorithm.kl_ctrl.type=adaptive model.use_remove_padding=True actor.use_dynamic_bsz=True "
DYNAMIC += "actor.ppo_max_token_len_per_gpu=140 rollout.log_prob_max_token_len_per_gpu=200 "
DYNAMIC += "ref.log_prob_max_token_len_per_gpu=130 actor.calculate_entropy=True"
BEGUN = {"beta": 0.1, "target_nats": 90.0, "per": "token"}
CASES = {
    "token-mean": (STATIC, PIDBeta(**BEGUN)),
    "seq-mean-token-mean": (DYNAMIC, ZieglerBeta(**BEGUN, horizon=50)),
}
"""How the loss is averaged -> micro-batches and type of controller, and what the controller must be."""


class KVBatchMeta(SimpleNamespace):
    """TransferQueue's class of this name."""

    partition_id, fields = "train", None

    def __len__(self):
        return len(self.keys)

    def reorder(self, order):
        self.keys, self.tags = ([column[i] for i in order] for column in (self.keys, self.tags))


def meta_of(keys):
    return KVBatchMeta(keys=list(keys), tags=[QUEUE.tags[key] for key in keys], extra_info={})


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
        return meta_of(keys)


QUEUE = Queue()


def in_sections(words):
    """Settings with the names of their sections."""
    return re.sub(r"\b(?=(actor|ref|rollout|model)\.)", "actor_rollout_ref.", words).split()


@cache
def configuration():
    """verl's, with the settings of ``WORDS``."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", in_sections(WORDS))


def import_verl():
    """Install kleash with the exact KL, then import verl's driver, workers and engine, and read its configuration."""
    sys.modules["transfer_queue"] = QUEUE
    with quiet(), stand_ins(("uvicorn", "fastapi", "aiohttp", "vllm")):
        install(exact=True)
        for name in ("trainer.ppo.v1.trainer_sync", "workers.engine.fsdp.transformer_impl"):
            __import__(f"verl.{name}")
        configuration()


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
    """What a rollout has put into the queue; the second token of a long response is a tool's."""
    random, keys = torch.Generator().manual_seed(step), []
    for place, (prompt, length) in enumerate(RESPONSES):
        ids = torch.randint(3, 300, (2 + prompt + length,), generator=random)
        mask, scores = torch.ones(length, dtype=torch.long), torch.zeros(length)
        mask[1], scores[-1] = length < 5, torch.randn((), generator=random)
        row = {"uid": prompt, "input_ids": ids, "rm_scores": scores, "response_mask": mask, "loss_mask": mask}
        row |= {"prompts": ids[:-length], "responses": ids[-length:], "position_ids": torch.arange(len(ids))}
        keys.append(f"{step}.{prompt}_{place}_0")
        QUEUE.rows[keys[-1]], QUEUE.tags[keys[-1]] = row, {"seq_len": len(ids)}
    return meta_of(keys)


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
    made.ref_in_actor = made.curr_step_profile = False
    made.parameter_sync_step, made.prepare_step = 1, dict
    return made


def response_logp(network, row):
    """log p of every word at each counted place of a response, and of its tokens."""
    mask = row["response_mask"].bool()
    logits = network(input_ids=row["input_ids"][None]).logits[0, len(row["prompts"]) - 1 : -1]
    logp = (logits / TEMPERATURE).log_softmax(-1)
    return logp[mask], logp.gather(-1, row["responses"][:, None])[mask, 0]


def expected_step(policy, reference, keys, beta, mode):
    """Rewards, the KL of each response and that of the loss; ``policy`` is trained, one response after the other."""
    rows, olds, rewards, kls = [QUEUE.rows[key] for key in keys], [], [], []
    for row in rows:
        with torch.no_grad():
            (_, old), (_, base) = (response_logp(network, row) for network in (policy, reference))
        olds.append(old)
        kls.append((base - old).exp() - 1 - (base - old))
        rewards.append(row["rm_scores"][row["response_mask"].bool()] - beta * kls[-1])
    returns, losses = [x.flip(0).cumsum(0).flip(0) for x in rewards], []
    every = torch.cat(returns)
    half, part = len(rows) // 2, MINI_BATCH // 2  # of a rank
    for start in range(0, half, part):
        batch = [n for first in (start, half + start) for n in range(first, first + part) if len(olds[n])]
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
    from omegaconf import OmegaConf
    from verl.plugin.platform import get_platform

    more, controller = CASES[mode]
    words = in_sections(f"{more} model.path={folder}/llama-policy actor.loss_agg_mode={mode}")
    with (
        quiet(),
        mock.patch.dict(os.environ, VERL_ENGINE_DEVICE="cuda"),
        mock.patch.multiple(type(get_platform()), current_device=lambda _: "cpu", device_name="cpu"),
        mock.patch.multiple(torch.cuda, mem_get_info=lambda: (0, 0), get_device_name=lambda: "CPU"),
        mock.patch.object(torch.Tensor, "pin_memory", lambda self: self),
        mock.patch("verl.models.transformers.monkey_patch.is_trl_available", bool),
    ):
        OmegaConf.resolve(config := OmegaConf.merge(configuration(), OmegaConf.from_dotlist(words)))
        trainer = trainer_of(config, f"{folder}/llama-reference")
        policy, start, reference = (
            AutoModelForCausalLM.from_pretrained(folder / f"llama-{role}", dtype=torch.float64).eval()
            for role in ("policy", "policy", "reference")
        )
        for step in (1, 2):
            trainer.global_steps = step
            keys = trainer.step(metrics := {}, {}).keys
            rewards, kls, loss_kl = expected_step(policy, reference, keys, controller.beta, mode)
            controller = controller.after(kl := sum(kls) / len(kls), sequences=len(kls))
            assert len(keys) == 8 and len(kls) == 7, "a response was added, and was not measured"
            measured = (
                metrics["actor/reward_kl_penalty"],
                metrics["actor/kl_loss"],
                trainer.kl_ctrl_in_reward.value,
            )
            torch.testing.assert_close(measured, (kl, loss_kl, controller.beta), rtol=1e-5, atol=0)
            for key, right in zip(keys, rewards, strict=True):
                own = QUEUE.rows[key]["token_level_rewards"][QUEUE.rows[key]["response_mask"].bool()]
                torch.testing.assert_close(own, right.float(), rtol=1e-4, atol=1e-5)
            for name, parameter in trainer.actor_rollout_wg.worker.actor.engine.module.named_parameters():
                right, begun = policy.get_parameter(name), start.get_parameter(name)
                error, update = ((x - right).abs().max() for x in (parameter.full_tensor(), begun))
                assert len(parameter.to_local()) < len(parameter), "a shard"
                assert error < 5e-5 * update and update > 1e-3, (step, name, error, update)
