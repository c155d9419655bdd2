"""TRL's RLOO with the KL taken over: exact or sampled, in the loss or in the reward."""

from typing import Any

import torch
from torch import Tensor

from kleash.integrations.trl.leash import BEHAVIOUR, REFERENCE_HIDDEN, REFERENCE_LOGP, OwnKL
from kleash.integrations.trl.seams import RLOOTrainer
from kleash.integrations.trl.terms import Window, refuse_reward


class RLOOLeash(OwnKL):
    """Takes over the KL of ``trl.RLOOTrainer`` or of a subclass: ``class Mine(RLOOLeash, Theirs)``.

    ``kl_place="reward"`` is TRL's own (the sum of k1 taken from each response's reward), whose gradient is right;
    it is what is logged that changes: the number that is trained, per response, not a mean over tokens. With
    ``kl_place="loss"`` the KL leaves the reward (TRL's code is shown a beta of 0, and the reference's pass is made
    here) and is added to the loss as the mean over responses of its sum, as RLOO averages.

    Logged: ``kl``, ``kl/per_token``, ``kl/per_sequence`` and ``beta``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer; arguments as ``OwnKL`` and TRL's own."""
        super().__init__(*args, **kwargs)
        refuse_reward(self._kl_options, {"normalize_advantages": (self.normalize_advantages, False)})

    normalize_advantages: bool

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        parent: Any = super()
        if self.beta == 0:
            return parent._generate_and_score_completions(inputs)
        if self._kl_options.place == "reward":
            with self._watched(hidden=False) as passes:
                output = parent._generate_and_score_completions(inputs)
            self._correct_log(passes[0].logp - passes[1].logp, output["completion_mask"])
            return output
        with self._parent_has(0.0), self._watched(hidden=False) as passes:
            output = parent._generate_and_score_completions(inputs)
        reference = self._pass_over(output, reference=True, hidden=self._kl_options.exact)
        output[REFERENCE_LOGP] = reference.logp
        if self._off_policy:
            output[BEHAVIOUR] = passes[0].logp
        if reference.hidden is not None:
            output[REFERENCE_HIDDEN] = reference.hidden
        return output

    def _correct_log(self, per_token: Tensor, completion_mask: Tensor) -> None:
        """In the place of TRL's mean over tokens: the KL that the rewards were charged, per response."""
        mask = completion_mask.bool()
        nats = torch.where(mask, per_token, 0.0).sum()
        sums = torch.stack([nats, mask.sum().float(), torch.tensor(float(len(mask)), device=mask.device)])
        total, tokens, sequences = self.accelerator.reduce(sums, reduction="sum").tolist()
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["kl"][-1] = total / sequences
        self._log(
            **{
                "kl/per_token": total / max(tokens, 1.0),
                "kl/per_sequence": total / sequences,
                "beta": self.beta,
            }
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        parent: Any = super()
        if self.beta == 0 or self._kl_options.place == "reward":
            return parent._compute_loss(model, inputs)
        with self._watched(hidden=self._kl_options.exact) as passes:
            loss = parent._compute_loss(model, inputs)
        window = Window(parts=1, tokens=1.0, length=self.args.max_completion_length)
        share = self._share(passes[0], inputs, window)
        mask = self._counted(inputs)
        self._note(share, self._kl_options.share(mask, window), mask, window.parts)
        return loss + self.beta * share.loss


class LeashedRLOOTrainer(RLOOLeash, RLOOTrainer):
    """``trl.RLOOTrainer`` with ``kl``, ``kl_place``, ``kl_scope``, ``kl_gradient``, ``kl_cap``; see ``RLOOLeash``."""
