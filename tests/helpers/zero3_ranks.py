"""Two processes that store the weights of tiny models between them by DeepSpeed's ZeRO-3.

Called as ``sharded_ranks``, of which ``make_models`` writes the models of ``ZERO3_KINDS``.
"""

import os
import sys
from functools import partial
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import deepspeed
import openrlhf_ranks
import sharded_ranks
import torch
import trl_training_ranks
from deepspeed.utils import safe_get_full_grad
from forked_ranks import fork_ranks
from sharded_ranks import PROMPTS, Ranks, largest_message, refusal_of, same

from kleash.linear import Head, linear_kl_loss, zero3_as_dtensor

CHECKS = {}
check = partial(sharded_ranks.check, checks=CHECKS)


def engine_of(network, *, accumulation=1, **zero):
    """DeepSpeed's engine around a network, with weights of more than 40 elements on both ranks."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 40, **zero}
    trained = [x for x in network.parameters() if x.requires_grad]
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation}
    config |= {"gradient_clipping": 0.0, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=network, optimizer=torch.optim.SGD(trained, lr=0.1), config=config)[0]


class Zero3Ranks(Ranks):
    sizes = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    config = dict.fromkeys((*sizes, "gradient_clipping"), "auto") | {"zero_allow_untested_optimizer": True}
    config |= {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40}}
    training = ("qwen3", {"deepspeed": config | {"bf16": {"enabled": "auto"}}}, "DeepSpeedEngine")
    loss_cases = (("GRPO", "llama", False, {"accumulation": 2}), ("GRPO", "qwen3", True, {"accumulation": 2}))
    dtype = torch.float32  # DeepSpeed's widest
    bound = 1e-6 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 3e-6
    wrapped = staticmethod(engine_of)

    def backward(self, model, loss, is_last):
        model.backward(loss)
        model.set_gradient_accumulation_boundary(is_last)

    def gradient(self, parameter):
        return 2 * safe_get_full_grad(parameter)  # of a mean over the two passes

    def whole(self, parameter):
        assert parameter.numel() == 0 or parameter.ds_numel <= 40, "the weights are on both ranks"
        with deepspeed.zero.GatheredParameters(parameter):
            return parameter.clone()


@check
def drift_of_models_under_zero3_equals_that_of_one_process(ranks):
    """With heads of which a rank has whole rows, no message has the size of the head."""
    for kind in ("llama", "qwen3"):
        networks = [ranks.network(f"{kind}-{role}") for role in ("policy", "reference")]
        alone = ranks.drift(*networks, alone=True, kind=kind, prompts=PROMPTS[:2])
        assert alone.per_token.value > 0.01
        networks = [engine_of(network).module.eval() for network in networks]
        head = networks[0].lm_head.weight
        with largest_message() as sizes:
            batch_tokens = 20 if kind == "llama" else 200
            same(alone, ranks.drift(*networks, kind=kind, prompts=PROMPTS[:2], batch_tokens=batch_tokens))
        assert head.numel() == 0, "the network's own weights are where they were"
        if kind == "llama":
            assert max(sizes.values()) < head.ds_numel / 2, sizes
            assert sizes["full_tensor"] >= 32 * 48, "the counters see something"


check(sharded_ranks.an_adapter_over_a_sharded_base_is_measured)
check(trl_training_ranks.exact_loss_of_trl_equals_that_of_one_process)
check(trl_training_ranks.a_training_run_of_trl_equals_that_of_one_process)


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
