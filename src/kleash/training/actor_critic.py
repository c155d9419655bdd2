"""The networks of a PPO run: the trained policy with its critic, and the frozen reference."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.checkpoints.resolution import find_checkpoint
from kleash.errors import ModelError, summarise_error
from kleash.extras import import_extra, suppress_library_output
from kleash.jobs import TrainJob
from kleash.linear import Head
from kleash.models import Model, Pair, TokenSequence
from kleash.models.adapters import make_probe, probe_logits
from kleash.models.compat import find_backbone
from kleash.models.heads import first_rows, truncate_head
from kleash.models.scoring import pad_batch
from kleash.training.model_options import load_models, lora_settings, require_trainable

MAX_MERGE_ERROR = 1e-3
"""Largest change of a log-probability, in nats, when an adapter is merged in float32."""


class TokenBatch(NamedTuple):
    """Token sequences as model inputs, padded on the right."""

    ids: Int[Tensor, "rows time"]
    """Prompts and responses without their last token, which is only predicted."""
    rows: Int[Tensor, " tokens"]
    cols: Int[Tensor, " tokens"]
    """The position whose hidden state predicts each response token: one before the token's own."""
    tokens: Int[Tensor, " tokens"]
    """The response tokens of all sequences, concatenated."""

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], device: torch.device) -> "TokenBatch":
        """The batch of these sequences."""
        tokens = torch.tensor([token for sequence in sequences for token in sequence.response_ids])
        return cls(*(x.to(device) for x in (*pad_batch(sequences), tokens)))


class ActorCritic(torch.nn.Module):
    """A causal language model with a critic, a linear layer on its final hidden states, and a frozen reference.

    It stays in evaluation mode during training passes: with dropout, the ratio of a token's probabilities in two
    passes would be meaningless.
    """

    def __init__(self, policy: Model, reference: Model | None, pair: Pair, adapters: Any = None) -> None:
        """Add a critic of zeros to the policy.

        Args:
            policy: its network is trained where its parameters require gradients.
            reference: None if it is the policy's network with its adapter disabled.
            pair: tokenizer, context length and notes.
            adapters: the PEFT model around the policy's network, if it is an adapter that is trained.
        """
        super().__init__()
        self.network, self.reference, self.pair = policy.network, reference, pair
        self.adapters = (adapters,)  # a tuple, so that torch does not register its parameters a second time
        weight = self.network.get_output_embeddings().weight
        assert policy.head.weight is not None
        self.value = torch.nn.Linear(
            weight.shape[1], 1, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device
        )
        torch.nn.init.zeros_(self.value.weight)
        torch.nn.init.zeros_(self.value.bias)
        self._head, self._vocab_size = (
            replace(policy.head, weight=None, bias=None),
            policy.head.weight.shape[0],
        )
        self.sampler = replace(
            policy,
            backbone=find_backbone(self.network),
            head=self.head(detached=True),
            adapters=None,
            adapter=None,
            context_length=pair.context_length,
        )
        """The policy as a model for generation, with the weights where the optimiser changes them."""

    @property
    def reference_head(self) -> Head:
        """The reference's head."""
        return self.head(detached=True) if self.reference is None else self.reference.head

    @property
    def dtypes(self) -> dict[str, str]:
        """Role -> dtype of the weights in memory."""
        reference = self.network if self.reference is None else self.reference.network
        dtypes = {"policy": self.network.dtype, "reference": reference.dtype}
        return {role: str(dtype).removeprefix("torch.") for role, dtype in dtypes.items()}

    def head(self, *, detached: bool = False) -> Head:
        """The policy's head as it is now, for its gradient or, detached, without."""
        layer = self.network.get_output_embeddings()
        weight, bias = (
            None if x is None else first_rows(x.detach() if detached else x, self._vocab_size)
            for x in (layer.weight, getattr(layer, "bias", None))
        )
        return replace(self._head, weight=weight, bias=bias)

    def head_copy(self) -> Head:
        """The policy's head, of which updates change nothing."""
        head = self.head(detached=True)
        trained = self.network.get_output_embeddings().weight.requires_grad
        parts = {name: x for name in ("weight", "bias") if (x := getattr(head, name)) is not None}
        return replace(head, **{name: x.clone() for name, x in parts.items()}) if trained else head

    def hidden(self, batch: TokenBatch) -> Float[Tensor, "tokens dim"]:
        """The policy's final hidden states at the positions that predict the batch's tokens."""
        states = find_backbone(self.network)(input_ids=batch.ids, use_cache=False).last_hidden_state
        return states[batch.rows, batch.cols]

    def hidden_of_reference(self, batch: TokenBatch) -> Float[Tensor, "tokens dim_q"]:
        """The reference's final hidden states at these positions, without gradient."""
        with torch.no_grad():
            if self.reference is None:
                with self.adapters[0].disable_adapter():
                    return self.hidden(batch)
            with self.reference.activate_adapter():
                states = self.reference.backbone(input_ids=batch.ids, use_cache=False).last_hidden_state
                return states[batch.rows, batch.cols]

    def values(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, " tokens"]:
        """The critic's values, in at least float32 also under autocast."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.value(hidden.to(self.value.weight.dtype))[:, 0]

    def save_policy(self, folder: Path) -> None:
        """Write the model (or the adapter) with its tokenizer, for ``kleash measure --policy`` and transformers."""
        (adapters,) = self.adapters
        with suppress_library_output():
            if adapters is None:
                self.network.save_pretrained(folder)
            else:
                adapters.save_pretrained(folder, save_embedding_layers=False)
            self.pair.tokenizer.save_pretrained(folder)


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
    for side in (policy, reference):
        if side.head.weight is None:
            raise ModelError(
                f"the {side.role} {side.path} does not come apart into hidden states and a head, from which critic "
                "and exact KL are computed; take another model"
            )
    if job.lora_rank and policy.is_same_as(reference):
        return ActorCritic(policy, None, pair, _add_adapter(policy, job.lora_rank)).eval()
    if policy.network is reference.network:
        policy = _load_separately(job, job.policy, pair, device)
        reference = replace(_load_separately(job, job.reference_name, pair, device), role="reference")
    if job.lora_rank:
        adapters = _add_adapter(policy, job.lora_rank)
    else:
        adapters, policy = None, _with_all_weights_trained(policy, is_adapter)
    return ActorCritic(policy, _freeze(reference, policy.network.dtype), pair, adapters).eval()


def _load_separately(job: TrainJob, name: str, pair: Pair, device: torch.device) -> Model:
    """Load a model with a separate network, with the pair's vocabulary."""
    model = load_models(job, name, name, device=str(device)).policy
    if model.vocab_size == pair.vocab_size:
        return model
    return replace(model, head=truncate_head(model.head, pair.vocab_size), vocab_size=pair.vocab_size)


def _with_all_weights_trained(policy: Model, is_adapter: bool) -> Model:
    dtype = torch.promote_types(policy.dtype, torch.float32)
    policy.network.to(dtype)
    network = _merge_adapter(policy, dtype) if is_adapter else policy.network
    return replace(policy, network=network.requires_grad_(True))


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
    return reference


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
    folder = Path(policy.path).expanduser()
    base = str(folder.resolve()) if folder.is_dir() else policy.path
    adapters.peft_config["default"].base_model_name_or_path = base
    return adapters
