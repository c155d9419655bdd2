"""The drift of a live policy: generate and score responses to a few prompts in memory, without files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kleash.errors import OptionError
from kleash.measuring.sequence_clusters import hashes_as_ints
from kleash.models import Pair, Prompt, Sampling, generate, score
from kleash.registry import require_choice
from kleash.store.statistics import KL_POLICY_REFERENCE
from kleash.uncertainty import Estimate, clustered_mean
from kleash.uncertainty.ratios import mean_per_token


class DriftPart(NamedTuple):
    """One row per generated response: its prompt, its length and its exact KL."""

    prompt: Int[np.ndarray, " sequences"]
    """Hash of its tokens, as ``hashes_as_ints``."""
    tokens: Int[np.ndarray, " sequences"]
    exact: Float[np.ndarray, " sequences"]
    """The exact next-token KLs, summed over the response."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """KL(policy || reference) on fixed prompts, with errors clustered by prompt."""

    per_token: Estimate
    """Exact KL in nats per token, over all tokens of all responses."""
    per_sequence: Estimate
    """KL between whole responses in nats: exact, summed over a response, as each step of training has it."""
    sequences: int
    tokens: int
    by_prompt: Mapping[str, float] = field(default_factory=dict[str, float], repr=False)
    """Hash of a prompt's tokens, as text -> KL per sequence, mean over the responses to it."""

    def per(self, what: str) -> Estimate:
        """The KL per "token" or per "sequence".

        Raises:
            OptionError: if ``what`` is neither.
        """
        require_choice(("token", "sequence"), per=what)
        return self.per_token if what == "token" else self.per_sequence


def draw_drift(
    pair: Pair, prompts: Sequence[Prompt], sampling: Sampling, *, batch_tokens: int = 4096
) -> DriftPart:
    """Generate responses to the prompts with the policy, and score them under both models.

    The prompts can be split over processes: the draws do not depend on the process.

    Args:
        pair: the live policy and its reference.
        prompts: to respond to.
        sampling: its options; both models are scored at its temperature.
        batch_tokens: largest batch in tokens, padding included.

    Raises:
        OptionError: at temperature 0 or with truncated sampling, which do not sample from the whole distribution.
        NonFiniteError: if a model gives NaN or infinities.
    """
    if sampling.temperature == 0 or (sampling.top_p, sampling.top_k, sampling.min_p) != (None, None, None):
        raise OptionError(
            "drift is a mean over samples of the policy's whole distribution; give a temperature above 0, and no "
            "top_p, top_k or min_p"
        )
    responses = generate(pair.policy, prompts, sampling, batch_tokens=batch_tokens)
    lengths = np.array([len(response.response_ids) for response in responses], dtype=np.int64)
    columns = score(pair, responses, temperature=sampling.temperature, batch_tokens=batch_tokens)
    response_of = np.repeat(np.arange(len(responses)), lengths)
    return DriftPart(
        prompt=hashes_as_ints(response.prompt_hash for response in responses),
        tokens=lengths,
        exact=np.bincount(response_of, weights=columns[KL_POLICY_REFERENCE], minlength=len(responses)),
    )


def drift_of(parts: Iterable[DriftPart]) -> Drift:
    """The drift over all parts, with prompts as clusters."""
    prompt, tokens, exact = (np.concatenate(column) for column in zip(*parts, strict=True))
    prompts, cluster = np.unique(prompt, return_inverse=True)
    means = np.bincount(cluster, weights=exact) / np.bincount(cluster)
    return Drift(
        per_token=mean_per_token(exact, tokens, cluster),
        per_sequence=clustered_mean(exact, cluster, lower=0.0),
        sequences=len(prompt),
        tokens=int(tokens.sum()),
        by_prompt=dict(zip(map(str, prompts.tolist()), means.tolist(), strict=True)),
    )
