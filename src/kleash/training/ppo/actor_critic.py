"""The models of a PPO run: the trained policy with its critic, and the frozen reference."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError, summarise_error
from kleash.extras import import_extra, suppress_library_output
from kleash.jobs import TrainJob
from kleash.linear import Head
from kleash.models import Model, Pair
from kleash.models.adapters.network_state import make_probe, probe_logits
from kleash.models.checkpoints.resolution import find_checkpoint
from kleash.models.compat import find_backbone
from kleash.models.heads import truncate_head
from kleash.training.model_options import load_models, lora_settings, require_trainable
from kleash.training.ppo.policy import Policy, TokenBatch

MAX_MERGE_ERROR = 1e-3
"""Largest change of a log-probability, in nats, when an adapter is merged in float32."""


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
            wrapped: the policy as Accelerate wrapped it, used if there is no separate network.
            batch: the token sequences.
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

    With ``lora_rank`` the reference is the policy's network with the adapter disabled, unless the job names another
    model. Otherwise all weights of the policy are trained, in at least float32, and the reference is a second copy, in
    the job's dtype. A policy that is an adapter is merged into its base first.

    Raises:
        ModelError: if a model cannot be loaded, compared or trained.
        OptionError: if the dtype cannot be trained.
        CannotRunError: if the device does not exist.
    """
    require_trainable(job.dtype)
    is_adapter = find_checkpoint(job.policy).adapter is not None
    if is_adapter and job.lora_rank:
        raise ModelError(
            f"the policy {job.policy} is an adapter, and --lora-rank {job.lora_rank} would put another one on it; "
            "merge it into its base and give that folder, or take --lora-rank 0"
        )
    pair = load_models(job, job.policy, job.reference_name, device=str(device))
    policy, reference = pair.policy, pair.reference
    shares_network = bool(job.lora_rank) and policy.is_same_as(reference)
    if policy.network is reference.network and not shares_network:
        policy = _load_separately(job, job.policy, pair, device)
        reference = replace(_load_separately(job, job.reference_name, pair, device), role="reference")
    _require_parts(policy, reference)
    network, adapters, base = _trainable_network(job, policy, is_adapter)
    if not shares_network:
        reference = _freeze(reference, network.dtype)
    dtypes = {"policy": network.dtype, "reference": network.dtype if shares_network else reference.dtype}
    return ActorCritic(
        policy=Policy(network, policy.head, adapters=adapters).eval(),
        sampler=replace(
            policy,
            network=network,
            backbone=find_backbone(network),
            adapters=None,
            adapter=None,
            context_length=pair.context_length,
        ),
        reference=Reference(model=None if shares_network else reference),
        pair=pair,
        base=base,
        dtypes={role: str(dtype).removeprefix("torch.") for role, dtype in dtypes.items()},
    )


def _load_separately(job: TrainJob, name: str, pair: Pair, device: torch.device) -> Model:
    """Load a model with a separate network, with the pair's vocabulary."""
    model = load_models(job, name, name, device=str(device)).policy
    if model.head.weight is None or model.vocab_size == pair.vocab_size:
        return model
    return replace(model, head=truncate_head(model.head, pair.vocab_size), vocab_size=pair.vocab_size)


def _require_parts(policy: Model, reference: Model) -> None:
    for side in (policy, reference):
        if side.head.weight is None:
            raise ModelError(
                f"the {side.role} {side.path} does not come apart into hidden states and a head, from which critic "
                "and exact KL are computed; take another model"
            )


def _trainable_network(job: TrainJob, policy: Model, is_adapter: bool) -> tuple[Any, Any, str]:
    """The network with its trainable weights, the PEFT model around it, and the base's name in that."""
    if job.lora_rank:
        adapters = _add_adapter(policy, job.lora_rank)
        return policy.network, adapters, adapters.peft_config["default"].base_model_name_or_path
    dtype = torch.promote_types(policy.dtype, torch.float32)
    policy.network.to(dtype)
    network = _merge_adapter(policy, dtype) if is_adapter else policy.network
    return network.requires_grad_(True), None, ""


def _merge_adapter(policy: Model, dtype: torch.dtype) -> Any:
    """The network of a policy with its adapter merged in ``dtype``.

    Raises:
        ModelError: if it cannot be merged, or merging changes its outputs.
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
    error = (probe_logits(network, probe).log_softmax(-1) - before.log_softmax(-1)).abs().max()
    if not error <= MAX_MERGE_ERROR:
        raise ModelError(
            f"merged into its base, the adapter {policy.path} is another model: its log-probabilities move by up to "
            f"{float(error):.3g} nats; give a policy that is no adapter"
        )
    return network


def _freeze(reference: Model, dtype: torch.dtype) -> Model:
    """The reference without gradients, computing as the policy does, so that equal models have a KL of exactly 0.

    A policy of bfloat16 is trained in float32 with bfloat16 products (autocast). The reference's weights stay in
    bfloat16, and the states between its layers are made float32, as the policy's are.
    """
    network = reference.network.requires_grad_(False)
    if network.dtype != dtype:
        network.get_input_embeddings().register_forward_hook(_widen_under_autocast)
    return replace(reference, network=network)


def _widen_under_autocast(_: Any, __: Any, states: Tensor) -> Tensor:
    return states.float() if torch.is_autocast_enabled(states.device.type) else states


def _add_adapter(policy: Model, rank: int) -> Any:
    """Add a LoRA adapter, initially without effect, to every linear layer except the head."""
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
