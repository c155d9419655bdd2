"""The models of a PPO run: the trained policy with its critic, and the frozen reference."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.jobs import TrainJob
from kleash.linear import Head
from kleash.models import Model, Pair, find_checkpoint
from kleash.models.adapters.network_state import make_probe, probe_logits
from kleash.models.compat import summarise_error, suppress_library_output
from kleash.models.heads import truncate_head
from kleash.training.model_options import both, lora_settings, require_trainable
from kleash.training.ppo.policy import Policy, TokenBatch

MERGED_NATS = 1e-3
"""The most that merging an adapter in float32 may move a log-probability by rounding."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Reference:
    """The frozen reference model."""

    model: Model | None
    """A separate frozen network; None if the reference is the policy's network with its adapter disabled."""

    @property
    def head(self) -> Head | None:
        """Its head; None if it is the policy's head, which is then not trained."""
        return None if self.model is None else self.model.head

    def hidden(self, wrapped: Any, batch: TokenBatch) -> Float[Tensor, "tokens dim"]:
        """Its hidden states at the positions that predict the batch's tokens.

        Args:
            wrapped: the policy as Accelerate wrapped it, which is asked where there is no other network.
            batch: what to read.
        """
        if self.model is None:
            return wrapped(Policy.reference, batch)
        with torch.no_grad(), self.model.activate_adapter():
            hidden = self.model.backbone(input_ids=batch.ids, use_cache=False).last_hidden_state
            return hidden[batch.rows, batch.cols]


@dataclass(frozen=True, eq=False, kw_only=True)
class ActorCritic:
    """Policy with critic, reference, and the sampling view of the policy."""

    policy: Policy
    sampler: Model
    """The policy as a model for generation; ``current_sampler`` gives it the current head."""
    reference: Reference
    pair: Pair
    """The loaded pair: tokenizer, context length, notes and fingerprints."""
    base: str
    """The base model's name in the trained adapter; "" if all weights are trained."""
    dtypes: Mapping[str, str]
    """The dtypes of the weights of policy and reference."""

    def current_sampler(self, policy: Policy) -> Model:
        """The policy with its current head, for generation."""
        return replace(self.sampler, head=policy.head(detached=True))


def load_actor_critic(job: TrainJob, device: torch.device) -> ActorCritic:
    """Load policy and reference, check that they are comparable, and select the trained weights.

    With ``lora_rank`` the reference is the policy's own network with the adapter off, unless another one was
    named. Otherwise every weight of the policy is trained, in at least float32, and the reference is another
    copy, in the dtype that was asked for. A policy that is an adapter is merged into its base first.

    Raises:
        ModelError: if a model cannot be loaded, compared or trained.
        OptionError: if the dtype is one that nothing can be trained in.
        CannotRunError: if the device is not there.
    """
    require_trainable(job.dtype)
    adapted = find_checkpoint(job.policy).adapter is not None
    if adapted and job.lora_rank:
        raise ModelError(
            f"the policy {job.policy} is an adapter, and --lora-rank {job.lora_rank} would put another one on it; "
            "merge it into its base and give that folder, or take --lora-rank 0"
        )
    pair = both(job, job.policy, job.reference_name, device=str(device))
    policy, reference = pair.policy, pair.reference
    shared = bool(job.lora_rank) and policy.is_same_as(reference)
    if policy.network is reference.network and not shared:
        policy = _alone(job, job.policy, pair, device)
        reference = replace(_alone(job, job.reference_name, pair, device), role="reference")
    _require_parts(policy, reference)
    network, adapters, base = _trained(job, policy, adapted)
    if not shared:
        reference = _frozen(reference, network.dtype)
    dtypes = {"policy": network.dtype, "reference": network.dtype if shared else reference.dtype}
    return ActorCritic(
        policy=Policy(network, policy.head, adapters=adapters).eval(),
        sampler=replace(
            policy,
            network=network,
            backbone=network.base_model,
            adapters=None,
            adapter=None,
            context_length=pair.context_length,
        ),
        reference=Reference(model=None if shared else reference),
        pair=pair,
        base=base,
        dtypes={role: str(dtype).removeprefix("torch.") for role, dtype in dtypes.items()},
    )


