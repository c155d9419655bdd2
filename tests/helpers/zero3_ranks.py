"""Two processes that store the weights of tiny models between them by DeepSpeed's ZeRO-3.

Called as ``sharded_ranks``, of which ``make_models`` writes the models of ``ZERO3_KINDS``.
"""

import os
import sys
from functools import partial
from pathlib import Path
from unittest import mock

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import deepspeed
import openrlhf_ranks
import sharded_ranks
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from forked_ranks import fork_ranks
from sharded_ranks import PROMPTS, Ranks, largest_message, refusal_of, same
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl_training_ranks import as_one_process, first_step_in_bfloat16, same_training, taken_for_gpus, train

from kleash.linear import Head, linear_kl_loss, zero3_as_dtensor

FEW_PROMPTS = PROMPTS[:2]
CHECKS = {}
check = partial(sharded_ranks.check, checks=CHECKS)


class Zero3Ranks(Ranks):
    """This process, and the folder of the models."""

    def sharded(self, name, **more):
        return engine_of(self.network(name), **more).module


def engine_of(network, *, accumulation=1, **zero):
    """DeepSpeed's engine around a network, with weights of more than 40 elements on both ranks."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 40, **zero}
    trained = [x for x in network.parameters() if x.requires_grad]
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation}
    config |= {"gradient_clipping": 0.0, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(trained, lr=0.1)
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
    return engine


@check
def drift_of_models_under_zero3_equals_that_of_one_process(ranks):
    """With heads of which a rank has whole rows, no message has the size of the head."""
    for kind in ("llama", "qwen3"):
        roles = ("policy", "reference")
        networks = [ranks.network(f"{kind}-{role}") for role in roles]
        alone = ranks.drift(*networks, alone=True, kind=kind, prompts=FEW_PROMPTS)
        assert alone.per_token.value > 0.01
        networks = [engine_of(network).module.eval() for network in networks]
        head = networks[0].lm_head.weight
        with largest_message() as sizes:
            batch_tokens = 20 if kind == "llama" else 200
            same(alone, ranks.drift(*networks, kind=kind, prompts=FEW_PROMPTS, batch_tokens=batch_tokens))
        assert head.numel() == 0, "the network's own weights are where they were"
        if kind == "llama":
            assert max(sizes.values()) < head.ds_numel / 2, sizes
            assert sizes["full_tensor"] >= 32 * 48, "the counters see something"


@check
def an_adapter_over_a_base_under_zero3_is_measured(ranks):
    from peft import PeftModel

    def adapted():
        return PeftModel.from_pretrained(
            ranks.network("llama-policy"), ranks.folder / "adapter", is_trainable=True
        )

    alone = ranks.drift(adapted().eval(), None, alone=True, prompts=FEW_PROMPTS)
    assert alone.per_token.value > 0.01
    same(alone, ranks.drift(engine_of(adapted()).module.train(), None, prompts=FEW_PROMPTS))


@check
def exact_loss_of_trl_equals_that_of_one_process(ranks):
    """Value and gradient of the exact KL of a batch whose rows are divided between the ranks, twice accumulated."""
    from trl_batches import batch

    inputs = batch(tools=False)
    inputs["advantages"].zero_()  # leaves the KL term alone
    inputs["old_logps"] = torch.zeros(4)
    for kind, empty in (("llama", False), ("qwen3", True)):
        inputs["completion_mask"][2:] *= int(not empty)  # then the second rank has no token
        inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
        made = partial(exact_loss, ranks, kind, inputs)
        loss, gradients = made(slice(None), sharded=False)
        assert loss > 0.01 and any(x.abs().max() > 1e-3 for x in gradients.values())
        sharded_loss, sharded = made(slice(2 * ranks.rank, 2 * ranks.rank + 2), sharded=True)
        assert abs(sharded_loss - loss) < 1e-6 * loss, (loss, sharded_loss)
        for name, gradient in gradients.items():
            error = (gradient - sharded[name]).abs().max()
            assert error < 1e-6 * max(1.0, float(gradient.abs().max())), (kind, name, error)


def exact_loss(ranks, kind, inputs, rows, *, sharded):
    """The mean over the ranks of GRPO's loss, and the mean over two passes of its gradient."""
    from trl import GRPOConfig
    from trl_batches import make

    from kleash.integrations.trl import LeashedGRPOTrainer

    network = ranks.network(f"{kind}-policy")
    reference = (ranks.sharded if sharded else ranks.network)(f"{kind}-reference")
    with (
        mock.patch("accelerate.Accelerator.prepare_model", lambda self, model, **_: model),
        mock.patch("accelerate.Accelerator.num_processes", 1 + sharded),
    ):
        trainer = make(
            LeashedGRPOTrainer,
            GRPOConfig,
            network,
            ranks.folder / "run",
            reference=reference.eval(),
            processing_class=ranks.tokenizer("llama-policy"),
            config_of={"gradient_accumulation_steps": 2},
        )
        engine = engine_of(network, accumulation=2) if sharded else None
        mine = {name: x[rows] if x.dim() else x for name, x in inputs.items()}
        mine["kleash_reference_hidden"] = trainer._forward_pass(mine, reference=True, hidden=True).hidden
        total = torch.zeros(())
        for step in range(2):
            loss = trainer._compute_loss(network if engine is None else engine, mine)
            total += loss.detach() / 2
            if engine is None:
                (loss / 2).backward()
            else:
                engine.backward(loss)
                engine.set_gradient_accumulation_boundary(step == 1)
    if engine is None:
        return float(total), {name: x.grad for name, x in network.named_parameters()}
    dist.all_reduce(total)
    return float(total) / 2, {name: safe_get_full_grad(x) for name, x in network.named_parameters()}


