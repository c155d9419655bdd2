"""A leashed trainer that measures what it generates before it learns from it."""

from typing import Any

import numpy as np
import torch

from kleash.integrations.trl import response_statistics
from kleash.models import Prompt
from kleash.training.process_group import ProcessGroup
from kleash.training.responses import Response, of_responses, to_samples
from kleash.training.rewards import Rewards, require_scored
from kleash.training.with_trl.arguments import PROMPT_COLUMN
from kleash.training.with_trl.step_logger import Generated

STEERED_BY = {"sequence": "kl/exact_per_sequence", "token": "kl/exact_per_token"}
"""What a controller follows, by what its target is per."""


class Measuring:
    """In front of a leashed trainer: exact KL, entropy and rewards of each generated batch."""

    accelerator: Any
    model: Any
    processing_class: Any
    beta: float

    def told_apart(self, prompts: list[Prompt], rewards: Rewards) -> None:
        """Say which prompts the column of the data set numbers, and how rewards are called and weighed."""
        self._prompts, self._rewards = prompts, rewards
        self._generated: Generated | None = None
        self._scores: Any = None

    def take_generated(self) -> Generated | None:
        """What was measured since it was last asked for."""
        generated, self._generated = self._generated, None
        return generated

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Any:
        parent: Any = super()
        self._scores = parent._calculate_rewards(*arguments, **named)
        self._require_scored()
        return self._scores

    def _require_scored(self) -> None:
        """See that a reward other than None was returned for each response of all processes."""
        names = [reward.name for reward in self._rewards.rewards]
        columns = self._scores[:, : len(names)].double().cpu().numpy().T
        require_scored(
            dict(zip(names, columns, strict=True)), [f"response {at}" for at in range(columns.shape[1])]
        )

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        parent: Any = super()
        output = parent._generate_and_score_completions(inputs)
        if self.model.training:
            self._generated = self._measure(inputs, output)
        return output

    def _measure(self, inputs: Any, output: dict[str, Any]) -> Generated:
        trainer: Any = self
        scored = response_statistics(trainer, output)
        group = ProcessGroup(self.accelerator.process_index, self.accelerator.num_processes)
        local_responses = self._responses(inputs, output, scored, group.rank)
        responses = [response for part in group.all_gather_object(local_responses) for response in part]
        metrics = of_responses(responses, self.beta)
        trainer._log_metrics(**{name: metrics[name] for name in STEERED_BY.values()})
        return Generated(metrics=metrics, samples=tuple(to_samples(responses)))

    def _responses(self, inputs: Any, output: dict[str, Any], scored: Any, rank: int) -> list[Response]:
        lengths = scored.mask.sum(-1).tolist()
        columns = {
            "token_kl": scored.statistics.kl_pq,
            "token_logp": scored.statistics.token_logp,
            "token_logq": scored.statistics.token_logq,
            "entropy": scored.statistics.entropy_p,
        }
        arrays = {name: x.double().cpu().numpy() for name, x in columns.items()}
        ends = np.cumsum(lengths)
        names = [reward.name for reward in self._rewards.rewards]
        weights = torch.tensor(
            [reward.weight for reward in self._rewards.rewards], device=self._scores.device
        )
        first = rank * len(inputs)
        ids, cut = output["completion_ids"], self._cut(output)
        responses: list[Response] = []
        for row, (row_inputs, end, length) in enumerate(zip(inputs, ends, lengths, strict=True)):
            parts = self._scores[first + row, : len(names)]
            responses.append(
                Response(
                    place=first + row,
                    prompt_id=row_inputs[PROMPT_COLUMN],
                    score=float((parts * weights).nansum()),
                    parts=dict(zip(names, parts.tolist(), strict=True)),
                    cut=cut[row],
                    tokens={name: x[end - length : end] for name, x in arrays.items()},
                    prompt=self._prompts[row_inputs[PROMPT_COLUMN]].text,
                    response=self.processing_class.decode(
                        ids[row][scored.mask[row]], skip_special_tokens=True
                    ),
                )
            )
        return responses

    def _cut(self, output: dict[str, Any]) -> list[bool]:
        """Whether a response stopped for another reason than an end token."""
        trainer: Any = self
        ends = torch.tensor(sorted(_ends(trainer)), device=output["completion_ids"].device)
        lengths = output["completion_mask"].sum(-1)
        last = output["completion_ids"].gather(-1, (lengths - 1).clamp(min=0).unsqueeze(-1))[..., 0]
        return [not is_end for is_end in torch.isin(last, ends).tolist()]


def _ends(trainer: Any) -> set[int]:
    end_tokens = trainer.eos_token_ids
    return set(end_tokens) if isinstance(end_tokens, list | tuple | set) else {end_tokens}


def measured(kind: type) -> Any:
    """The class of leashed trainer that measures what it generates."""
    return type(f"Measured{kind.__name__}", (Measuring, kind), {})
