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
    def verl(self):
        import sys
        import torch
        import verl.trainer.ppo.core_algos as core  # as a worker imports it: by itself
        from omegaconf import OmegaConf
        assert "verl.workers.engine.fsdp" not in sys.modules, "not every process needs the engine"
        logp = torch.tensor([-1.0, -30.0], requires_grad=True)
        value = core.kl_penalty(logp, torch.tensor([-21.0, -1.0]), "k3")
        (slope,) = torch.autograd.grad(value.sum(), logp)
        config = OmegaConf.create({"type": "adaptive", "kl_coef": 0.1, "target_kl": 6.0, "horizon": 100})
        return value.tolist(), slope.tolist(), type(core.get_kl_controller(config)).__module__

    def openrlhf(self):
        import sys
        from kleash.auditing.targets.packages import quiet, stand_ins
        before = [name for name in sys.modules if name.startswith("openrlhf.")]
        with stand_ins(("deepspeed", "flash_attn", "pylatexenc")), quiet():
            import openrlhf.models.utils as utils
        return before, utils.compute_approx_kl.func.__module__

true_kl()
ray.init(
    num_cpus=1, include_dashboard=False, log_to_driver=False,
    runtime_env={"worker_process_setup_hook": true_kl},
)
worker = Worker.remote()
print(json.dumps([*ray.get(worker.verl.remote()), *ray.get(worker.openrlhf.remote())]))
ray.shutdown()
"""


@pytest.mark.peers("ray", "verl", "openrlhf")
def test_ray_workers_use_kleash_in_both_frameworks(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "true_kl.py").write_text("import kleash.integrations.verl as ours\nours.install(exact=True)")
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "VERL_USE_EXTERNAL_MODULES": "true_kl"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(tmp_path / "driver.py")],
        env={**os.environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values, slopes, controller, before, estimate = json.loads(done.stdout.strip().splitlines()[-1])
    # verl's own clamps both values to 10, and takes their gradients for 0.
    assert values == pytest.approx([math.exp(-20) + 19, math.exp(29) - 30])
    assert slopes == pytest.approx([1 - math.exp(-20), 1 - math.exp(29)])
    assert controller.startswith("kleash.") and estimate == "kleash.integrations.openrlhf"
    assert before == [], "OpenRLHF is imported after kleash"
