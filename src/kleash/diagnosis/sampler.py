"""Whether the tokens were drawn from the distribution whose log-probabilities the columns hold."""

import math

import numpy as np
import torch

from kleash.diagnosis.causes import likely_cause
from kleash.diagnosis.model_scores import ModelScores
from kleash.store.rollout_results import LikelyCause

PRIOR_NATS = 9.0
"""Log of the prior odds against another sampler; a deviation of z standard errors is z^2 / 2 nats for it."""


def other_sampler(scores: ModelScores, limit: float) -> LikelyCause | None:
    """The finding that the tokens were drawn by another sampler; None if they were not, or it cannot be seen.

    Under the columns' distribution, which is the policy's at the temperature of the scores, the sum of log p + entropy
    over the tokens has mean 0 and a known variance, and so has the number of tokens that stand before.
    """
    table = scores.table
    is_uncertain = table.unit > 1e-3
    away = (np.abs(scores.policy - table.engine) / table.unit.clip(1e-3))[is_uncertain]
    if float(np.median(away)) > limit + 1e-4:
        return None
    moments: list[np.ndarray] = []
    for logits, rows in scores.blocks():
        logp = logits.log_softmax(-1).double()
        p, finite = logp.exp(), logp.clamp(min=-745)
        seen = (scores.counts(rows, with_prompt=True) > 0).to(p.device)
        mean, square, share = (p * finite).sum(-1), (p * finite**2).sum(-1), (p * seen).sum(-1)
        ids = torch.from_numpy(table.token_id[rows]).to(p.device).unsqueeze(-1)
        drawn, is_seen = finite.gather(-1, ids).squeeze(-1), seen.double().gather(-1, ids).squeeze(-1)
        columns = (drawn - mean, is_seen - share, square - mean**2, share * (1 - share))
        moments.append(torch.stack(columns, dim=-1).cpu().numpy())
    gaps, variances = np.split(np.concatenate(moments).sum(axis=0), 2)
    errors = gaps / np.sqrt(np.where(variances > 0, variances, np.inf))
    probability = 1 / (1 + math.exp(min(700.0, PRIOR_NATS - float((errors**2).max()) / 2)))
    if probability < 0.5:
        return None
    return likely_cause(
        "sampler",
        f"the sum of the drawn tokens' log-probabilities is {gaps[0]:+.3g} nats from its expectation ({errors[0]:+.1f} "
        f"standard errors), and the number of tokens that stand before {gaps[1]:+.3g} ({errors[1]:+.1f})",
        probability,
    )
