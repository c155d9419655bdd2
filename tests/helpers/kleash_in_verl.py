"""verl with kleash's functions in it, and its own back afterwards."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kleash.auditing.targets.packages import quiet
from kleash.extras import replace_everywhere
from kleash.integrations.verl import install

REPLACED = ("kl_penalty_forward", "kl_penalty", "agg_loss", "get_kl_controller")
WRAPPED = {
    "verl.trainer.ppo.ray_trainer": "apply_kl_penalty",
    "verl.trainer.ppo.utils": "need_reference_policy",
    "verl.workers.utils.losses": "ppo_loss",
    "verl.trainer.distillation.fsdp.losses": "compute_forward_kl_topk",
}


@contextmanager
def kleash_in_verl(**options: Any) -> Iterator[Any]:
    """verl's ``core_algos`` after ``install``; its own functions are in its attribute ``own``."""
    with quiet():  # what verl's own dependencies warn of when they are imported
        core = pytest.importorskip("verl.trainer.ppo.core_algos")
    own = {name: getattr(core, name) for name in REPLACED}
    finders = list(sys.meta_path)
    install(**options)
    core.own = SimpleNamespace(**own)
    try:
        yield core
    finally:
        sys.meta_path[:] = finders
        for name, function in own.items():
            replace_everywhere(core, name, function)
        for owner, name in WRAPPED.items():
            if owner in sys.modules:
                module = sys.modules[owner]
                replace_everywhere(module, name, inspect.unwrap(getattr(module, name)))
