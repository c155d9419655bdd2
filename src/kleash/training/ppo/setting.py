"""What a run works with from its first step to its last: job, processes, models, optimiser, rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kleash.errors import CannotRunError, OptionError
from kleash.extras import import_extra
from kleash.models import TokenSequence
from kleash.models.pair_loading import place_of
from kleash.records import PPOJob
from kleash.training.ppo.models import Trainee, load
from kleash.training.ppo.policy import Batch
from kleash.training.ranks import Ranks
from kleash.training.rewards import Rewards, load_rewards


@dataclass(frozen=True, eq=False, kw_only=True)
class Setting:
    """What a run works with; only what ``wrapped`` and ``optimizer`` hold changes."""

    job: PPOJob
    accelerator: Any
    ranks: Ranks
    trainee: Trainee
    wrapped: Any
    """The policy as Accelerate wrapped it: call it, and gradients and weights are shared with other processes."""
    optimizer: Any
    rewards: Rewards

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.accelerator.device

    def autocast(self) -> torch.autocast:
        """What the networks' passes run under: bfloat16, if job, checkpoint or Accelerate's settings say so."""
        half = self.trainee.speaker.dtype == torch.bfloat16 or self.accelerator.mixed_precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half)

    def batch(self, sequences: Sequence[TokenSequence]) -> Batch:
        """Sequences as the network reads them."""
        return Batch.of(sequences, self.job.temperature, self.device)


def set_up(job: PPOJob) -> Setting:
    """Load the models and hand them to Accelerate, which ``accelerate launch`` has told how many processes there are.

    The generators of Python, numpy and torch are seeded: once for adapters, and again for rewards that draw.

    Raises:
        ModelError, OptionError, UnknownNameError: if a model or a reward cannot be loaded.
        CannotRunError: if the device is not there, or Accelerate was told to shard in a way that does not work here.
    """
    accelerate = import_extra("accelerate", "train")
    place = place_of(job.device, None)
    processes = accelerate.PartialState(cpu=place.type == "cpu")
    if job.device not in ("auto", processes.device.type, str(processes.device)):
        raise OptionError(
            f"--device is {job.device} and Accelerate puts this process on {processes.device}; leave it out, and "
            "choose by CUDA_VISIBLE_DEVICES"
        )
    accelerate.utils.set_seed(job.seed % 2**32)
    trainee = load(job, processes.device)
    accelerator = accelerate.Accelerator(cpu=place.type == "cpu")
    _require_known(accelerator)
    trained = [parameter for parameter in trainee.policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.learning_rate, weight_decay=0.0)
    wrapped, optimizer = accelerator.prepare(trainee.policy, optimizer)
    rewards = load_rewards(
        job.rewards,
        tokenizer=trainee.pair.tokenizer,
        device=str(processes.device),
        dtype=job.dtype,
        batch_tokens=job.batch_tokens,
    )
    accelerate.utils.set_seed(job.seed % 2**32)
    return Setting(
        job=job,
        accelerator=accelerator,
        ranks=Ranks(accelerator.process_index, accelerator.num_processes),
        trainee=trainee,
        wrapped=wrapped,
        optimizer=optimizer,
        rewards=rewards,
    )


def _require_known(accelerator: Any) -> None:
    """Refuse what nobody has taught this loop: it would save or generate from parts of weights."""
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
