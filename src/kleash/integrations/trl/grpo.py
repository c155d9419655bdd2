"""TRL's GRPO with the KL taken over: exact or sampled, in the loss or in the reward."""

from typing import Any

import torch
from torch import Tensor

from kleash.integrations.trl.leash import REFERENCE_HIDDEN, OwnKL
from kleash.integrations.trl.passes import Pass
from kleash.integrations.trl.seams import GRPOTrainer
from kleash.integrations.trl.terms import Window, refuse_reward

PENALTY = "kl_penalty"


class GRPOLeash(OwnKL):
    """Takes over the KL of ``trl.GRPOTrainer`` or of a subclass: ``class Mine(GRPOLeash, Theirs)``.

    TRL's own term (k3 times the ratio, whose gradient is KL(policy || reference) on-policy only for importance
    ratios of single tokens) is switched off by showing TRL's loss a beta of 0, and this one is added to what
    TRL's loss returns, averaged over tokens exactly as ``loss_type`` averages the policy term.

    ``kl_place="reward"`` subtracts beta times the sum of k1 from each response's reward, as one more reward
    function ``kl_penalty`` whose weight is beta; with ``scale_rewards="none"``, since a division by the group's
    spread would change beta from group to group.

    Logged: ``kl``, the number that beta multiplies in the loss (or, in the reward, the mean over responses);
    ``kl/per_token``, ``kl/per_sequence``, ``beta``, and with importance weights ``kl/effective_share``, the part of
    the tokens that these leave.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer; arguments as ``OwnKL`` and TRL's own."""
        super().__init__(*args, **kwargs)
        refuse_reward(
            self._kl_options,
            {
                "scale_rewards": (self.scale_rewards, "none"),
                "multi_objective_aggregation": (self.multi_objective_aggregation, "sum_then_normalize"),
            },
        )
        self._tools: Any = None
        if self._kl_options.place == "reward" and self.beta != 0:
            self.reward_funcs.append(self._penalty)
            self.reward_processing_classes.append(None)
            self.reward_func_names.append(PENALTY)
            weight = torch.tensor([self.beta], dtype=self.reward_weights.dtype)
            self.reward_weights = torch.cat([self.reward_weights, weight.to(self.reward_weights.device)])

    scale_rewards: Any
    multi_objective_aggregation: Any
    reward_processing_classes: list[Any]
    reward_weights: Tensor
    loss_type: str
    use_vllm: bool
    current_gradient_accumulation_steps: int

    @property
    def _loss_type(self) -> str:
        return self.loss_type

    @property
    def _off_policy(self) -> bool:
        """Whether TRL keeps the log-probabilities of an older policy."""
        return super()._off_policy or self.use_vllm

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        parent: Any = super()
        if self.beta == 0:
            return parent._generate_and_score_completions(inputs)
        in_loss = self._kl_options.place == "loss"
        if not in_loss:
            self.reward_weights[-1] = self.beta
        with self._watched(hidden=in_loss and self._kl_options.exact) as passes:
            output = parent._generate_and_score_completions(inputs)
        if in_loss and self._kl_options.exact:
            output[REFERENCE_HIDDEN] = passes[-1].hidden
        return output

    def _generate(self, prompts: Any) -> Any:
        parent: Any = super()
        generated = parent._generate(prompts)
        self._tools = generated[2]
        return generated

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        parent: Any = super()
        rewards = parent._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if PENALTY in self.reward_func_names:
            is_unscored = rewards[:, :-1].isnan().all(-1)
            rewards[is_unscored, -1] = torch.nan  # so that the response stays without a reward
        return rewards

    def _penalty(self, prompts: Any, **_: Any) -> list[float]:
        """Minus the KL of each response, by k1 of its own tokens."""
        passes = self._passes
        if not passes:
            return [0.0] * len(prompts)
        reference: Pass = passes[-1]
        policy: Pass = passes[0] if len(passes) > 1 else self._policy_pass(reference)
        attention_mask, length = reference.arguments[0][1:3]
        mask = attention_mask[:, -length:].bool() & self._own_tokens(length, attention_mask)
        per_token = self._term.per_token(policy.logp, reference.logp, mask)
        kl = per_token.sum(-1)
        total = self.accelerator.reduce(
            torch.stack([kl.sum(), mask.sum().float(), torch.tensor(float(len(kl)), device=kl.device)]),
            reduction="sum",
        )
        nats, tokens, sequences = total.tolist()
        self._log(
            **{
                "kl": nats / sequences,
                "kl/per_token": nats / max(tokens, 1.0),
                "kl/per_sequence": nats / sequences,
                "beta": self.beta,
            }
        )
        return (-kl).tolist()

    def _policy_pass(self, reference: Pass) -> Pass:
        """The policy's pass over the same tokens, which TRL leaves out where it is not off-policy."""
        args, kwargs = reference.arguments
        with torch.no_grad():
            self._get_per_token_logps_and_entropies(self.model, *args, **kwargs)
        assert self._passes is not None
        return self._passes[-1]

    def _own_tokens(self, length: int, like: Tensor) -> Tensor:
        mask = torch.ones(len(like), length, dtype=torch.bool, device=like.device)
        for row, flags in enumerate(self._tools or ()):
            mask[row, : len(flags)] = torch.tensor(flags, dtype=torch.bool, device=like.device)
        return mask

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        parent: Any = super()
        if self.beta == 0:
            return parent._compute_loss(model, inputs)
        in_loss = self._kl_options.place == "loss"
        with self._parent_has(0.0), self._watched(hidden=in_loss and self._kl_options.exact) as passes:
            loss = parent._compute_loss(model, inputs)
        if not in_loss:
            return loss
        window = self._window(inputs)
        share = self._share(passes[0], inputs, window)
        mask = self._counted(inputs)
        self._note(share, self._kl_options.share(mask, window), mask, window.parts)
        return loss + self.beta * share.loss

    def _window(self, inputs: dict[str, Any]) -> Window:
        """What this micro-batch is a part of, as TRL's loss takes it."""
        parts = self.current_gradient_accumulation_steps if self.model.training else 1
        tokens = inputs["num_items_in_batch"].clamp(min=1).item() / self.accelerator.num_processes
        if self.model.training:
            tokens *= self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return Window(parts=parts, tokens=tokens, length=self.args.max_completion_length)

    def _behaviour(self, inputs: dict[str, Any]) -> Tensor | None:
        older = inputs.get("old_per_token_logps")
        engine = inputs.get("sampling_per_token_logps")
        if older is None or engine is None:
            return older
        return torch.where(engine.isnan(), older, engine)


class LeashedGRPOTrainer(GRPOLeash, GRPOTrainer):
    """``trl.GRPOTrainer`` with ``kl``, ``kl_place``, ``kl_scope``, ``kl_gradient``, ``kl_cap``; see ``GRPOLeash``."""
