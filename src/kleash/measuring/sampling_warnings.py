"""Checks that a run can make of itself."""

import numpy as np

from kleash.measuring.estimands import Estimand
from kleash.measuring.numbers import mean_per_token
from kleash.measuring.rows import Floats
from kleash.measuring.tally import ClusterSums
from kleash.uncertainty import effective_sample_size

SURPRISING = 4.0
"""Standard errors beyond which a mean that ought to be 0 is not taken for chance."""
FEW = 0.5
"""Share of the responses below which their importance weights leave too little to average."""


def on_policy_warnings(sums: ClusterSums, estimand: Estimand) -> tuple[str, ...]:
    """Whether the tokens can have been drawn from the policy.

    If they were, the log ratio of a drawn token has the exact KL as its mean, prefix by prefix. A difference
    of many standard errors means another sampler: other weights, temperature, truncation, or tokenisation.
    """
    if estimand.weighting is None:
        return ()
    gap = mean_per_token(sums, "k1 - exact")
    if estimand.weighting == "importance" and not np.isfinite(gap.value):
        sentence = (
            "the weighted estimators are no numbers: some tokens are so much likelier under the policy than their "
            "logprobs say; check that the logprobs are of these tokens"
        )
        return (sentence,)
    known = 0 < gap.standard_error < np.inf
    if not known or abs(gap.value) <= SURPRISING * gap.standard_error:
        return ()
    drawn = "the tokens" if estimand.weighting == "none" else "even with their weights the tokens"
    sentence = (
        f"{drawn} do not look drawn from the policy: their mean log ratio misses the exact KL by {gap.value:+.3g} "
        f"nats, {abs(gap.value) / gap.standard_error:.0f} standard errors; check the temperature, the truncation and "
        "the weights with which they were generated"
    )
    return (sentence,)


def weight_warnings(weights: Floats, estimand: Estimand) -> tuple[str, ...]:
    """Whether the importance weights of whole responses leave enough of them to average over."""
    if estimand.weighting != "importance":
        return ()
    overflowing = int(np.sum(~np.isfinite(weights)))
    if overflowing:
        sentence = (
            f"the KL between responses is left out: {overflowing} of {len(weights)} responses are so much likelier "
            "under the policy than their logprobs say that the ratio is no number; check that the logprobs are of "
            "these tokens"
        )
        return (sentence,)
    effective = effective_sample_size(weights)
    if effective >= FEW * len(weights):
        return ()
    sentence = (
        f"the importance weights of whole responses leave an effective sample of {effective:.1f} out of "
        f"{len(weights)}: the KL between responses rests on a few of them"
    )
    return (sentence,)
