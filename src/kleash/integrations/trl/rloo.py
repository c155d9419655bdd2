"""TRL's RLOO with its KL replaced: exact or sampled, in the loss or in the reward."""

from typing import Any

from kleash.integrations.trl.compat import RLOOTrainer
from kleash.integrations.trl.kl_mixin import BEHAVIOUR_LOGP, KLMixin
from kleash.integrations.trl.terms import require_unscaled_reward


class RLOOLeash(KLMixin):
    """Mixin that replaces the KL of ``trl.RLOOTrainer`` or a subclass: ``class Mine(RLOOLeash, Theirs)``.

    TRL's code reads a beta of 0, and the reference's pass is made here. ``kl_place="reward"`` is TRL's own term (beta
    times the sum of k1, subtracted from the reward of each response), whose gradient is right; only the log differs, in
    which ``kl`` is the number that is trained, per response. With ``kl_place="loss"`` the KL is added to the loss as
    the mean over responses of the sum over tokens, as RLOO averages.

    Logged: ``kl``, ``kl/per_token``, ``kl/per_sequence``, the latter two with ``_error`` (clustered by prompt), of the
    responses since the last log, and ``beta``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer, from the arguments of ``KLMixin`` and those of TRL's trainer."""
        super().__init__(*args, **kwargs)
        require_unscaled_reward(self._term, {"normalize_advantages": (self.normalize_advantages, False)})

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's generated batch with what the KL needs of the reference."""
        with self._parent_beta(0.0), self._record_passes(hidden=False) as passes:
            output = super()._generate_and_score_completions(inputs)
        policy_logp = passes[0].logp
        self._keep_reference(output)
        if self._term.place == "reward":
            self._charge_advantages(output, policy_logp)
        elif self._is_off_policy:
            output[BEHAVIOUR_LOGP] = policy_logp
        return output


class LeashedRLOOTrainer(RLOOLeash, RLOOTrainer):
    """``trl.RLOOTrainer`` with ``kl``, ``kl_place``, ``kl_scope``, ``kl_gradient``, ``kl_cap``; see ``RLOOLeash``."""
