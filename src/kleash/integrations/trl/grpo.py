"""TRL's GRPO with its KL replaced: exact or sampled, in the loss or in the reward."""

from typing import Any, ClassVar

from kleash.integrations.trl.compat import GRPOTrainer
from kleash.integrations.trl.kl_mixin import KLMixin
from kleash.integrations.trl.terms import UpdateSize


class GRPOLeash(KLMixin):
    """Mixin that replaces the KL of ``trl.GRPOTrainer`` or a subclass: ``class Mine(GRPOLeash, Theirs)``.

    TRL's own term (k3 times the ratio, whose gradient is that of KL(policy || reference) on-policy and only for
    importance ratios of single tokens) is switched off by a beta of 0 inside TRL's loss. This term is added to the
    result of TRL's loss, averaged over tokens as ``loss_type`` averages the policy term.

    ``kl_place="reward"`` subtracts beta times the sum of k1 from the reward of each response, in its advantage: the
    rewards that TRL logs have no KL. It requires ``scale_rewards="none"``, since dividing by the standard deviation of
    a group would change beta from group to group.

    Logged: ``kl``, the number that beta multiplies in the loss (in the reward: the mean over responses);
    ``kl/per_token``, ``kl/per_sequence`` since the last log, each with ``_error`` (clustered by prompt),
    ``beta``, and with importance weights ``kl/effective_share``, the effective sample size as a share of the tokens.
    With vLLM also the mismatch of trainer and engine, ``mismatch/*``.
    """

    _unscaled: ClassVar = {"scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize"}

    @property
    def _is_off_policy(self) -> bool:
        """Whether TRL keeps the log-probabilities of an older policy."""
        return super()._is_off_policy or self.use_vllm

    def _update_size(self, inputs: dict[str, Any]) -> UpdateSize:
        """The sizes of the update that this micro-batch belongs to, as in TRL's loss."""
        micro_batches = self.current_gradient_accumulation_steps if self.model.training else 1
        tokens = inputs["num_items_in_batch"].clamp(min=1).item() / self.accelerator.num_processes
        if self.model.training:
            tokens *= self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return UpdateSize(
            micro_batches=micro_batches, tokens=tokens, max_length=self.args.max_completion_length
        )


class LeashedGRPOTrainer(GRPOLeash, GRPOTrainer):
    """``trl.GRPOTrainer`` with ``kl``, ``kl_place``, ``kl_scope``, ``kl_gradient``, ``kl_cap``; see ``GRPOLeash``."""
