"""The KL term of GRPO and RLOO, added to TRL's own loss."""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.errors import CannotRunError
from kleash.estimators import importance_weights
from kleash.estimators.weights import effective_sample_size
from kleash.extras import import_extra, replaced
from kleash.integrations.trl.compat import split_pixel_values_by_grid
from kleash.integrations.trl.forward_capture import (
    ForwardCapture,
    ForwardPass,
    find_policy_pass,
    mode_of,
    recorded_passes,
    warn_of_dropout,
    without_head,
    without_nan,
)
from kleash.integrations.trl.mismatch_metrics import mismatch_metrics
from kleash.integrations.trl.sampling_settings import require_policy_samples
from kleash.integrations.trl.terms import LOSS_TYPES, kl_term, require_unscaled_reward
from kleash.kl_rules import default_scope
from kleash.leash import group_advantages
from kleash.linear import Head, LinearLoss, LinearOptions, linear_kl, linear_objective
from kleash.losses import future_kl_loss
from kleash.models.live_models import base_network
from kleash.sources.sequences import hash_tokens
from kleash.store.metrics import with_errors
from kleash.uncertainty import clustered_mean
from kleash.uncertainty.ratios import mean_per_token

REFERENCE_HIDDEN = "kleash_reference_hidden"
POLICY_LOGP = "kleash_policy_logps"
REFERENCE_LOGP = "ref_per_token_logps"
OLD_LOGP, ENGINE_LOGP = "old_per_token_logps", "sampling_per_token_logps"
TOKEN_KL = "kleash_token_kl"
"""Entries of a generated batch that the trainers read or add."""


ResponseKL: TypeAlias = tuple[str, float, int]
"""Of a response, for the standard error of the KL: the hash of its prompt (responses to equal prompts are one cluster),
the sum over its tokens in nats, and their number."""


def rows_by_prompt(
    token_kl: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], inputs: Mapping[str, Any]
) -> list[ResponseKL]:
    """The KL of each response with its prompt; masked values are not read, and a response without tokens has no KL."""
    nats, tokens = torch.where(mask, token_kl, 0.0).sum(-1).tolist(), mask.sum(-1).tolist()
    rows = zip(prompt_hashes(inputs), nats, tokens, strict=True)
    return [(prompt, kl, count) for prompt, kl, count in rows if count]


def prompt_hashes(inputs: Mapping[str, Any]) -> list[str]:
    """The hash of each prompt of a batch: of its tokens and of its images, of which tokens say the number alone."""
    prompts = zip(inputs["prompt_ids"].cpu(), inputs["prompt_mask"].bool().cpu(), strict=True)
    hashes = [hash_tokens(tuple(ids[is_token].tolist())) for ids, is_token in prompts]
    images = split_pixel_values_by_grid(dict(inputs)).get("pixel_values")
    if images is None:
        return hashes
    pixels = (each.contiguous().cpu().view(torch.uint8).numpy().tobytes() for each in images)
    return [prompt + sha256(each).hexdigest()[:16] for prompt, each in zip(hashes, pixels, strict=True)]


def response_mask(inputs: Mapping[str, Any]) -> Bool[Tensor, "batch time"]:
    """True for the tokens that the policy generated: no padding, no tool output."""
    mask = inputs["completion_mask"].bool()
    return mask if inputs.get("tool_mask") is None else mask & inputs["tool_mask"].bool()


