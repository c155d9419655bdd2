"""How far a live policy is from its reference: a few prompts answered and scored in memory, nothing written."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kleash.errors import OptionError
from kleash.models import Pair, Prompt, Sampling, generate, score
from kleash.uncertainty import Estimate, controlled_total, ratio_of_sums


class DriftPart(NamedTuple):
    """Of each response that was drawn: whose it is, its length, and what both models say of it."""

    prompt: Int[np.ndarray, " sequences"]
    tokens: Int[np.ndarray, " sequences"]
    log_ratio: Float[np.ndarray, " sequences"]
    """log p − log q of the response."""
    exact: Float[np.ndarray, " sequences"]
    """The exact KL of each next token, summed over the response."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """KL(policy || reference) on fixed prompts, exact, with errors over prompts."""

    per_token: Estimate
    """Nats per token, mean over all tokens of all responses."""
    per_sequence: Estimate
    """Nats between whole responses: the exact sums, combined with the sampled ones where that varies less."""
    sequences: int
    tokens: int

    def per(self, what: str) -> Estimate:
        """The KL per "token" or per "sequence".

        Raises:
            OptionError: if ``what`` is neither.
        """
        if what not in ("token", "sequence"):
            raise OptionError(f"a KL is counted per token or per sequence, not per {what}")
        return self.per_token if what == "token" else self.per_sequence


def draw_drift(
    pair: Pair, prompts: Sequence[Prompt], sampling: Sampling, *, batch_tokens: int = 4096
) -> DriftPart:
    """Let the policy answer the prompts, and score the answers under both models.

    Parts of the prompts may be drawn by different processes: the draws do not depend on who does it.

    Args:
        pair: the policy as it is now, and its reference.
        prompts: what is answered.
        sampling: how; at its temperature both models are scored.
        batch_tokens: the most tokens read at once, padding included.

    Raises:
        OptionError: at temperature 0, where nothing is drawn, or if the sampling is truncated.
        NonFiniteError: if a model gives NaN or infinities.
    """
    if sampling.temperature == 0 or (sampling.top_p, sampling.top_k, sampling.min_p) != (None, None, None):
        raise OptionError(
            "drift is the mean over what the policy draws from its whole distribution; give a temperature above "
            "0, and no top_p, top_k or min_p"
        )
    answers = generate(pair.policy, prompts, sampling, batch_tokens=batch_tokens)
    lengths = np.array([len(one.response_ids) for one in answers], dtype=np.int64)
    columns = score(pair, answers, temperature=sampling.temperature, batch_tokens=batch_tokens)
    of = np.repeat(np.arange(len(answers)), lengths)
    ratios = columns["logp_policy"].astype(np.float64) - columns["logp_reference"]
    return DriftPart(
        prompt=np.array([one.prompt_id for one in answers], dtype=np.int64),
        tokens=lengths,
        log_ratio=np.bincount(of, weights=ratios, minlength=len(answers)),
        exact=np.bincount(of, weights=columns["kl_policy_reference"], minlength=len(answers)),
    )


def drift_of(parts: Iterable[DriftPart]) -> Drift:
    """The drift that was drawn, in one part or in several; prompts are the clusters of its errors."""
    prompt, tokens, log_ratio, exact = (np.concatenate(column) for column in zip(*parts, strict=True))
    _, cluster = np.unique(prompt, return_inverse=True)
    return Drift(
        per_token=ratio_of_sums(
            np.bincount(cluster, weights=exact), np.bincount(cluster, weights=tokens), unit="nats", lower=0.0
        ),
        per_sequence=controlled_total(log_ratio, exact, cluster, unit="nats").estimate,
        sequences=len(prompt),
        tokens=int(tokens.sum()),
    )
