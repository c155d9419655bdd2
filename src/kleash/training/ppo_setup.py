"""The set-up of a PPO run: device, models, optimiser and rewards."""

from dataclasses import dataclass
from typing import Any

import torch

from kleash.errors import CannotRunError, OptionError
from kleash.extras import import_extra
from kleash.jobs import PPOJob
from kleash.models.pair_loading import resolve_device
from kleash.training.actor_critic import ActorCritic, load_actor_critic
from kleash.training.process_group import ProcessGroup
from kleash.training.rewards import Rewards, load_rewards


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """The objects of a run; only the state of networks and optimiser changes."""

    job: PPOJob
    group: ProcessGroup
    networks: ActorCritic
    optimizer: torch.optim.Optimizer
    rewards: Rewards
    device: torch.device
    has_bfloat16_products: bool
    """In forward passes: if job, checkpoint or Accelerate ask for them."""

    def autocast(self) -> torch.autocast:
        """The context of forward passes."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.has_bfloat16_products)


def set_up(job: PPOJob) -> Run:
    """Load the models and the rewards, on the device that Accelerate gives to this process.

    The generators of Python, numpy and torch are seeded twice: before adapters are initialised, and again for
    rewards that use random numbers.

    Raises:
        ModelError, OptionError, UnknownNameError: if a model or a reward cannot be loaded.
        CannotRunError: if the device is missing, or Accelerate is set to shard the weights.
    """
    accelerate = import_extra("accelerate", "train")
    is_cpu = resolve_device(job.device, None).type == "cpu"
    accelerator = accelerate.Accelerator(cpu=is_cpu)
    device = accelerator.device
    if job.device not in ("auto", device.type, str(device)):
        raise OptionError(
            f"--device is {job.device} and Accelerate puts this process on {device}; leave it out, and "
            "choose by CUDA_VISIBLE_DEVICES"
        )
    require_replicas(accelerator)
    accelerate.utils.set_seed(job.seed % 2**32)
    networks = load_actor_critic(job, device)
    trained = [parameter for parameter in networks.parameters() if parameter.requires_grad]
    rewards = load_rewards(
        job.rewards,
        tokenizer=networks.pair.tokenizer,
        device=str(device),
        dtype=job.dtype,
        batch_tokens=job.batch_tokens,
    )
    accelerate.utils.set_seed(job.seed % 2**32)
    return Run(
        job=job,
        group=ProcessGroup(accelerator.process_index, accelerator.num_processes),
        networks=networks,
        optimizer=torch.optim.AdamW(trained, lr=job.learning_rate, weight_decay=0.0),
        rewards=rewards,
        device=device,
        has_bfloat16_products=(
            networks.sampler.dtype == torch.bfloat16 or accelerator.mixed_precision == "bf16"
        ),
    )


def require_replicas(accelerator: Any) -> None:
    """Refuse configurations of Accelerate under which a process would not have all weights, or scales the loss."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"):
        raise CannotRunError(
            f"Accelerate is set to {kind}, and every process of kleash's PPO has whole copies of the models; take "
            "plain processes, with --lora-rank if memory is short, or train grpo, which TRL shards"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise CannotRunError(
            f"Accelerate is set to mixed precision {accelerator.mixed_precision}; kleash's PPO takes no or bf16"
        )
