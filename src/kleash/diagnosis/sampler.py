"""Whether the tokens were drawn from the distribution whose log-probabilities the columns hold."""

import math

import numpy as np
import torch

from kleash.diagnosis.causes import likely_cause
from kleash.diagnosis.model_hypotheses import SMALLEST_LOG_RATIO, fitted_temperature
from kleash.diagnosis.model_scores import ModelScores, at_temperature
from kleash.store.likely_causes import LikelyCause

PRIOR_NATS = 9.0
"""Log of the prior odds against another sampler; a deviation of z standard errors is z^2 / 2 nats for it."""


def other_sampler(scores: ModelScores, limit: float) -> LikelyCause | None:
    """The finding that the tokens were drawn by another sampler; None if they were not, or it cannot be seen.

    Under the columns' distribution, which is the policy's at the temperature that fits the engine's column, the sum of
    log p + entropy over the tokens has mean 0 and a known variance, and so has the number of tokens that stand before.
    """
    table = scores.table
    temperature = fitted_temperature(scores, "engine")
    temperature = 1.0 if abs(math.log(temperature)) < 10 * SMALLEST_LOG_RATIO else temperature
    away = np.abs(scores.column(at_temperature(temperature)) - table.engine)
    if (
        float(
            np.median(
                away[table.unit > 1e-3] / table.unit[table.unit > 1e-3],
            )
        )
        > limit + 1e-4
    ):
        return None
    rows = np.arange(len(table.trainer))
    moments: list[np.ndarray] = []
    for logits, part in scores.blocks(rows):
        logp = (logits / temperature).log_softmax(-1).double()
        p, finite = logp.exp(), logp.clamp(min=-745)
        seen = (scores.counts(rows[part], with_prompt=True) > 0).to(p.device)
        mean, square, share = (p * finite).sum(-1), (p * finite**2).sum(-1), (p * seen).sum(-1)
        ids = torch.from_numpy(table.token_id[part]).to(p.device).unsqueeze(-1)
        drawn, is_seen = finite.gather(-1, ids).squeeze(-1), seen.double().gather(-1, ids).squeeze(-1)
        columns = (drawn - mean, square - mean**2, is_seen - share, share * (1 - share))
        moments.append(torch.stack(columns, dim=-1).cpu().numpy())
    logp_gap, logp_variance, seen_gap, seen_variance = np.concatenate(moments).sum(axis=0)
    of_logp = logp_gap / math.sqrt(logp_variance) if logp_variance > 0 else 0.0
    of_seen = seen_gap / math.sqrt(seen_variance) if seen_variance > 0 else 0.0
    probability = 1 / (1 + math.exp(min(700.0, PRIOR_NATS - max(of_logp**2, of_seen**2) / 2)))
    if probability < 0.5:
        return None
    likeliest = _sampling_temperature(scores)
    return likely_cause(
        "sampler",
        f"the log-probabilities of the drawn tokens are {logp_gap / len(rows):+.3g} nats a token from their "
        f"expectation ({of_logp:+.1f} standard errors), tokens that stand before are "
        f"{seen_gap / len(rows):+.2%} from theirs ({of_seen:+.1f}); they are likeliest at temperature {likeliest:.2g}",
        probability,
    )


def _sampling_temperature(scores: ModelScores) -> float:
    """The temperature under which the drawn tokens are likeliest."""
    tried = np.geomspace(0.2, 3.0, 28)
    return float(max(tried, key=lambda value: float(scores.sampled(at_temperature(value)).sum())))
