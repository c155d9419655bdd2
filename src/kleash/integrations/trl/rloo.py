"""TRL's RLOO with its KL replaced: exact or sampled, in the loss or in the reward."""

from typing import Any

from torch import Tensor

from kleash.integrations.trl.compat import RLOOTrainer
from kleash.integrations.trl.kl_mixin import BEHAVIOUR_LOGP, KLMixin, rows_by_prompt
from kleash.integrations.trl.mismatch_metrics import EngineLogprobs
from kleash.integrations.trl.terms import UpdateSize, require_unscaled_reward


class RLOOLeash(KLMixin):
    """Mixin that replaces the KL of ``trl.RLOOTrainer`` or a subclass: ``class Mine(RLOOLeash, Theirs)``.

    ``kl_place="reward"`` is TRL's own term (beta times the sum of k1, subtracted from the reward of each response),
    whose gradient is right. Only its log changes: the number that is trained, per response, not a mean over tokens.
    With ``kl_place="loss"`` the KL is not in the reward (TRL's code reads a beta of 0, and the reference's pass is
    made here). It is added to the loss as the mean over responses of the sum over tokens, as RLOO averages.

    Logged: ``kl``, ``kl/per_token``, ``kl/per_sequence``, the latter two with ``_error`` (standard error over
    an update, clustered by prompt), and ``beta``; with vLLM also the mismatch of trainer and engine, ``mismatch/*``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer, from the arguments of ``KLMixin`` and those of TRL's trainer."""
        super().__init__(*args, **kwargs)
        require_unscaled_reward(
            self._kl_options, {"normalize_advantages": (self.normalize_advantages, False)}
        )
        self._engine_logprobs = EngineLogprobs(self.vllm_generation) if self.use_vllm else None

    normalize_advantages: bool
    use_vllm: bool
    vllm_generation: Any

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output, trainer_logp = self._generated_and_scored(inputs)
        if self._engine_logprobs is not None:
            engine_logp = self._engine_logprobs.as_tensor(output["completion_ids"])
            self._log_engine_mismatch(output, trainer_logp, engine_logp)
        return output

    def _generated_and_scored(self, inputs: Any) -> tuple[dict[str, Any], Tensor]:
        """TRL's generated batch with what the KL needs of the reference, and the policy's log-probabilities."""
        parent: Any = super()
        in_reward = self._kl_options.place == "reward"
        with (
            self._parent_beta(self.beta if in_reward else 0.0),
            self._record_passes(hidden=self._captures and in_reward) as passes,
        ):
            output = parent._generate_and_score_completions(inputs)
        policy_logp = passes[0].logp
        if in_reward and self.beta != 0:
            self._metrics[self._mode]["kl"].pop()  # TRL's mean over tokens
            reference = passes[1]
        else:
            reference = self._forward_pass(output, reference=True, hidden=self._captures)
        self._keep_reference(output, reference)
        if in_reward:
            per_token, mask = policy_logp - reference.logp, output["completion_mask"].bool()
            rows = rows_by_prompt(per_token, mask, output["prompt_ids"], output["prompt_mask"])
            self._log_metrics(kl=self._log_kl_rows(rows))
        elif self._is_off_policy:
            output[BEHAVIOUR_LOGP] = policy_logp
        return output, policy_logp

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        parent: Any = super()
        with self._record_passes(hidden=self._captures) as passes:
            loss = parent._compute_loss(model, inputs)
        self._keep_exact_kl(passes[0], inputs)
        if self._kl_options.place == "reward":
            return loss
        size = UpdateSize(micro_batches=1, tokens=1.0, max_length=self.args.max_completion_length)
        kl = self._micro_batch_kl(passes[0], inputs, size)
        mask = self._response_mask(inputs)
        self._log_kl(kl, self._kl_options.token_weights(mask, size), inputs, size.micro_batches)
        return loss if self.beta == 0 else loss + self.beta * kl.loss


class LeashedRLOOTrainer(RLOOLeash, RLOOTrainer):
    """``trl.RLOOTrainer`` with ``kl``, ``kl_place``, ``kl_scope``, ``kl_gradient``, ``kl_cap``; see ``RLOOLeash``."""
