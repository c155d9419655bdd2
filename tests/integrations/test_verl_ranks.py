"""verl's FSDP2 on two processes, each with half of the weights and half of the batch: the exact KL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys, warnings
warnings.simplefilter("ignore")
from copy import deepcopy
import torch
import torch.distributed as dist
from forked_ranks import fork_ranks
from kleash.integrations.verl import REFERENCE_HIDDEN, install
install(exact=True)
import verl.workers.engine.fsdp.transformer_impl as fsdp
import verl.workers.utils.losses as losses
from verl.plugin.platform import get_platform
from verl.utils.tensordict_utils import chunk_tensordict
from verl_engines import batch, engine_of, expected_update, loss_of, on_policy, tiny
rank = fork_ranks(2, [sys.argv[1]])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
platform = type(get_platform())
platform.current_device, platform.device_name = (lambda self: "cpu"), "cpu"

policy, reference = tiny(0, torch.float32), tiny(1, torch.float32)
alone, whole = (deepcopy(policy), deepcopy(reference)), batch(torch.float32, micro_batch_size_per_gpu=1)
on_policy(alone[0], whole)
expected, nats = expected_update(*alone, whole)
own = chunk_tensordict(whole, 2)[rank]
engine = engine_of(fsdp, reference, forward_only=True, shard=True)
own[REFERENCE_HIDDEN] = engine.infer_batch(deepcopy(own))["model_output"][REFERENCE_HIDDEN]
engine = engine_of(fsdp, policy, shard=True)
out = engine.forward_backward_batch(own, loss_of(losses))
for name, parameter in engine.module.named_parameters():
    assert len(parameter.to_local()) < len(parameter), "a shard"
    torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=2e-4, atol=2e-6)
mean = torch.tensor(out["metrics"]["kl_loss"].aggregate())
dist.all_reduce(mean)
torch.testing.assert_close(mean.item() / 2, nats, rtol=1e-5, atol=0)
print("agrees", flush=True)
"""


@pytest.mark.peers("verl")
def test_two_ranks_train_the_kl_of_the_whole_batch(tmp_path):
    helpers = str(Path(__file__).parents[1] / "helpers")
    paths = os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "store")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert (done.returncode, done.stdout.count("agrees")) == (0, 2), done.stderr[-6000:]
