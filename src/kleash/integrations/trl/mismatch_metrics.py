"""The mismatch of TRL's trainer and the vLLM engine that generates for it, measured on every generated batch."""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from kleash.leash import mismatch


def mismatch_metrics(
    trainer_logp: Float[Tensor, "batch time"],
    engine_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    accelerator: Any,
) -> dict[str, float]:
    """The mismatch of trainer and engine over the batches of all processes, under the names that are logged.

    A token without a log-probability of the engine (NaN) is left out. A collective.

    Args:
        trainer_logp: log-probabilities of the tokens by the trainer, with the weights that generated them.
        engine_logp: as the engine returned them with the tokens.
        mask: true for the tokens that the policy generated.
        accelerator: of the trainer, which gathers the columns.
    """
    is_counted = mask & ~engine_logp.isnan()
    columns = [
        accelerator.gather(accelerator.pad_across_processes(column, dim=1))
        for column in (trainer_logp, engine_logp, is_counted.long())
    ]
    if not columns[2].any():
        return {"mismatch/tokens": 0.0}
    measured = mismatch(*columns)
    return {
        "mismatch/kl_engine_trainer": measured.kl_engine_trainer.value,
        "mismatch/kl_trainer_engine": measured.kl_trainer_engine.value,
        "mismatch/jensen_shannon": measured.jensen_shannon.value,
        "mismatch/mean_weight": measured.mean_weight.value,
        "mismatch/effective_share": measured.effective_sample_size / measured.tokens,
        "mismatch/largest_log_ratio": measured.largest_log_ratio,
        "mismatch/tokens": float(measured.tokens),
    }
