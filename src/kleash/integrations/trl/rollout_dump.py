"""A callback that writes the rollouts of TRL's GRPO and RLOO for ``kleash mismatch`` and ``kleash doctor``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kleash.diagnosis import write_rollouts
from kleash.errors import CannotRunError, OptionError
from kleash.integrations.trainer.callback import AttachedCallback
from kleash.integrations.trl.compat import GRPOTrainer, RLOOTrainer
from kleash.integrations.trl.forward_capture import replaced, whole_rows
from kleash.integrations.trl.kl_mixin import ENGINE_LOGP, OLD_LOGP, REFERENCE_LOGP, KLMixin
from kleash.models.live_models import base_network
from kleash.precision import normalised
from kleash.registry import require_at_least


class RolloutDump(AttachedCallback):
    """Writes generated batches with the log-probabilities of trainer and engine, every so many steps.

    Each process writes a file of its own, ``step-000010-rank-0.jsonl``, with token ids, masks, both columns, the
    reference's (of kleash's trainers, and of TRL's GRPO with a beta above 0), and ``version``: the number of updates of
    the weights. The engine's column is vLLM's, or that of transformers' ``generate`` after its temperature and
    truncation. The trainer's column is TRL's pass with the weights that generated; where there was no pass for a
    column, there is one more. Random states are restored, so that the training is the same without the callback.
    """

    def __init__(self, folder: str | Path, *, every: int = 100) -> None:
        """Create the callback; ``attach`` adds it to a trainer.

        Args:
            folder: where the files are written; it is made.
            every: steps between two batches that are written; the first is.

        Raises:
            OptionError: if ``every`` is not at least 1.
        """
        require_at_least(1, every=every)
        self.folder, self.every = Path(folder), every
        self._next = 0

    def attach(self, trainer: Any) -> "RolloutDump":
        """Add this callback to TRL's GRPO or RLOO trainer; returns itself.

        Raises:
            OptionError: if the trainer is another one, or the callback is attached already.
        """
        if not isinstance(trainer, GRPOTrainer | RLOOTrainer):
            raise OptionError(
                f"RolloutDump reads the batches of TRL's GRPO and RLOO trainers, and {type(trainer).__name__} is "
                "none; write its batches with kleash.diagnosis.write_rollouts"
            )
        super().attach(trainer)
        attached: Any = trainer
        generate = attached._generate_and_score_completions

        def generate_and_write(inputs: Any) -> Any:
            step = attached.state.global_step
            if not attached.model.training or step < self._next:
                return generate(inputs)
            with _generation_columns(attached) as columns:
                output = generate(inputs)
            self._next = step + self.every
            self._write(output, columns, step)
            return output

        attached._generate_and_score_completions = generate_and_write
        return self

    def _write(self, output: dict[str, Any], columns: list["GenerationLogprobs"], step: int) -> None:
        """Write a batch that TRL has generated."""
        batch = dict(output)
        if ENGINE_LOGP not in batch:
            batch[ENGINE_LOGP] = _engine_column(batch["completion_ids"], columns)
        self._add_columns(batch)
        is_known = ~batch[ENGINE_LOGP].isnan()  # vLLM leaves some out
        batch["completion_mask"] = batch["completion_mask"] * is_known
        name = f"step-{step:06d}-rank-{self.trainer.accelerator.process_index}.jsonl"
        write_rollouts(self.folder / name, batch, version=step)

    def _add_columns(self, batch: dict[str, Any]) -> None:
        """Add the trainer's column, in the mode in which it trains, and with kleash's KL the reference's."""
        device, trainer = batch["completion_ids"].device, self.trainer
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if OLD_LOGP not in batch:
                batch[OLD_LOGP] = trainer._get_per_token_logps_and_entropies(
                    trainer.model, *whole_rows(batch), batch_size=trainer.args.per_device_train_batch_size
                )[0]
            if REFERENCE_LOGP not in batch and isinstance(trainer, KLMixin):
                batch[REFERENCE_LOGP] = trainer._forward_pass(batch, reference=True, hidden=False).logp


class GenerationLogprobs:
    """The last of a generation's processors: keeps the log-probabilities of the tokens that are drawn after it."""

    def __init__(self) -> None:
        """Start with the first token."""
        self.columns: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores unchanged."""
        self._keep(input_ids[:, -1:])
        self._last = normalised(scores.float())
        return scores

    def of(self, completion_ids: Tensor) -> Tensor | None:
        """Log-probabilities [batch, time] of all tokens, NaN after the last step; None if the shapes differ."""
        steps = len(self.columns) + 1
        if self._last is None or len(self._last) != len(completion_ids) or steps > completion_ids.shape[1]:
            return None
        self._keep(completion_ids[:, steps - 1 : steps])
        values = torch.full(completion_ids.shape, torch.nan, device=completion_ids.device)
        values[:, :steps] = torch.cat(self.columns, dim=1)
        return values

    def _keep(self, drawn: Tensor) -> None:
        """Keep the value of the tokens [batch, 1] that were drawn from the last distribution."""
        if self._last is not None:
            self.columns.append(self._last.gather(-1, drawn.to(self._last.device)))


@contextmanager
def _generation_columns(trainer: Any) -> Iterator[list[GenerationLogprobs]]:
    """Context in which transformers' ``generate`` keeps log-probabilities: a column for each call of it."""
    network = base_network(trainer.accelerator.unwrap_model(trainer.model))
    make_processors, columns = network._get_logits_processor, list[GenerationLogprobs]()

    def with_column(*args: Any, **kwargs: Any) -> Any:
        """The processors that ``generate`` makes, and one that keeps log-probabilities."""
        processors = make_processors(*args, **kwargs)
        columns.append(GenerationLogprobs())
        processors.append(columns[-1])
        return processors

    with replaced(network, "_get_logits_processor", with_column):
        yield columns


def _engine_column(completion_ids: Tensor, columns: list[GenerationLogprobs]) -> Tensor:
    """The log-probabilities of the one generation of a batch.

    Raises:
        CannotRunError: if there was none, or several, as with tools.
    """
    column = columns[0].of(completion_ids) if len(columns) == 1 else None
    if column is None:
        raise CannotRunError(
            f"RolloutDump found {len(columns)} calls of generate for a batch of {len(completion_ids)} responses, and "
            "reads the log-probabilities of one; generate with vLLM in GRPO, which returns them"
        )
    return column
