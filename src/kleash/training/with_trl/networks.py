"""The networks that TRL's trainers are given: one to be trained, and others that stay as they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kleash.errors import ModelError
from kleash.jobs import TrainJob
from kleash.models import Pair, find_checkpoint
from kleash.training.model_options import both, lora_settings
from kleash.training.with_trl.forward_passes import positions_from_the_first_token, without_dropout


@dataclass(frozen=True, eq=False, kw_only=True)
class Networks:
    """What a run of TRL's works with."""

    policy: Any
    """To be trained."""
    other: Any
    """Kept near, or learned from; None where it is the policy with its adapter off."""
    lora: Any
    """The adapter that TRL is to put on the policy; None to train every weight."""
    pair: Pair
    """Both as they were loaded: tokenizer, context, notes."""
    dtypes: Mapping[str, str]
    """In which dtypes the weights are in memory, by role."""


def load_networks(job: TrainJob, other: str, *, role: str = "reference") -> Networks:
    """Load the policy, and beside it the model called ``other``, each as a network of its own.

    Raises:
        ModelError: if one cannot be loaded, is an adapter, or the two cannot be compared.
        OptionError, CannotRunError: as ``load_pair``.
    """
    for who, name in (("policy", job.policy), (role, other)):
        if find_checkpoint(name).adapter is not None:
            raise ModelError(
                f"the {who} {name} is an adapter, which TRL's trainers would train or compare in their own way; merge "
                "it into its base and give that folder"
            )
    pair = both(job, job.policy, other, device=job.device)
    alone = pair.policy.is_same_as(pair.reference)
    shared = alone and bool(job.lora_rank) and role == "reference"
    second = pair.reference if not alone else both(job, other, other, device=job.device).policy
    policy = positions_from_the_first_token(without_dropout(pair.policy.network.requires_grad_(True)))
    if not job.lora_rank:
        policy = policy.to(torch.promote_types(policy.dtype, torch.float32))
    return Networks(
        policy=policy.train(),
        other=None if shared else positions_from_the_first_token(second.network),
        lora=lora_settings(job.lora_rank, policy) if job.lora_rank else None,
        pair=pair,
        dtypes={
            "policy": str(policy.dtype).removeprefix("torch."),
            role: str((policy if shared else second.network).dtype).removeprefix("torch."),
        },
    )
