"""What GRPO and RLOO have in common: catching TRL's passes, and the KL term beside TRL's own loss."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.errors import OptionError
from kleash.estimators import importance_weights
from kleash.estimators.weights import ImportanceWeights
from kleash.integrations.trl.passes import Pass, caught, head_of, inner, of_responses, reading_of
from kleash.integrations.trl.seams import disable_gradient_checkpointing, use_adapter
from kleash.integrations.trl.terms import Wanted, Window
from kleash.linear import LinearOptions, linear_kl_loss
from kleash.losses import future_kl_loss

REFERENCE_HIDDEN = "kleash_reference_hidden"
REFERENCE_LOGP = "ref_per_token_logps"
BEHAVIOUR = "kleash_behaviour_logps"
IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Share:
    """The KL of a micro-batch."""

    loss: Float[Tensor, ""]
    """What it adds to the loss of the update, but for beta."""
    per_token: Float[Tensor, "batch time"]
    """Its value at each token, weighted as it is trained; 0 where masked."""
    effective: float | None = None
    """Tokens that the importance weights leave, as a share of all; None without weights."""


class OwnKL:
    """In front of one of TRL's trainers: takes over its KL.

    ``kl`` "exact", "k1", "k2" or "k3"; ``kl_place`` "loss" or "reward"; ``kl_scope`` "token" or "sequence";
    ``kl_gradient`` and ``kl_cap`` as the fields of ``kleash.losses.KLTerm``. A combination that trains something
    else than KL(policy || reference) raises OptionError and says what.
    """

    accelerator: Any
    args: Any
    model: Any
    ref_model: Any
    _metrics: Any

    # More arguments than elsewhere: they are options of a trainer, all by name, before those of TRL's own.
    def __init__(
        self,
        *given: Any,
        kl: str = "exact",
        kl_place: str = "loss",
        kl_scope: str = "token",
        kl_gradient: str | None = None,
        kl_cap: float | None = None,
        linear_options: LinearOptions | None = None,
        **named: Any,
    ) -> None:
        """Make TRL's trainer, which is given everything else, and see that its KL makes sense."""
        self._passes: list[Pass] | None = None
        self._catching = False
        super().__init__(*given, **named)
        self.beta: float
        self.temperature: float
        self._linear = linear_options
        self._wanted = Wanted(
            kl=kl,
            place=kl_place,
            scope=kl_scope,
            gradient=kl_gradient,
            cap=kl_cap,
            loss_type=self._loss_type,
            length=self.args.max_completion_length,
        )
        self._term = self._wanted.term(off_policy=self._off_policy)
        if self.beta != 0 and self._wanted.exact:
            tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
            self._own_reading = reading_of(self._bare(self.model), tokenizer, "policy")
            self._reference_reading = self._own_reading
            if self.ref_model is not None:
                self._reference_reading = reading_of(self._bare(self.ref_model), tokenizer, "reference")

    processing_class: Any

    @property
    def _loss_type(self) -> str:
        """How the policy term is averaged, by a name of ``LOSS_TYPES``."""
        return "rloo"

    @property
    def _off_policy(self) -> bool:
        """Whether some updates are made with samples of an older policy."""
        every = self.args.steps_per_generation * self.args.num_iterations
        return self.args.gradient_accumulation_steps % every != 0

    def _bare(self, model: Any) -> Any:
        return self.accelerator.unwrap_model(model)

    @contextmanager
    def _parent_has(self, beta: float) -> Iterator[None]:
        """Inside, TRL's own code sees this beta."""
        own, self.beta = self.beta, beta
        try:
            yield
        finally:
            self.beta = own

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
        *more: Any,
        **named: Any,
    ) -> Any:
        ask: Any = super()._get_per_token_logps_and_entropies  # pyright: ignore[reportAttributeAccessIssue]
        given = (input_ids, attention_mask, logits_to_keep, *more)
        if self._passes is None:
            return ask(model, *given, **named)
        hidden = None
        if self._catching:
            with caught(inner(self._bare(model)).base_model) as seen:
                found = ask(model, *given, **named)
            hidden = of_responses(seen, logits_to_keep)
        else:
            found = ask(model, *given, **named)
        self._passes.append(Pass(logp=found[0], hidden=hidden, given=(given, named)))
        return found

    def _reference_pass(self, output: dict[str, Any]) -> Pass:
        """The reference's own pass over what was generated, where TRL makes none."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        training = "train" if self.model.training else "eval"
        batch = getattr(self.args, f"per_device_{training}_batch_size")
        images = {name: output[name] for name in IMAGES if output.get(name) is not None}
        quietly = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), quietly, self._watched(hidden=self._wanted.exact) as passes:
            given = (ids, mask, output["completion_ids"].size(1), batch)
            if self.ref_model is not None:
                self._get_per_token_logps_and_entropies(self.ref_model, *given, **images)
            else:
                bare = self._bare(self.model)
                with use_adapter(bare, adapter_name="ref" if "ref" in bare.peft_config else None):
                    self._get_per_token_logps_and_entropies(self.model, *given, **images)
        return passes[-1]

    def _share(self, own: Pass, inputs: dict[str, Any], window: Window) -> Share:
        """The KL of a micro-batch, from the policy's pass and what was kept of the reference's."""
        mask = self._counted(inputs)
        shares = self._wanted.share(mask, window)
        behaviour, ratio, effective = None, None, None
        if self._term.ratio != "none":
            behaviour = self._behaviour(inputs)
            behaviour = own.logp.detach() if behaviour is None else behaviour
            level, cap = self._term.ratio, self._term.cap
            ratio = importance_weights(own.logp, behaviour, mask, level=level, cap=cap)
            effective = float(ratio.effective_sample_size / mask.sum().clamp(min=1))
        if self._wanted.exact:
            return replace(self._exact_share(own, inputs, mask, shares, ratio), effective=effective)
        per_token = self._term.per_token(own.logp, inputs[REFERENCE_LOGP], mask, behaviour_logp=behaviour)
        return Share(loss=(shares * per_token).sum(), per_token=per_token.detach(), effective=effective)

    def _exact_share(
        self, own: Pass, inputs: dict[str, Any], mask: Tensor, shares: Tensor, ratio: ImportanceWeights | None
    ) -> Share:
        weights = shares if ratio is None else shares * ratio.values
        reference = self.model if self.ref_model is None else self.ref_model
        if own.hidden is None:
            raise OptionError("no hidden states were caught; the model's backbone was not run by its forward")
        found = linear_kl_loss(
            own.hidden[mask],
            head_of(self._bare(self.model), self._own_reading, trained=True),
            inputs[REFERENCE_HIDDEN][mask],
            head_of(self._bare(reference), self._reference_reading, trained=False),
            weights=weights[mask].detach(),
            temperature=self.temperature,
            options=self._linear,
        )
        cost = torch.zeros_like(shares).masked_scatter(mask, found.per_token.to(shares.dtype))
        loss = found.loss
        rho = None if ratio is None else ratio.values
        if self._term.scope == "sequence":
            loss = loss + (shares * future_kl_loss(own.logp, cost, mask, weights=rho)).sum()
        return Share(loss=loss, per_token=cost if rho is None else cost * rho)

    def _counted(self, inputs: dict[str, Any]) -> Bool[Tensor, "batch time"]:
        """Where a response's own tokens are: not padding, and not what a tool answered."""
        mask = inputs["completion_mask"].bool()
        return mask if inputs.get("tool_mask") is None else mask & inputs["tool_mask"].bool()

    def _behaviour(self, inputs: dict[str, Any]) -> Tensor | None:
        """Log-probabilities under what the tokens were drawn from, where that is not the policy as it is."""
        return inputs.get(BEHAVIOUR)

    def _note(self, share: Share, shares: Tensor, mask: Tensor, parts: int) -> None:
        """Log the KL that was trained, and what it is per token and per response."""
        sums = torch.stack(
            [
                (shares * share.per_token).sum() * parts,
                share.per_token.sum(),
                mask.sum().float(),
                torch.tensor(float(len(mask)), device=mask.device),
                torch.ones((), device=mask.device),
            ]
        )
        trained, kl, tokens, sequences, processes = self.accelerator.reduce(sums, reduction="sum").tolist()
        self._log(
            **{
                "kl": trained / processes,
                "kl/per_token": kl / max(tokens, 1.0),
                "kl/per_sequence": kl / sequences,
                "beta": self.beta,
            }
        )
        if share.effective is not None:
            self._log(**{"kl/effective_share": share.effective})

    def _log(self, **numbers: float) -> None:
        mode = "train" if self.model.training else "eval"
        for name, value in numbers.items():
            self._metrics[mode][name].append(value)
