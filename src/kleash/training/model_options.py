"""Loading of a training job's models: the pair, its dtype, and the LoRA configuration."""

from typing import Any

import torch

from kleash.errors import OptionError
from kleash.extras import import_extra
from kleash.jobs import TrainJob
from kleash.models import Pair, load_pair

LORA_SCALE = 2
"""Alpha divided by rank: the scale of the adapter's product."""


def load_models(job: TrainJob, policy: str, reference: str, *, device: str) -> Pair:
    """A policy and a reference, loaded with the job's dtype.

    Raises:
        ModelError, OptionError, CannotRunError: as ``load_pair``.
    """
    return load_pair(
        policy, reference, dtype=job.dtype, device=device, trust_remote_code=job.trust_remote_code
    )


def require_trainable(dtype: str) -> None:
    """Check that the dtype is suitable for training.

    Raises:
        OptionError: if it is float16.
    """
    if dtype == "float16":
        raise OptionError("training in float16 loses gradients below 6e-8; take --dtype bfloat16 or float32")


def lora_settings(rank: int, network: Any) -> Any:
    """The configuration of a LoRA adapter on every linear layer except the head and routers.

    Raises:
        OptionError: if the rank is above the width of every matrix that it would be put on.
    """
    widest = max((min(weight.shape) for weight in network.parameters() if weight.dim() == 2), default=0)
    if widest and rank > widest:
        raise OptionError(
            f"--lora-rank is {rank}, and no matrix of the policy has a rank above {widest}: an adapter of that "
            "rank has more weights than the matrices that it adapts; lower it, or train every weight with --lora-rank 0"
        )
    # PEFT cannot run an adapter on a layer that returns more than its product, such as the router of Llama 4.
    routers = [
        name
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear)
        and type(module).forward is not torch.nn.Linear.forward
        and type(module).__module__.startswith("transformers.models.")
    ]
    return import_extra("peft", "models").LoraConfig(
        r=rank,
        lora_alpha=LORA_SCALE * rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        exclude_modules=routers or None,
        task_type="CAUSAL_LM",
    )
