"""TRL's GRPO with its KL replaced: exact or sampled, in the loss or in the reward."""

from typing import Any

import torch
from torch import Tensor

from kleash.integrations.trl.compat import GRPOTrainer
from kleash.integrations.trl.forward_capture import ForwardPass
from kleash.integrations.trl.kl_mixin import KLMixin, response_mask, rows_by_prompt
from kleash.integrations.trl.mismatch_metrics import mismatch_metrics
from kleash.integrations.trl.terms import UpdateSize, require_unscaled_reward

PENALTY = "kl_penalty"
"""Name of the reward function that is minus the KL."""


class GRPOLeash(KLMixin):
    """Mixin that replaces the KL of ``trl.GRPOTrainer`` or a subclass: ``class Mine(GRPOLeash, Theirs)``.

    TRL's own term (k3 times the ratio, whose gradient is that of KL(policy || reference) on-policy and only for
    importance ratios of single tokens) is switched off by a beta of 0 inside TRL's loss. This term is added to the
    result of TRL's loss, averaged over tokens as ``loss_type`` averages the policy term.

    ``kl_place="reward"`` subtracts beta times the sum of k1 from the reward of each response, by an additional reward
    function ``kl_penalty`` of weight beta. It requires ``scale_rewards="none"``, since dividing by the standard
    deviation of a group would change beta from group to group.

    Logged: ``kl``, the number that beta multiplies in the loss (in the reward: the mean over responses);
    ``kl/per_token``, ``kl/per_sequence`` since the last log, each with ``_error`` (clustered by prompt),
    ``beta``, and with importance weights ``kl/effective_share``, the effective sample size as a share of the tokens.
    With vLLM also the mismatch of trainer and engine, ``mismatch/*``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer, from the arguments of ``KLMixin`` and those of TRL's trainer."""
        super().__init__(*args, **kwargs)
        require_unscaled_reward(
            self._term,
            {
                "scale_rewards": (self.scale_rewards, "none"),
                "multi_objective_aggregation": (self.multi_objective_aggregation, "sum_then_normalize"),
            },
        )
        self._tool_masks: Any = None
        if self._term.place == "reward":
            self.reward_funcs.append(self._kl_penalty)
            self.reward_processing_classes.append(None)
            self.reward_func_names.append(PENALTY)
            weight = torch.tensor([self.beta], dtype=self.reward_weights.dtype)
            self.reward_weights = torch.cat([self.reward_weights, weight.to(self.reward_weights.device)])

    @property
    def _loss_type(self) -> str:
        return self.loss_type

    @property
    def _is_off_policy(self) -> bool:
        """Whether TRL keeps the log-probabilities of an older policy."""
        return super()._is_off_policy or self.use_vllm

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's generated batch with what the KL needs of the reference; logs the mismatch of trainer and engine."""
        if self._term.place == "reward":
            self.reward_weights[-1] = self.beta
        with self._parent_beta(self.beta or 1.0), self._record_passes(hidden=self._captures) as passes:
            output = super()._generate_and_score_completions(inputs)
        trainer_logp, engine_logp = (output.get(f"{which}_per_token_logps") for which in ("old", "sampling"))
        self._keep_reference(output, passes[0 if trainer_logp is None else 1])
        if engine_logp is not None:
            if trainer_logp is None:
                trainer_logp = self._forward_pass(output, reference=False, hidden=False).logp
            mask = response_mask(output)
            self._log_metrics(**mismatch_metrics(trainer_logp, engine_logp, mask, self.accelerator))
        return output

    def _generate(self, prompts: Any) -> Any:
        generated = super()._generate(prompts)
        self._tool_masks = generated[2]
        return generated

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if PENALTY in self.reward_func_names:
            is_unscored = rewards[:, :-1].isnan().all(-1)
            rewards[is_unscored, -1] = torch.nan  # so that the response stays without a reward
        return rewards

    def _kl_penalty(self, prompts: Any, **_: Any) -> list[float]:
        """Minus the KL of each response: the sum of k1 over the tokens that the policy generated."""
        passes = self._passes
        if not passes:
            return [0.0] * len(prompts)
        reference: ForwardPass = passes[-1]
        policy: ForwardPass = passes[0] if len(passes) > 1 else self._policy_pass(reference)
        attention_mask, length = reference.arguments[0][1:3]
        mask = attention_mask[:, -length:].bool() & self._tool_mask(length, attention_mask)
        per_token = self._term.per_token(policy.logp, reference.logp, mask)
        prompt_ids, prompt_mask = (x[:, :-length] for x in reference.arguments[0][:2])
        self._kl_rows[self._mode] += rows_by_prompt(per_token, mask, prompt_ids, prompt_mask)
        return (-per_token.sum(-1)).tolist()

    def _policy_pass(self, reference: ForwardPass) -> ForwardPass:
        """The policy's pass over the tokens of the reference's, which TRL does not make if it is on-policy."""
        args, kwargs = reference.arguments
        with torch.no_grad():
            self._get_per_token_logps_and_entropies(self.model, *args, **kwargs)
        assert self._passes is not None
        return self._passes[-1]

    def _tool_mask(self, length: int, like: Tensor) -> Tensor:
        """False for tokens of tool outputs, ``[batch, length]``."""
        mask = torch.ones(len(like), length, dtype=torch.bool, device=like.device)
        for row, flags in enumerate(self._tool_masks or ()):
            mask[row, : len(flags)] = torch.tensor(flags, dtype=torch.bool, device=like.device)
        return mask

    def _update_size(self, inputs: dict[str, Any]) -> UpdateSize:
        """The sizes of the update that this micro-batch belongs to, as in TRL's loss."""
        micro_batches = self.current_gradient_accumulation_steps if self.model.training else 1
        tokens = inputs["num_items_in_batch"].clamp(min=1).item() / self.accelerator.num_processes
        if self.model.training:
            tokens *= self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return UpdateSize(
            micro_batches=micro_batches, tokens=tokens, max_length=self.args.max_completion_length
        )

    def _behaviour_logp(self, inputs: dict[str, Any]) -> Tensor | None:
        old = inputs.get("old_per_token_logps")
        engine = inputs.get("sampling_per_token_logps")
        if old is None or engine is None:
            return old
        return torch.where(engine.isnan(), old, engine)


class LeashedGRPOTrainer(GRPOLeash, GRPOTrainer):
    """``trl.GRPOTrainer`` with ``kl``, ``kl_place``, ``kl_scope``, ``kl_gradient``, ``kl_cap``; see ``GRPOLeash``."""
