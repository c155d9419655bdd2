"""GRPO and RLOO trainers that measure each generated batch before the update."""

from typing import Any

import numpy as np
import torch

from kleash.integrations.trl import response_statistics
from kleash.models import Prompt
from kleash.training.response_metrics import Response, gather_object, response_metrics, to_samples
from kleash.training.rewards import Rewards, require_scored
from kleash.training.with_trl.runs import PROMPT_COLUMN
from kleash.training.with_trl.step_logger import StepMeasurement

CONTROLLED_METRICS = {"sequence": "kl/exact_per_sequence", "token": "kl/exact_per_token"}
"""Unit of a controller's target -> the metric that it follows."""


class MeasuringMixin:
    """Mixin before a trainer with ``KLMixin``: exact KL, entropy and rewards of each generated batch."""

    accelerator: Any
    model: Any
    processing_class: Any
    beta: float

    def set_prompts_and_rewards(self, prompts: list[Prompt], rewards: Rewards) -> None:
        """Set the prompts that ``PROMPT_COLUMN`` indexes, and the names and weights of the rewards."""
        self._prompts, self._rewards = prompts, rewards
        self._measurement: StepMeasurement | None = None
        self._scores: Any = None

    def pop_measurement(self) -> StepMeasurement | None:
        """The measurement of the last generated batch; None if it was returned before."""
        measurement, self._measurement = self._measurement, None
        return measurement

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Any:
        parent: Any = super()
        self._scores = parent._calculate_rewards(*arguments, **named)
        self._require_scored()
        return self._scores

    def _require_scored(self) -> None:
        """Check that each response of all processes has a reward that is not None."""
        names = [reward.name for reward in self._rewards.rewards]
        columns = self._scores[:, : len(names)].double().cpu().numpy().T
        require_scored(
            dict(zip(names, columns, strict=True)), [f"response {at}" for at in range(columns.shape[1])]
        )

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        parent: Any = super()
        output = parent._generate_and_score_completions(inputs)
        if self.model.training:
            self._measurement = self._measure(inputs, output)
        return output

    def _measure(self, inputs: Any, output: dict[str, Any]) -> StepMeasurement:
        """Metrics and samples of a generated batch over all processes. A collective."""
        trainer: Any = self
        scores = response_statistics(trainer, output)
        local_responses = self._responses(inputs, output, scores, self.accelerator.process_index)
        responses = gather_object(local_responses)
        metrics = response_metrics(responses, self.beta)
        controlled = [name + suffix for name in CONTROLLED_METRICS.values() for suffix in ("", "_error")]
        trainer._log_metrics(**{name: metrics[name] for name in controlled})
        return StepMeasurement(metrics=metrics, samples=tuple(to_samples(responses)))

    def _responses(self, inputs: Any, output: dict[str, Any], scores: Any, rank: int) -> list[Response]:
        lengths = scores.mask.sum(-1).tolist()
        columns = {
            "token_kl": scores.statistics.kl_pq,
            "token_logp": scores.statistics.token_logp,
            "token_logq": scores.statistics.token_logq,
            "entropy": scores.statistics.entropy_p,
        }
        arrays = {name: x.double().cpu().numpy() for name, x in columns.items()}
        ends = np.cumsum(lengths)
        names = [reward.name for reward in self._rewards.rewards]
        weights = torch.tensor(
            [reward.weight for reward in self._rewards.rewards], device=self._scores.device
        )
        first = rank * len(inputs)
        ids, is_truncated = output["completion_ids"], self._is_truncated(output)
        responses: list[Response] = []
        for row, (row_inputs, end, length) in enumerate(zip(inputs, ends, lengths, strict=True)):
            prompt = self._prompts[row_inputs[PROMPT_COLUMN]]
            parts = self._scores[first + row, : len(names)]
            responses.append(
                Response(
                    index=first + row,
                    prompt_hash=prompt.prompt_hash,
                    score=float((parts * weights).nansum()),
                    parts=dict(zip(names, parts.tolist(), strict=True)),
                    is_truncated=is_truncated[row],
                    tokens={name: x[end - length : end] for name, x in arrays.items()},
                    prompt=prompt.text,
                    response=self.processing_class.decode(
                        ids[row][scores.mask[row]], skip_special_tokens=True
                    ),
                )
            )
        return responses

    def _is_truncated(self, output: dict[str, Any]) -> list[bool]:
        """For each response, whether it ends without an end token."""
        trainer: Any = self
        end_tokens = torch.tensor(sorted(_end_tokens(trainer)), device=output["completion_ids"].device)
        lengths = output["completion_mask"].sum(-1)
        last = output["completion_ids"].gather(-1, (lengths - 1).clamp(min=0).unsqueeze(-1))[..., 0]
        return [not is_end for is_end in torch.isin(last, end_tokens).tolist()]


def _end_tokens(trainer: Any) -> set[int]:
    end_tokens = trainer.eos_token_ids
    return set(end_tokens) if isinstance(end_tokens, list | tuple | set) else {end_tokens}


def with_measurement(trainer_class: type) -> Any:
    """The subclass of a trainer with ``KLMixin`` that measures each generated batch."""
    return type(f"Measured{trainer_class.__name__}", (MeasuringMixin, trainer_class), {})
