"""The KL in the reward of TRL's RLOO, read off the advantages that the trainer's own method computes.

The method generates, scores, and subtracts from each response's reward the mean of the others in its
group. So each response is put into a group of two with another whose log-probabilities are the same
under both models: with scores of 0 and beta 1, its advantage is then minus its own KL.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kleash.auditing.targets.dotted import import_target


class OneProcess:
    """An accelerator with one process: what is reduced over all processes is one's own."""

    device = torch.device("cpu")
    process_index = 0

    def reduce(self, values: Tensor, reduction: str = "sum") -> Tensor:
        """The values."""
        return values


class Generated:
    """In front of a trainer: responses, their log-probabilities and their scores are handed over."""

    policy: Tensor
    reference: Tensor
    model: Any

    def _generate(self, prompts: list[str]) -> tuple[list[list[int]], list[list[int]], list[str]]:
        return [[0]] * len(prompts), [[0] * self.policy.shape[1]] * len(prompts), [""] * len(prompts)

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        return self.policy if model is self.model else self.reference, None, None

    def _calculate_rewards(self, inputs: Any, prompts: list[str], *_: Any) -> Tensor:
        return torch.zeros(len(prompts), 1, dtype=self.policy.dtype)


def with_companions(token_logp: Tensor) -> Tensor:
    """Each response followed by one whose log-probabilities are all −1, whichever the model."""
    return torch.stack([token_logp, torch.full_like(token_logp, -1.0)], dim=1).flatten(0, 1)


def rloo_reward(token_logp: Tensor, token_logq: Tensor) -> Tensor:
    """The advantage of each response in TRL's ``RLOOTrainer`` beside one whose KL is 0: minus its KL."""
    kind = import_target("trl.trainer.rloo_trainer").RLOOTrainer
    trainer: Any = object.__new__(type("Audited", (Generated, kind), {}))
    lists = defaultdict(list)
    vars(trainer).update(
        policy=with_companions(token_logp.detach()),
        reference=with_companions(token_logq.detach()),
        beta=1.0,
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model=SimpleNamespace(),
        accelerator=OneProcess(),
        args=SimpleNamespace(per_device_train_batch_size=1, gradient_checkpointing_kwargs=None),
        processing_class=SimpleNamespace(),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        reward_weights=torch.ones(1, dtype=token_logp.dtype),
        reward_clip_range=None,
        reward_func_names=["none"],
        num_generations=2,
        normalize_advantages=False,
        _metrics={"train": lists},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    found = trainer._generate_and_score_completions([{"prompt": ""}] * (2 * len(token_logp)))
    return found["advantages"][::2]
