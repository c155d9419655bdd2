"""TRL's GRPO with its KL replaced: exact or sampled, in the loss or in the reward."""

from typing import Any

from kleash.integrations.trl.compat import GRPOTrainer
from kleash.integrations.trl.kl_mixin import KLMixin


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

    @property
    def _is_off_policy(self) -> bool:
        """Whether TRL keeps the log-probabilities of an older policy."""
        return super()._is_off_policy or self.use_vllm

    def _update_size(self, inputs: dict[str, Any]) -> tuple[int, float]:
        """The micro-batches of an update, and their mean number of tokens on one process, as in TRL's loss."""
        tokens = inputs["num_items_in_batch"].clamp(min=1).item() / self.accelerator.num_processes
        if not self.model.training:
            return 1, tokens
        return self.current_gradient_accumulation_steps, tokens / self.args.steps_per_generation


class LeashedGRPOTrainer(GRPOLeash, GRPOTrainer):
    """``trl.GRPOTrainer`` with ``kl``, ``kl_place``, ``kl_scope``, ``kl_gradient``, ``kl_cap``; see ``GRPOLeash``."""
