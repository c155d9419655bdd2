"""Hidden states of TRL's own forward passes, and the heads of policy and reference."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.errors import CannotRunError, OptionError
from kleash.extras import replaced
from kleash.integrations.trainer.compat import makes_trl_passes, tokenizer_of
from kleash.integrations.trl.compat import (
    MIXIN,
    add_fused_lm_head,
    disable_gradient_checkpointing,
    prepare_deepspeed,
    prepare_fsdp,
    use_adapter,
)
from kleash.linear import Head
from kleash.models import at_rest, live_model
from kleash.models.adapters import require_unchanged_base
from kleash.models.compat import find_backbone
from kleash.models.live_models import (
    base_network,
    checked_language_model,
    current_head,
    dropouts_of,
    require_plain_head,
    require_two_networks,
)

IMAGE_INPUTS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
"""Columns of a generated batch that a multimodal model takes besides tokens."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardPass:
    """One forward pass of a model over prompts and responses."""

    model: Any
    completion_ids: Int[Tensor, "batch time"]
    """The response tokens."""
    logp: Float[Tensor, "batch time"]
    """Their log-probabilities, at the training temperature; 0 at padding."""
    entropy: Float[Tensor, "batch time"] | None
    """The entropy at the same positions, where TRL computes it."""
    hidden: Float[Tensor, "batch time dim"] | None
    """Final hidden states at the positions that predict the response tokens, with gradient; None if not captured."""


