"""The networks that a job trains with: the policy, its LoRA configuration, and the frozen reference or teacher."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.checkpoints.resolution import Checkpoint, find_checkpoint
from kleash.errors import ModelError, OptionError
from kleash.extras import import_extra, suppress_library_output
from kleash.jobs import TrainJob
from kleash.linear import Head
from kleash.models import Loading, Model, Pair, StoredReference, load_beside
from kleash.models.adapters import attach_adapter, check_adapter, find_rule
from kleash.models.compat import find_backbone
from kleash.models.live_models import current_head, dropouts_of, require_plain_head
from kleash.models.model_building import read_context_length
from kleash.models.pair_loading import load_checkpoints
from kleash.registry import look_up, options_given
from kleash.training.library_fields import LORA, set_fields

TAKES_ADAPTERS = ("grpo", "rloo", "dpo")
"""Algorithms whose policy and reference may be adapters."""
NAMING = (
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
)
"""Fields of PEFT's LoraConfig that name modules or parameters, or have patterns of such names as keys."""
LORA_SCALE = 2
"""Alpha divided by rank: the scale of the adapter's product."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Networks:
    """The networks of a run."""

    policy: Any
    """The trained network."""
    frozen: Any
    """The reference or teacher; None if it is the policy with its adapter disabled, or is not loaded."""
    lora: Any
    """Configuration of the adapter that is put on the policy; None to train all weights."""
    pair: Pair
    """The loaded pair: tokenizer, context length, notes."""
    dtypes: Mapping[str, str]
    """Role -> dtype of the weights in memory."""


def load_networks(
    job: TrainJob,
    frozen: str | None,
    *,
    device: str,
    role: str = "reference",
    stored: StoredReference | None = None,
) -> Networks:
    """Load the policy and the model called ``frozen``, as separate networks.

    An adapter that is the policy is trained further; its reference is that adapter as it is, unless another is given.

    Args:
        job: its policy, and how models are loaded.
        frozen: the reference or teacher; None if ``stored`` has its hidden states, or it is not needed.
        device: for both.
        role: "reference" or "teacher".
        stored: the cache of the frozen model, which is then not loaded.

    Raises:
        ModelError: if a model cannot be loaded, the two cannot be compared, or one is an adapter that the algorithm
            does not take.
        OptionError: if the dtype is float16, or the adapter that is to be made is refused.
        CannotRunError: if the device does not exist.
    """
    if job.dtype == "float16":
        raise OptionError("training in float16 loses gradients below 6e-8; take --dtype bfloat16 or float32")
    names = options_given(**{"policy": job.policy, role: frozen})
    checkpoints = {who: find_checkpoint(name, role=who) for who, name in names.items()}
    has_adapters = _check_adapters(job, checkpoints)
    bases = {
        who: each if each.adapter is None else find_checkpoint(str(each.folder), role=who)
        for who, each in checkpoints.items()
    }
    loading = Loading(dtype=job.dtype, device=device, trust_remote_code=job.trust_remote_code)
    pair = (
        load_checkpoints({"policy": bases["policy"], "reference": bases.get(role, bases["policy"])}, loading)
        if stored is None
        else load_beside(stored, bases["policy"].name, None, loading=loading)
    )
    lora = lora_settings(job, pair.policy.network) if job.lora_rank else None
    rule = None if lora is None else find_rule(lora.to_dict())
    if rule is not None and rule.treatment == "refused":
        raise OptionError(
            f"--set {' '.join(entry for entry in job.set if entry.startswith(LORA))}: kleash measure would refuse the "
            f"adapter, as one that {rule.reason}"
        )
    has_whole_base = lora is not None and not (rule is not None and rule.changes_base)
    is_same = pair.policy.is_same_as(pair.reference)
    shares_network = is_same and role == "reference" and has_whole_base and not has_adapters
    policy = skip_padding_in_positions(pair.policy.network.requires_grad_(True))
    policy = disable_dropout(with_adapter(policy, checkpoints["policy"], is_trainable=True))
    if has_adapters and hasattr(policy.get_output_embeddings(), "base_layer"):
        raise ModelError(
            f"the adapter {job.policy} is on the head, whose weight alone TRL reads; train one without it, or merge it "
            "and give that folder"
        )
    if not job.lora_rank and not has_adapters:
        policy = policy.to(torch.promote_types(policy.dtype, torch.float32))
    frozen_dtype = None if frozen is None and stored is None else pair.reference.dtype
    dtypes = options_given(**{"policy": policy.dtype, role: frozen_dtype})
    network = None
    if frozen is not None and not shares_network:
        second = load_checkpoints({role: bases[role]}, loading) if is_same else pair
        network = skip_padding_in_positions(second.reference.network.requires_grad_(False))
        if network.dtype != policy.dtype:
            _widen_states(network)
        network = with_adapter(network, checkpoints[role])
    return Networks(
        policy=policy.train(),
        frozen=network,
        lora=lora,
        pair=pair,
        dtypes={who: str(dtype).removeprefix("torch.") for who, dtype in dtypes.items()},
    )


def _check_adapters(job: TrainJob, checkpoints: Mapping[str, Checkpoint]) -> bool:
    """Whether a model is an adapter.

    Raises:
        ModelError: if the algorithm takes none.
        OptionError: if the policy is one, and another is to be put on it.
    """
    adapters = [who for who, checkpoint in checkpoints.items() if checkpoint.adapter is not None]
    if adapters and job.algorithm not in TAKES_ADAPTERS:
        raise ModelError(
            f"the {adapters[0]} {checkpoints[adapters[0]].name} is an adapter; merge it into its base (PEFT's "
            f"merge_and_unload) and give that folder: only {', '.join(TAKES_ADAPTERS)} and kleash cache take adapters"
        )
    if "policy" in adapters and job.lora_rank:
        raise OptionError(
            f"the policy {job.policy} is an adapter, which is trained further; leave --lora-rank out"
        )
    return bool(adapters)


def with_adapter(network: Any, checkpoint: Checkpoint, *, is_trainable: bool = False) -> Any:
    """The network of a checkpoint's base with its adapter, if it has one: PEFT's model to train, its network otherwise.

    Raises:
        ModelError: if the adapter is not of a kind that acts through weights, or does not fit its base.
    """
    if checkpoint.adapter is None:
        return network
    check_adapter(checkpoint)
    # TRL copies the adapter "default" for its reference, and PEFT saves it without a folder of its own
    wrapper = attach_adapter(network, None, checkpoint, name="default", is_trainable=is_trainable)
    return wrapper if is_trainable else wrapper.get_base_model()


def lora_settings(job: TrainJob, network: Any) -> Any:
    """The configuration of a job's LoRA adapter, on every linear layer except the head and routers unless it says so.

    Args:
        job: its rank, and the fields of PEFT's LoraConfig that it sets.
        network: the policy.

    Raises:
        OptionError: if a field is refused.
        UnknownNameError: if a list of modules names one that the policy does not have.
    """
    # PEFT cannot run an adapter on a layer that returns more than its product, such as the router of Llama 4.
    linear = {name: each for name, each in network.named_modules() if isinstance(each, torch.nn.Linear)}
    routers = [
        name
        for name, module in linear.items()
        if type(module).forward is not torch.nn.Linear.forward
        and type(module).__module__.startswith("transformers.models.")
    ]
    values = {name.removeprefix(LORA): x for name, x in set_fields(job).items() if name.startswith(LORA)}
    if isinstance(target := values.get("target_modules"), str) and target.isidentifier():
        values["target_modules"] = [target]  # PEFT reads a text as a pattern of whole paths
    paths = [path for path, _ in (*network.named_modules(), *network.named_parameters())]
    for name, is_pattern in (
        (name, isinstance(values[field], dict))
        for field in NAMING
        if not isinstance(values.get(field), str | None)
        for name in values[field]
    ):
        # PEFT leaves one that does not exist out without an error
        if not any(re.search(rf"(^|\.)({name if is_pattern else re.escape(name)})$", path) for path in paths):
            look_up({path.rpartition(".")[2]: path for path in linear}, name, "module of the policy")
    return import_extra("peft", "models").LoraConfig(
        **{
            "r": job.lora_rank,
            "lora_alpha": LORA_SCALE * job.lora_rank,
            "lora_dropout": 0.0,
            "target_modules": "all-linear",
            "exclude_modules": routers or None,
            "task_type": "CAUSAL_LM",
            **values,
        }
    )


def disable_dropout(network: Any) -> Any:
    """Set all dropout probabilities to 0, keep adapters in evaluation mode, and return the network.

    TRL trains in training mode. With dropout, the policy would differ in every pass from the policy that generated, and
    from a reference with equal weights. Adapters have noise of their own there, too: ranks, blocks or layers that are
    dropped (LoHa, LoKr, BOFT), samples (PVeRA). The configuration that is saved is not changed.
    """
    for module, name in dropouts_of(network):
        setattr(module, name, 0.0)
    for module in network.modules():
        if hasattr(module, "get_base_layer"):
            module.register_forward_pre_hook(_put_at_rest)
    return network


def _put_at_rest(layer: Any, _: tuple[Any, ...]) -> None:
    """A hook that puts an adapter's layer into evaluation mode; each of TRL's steps begins in training mode."""
    layer.eval()


def skip_padding_in_positions(network: Any) -> Any:
    """Make positions start at the first token after padding, and return the network.

    TRL pads prompts on the left and passes no positions. Rotary embeddings give the same outputs; learned positions, as
    in GPT-2, would be those of the padded prompt, not those at which the response was generated. The last token of a
    response, which TRL reads too and which predicts nothing, may stand just beyond the context.
    """
    body = find_backbone(network)
    if "position_ids" in inspect.signature(body.forward).parameters:
        body.register_forward_pre_hook(_pass_positions, with_kwargs=True)
    return network


def _pass_positions(
    body: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], Any]:
    """A hook that adds ``position_ids``, counted from the first unmasked token, to the arguments of ``forward``."""
    mask = named.get("attention_mask")
    if named.get("position_ids") is None and torch.is_tensor(mask) and mask.dim() == 2:
        length = read_context_length(body.config) or mask.shape[-1]
        named = {**named, "position_ids": (mask.long().cumsum(-1) - 1).clamp(0, length - 1)}
    return arguments, named


class ActorCritic(torch.nn.Module):
    """What PPO trains: the policy with a critic, a linear layer on its final hidden states; and the frozen reference.

    It stays in evaluation mode during training passes: with dropout, the ratio of a token's probabilities in two
    passes would be meaningless.
    """

    def __init__(self, networks: Networks) -> None:
        """Add a critic of zeros, and the adapter that is trained, to the policy.

        Raises:
            ModelError: if a model does not come apart into hidden states and a head.
            CannotRunError: if the adapter is on the head.
        """
        super().__init__()
        self.pair, self.dtypes, self.network = networks.pair, networks.dtypes, networks.policy
        for side in (self.pair.policy, self.pair.reference):
            if side.head.weight is None:
                raise ModelError(
                    f"the {side.role} {side.path} does not come apart into hidden states and a head, from which critic "
                    "and exact KL are computed; take another model"
                )
        self.adapters: Any = None
        if networks.lora is not None:
            with suppress_library_output():
                self.adapters = import_extra("peft", "models").get_peft_model(self.network, networks.lora)
            require_plain_head(self.network, "policy")
        frozen = self.network if networks.frozen is None else networks.frozen
        self.reference = replace(
            self.pair.reference,
            network=frozen,
            backbone=find_backbone(frozen),
            head=current_head(frozen, self.pair.reference.head, requires_grad=False),
            adapters=self.adapters if networks.frozen is None else None,
        )
        """The reference: a network of its own, or the policy's with its adapter disabled."""
        weight = self.network.get_output_embeddings().weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.value = torch.nn.Linear(weight.shape[1], 1, dtype=dtype, device=weight.device)
        torch.nn.init.zeros_(self.value.weight)
        torch.nn.init.zeros_(self.value.bias)
        self.eval()

    @property
    def sampler(self) -> Model:
        """The policy as a model for generation; its head is read anew, since Accelerate gives weights other storage."""
        return replace(
            self.pair.policy,
            backbone=find_backbone(self.network),
            head=self.head(),
            context_length=self.pair.context_length,
        )

    def head(self, *, requires_grad: bool = False) -> Head:
        """The policy's head as it is now."""
        return current_head(self.network, self.pair.policy.head, requires_grad=requires_grad)

    def values(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, " tokens"]:
        """The critic's values, in at least float32 also under autocast."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.value(hidden.to(self.value.weight.dtype))[:, 0]

    def save_policy(self, folder: Path) -> None:
        """Write the model (or the adapter) with its tokenizer, for ``kleash measure --policy`` and transformers."""
        with suppress_library_output():
            if self.adapters is None:
                self.network.save_pretrained(folder)
            else:
                self.adapters.save_pretrained(folder, save_embedding_layers=False)
            self.pair.tokenizer.save_pretrained(folder)


def final_states(model: Model, ids: Int[Tensor, "rows time"]) -> Float[Tensor, "rows time dim"]:
    """The final hidden states of the policy or the reference, with their gradient where one is recorded."""
    with model.activate_adapter():
        return model.backbone(input_ids=ids, use_cache=False).last_hidden_state


def _widen_states(network: Any) -> None:
    """Make the states between the layers of a bfloat16 network float32 under autocast, as those of the policy are.

    The policy is trained in float32 with bfloat16 products; equal models then have a KL of exactly 0.
    """
    network.get_input_embeddings().register_forward_hook(
        lambda _, __, states: states.float() if torch.is_autocast_enabled(states.device.type) else states
    )
    for module in network.modules():
        if isinstance(module, torch.nn.LayerNorm) and network.device.type == "cpu":
            module.float()  # as autocast does on a GPU
