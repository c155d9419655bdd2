"""The set-up of a PPO run: job, process group, models, optimiser and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kleash.errors import CannotRunError, OptionError
from kleash.extras import import_extra
from kleash.jobs import PPOJob
from kleash.models import TokenSequence
from kleash.models.pair_loading import resolve_device
from kleash.training.ppo.actor_critic import ActorCritic, load_actor_critic
from kleash.training.ppo.policy import TokenBatch
from kleash.training.process_group import ProcessGroup
from kleash.training.rewards import Rewards, load_rewards


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingSetup:
    """The objects of a run; only the state of ``wrapped_policy`` and ``optimizer`` changes."""

    job: PPOJob
    accelerator: Any
    group: ProcessGroup
    actor_critic: ActorCritic
    wrapped_policy: Any
    """The policy as Accelerate wrapped it, with gradient reduction and weight gathering over processes."""
    optimizer: Any
    rewards: Rewards

    @property
    def device(self) -> torch.device:
        """The device of all models."""
        return self.accelerator.device

    def autocast(self) -> torch.autocast:
        """The autocast context of forward passes: bfloat16 if job, checkpoint or Accelerate ask for it."""
        half = self.actor_critic.sampler.dtype == torch.bfloat16 or self.accelerator.mixed_precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half)

    def batch(self, sequences: Sequence[TokenSequence]) -> TokenBatch:
        """The padded batch of some sequences."""
        return TokenBatch.of(sequences, self.job.temperature, self.device)


def set_up(job: PPOJob) -> TrainingSetup:
    """Load the models and prepare them with Accelerate.

    The generators of Python, numpy and torch are seeded twice: before adapters are initialised, and again for
    rewards that use random numbers.

    Raises:
        ModelError, OptionError, UnknownNameError: if a model or a reward cannot be loaded.
        CannotRunError: if the device is missing, or Accelerate's sharding mode is unsupported.
    """
    accelerate = import_extra("accelerate", "train")
    device = resolve_device(job.device, None)
    processes = accelerate.PartialState(cpu=device.type == "cpu")
    if job.device not in ("auto", processes.device.type, str(processes.device)):
        raise OptionError(
            f"--device is {job.device} and Accelerate puts this process on {processes.device}; leave it out, and "
            "choose by CUDA_VISIBLE_DEVICES"
        )
    accelerate.utils.set_seed(job.seed % 2**32)
    actor_critic = load_actor_critic(job, processes.device)
    accelerator = accelerate.Accelerator(cpu=device.type == "cpu")
    _check_sharding(accelerator)
    trainable = [parameter for parameter in actor_critic.policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=job.learning_rate, weight_decay=0.0)
    wrapped, optimizer = accelerator.prepare(actor_critic.policy, optimizer)
    rewards = load_rewards(
        job.rewards,
        tokenizer=actor_critic.pair.tokenizer,
        device=str(processes.device),
        dtype=job.dtype,
        batch_tokens=job.batch_tokens,
    )
    accelerate.utils.set_seed(job.seed % 2**32)
    return TrainingSetup(
        job=job,
        accelerator=accelerator,
        group=ProcessGroup(accelerator.process_index, accelerator.num_processes),
        actor_critic=actor_critic,
        wrapped_policy=wrapped,
        optimizer=optimizer,
        rewards=rewards,
    )


def _check_sharding(accelerator: Any) -> None:
    """Refuse sharding modes in which this loop would save or generate from partial weights."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or (kind == "FSDP" and not accelerator.is_fsdp2):
        raise CannotRunError(
            f"Accelerate is set to {kind}, in which kleash's PPO does not know where the weights are; take "
            "--use_fsdp --fsdp_version 2, or plain processes"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise CannotRunError(
            f"Accelerate is set to mixed precision {accelerator.mixed_precision}; kleash's PPO takes no or bf16"
        )
