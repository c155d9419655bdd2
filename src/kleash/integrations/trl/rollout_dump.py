"""A callback that writes the rollouts of TRL's GRPO and RLOO for ``kleash mismatch`` and ``kleash doctor``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.diagnosis import write_rollouts
from kleash.errors import CannotRunError, OptionError
from kleash.extras import replaced
from kleash.integrations.trainer.callback import AttachedCallback
from kleash.integrations.trainer.compat import makes_trl_passes
from kleash.integrations.trl.compat import GRPOTrainer, RLOOTrainer
from kleash.integrations.trl.forward_capture import run_pass
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
            every: steps of the run from one batch that is written to the next, also of a run that is resumed; the
                first batch of each process is written, too.

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
        if not (isinstance(trainer, GRPOTrainer | RLOOTrainer) and makes_trl_passes(trainer)):
            raise OptionError(
                f"RolloutDump reads batches and passes of TRL's GRPO and RLOO trainers, and {type(trainer).__name__} "
                "has others; write its batches with kleash.diagnosis.write_rollouts"
            )
        super().attach(trainer)
        self.trainer._generate_and_score_completions = partial(
            self._generate_and_write, self.trainer._generate_and_score_completions
        )
        return self

    def _generate_and_write(self, generate: Callable[[Any], dict[str, Any]], inputs: Any) -> dict[str, Any]:
        """TRL's method, and every so many steps its batch in a file."""
        step = self.trainer.state.global_step
        if not self.trainer.model.training or step < self._next:
            return generate(inputs)
        with _generations(self.trainer) as generations:
            output = generate(inputs)
        self._next = step - step % self.every + self.every
        self._write(output, generations, step)
        return output

    def _write(self, output: dict[str, Any], generations: list[list[Tensor]], step: int) -> None:
        """Write a batch that TRL has generated, with the columns that it lacks.

        They are the engine's, the trainer's in the mode in which it trains, and with kleash's KL the reference's.
        """
        batch, trainer, device = dict(output), self.trainer, output["completion_ids"].device
        if ENGINE_LOGP not in batch:
            batch[ENGINE_LOGP] = _engine_column(batch["completion_ids"], generations)
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if OLD_LOGP not in batch:
                batch[OLD_LOGP] = run_pass(
                    trainer, trainer.model, batch, batch_size=trainer.args.per_device_train_batch_size
                )
            if REFERENCE_LOGP not in batch and isinstance(trainer, KLMixin):
                batch[REFERENCE_LOGP] = trainer._forward_pass(batch, reference=True).logp
        batch["completion_mask"] = (
            batch["completion_mask"] * ~batch[ENGINE_LOGP].isnan()
        )  # vLLM leaves some out
        rank = trainer.accelerator.process_index
        write_rollouts(self.folder / f"step-{step:06d}-rank-{rank}.jsonl", batch, version=step)


@contextmanager
def _generations(trainer: Any) -> Iterator[list[list[Tensor]]]:
    """Context in which transformers' ``generate`` keeps log-probabilities: for each call of it, those of its steps.

    Of the last step the whole distribution [batch, vocab], of the others those of the tokens [batch, 1] drawn from it.
    """
    network = base_network(trainer.accelerator.unwrap_model(trainer.model))
    make_processors, generations = network._get_logits_processor, list[list[Tensor]]()

    def with_last(*args: Any, **kwargs: Any) -> Any:
        """The processors that ``generate`` makes, and after them ``_keep_step``."""
        processors = make_processors(*args, **kwargs)
        generations.append([])
        processors.append(partial(_keep_step, generations[-1]))
        return processors

    with replaced(network, "_get_logits_processor", with_last):
        yield generations


def _keep_step(steps: list[Tensor], input_ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that keeps the distribution which the next token is drawn from; the scores unchanged."""
    if steps:
        steps[-1] = steps[-1].gather(-1, input_ids[:, -1:])
    steps.append(normalised(scores.float()))
    return scores


def _engine_column(
    completion_ids: Int[Tensor, "batch time"], generations: list[list[Tensor]]
) -> Float[Tensor, "batch time"]:
    """The log-probabilities of the one generation of a batch, NaN after its last step.

    Raises:
        CannotRunError: if there was none, or several, as with tools, or one of another shape.
    """
    steps = generations[0] if len(generations) == 1 else []
    batch, time = completion_ids.shape
    if not 0 < len(steps) <= time or len(steps[-1]) != batch:
        raise CannotRunError(
            f"RolloutDump found {len(generations)} calls of generate for a batch of {batch} responses, and reads the "
            'log-probabilities of one; in GRPO, generate with vLLM, or return "logprobs" from rollout_func'
        )
    column = torch.full(completion_ids.shape, torch.nan, device=completion_ids.device)
    last = steps[-1].gather(-1, completion_ids[:, len(steps) - 1 : len(steps)])
    column[:, : len(steps)] = torch.cat([*steps[:-1], last], dim=1)
    return column