def _alone(job: TrainJob, name: str, pair: Pair, device: torch.device) -> Model:
    """A model with a network of its own, with the pair's vocabulary."""
    model = both(job, name, name, device=str(device)).policy
    if model.head.weight is None or model.vocab_size == pair.vocab_size:
        return model
    return replace(model, head=truncate_head(model.head, pair.vocab_size), vocab_size=pair.vocab_size)


def _require_parts(policy: Model, reference: Model) -> None:
    for side in (policy, reference):
        if side.head.weight is None:
            raise ModelError(
                f"the {side.role} {side.path} does not come apart into hidden states and a head, off which critic and "
                "exact KL are read; take another model"
            )


def _trained(job: TrainJob, policy: Model, adapted: bool) -> tuple[Any, Any, str]:
    """The network with what is trained in it, the PEFT model around it, and what that calls its base."""
    if job.lora_rank:
        adapters = _with_adapter(policy, job.lora_rank)
        return policy.network, adapters, adapters.peft_config["default"].base_model_name_or_path
    wide = torch.promote_types(policy.dtype, torch.float32)
    policy.network.to(wide)
    network = _merged(policy, wide) if adapted else policy.network
    return network.requires_grad_(True), None, ""


def _merged(policy: Model, dtype: torch.dtype) -> Any:
    """The network of a policy with its adapter merged into it, which is done in ``dtype`` so that little is rounded.

    Raises:
        ModelError: if it cannot be merged, or is another model then.
    """
    probe = make_probe(policy.network)
    try:
        with policy.activate_adapter():
            before = probe_logits(policy.network, probe)
            network = policy.adapters.to(dtype).merge_and_unload()
    except Exception as error:  # each kind of adapter has its own
        raise ModelError(
            f"the policy {policy.path} is an adapter that cannot be merged into its base "
            f"({summarise_error(error)}), which training every weight of it needs; "
            "merge it yourself and give that folder"
        ) from error
    moved = (probe_logits(network, probe).log_softmax(-1) - before.log_softmax(-1)).abs().max()
    if not moved <= MERGED_NATS:
        raise ModelError(
            f"merged into its base, the adapter {policy.path} is another model: its log-probabilities move by up to "
            f"{float(moved):.3g} nats; give a policy that is no adapter"
        )
    return network


def _frozen(reference: Model, dtype: torch.dtype) -> Model:
    """The reference, never to be trained, which computes as the policy does: while both are one model, their KL is 0.

    A policy of bfloat16 is trained in float32 with bfloat16 products (autocast). The reference's weights stay in
    bfloat16, and the states between its layers are made float32, as the policy's are.
    """
    network = reference.network.requires_grad_(False)
    if network.dtype != dtype:
        network.get_input_embeddings().register_forward_hook(_widen_under_autocast)
    return replace(reference, network=network)


def _widen_under_autocast(_: Any, __: Any, states: Tensor) -> Tensor:
    return states.float() if torch.is_autocast_enabled(states.device.type) else states


def _with_adapter(policy: Model, rank: int) -> Any:
    """Put a LoRA adapter on every linear layer but the head; it changes nothing yet."""
    peft = import_extra("peft", "models")
    settings = lora_settings(rank, policy.network)
    try:
        with suppress_library_output():
            adapters = peft.get_peft_model(policy.network, settings)
    except (ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"no LoRA adapter can be put on {policy.path}: {summarise_error(error)}") from error
    adapters.peft_config["default"].base_model_name_or_path = base_name(policy)
    return adapters


def base_name(policy: Model) -> str:
    """The base model's name for an adapter's configuration: an absolute path or a hub id."""
    folder = Path(policy.path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else policy.path
