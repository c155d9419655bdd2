"""TRL's RLOO with its KL replaced: exact or sampled, in the loss or in the reward."""

from typing import Any

from kleash.integrations.trl.compat import RLOOTrainer
from kleash.integrations.trl.kl_mixin import BEHAVIOUR_LOGP, KLMixin, rows_by_prompt
from kleash.integrations.trl.terms import require_unscaled_reward


class RLOOLeash(KLMixin):
    """Mixin that replaces the KL of ``trl.RLOOTrainer`` or a subclass: ``class Mine(RLOOLeash, Theirs)``.

    ``kl_place="reward"`` is TRL's own term (beta times the sum of k1, subtracted from the reward of each response),
    whose gradient is right. Only its log changes: the number that is trained, per response, not a mean over tokens.
    With ``kl_place="loss"`` the KL is not in the reward (TRL's code reads a beta of 0, and the reference's pass is
    made here). It is added to the loss as the mean over responses of the sum over tokens, as RLOO averages.

    Logged: ``kl``, ``kl/per_token``, ``kl/per_sequence``, the latter two with ``_error`` (clustered by prompt), of the
    responses since the last log, and ``beta``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer, from the arguments of ``KLMixin`` and those of TRL's trainer."""
        super().__init__(*args, **kwargs)
        require_unscaled_reward(self._term, {"normalize_advantages": (self.normalize_advantages, False)})

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's generated batch with what the KL needs of the reference."""
        in_reward = self._term.place == "reward"
        with (
            self._parent_beta(self.beta if in_reward else 0.0),
            self._record_passes(hidden=self._captures and in_reward) as passes,
        ):
            output = super()._generate_and_score_completions(inputs)
        policy_logp = passes[0].logp
        if in_reward and self.beta != 0:
            self._metrics[self._mode].pop("kl")  # TRL's mean over tokens
            reference = passes[1]
        else:
            reference = self._forward_pass(output, reference=True, hidden=self._captures)
        self._keep_reference(output, reference)
        if in_reward:
            per_token, mask = policy_logp - reference.logp, output["completion_mask"].bool()
            rows = rows_by_prompt(per_token, mask, output["prompt_ids"], output["prompt_mask"])
            self._kl_rows[self._mode] += rows
        elif self._is_off_policy:
            output[BEHAVIOUR_LOGP] = policy_logp
        return output


class LeashedRLOOTrainer(RLOOLeash, RLOOTrainer):
    """``trl.RLOOTrainer`` with ``kl``, ``kl_place``, ``kl_scope``, ``kl_gradient``, ``kl_cap``; see ``RLOOLeash``."""