@contextmanager
def recorded_passes(trainer: Any, *, hidden: bool = False) -> Iterator[list[ForwardPass]]:
    """Context in which every forward pass of one of TRL's trainers is appended to the list.

    TRL gets log-probabilities of 0 at padding: it multiplies by the mask, and attention may give NaN there.

    Args:
        trainer: TRL's GRPO or RLOO.
        hidden: whether the final hidden states are kept, too; in all passes or in none, since what ``model.compile()``
            made of a pass without a hook is run in the next ones, too.
    """
    run, passes = trainer._get_per_token_logps_and_entropies, list[ForwardPass]()

    def run_and_record(
        model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        states: list[Tensor] = []  # of each chunk of the batch
        network = base_network(trainer.accelerator.unwrap_model(model))
        with (
            find_backbone(network).register_forward_hook(
                lambda _, __, output: states.append(output.last_hidden_state)
            )
            if hidden
            else nullcontext()
        ):
            logp, entropy, *further_outputs = run(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        logp = torch.where(attention_mask[:, -logits_to_keep:].bool(), logp, 0.0)
        of_responses = torch.cat(states)[:, :-1][:, -logits_to_keep:] if states else None
        responses = input_ids[:, -logits_to_keep:]
        passes.append(
            ForwardPass(
                model=model, completion_ids=responses, logp=logp, entropy=entropy, hidden=of_responses
            )
        )
        return logp, entropy, *further_outputs

    with replaced(trainer, "_get_per_token_logps_and_entropies", run_and_record):
        yield passes


def passes_over(passes: Sequence[ForwardPass], inputs: Mapping[str, Any]) -> list[ForwardPass]:
    """Those of some passes that are over the responses of a batch.

    A subclass may fill a batch from several generations, and each has passes of its own.
    """
    return [each for each in passes if torch.equal(each.completion_ids, inputs["completion_ids"])]


def find_policy_pass(
    passes: Sequence[ForwardPass], model: Any, inputs: Mapping[str, Any]
) -> ForwardPass | None:
    """The pass over the responses of a batch that is differentiated, or else the first of ``model``; None without one.

    A subclass may run others before, of the reference or of a teacher.
    """
    return max(
        passes_over(passes, inputs),
        key=lambda each: (each.logp.requires_grad, each.model is model),
        default=None,
    )


class ForwardCapture(MIXIN):
    """Mixin before one of TRL's trainers: captures its forward passes, and runs the reference where TRL does not."""

    def __init__(self, *args: Any, reference: Any = None, **kwargs: Any) -> None:
        """Make TRL's trainer, with the model ``reference`` in place of the one that TRL would load.

        Raises:
            OptionError: if the configuration is not passed by keyword, or asks for Liger's layers; or if ``reference``
                is given, and TRL is to move the reference, or it is the policy's network.
            ModelError: if ``reference`` is no language model in memory, or an adapter has changed the base that it is
                to be.
            CannotRunError: if the trainer passes over responses in its own way.
        """
        if not makes_trl_passes(self):
            raise CannotRunError(
                f"{type(self).__name__} computes its KL from TRL's passes over responses, and the trainer behind it, "
                "as that of Unsloth, has others; give that trainer to kleash.attach, with monitor="
            )
        self._head_layouts: tuple[Head, ...] = ()
        """Those of policy and reference (``read_head_layout``) if an exact KL is measured, otherwise none."""
        self._stored_head: Head | None = None
        config = kwargs.get("args")
        if config is None:
            raise OptionError(
                "pass the configuration by keyword, args=GRPOConfig(beta=0.05), or with beta=0.0 for a KL that is only "
                "logged: with TRL's default, 0, no KL would be trained"
            )
        if reference is not None and config.sync_ref_model:
            raise OptionError(
                "sync_ref_model=True moves the copy of the policy that TRL loads as its reference, and reference= is a "
                "model that stays as it is; leave one of them out"
            )
        if config.use_liger_kernel:
            raise OptionError(
                "use_liger_kernel=True replaces layers of the policy and not of the reference, so that two equal "
                "models would have a KL above 0; leave it out"
            )
        kwargs["args"] = copy(config)
        # TRL loads a reference unless beta is 0, and the KL is logged at a beta of 0 too.
        kwargs["args"].beta = 0.0 if reference is not None else config.beta or 1.0
        super().__init__(*args, **kwargs)
        self.beta = self.args.beta = config.beta
        network = self.accelerator.unwrap_model(self.model)
        if reference is not None:
            require_two_networks(network, checked_language_model(reference, "reference"))
            reference.requires_grad_(False)
            if add_fused_lm_head is not None:
                # an option of GRPO, not of RLOO
                in_float32 = getattr(self.args, "cast_lm_head_to_fp32", False)
                add_fused_lm_head(
                    base_network(reference), temperature=self.temperature, cast_lm_head_to_fp32=in_float32
                )
            self.ref_model = prepare_frozen(self, reference)
        elif self.ref_model is None and hasattr(network, "peft_config"):
            require_unchanged_base(
                network, "reference", instead="give reference=, a separate model in memory"
            )

    def _forward_pass(self, output: dict[str, Any], *, reference: bool) -> ForwardPass:
        """A pass of the policy or the reference over a generated batch, without gradient."""
        batch_size = getattr(self.args, f"per_device_{mode_of(self)}_batch_size")
        model, adapter = self.model, nullcontext()
        if reference and self.ref_model is not None:
            model = self.ref_model
        elif reference:
            adapters = self._reference_network.peft_config
            adapter = use_adapter(self._reference_network, adapter_name="ref" if "ref" in adapters else None)
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            adapter,
            recorded_passes(self, hidden=bool(self._head_layouts)) as passes,
        ):
            run_pass(self, model, output, batch_size=batch_size)
        return passes[-1]

    def measure_exact_kl(self) -> None:
        """Have the exact KL of each token in every micro-batch, also where a sampled one is trained.

        The hidden states are those of the passes that TRL would make anyway.

        Raises:
            CannotRunError: if a model does not come apart into hidden states and a head.
            ModelError: if a head is sharded in a way that is not supported.
        """
        networks = {"policy": self.model, "reference": self._reference_network}
        self._head_layouts = tuple(
            # what torch.compile makes rounds otherwise, and would not come apart
            read_head_layout(
                self.accelerator.unwrap_model(network, keep_torch_compile=False), tokenizer_of(self), role
            )
            for role, network in networks.items()
        )

    def _heads(self) -> tuple[Head, Head]:
        """The policy's head with its current weights and their gradient, and that of the reference's hidden states."""
        policy_head, reference_head = self._head_layouts
        stored = self._stored_head if self.model.training else None
        return (
            current_head(self.accelerator.unwrap_model(self.model), policy_head, requires_grad=True),
            stored or current_head(self._reference_network, reference_head, requires_grad=False),
        )

    @property
    def _reference_network(self) -> Any:
        """The reference's network: one of its own, or the policy's with another adapter or none."""
        return self.accelerator.unwrap_model(self.model if self.ref_model is None else self.ref_model)

    def _store_reference_head(self) -> None:
        """Keep a copy of the reference's head for the hidden states that were just stored.

        The responses are learned from after it may have moved, and hidden states belong to the head of their time.
        """
        head = current_head(self._reference_network, self._head_layouts[1], requires_grad=False)
        weight, bias = (None if x is None else x.clone() for x in (head.weight, head.bias))
        self._stored_head = replace(head, weight=weight, bias=bias)


def warn_of_dropout(trainer: Any) -> None:
    """Warn where TRL's passes of the policy have dropout: they measure another network than the one that generates."""
    for module, name in dropouts_of(trainer.model)[:1]:
        warnings.warn(
            f"the policy is trained with dropout ({type(module).__name__}.{name} is {getattr(module, name)}), and "
            "generates without: its KL is measured too large, and above 0 for the reference itself; give the "
            "model or adapter a dropout of 0, or, for modules of the type Dropout, disable_dropout=True",
            stacklevel=4,
        )


def mode_of(trainer: Any) -> str:
    """TRL's key for what it does, training or evaluation: "train" or "eval"."""
    return "train" if trainer.model.training else "eval"


def without_nan(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are known: TRL logs NaN, such as an error of one prompt, as None, of which trackers warn."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def run_pass(trainer: Any, model: Any, batch: Mapping[str, Any], *, batch_size: int) -> Tensor:
    """The log-probabilities of a generated batch's responses by TRL's pass of a model, with the prompts' images."""
    images = {name: batch[name] for name in IMAGE_INPUTS if batch.get(name) is not None}
    return trainer._get_per_token_logps_and_entropies(
        model, *whole_rows(batch), batch_size=batch_size, **images
    )[0]


def whole_rows(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Token ids and mask of prompts with their responses, and the number of columns that are responses."""
    ids, mask = (
        torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
    )
    return ids, mask, batch["completion_ids"].size(1)


def prepare_frozen(trainer: Any, network: Any) -> Any:
    """A network that is not trained, in evaluation mode, placed or sharded as the trainer's policy is."""
    network.eval()
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(network, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return prepare_fsdp(network, trainer.accelerator)
    return trainer.accelerator.prepare_model(network, evaluation_mode=True)


def without_autocast(network: Any) -> AbstractContextManager[Any]:
    """Context without the autocast that Accelerate puts around a network's forward: its logits are rounded twice."""
    original = vars(network).get("_original_forward")
    return nullcontext() if original is None else replaced(network, "forward", original)


def without_head(network: Any) -> AbstractContextManager[Any]:
    """Context in which TRL's pass of a network ends at its final hidden states, and gives log-probabilities of 0.

    Where TRL has no fused head, the pass stays as it is.
    """
    if add_fused_lm_head is None:
        return nullcontext()

    def forward(*args: Any, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> SimpleNamespace:
        states = find_backbone(network)(*args, use_cache=False, **inputs).last_hidden_state
        return SimpleNamespace(log_probs=states.new_zeros(labels[:, 1:].shape))

    return replaced(network, "forward", forward)


def read_head_layout(network: Any, tokenizer: Any, role: str) -> Head:
    """The head of a model in memory: scale, softcap, and the number of its rows that are tokens.

    Raises:
        CannotRunError: if the model does not come apart into hidden states and a plain matrix.
        ModelError: if it is not a causal language model of text, or its weights are sharded in a way that is not
            supported.
    """
    require_plain_head(network, role)
    with at_rest(network), without_autocast(network):
        head = live_model(network, tokenizer, role=role).head
    if head.weight is None:
        raise CannotRunError(
            f"the {role} ({type(base_network(network)).__name__}) does not come apart into hidden states and a head, "
            "from which the exact KL is computed; take kl='k3'"
        )
    return head
