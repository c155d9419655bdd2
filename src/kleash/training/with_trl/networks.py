"""The networks of TRL's trainers: the trained policy, and a frozen reference or teacher."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kleash.checkpoints.resolution import find_checkpoint
from kleash.errors import ModelError
from kleash.jobs import TrainJob
from kleash.models import Pair
from kleash.models.compat import find_backbone
from kleash.training.model_options import load_models, lora_settings


@dataclass(frozen=True, eq=False, kw_only=True)
class Networks:
    """The networks of a run."""

    policy: Any
    """The trained network."""
    frozen: Any
    """The reference or teacher; None if it is the policy with its adapter disabled."""
    lora: Any
    """Configuration of the adapter that TRL puts on the policy; None to train all weights."""
    pair: Pair
    """The loaded pair: tokenizer, context length, notes."""
    dtypes: Mapping[str, str]
    """Role -> dtype of the weights in memory."""


def load_networks(job: TrainJob, frozen: str, *, role: str = "reference") -> Networks:
    """Load the policy and the model called ``frozen``, as separate networks.

    Raises:
        ModelError: if a model cannot be loaded, is an adapter, or the two cannot be compared.
        OptionError, CannotRunError: as ``load_pair``.
    """
    for who, name in (("policy", job.policy), (role, frozen)):
        if find_checkpoint(name).adapter is not None:
            raise ModelError(
                f"the {who} {name} is an adapter, which TRL's trainers would load in another way; merge it into its "
                "base and give that folder"
            )
    pair = load_models(job, job.policy, frozen, device=job.device)
    is_same = pair.policy.is_same_as(pair.reference)
    shares_network = is_same and bool(job.lora_rank) and role == "reference"
    second = load_models(job, frozen, frozen, device=job.device).policy if is_same else pair.reference
    policy = skip_padding_in_positions(disable_dropout(pair.policy.network.requires_grad_(True)))
    if not job.lora_rank:
        policy = policy.to(torch.promote_types(policy.dtype, torch.float32))
    return Networks(
        policy=policy.train(),
        frozen=None if shares_network else skip_padding_in_positions(second.network),
        lora=lora_settings(job.lora_rank, policy) if job.lora_rank else None,
        pair=pair,
        dtypes={
            "policy": str(policy.dtype).removeprefix("torch."),
            role: str((policy if shares_network else second.network).dtype).removeprefix("torch."),
        },
    )


def disable_dropout(network: Any) -> Any:
    """Set all dropout probabilities to 0, and return the network.

    TRL trains in training mode. With dropout, the policy would differ in every pass from the policy that generated, and
    from a reference with equal weights. The configuration that is saved is not changed.
    """
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):  # attention dropout is an attribute
                setattr(module, name, 0.0)
    return network


def skip_padding_in_positions(network: Any) -> Any:
    """Make positions start at the first token after padding, if the network depends on it, and return the network.

    TRL pads prompts on the left and passes no positions. Rotary embeddings give the same outputs; learned positions, as
    in GPT-2, would be those of the padded prompt, not those at which the response was generated.
    """
    body = find_backbone(network)
    if "position_ids" in inspect.signature(body.forward).parameters and _depends_on_padding(body):
        body.register_forward_pre_hook(_pass_positions, with_kwargs=True)
    return network


def _pass_positions(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """A hook that adds ``position_ids``, counted from the first unmasked token, to the arguments of ``forward``."""
    mask = named.get("attention_mask")
    if named.get("position_ids") is None and torch.is_tensor(mask) and mask.dim() == 2:
        named = {**named, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}
    return arguments, named


def _depends_on_padding(body: Any) -> bool:
    """Whether the hidden states of two tokens change with a padding token before them."""
    training, device = body.training, next(body.parameters()).device
    ids = torch.tensor([[0, 1, 2]], device=device)
    mask = torch.tensor([[0, 1, 1]], device=device)
    try:
        with torch.no_grad():
            body.eval()
            padded = body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, 1:]
            unpadded = body(
                input_ids=ids[:, 1:], attention_mask=mask[:, 1:], use_cache=False
            ).last_hidden_state
    finally:
        body.train(training)
    relative_difference = (padded.float() - unpadded.float()).norm() / unpadded.float().norm()
    return bool(relative_difference > 1e-2)  # bfloat16 rounds to 4e-3
