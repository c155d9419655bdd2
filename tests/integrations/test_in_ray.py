"""What the pages of verl and OpenRLHF say of Ray: kleash is in every process that Ray starts, a real Ray here."""

import json
import math
import os
import subprocess
import sys

import pytest

DRIVER = """
import json
import ray
from kleash.integrations.openrlhf import install

def true_kl():
    install(controller={"kind": "pid"})

@ray.remote
class Worker:
    def penalty(self, name):
        import sys
        import torch
        import verl.trainer.ppo.core_algos as core  # as a worker imports it: by itself
        assert "verl.workers.engine.fsdp" not in sys.modules, "not every process needs the engine"
        logp = torch.tensor([-1.0, -30.0], requires_grad=True)
        value = core.kl_penalty(logp, torch.tensor([-21.0, -1.0]), name)
        (slope,) = torch.autograd.grad(value.sum(), logp)
        return value.tolist(), slope.tolist()

    def controller(self):
        import verl.trainer.ppo.core_algos as core
        from omegaconf import OmegaConf
        config = OmegaConf.create({"type": "adaptive", "kl_coef": 0.1, "target_kl": 6.0, "horizon": 100})
        return type(core.get_kl_controller(config)).__module__

    def openrlhf(self):
        import sys
        from kleash.auditing.targets.packages import quiet, stand_ins
        before = [name for name in sys.modules if name.startswith("openrlhf.")]
        with stand_ins(("deepspeed", "flash_attn", "pylatexenc")), quiet():
            import openrlhf.models.utils as utils
        return before, utils.compute_approx_kl.func.__module__

true_kl()
ray.init(
    num_cpus=2, include_dashboard=False, log_to_driver=False,
    runtime_env={"worker_process_setup_hook": true_kl},
)
worker = Worker.remote()
values, slopes = ray.get(worker.penalty.remote("k3"))
verl = {"values": values, "slopes": slopes, "controller": ray.get(worker.controller.remote())}
print(json.dumps({"verl": verl, "openrlhf": ray.get(worker.openrlhf.remote())}))
ray.shutdown()
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """What the workers of both frameworks report, from one Ray."""
    for package in ("ray", "verl", "openrlhf"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("ray")
    (folder / "driver.py").write_text(DRIVER)
    (folder / "true_kl.py").write_text(
        "from kleash.integrations.verl import install\n\ninstall(exact=True)\n"
    )
    variables = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "VERL_USE_EXTERNAL_MODULES": "true_kl"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(folder / "driver.py")],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_verl_ray_workers_use_kleash_penalty(reported):
    verl = reported["verl"]
    # verl's own clamps both values to 10, and takes their gradients for 0.
    assert verl["values"] == pytest.approx([math.exp(-20) + 19, math.exp(29) - 30])
    assert verl["slopes"] == pytest.approx([1 - math.exp(-20), 1 - math.exp(29)])
    assert verl["controller"].startswith("kleash.")


def test_openrlhf_ray_workers_use_kleash_penalty(reported):
    assert reported["openrlhf"] == [[], "kleash.integrations.openrlhf"]
