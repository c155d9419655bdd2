"""In front of one of TRL's trainers: its passes through policy and reference, caught with their hidden states."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor

from kleash.errors import CannotRunError, OptionError
from kleash.integrations.trl.passes import Pass, caught, head_of, inner, of_responses, reading_of
from kleash.integrations.trl.seams import add_fused_lm_head, disable_gradient_checkpointing, use_adapter
from kleash.linear import Head
from kleash.models import require_unchanged_base

IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


class Catching:
    """Catches what TRL's trainer computes, and runs the reference where TRL does not."""

    accelerator: Any
    args: Any
    model: Any
    ref_model: Any
    processing_class: Any
    beta: float
    temperature: float

    def __init__(self, *args: Any, reference: Any = None, **kwargs: Any) -> None:
        """Make TRL's trainer, with another reference than the checkpoint of the policy if one is given."""
        self._passes: list[Pass] | None = None
        self._catching = False
        self._known: tuple[Head, Head] | None = None
        if reference is None:
            super().__init__(*args, **kwargs)
            self._require_reference()
            return
        if kwargs.get("args") is None:
            raise OptionError("a reference of one's own needs the configuration by name: args=…")
        beta, kwargs["args"] = kwargs["args"].beta, copy(kwargs["args"])
        kwargs["args"].beta = 0.0  # so that TRL does not load one
        super().__init__(*args, **kwargs)
        self.beta = self.args.beta = beta
        reference.requires_grad_(False)
        wide = getattr(self.args, "cast_lm_head_to_fp32", False)  # GRPO has it, RLOO not
        add_fused_lm_head(reference, temperature=self.temperature, cast_lm_head_to_fp32=wide)
        self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def _require_reference(self) -> None:
        """See that what TRL takes for the reference, the policy with its adapters off, is the policy's base.

        Raises:
            ModelError: if an adapter has changed that base.
        """
        network = self._bare(self.model)
        if self.beta != 0 and self.ref_model is None and hasattr(network, "peft_config"):
            require_unchanged_base(
                network, "reference", instead="give reference=, a model of its own in memory"
            )

    def _bare(self, model: Any) -> Any:
        return self.accelerator.unwrap_model(model)

    @contextmanager
    def _parent_has(self, beta: float) -> Iterator[None]:
        """Inside, TRL's own code sees this beta."""
        original_beta, self.beta = self.beta, beta
        try:
            yield
        finally:
            self.beta = original_beta

    @contextmanager
    def _watched(self, *, hidden: bool) -> Iterator[list[Pass]]:
        """Inside, every pass that TRL makes is kept in the list, with its hidden states if asked for."""
        self._passes, self._catching = [], hidden
        try:
            yield self._passes
        finally:
            self._passes = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ask: Any = super()._get_per_token_logps_and_entropies  # pyright: ignore[reportAttributeAccessIssue]
        args = (input_ids, attention_mask, logits_to_keep, *args)
        if self._passes is None:
            return ask(model, *args, **kwargs)
        hidden = None
        if self._catching:
            with caught(inner(self._bare(model)).base_model) as seen:
                result = ask(model, *args, **kwargs)
            hidden = of_responses(seen, logits_to_keep)
        else:
            result = ask(model, *args, **kwargs)
        self._passes.append(Pass(logp=result[0], hidden=hidden, arguments=(args, kwargs)))
        return result

    def _pass_over(self, output: dict[str, Any], *, reference: bool, hidden: bool) -> Pass:
        """A pass of the policy or of its reference over what was generated, without a gradient."""
        ids, mask = (
            torch.cat([output[f"prompt_{what}"], output[f"completion_{what}"]], dim=1)
            for what in ("ids", "mask")
        )
        training = "train" if self.model.training else "eval"
        batch = getattr(self.args, f"per_device_{training}_batch_size")
        images = {name: output[name] for name in IMAGES if output.get(name) is not None}
        quietly = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), quietly, self._watched(hidden=hidden) as passes:
            args = (ids, mask, output["completion_ids"].size(1), batch)
            if not reference:
                self._get_per_token_logps_and_entropies(self.model, *args, **images)
            elif self.ref_model is not None:
                self._get_per_token_logps_and_entropies(self.ref_model, *args, **images)
            else:
                bare = self._bare(self.model)
                with use_adapter(bare, adapter_name="ref" if "ref" in bare.peft_config else None):
                    self._get_per_token_logps_and_entropies(self.model, *args, **images)
        return passes[-1]

    def _readings(self) -> tuple[Head, Head]:
        """How the heads of policy and reference are read; found out once.

        Raises:
            CannotRunError: if they cannot be read, or are sharded.
        """
        if self._known is None:
            if getattr(self, "is_fsdp_enabled", False):
                raise CannotRunError(
                    "FSDP shards the heads from which the exact KL is computed, which was not tried; take kl='k3', or "
                    "DistributedDataParallel"
                )
            tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
            policy_head = reading_of(self._bare(self.model), tokenizer, "policy")
            reference_head = policy_head
            if self.ref_model is not None:
                reference_head = reading_of(self._bare(self.ref_model), tokenizer, "reference")
            self._known = policy_head, reference_head
        return self._known

    def _heads(self) -> tuple[Head, Head]:
        """Both heads as they are now: the policy's with its gradient."""
        policy_head, reference_head = self._readings()
        reference = self.model if self.ref_model is None else self.ref_model
        return (
            head_of(self._bare(self.model), policy_head, trained=True),
            head_of(self._bare(reference), reference_head, trained=False),
        )