@check
def a_training_run_of_trl_equals_that_of_one_process(ranks):
    """The Trainer shards by its own ``deepspeed=``: generation, rewards, two updates, DriftMonitors, a controller."""
    names = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 40}
    config = {**dict.fromkeys((*names, "gradient_clipping"), "auto"), "zero_optimization": zero}
    config["zero_allow_untested_optimizer"] = True
    with as_one_process():
        alone, log = train(ranks.folder, "qwen3", None)
    with taken_for_gpus():
        shared, shared_log = train(ranks.folder, "qwen3", {"deepspeed": config})
    unset_hf_deepspeed_config()
    assert isinstance(shared.model_wrapped, deepspeed.DeepSpeedEngine)
    assert shared.model.lm_head.weight.numel() == 0, "the weights are on both ranks"
    same_training(log, shared_log)
    for mine, right in zip(shared.model.parameters(), alone.model.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters(mine):
            assert (mine - right).abs().max() < 1e-6
    first_step_in_bfloat16(ranks.folder, "qwen3", {"deepspeed": config | {"bf16": {"enabled": "auto"}}}, log)
    unset_hf_deepspeed_config()


@check
def what_cannot_be_done_is_refused_on_all_ranks(ranks):
    whole = ranks.network("llama-reference")
    engine = engine_of(ranks.network("llama-policy"))
    policy = engine.module.eval()
    hidden, weights = torch.randn(3, 32), torch.ones(3)
    head = Head(zero3_as_dtensor(policy.lm_head.weight))
    alone = linear_kl_loss(hidden, head, hidden + 1, Head(torch.randn(320, 32)), weights=weights).loss
    refusal_of(alone.backward, "let the loss depend on the module's output")
    policy.lm_head.weight.ds_tensor.ds_quant_scale = torch.ones(1)
    refusal_of(lambda: ranks.drift(policy, whole), "lm_head.weight of the policy.*is quantised")
    refusal_of(lambda: zero3_as_dtensor(policy.lm_head.weight), "a parameter of ZeRO-3 is quantised")


@check
def openrlhfs_command_equals_one_process(ranks):
    openrlhf_ranks.check_command(ranks.folder)


def main():
    """Arguments as of ``sharded_ranks``."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile
    store, folder, *only = sys.argv[1:]
    sharded_ranks.import_what_checks_use()
    openrlhf_ranks.import_openrlhf()
    sharded_ranks.main(fork_ranks(2, [store]), store, Path(folder), only, CHECKS, Zero3Ranks)


if __name__ == "__main__":
    main()
