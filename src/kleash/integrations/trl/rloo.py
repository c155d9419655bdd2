"""TRL's RLOO with its KL replaced: exact or sampled, in the loss or in the reward."""

from kleash.integrations.trl.compat import RLOOTrainer
from kleash.integrations.trl.kl_mixin import KLMixin


class RLOOLeash(KLMixin):
    """Mixin that replaces the KL of ``trl.RLOOTrainer`` or a subclass: ``class Mine(RLOOLeash, Theirs)``.

    TRL's code reads a beta of 0, and the reference's pass is made here. ``kl_place="reward"`` is TRL's own term (beta
    times the sum of k1, subtracted from the reward of each response), whose gradient is right; only the log differs, in
    which ``kl`` is the number that is trained, per response. With ``kl_place="loss"`` the KL is added to the loss as
    the mean over responses of the sum over tokens, as RLOO averages.

    Logged: ``kl``, ``kl/per_token``, ``kl/per_sequence``, the latter two with ``_error`` (clustered by prompt), of the
    responses since the last log, and ``beta``.
    """


class LeashedRLOOTrainer(RLOOLeash, RLOOTrainer):
    """``trl.RLOOTrainer`` with ``kl``, ``kl_place``, ``kl_scope``, ``kl_gradient``, ``kl_cap``; see ``RLOOLeash``."""