class KLMixin(ForwardCapture):
    """Mixin before one of TRL's trainers: replaces its KL term.

    ``kl`` is "exact", "k1", "k2" or "k3"; ``kl_place`` "loss" or "reward"; ``kl_scope`` "token" (default in a loss) or
    "sequence" (default in a reward); ``kl_gradient`` and ``kl_cap`` are fields of ``kleash.losses.KLTerm``. A
    combination without the gradient of KL(policy || reference) raises OptionError. ``reference`` is a model in memory;
    without it, TRL loads the checkpoint that the policy came from. With a beta of 0 (TRL's default) a warning says that
    the KL is only logged: it costs the reference in memory, its forward pass and that of the KL, no backward pass.
    """

    token_columns: Mapping[str, Tensor] | None = None
    """Of each token of the last micro-batch, what the loss measured; None before the first loss. Not in the batch, of
    which a subclass may copy the entries."""

    # Many arguments, since they are options of a trainer; all by keyword.
    def __init__(
        self,
        *args: Any,
        kl: str = "exact",
        kl_place: str = "loss",
        kl_scope: str | None = None,
        kl_gradient: str | None = None,
        kl_cap: float | None = None,
        linear_options: LinearOptions | None = None,
        **kwargs: Any,
    ) -> None:
        """Make TRL's trainer from the other arguments, and check the KL options.

        Raises:
            OptionError, CannotRunError: if the KL term has another gradient than it names, or cannot be computed.
        """
        super().__init__(*args, **kwargs)
        self._kl_rows: dict[str, list[ResponseKL]] = {"train": [], "eval": []}
        self._linear_options = linear_options
        self._loss_type = getattr(self, "loss_type", "rloo")  # GRPO's, the key of its average in LOSS_TYPES
        self._term = kl_term(
            kl=kl,
            place=kl_place,
            scope=default_scope(kl_place) if kl_scope is None else kl_scope,
            gradient=kl_gradient,
            cap=kl_cap,
            loss_type=self._loss_type,
            length=self.args.max_completion_length,
            off_policy=self._is_off_policy,
        )
        require_policy_samples(self._term, self)
        require_unscaled_reward(self._term, self)
        if kl == "exact":
            self.measure_exact_kl()
        warn_of_dropout(self)
        if self.beta == 0:
            warnings.warn(
                "beta is 0, TRL's default, so the KL is logged and not trained, at the cost of the reference in memory "
                "and of its forward pass over each response; give the configuration a beta, or take TRL's own trainer",
                stacklevel=3,
            )

    @property
    def _reuses_responses(self) -> bool:
        """Whether some updates use samples of an older policy."""
        args = self.args
        return args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) != 0

    _is_off_policy = _reuses_responses

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's generated batch with what the KL needs; logs the mismatch of trainer and engine."""
        # TRL's code reads the beta
        with replaced(self, "beta", 0.0), recorded_passes(self, hidden=bool(self._head_layouts)) as passes:
            output = super()._generate_and_score_completions(inputs)
        self._keep_reference(output)
        if self._term.place == "reward" or self._reuses_responses or ENGINE_LOGP in output:
            policy_logp = output.get(OLD_LOGP)
            if policy_logp is None:
                own_pass = find_policy_pass(passes, self.model, output)
                policy_logp = (own_pass or self._forward_pass(output, reference=False)).logp
            if self._reuses_responses:
                output[OLD_LOGP] = policy_logp  # of which RLOO keeps sums
            if ENGINE_LOGP in output:
                self._log_metrics(
                    **mismatch_metrics(
                        policy_logp, output[ENGINE_LOGP], response_mask(output), self.accelerator
                    )
                )
            if self._term.place == "reward":
                self._charge_advantages(output, policy_logp)
        return output

    def _keep_reference(self, output: dict[str, Any]) -> None:
        """Run the reference, and keep in the generated batch what the KL needs of it.

        An exact KL takes hidden states alone; the log-probabilities of the tokens come with it, in the loss.
        """
        is_exact = self._term.estimator == "exact"
        with without_head(base_network(self._reference_network)) if is_exact else nullcontext():
            reference = self._forward_pass(output, reference=True)
        if not is_exact:
            output[REFERENCE_LOGP] = reference.logp
        if reference.hidden is not None:
            output[REFERENCE_HIDDEN] = reference.hidden
            if self._reuses_responses and self.model.training and self.ref_model is not None:
                self._store_reference_head()

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's rewards of the responses of all processes, of which those without a reward are remembered."""
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._is_scored = ~rewards.isnan().all(-1)
        return rewards

    def _charge_advantages(self, output: dict[str, Any], policy_logp: Tensor) -> None:
        """Subtract beta times the KL of each response, the sum of k1, from its reward, in the advantages of a batch.

        They are linear in the rewards: the reward minus the mean of its group, in RLOO of the others in its group.
        """
        mask = response_mask(output)
        per_token = self._term.per_token(policy_logp, output[REFERENCE_LOGP], mask)
        self._kl_rows[mode_of(self)] += rows_by_prompt(per_token, mask, output)
        kl = self.accelerator.gather(per_token.sum(-1))
        size = self.num_generations if self.model.training else self.num_generations_eval
        scored = self._is_scored.view(-1, size)
        is_compared = (scored & (scored.sum(-1, keepdim=True) > 1)).flatten()
        excess = group_advantages(
            kl,
            torch.arange(len(kl), device=kl.device) // size,
            is_compared,
            corrected=self._loss_type == "rloo",
        )
        own_excess = excess.split(len(mask))[self.accelerator.process_index]
        columns = [1] * (output["advantages"].dim() - 1)  # one, where a subclass has advantages of each token
        output["advantages"] = output["advantages"] - self.beta * own_excess.view(-1, *columns)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss without a KL, and the KL of the micro-batch times beta."""
        self.token_columns = {}
        with replaced(self, "beta", 0.0), recorded_passes(self, hidden=bool(self._head_layouts)) as passes:
            loss = super()._compute_loss(model, inputs)
        policy_pass = find_policy_pass(passes, model, inputs)
        if policy_pass is None:
            raise CannotRunError(
                f"the loss of {type(self).__name__} makes no pass by _get_per_token_logps_and_entropies, from which "
                "the KL is computed; call it in _compute_loss"
            )
        mask = response_mask(inputs)
        if self._head_layouts and self._term.estimator != "exact" and TOKEN_KL not in inputs:
            self._keep_exact_kl(policy_pass, inputs, mask)  # once for each response
        if self._term.place == "reward":
            return loss
        micro_batches, tokens = self._update_size(inputs)
        token_weights = LOSS_TYPES[self._loss_type].token_weights(
            mask.float(), tokens, self.args.max_completion_length
        )
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.beta != 0):
            kl = self._micro_batch_kl(policy_pass, inputs, mask, token_weights / micro_batches)
        self._log_metrics(
            kl=self.accelerator.reduce((token_weights * kl.per_token).sum().float(), reduction="mean").item()
        )
        self._kl_rows[mode_of(self)] += rows_by_prompt(kl.per_token, mask, inputs)
        return loss if self.beta == 0 else loss + self.beta * kl.loss

    def _update_size(self, inputs: dict[str, Any]) -> tuple[int, float]:
        """The micro-batches of an update, and their mean number of tokens: 1 in RLOO, whose loss divides by neither."""
        return 1, 1.0

    def _keep_exact_kl(self, policy_pass: ForwardPass, inputs: dict[str, Any], mask: Tensor) -> None:
        """Measure the exact KL of each token, where a sampled one is trained."""
        with torch.no_grad():
            nats = linear_kl(
                *self._both_hidden(policy_pass, inputs, mask),
                temperature=self.temperature,
                options=self._linear_options,
            )
        inputs[TOKEN_KL] = torch.zeros_like(policy_pass.logp).masked_scatter(mask, nats.to(policy_pass.logp))
        self.token_columns = {TOKEN_KL: inputs[TOKEN_KL]}

    def _both_hidden(
        self, policy_pass: ForwardPass, inputs: dict[str, Any], mask: Tensor
    ) -> tuple[Tensor, Head, Tensor, Head]:
        """Hidden states of the response tokens and head of the policy, and those of the reference."""
        assert policy_pass.hidden is not None, "hidden states are captured for an exact KL"
        if REFERENCE_HIDDEN not in inputs:
            raise CannotRunError(
                f"the reference made no pass: _generate_and_score_completions of {type(self).__name__} does not call "
                "that of kleash's mixin, in which it does; put GRPOLeash or RLOOLeash in front: class Mine(GRPOLeash, "
                "Theirs)"
            )
        head_p, head_q = self._heads()
        return policy_pass.hidden[mask], head_p, inputs[REFERENCE_HIDDEN][mask], head_q

    def _micro_batch_kl(
        self, policy_pass: ForwardPass, inputs: dict[str, Any], mask: Tensor, token_weights: Tensor
    ) -> LinearLoss:
        """The KL term of a micro-batch, from the policy's pass and the stored columns of the reference's.

        Its contribution to the loss of the update, without beta; and the KL of each token times its importance weight.
        """
        behaviour, ratios = None, None
        if self._term.ratio != "none":
            # What drew the tokens: the engine; where its value is not known, the policy of then.
            behaviour = inputs.get(OLD_LOGP, policy_pass.logp.detach())
            if ENGINE_LOGP in inputs:
                behaviour = torch.where(inputs[ENGINE_LOGP].isnan(), behaviour, inputs[ENGINE_LOGP])
            ratios = importance_weights(
                policy_pass.logp, behaviour, mask, level=self._term.ratio, cap=self._term.cap
            ).values
            of_all_ranks = self.accelerator.gather(self.accelerator.pad_across_processes(ratios, dim=1))
            tokens = self.accelerator.reduce(mask.sum(), "sum")
            if tokens:
                self._log_metrics(
                    **{"kl/effective_share": float(effective_sample_size(of_all_ranks.log()) / tokens)}
                )
        if self._term.estimator == "exact":
            return self._exact_kl(policy_pass, inputs, mask, token_weights, ratios)
        per_token = self._term.per_token(
            policy_pass.logp, inputs[REFERENCE_LOGP], mask, behaviour_logp=behaviour
        )
        return LinearLoss((token_weights * per_token).sum(), per_token.detach())

    def _exact_kl(
        self,
        policy_pass: ForwardPass,
        inputs: dict[str, Any],
        mask: Tensor,
        token_weights: Tensor,
        ratios: Tensor | None,
    ) -> LinearLoss:
        """The exact KL of each response token, from both models' hidden states, as the micro-batch's term.

        Keeps the KL and both log-probabilities of each token.
        """
        weights = (token_weights if ratios is None else token_weights * ratios)[mask].detach()
        hidden_p, head_p, hidden_q, head_q = self._both_hidden(policy_pass, inputs, mask)
        loss, terms = linear_objective(
            hidden_p,
            head_p,
            inputs["completion_ids"][mask],
            hidden_q,
            head_q,
            lambda terms, rows: weights[rows] * terms.kl,
            temperature=self.temperature,
            options=self._linear_options,
        )
        self.token_columns = {
            name: torch.zeros_like(token_weights).masked_scatter(mask, term.to(token_weights.dtype))
            for name, term in (
                (POLICY_LOGP, terms.token_logp),
                (REFERENCE_LOGP, terms.token_logq),
                (TOKEN_KL, terms.kl),
            )
        }
        token_kl = self.token_columns[TOKEN_KL]
        if self._term.scope == "sequence":
            later_kl = future_kl_loss(policy_pass.logp, token_kl, mask, weights=ratios)
            loss = loss + (token_weights * later_kl).sum()
        return LinearLoss(loss, token_kl if ratios is None else token_kl * ratios)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's method, with the KL of the responses since the last log."""
        if "loss" in logs and self._term.place == "loss" and self.token_columns is None:
            raise CannotRunError(
                f"no KL was trained: the loss of {type(self).__name__} does not call that of kleash's mixin, which "
                "adds it; write it as _compute_loss of a class Theirs, and put GRPOLeash or RLOOLeash in front: class "
                "Mine(GRPOLeash, Theirs)"
            )
        if any(name.endswith("loss") for name in logs):  # of transformers, which all processes call
            self._log_kl_rows()
        super().log(logs, *args, **kwargs)

    def _log_kl_rows(self) -> None:
        """Log the KL of the responses of all processes, per token and per response, with its standard errors.

        Errors are clustered by prompt. A collective.
        """
        local, self._kl_rows[mode_of(self)] = self._kl_rows[mode_of(self)], []
        rows = import_extra("accelerate.utils", "models").gather_object(local)
        if not rows:
            return
        prompts, nats, tokens = (np.array(column) for column in zip(*rows, strict=True))
        per_token, per_sequence = mean_per_token(nats, tokens, prompts), clustered_mean(nats, prompts)
        self._log_metrics(
            **without_nan(with_errors({"kl/per_token": per_token, "kl/per_sequence": per_sequence})),
            beta=self.beta,
            **({"kl": per_sequence.value} if self._term.place == "reward" else {}),
        )

    def _log_metrics(self, **metrics: float) -> None:
        """Add values to those that TRL averages and logs."""
        for name, value in metrics.items():
            self._metrics[mode_of(self)][name].append(value)
