"""What is measured, in words, and which averages of sampled estimators mean anything there."""

from dataclasses import dataclass

import numpy as np

from kleash.measuring.cluster_sums import ClusterSums
from kleash.measuring.estimates import mean_per_token
from kleash.measuring.sequence_clusters import Floats
from kleash.records import MeasureJob
from kleash.uncertainty import effective_sample_size

ON_TRUST = (
    "not every response carries the log-probabilities of its tokens, so that the policy drew them, at this "
    "temperature and from its whole distribution, is taken on trust; give logprobs for each token to have it checked "
    "and weighted"
)


@dataclass(frozen=True, kw_only=True)
class Estimand:
    """What a run measures."""

    words: str
    """Divergence, direction, whose prefixes, positions, temperature."""
    weighting: str | None
    """How sampled estimators are averaged: "none", "importance", or None where none of them applies."""
    estimators_note: str
    """The reason for that."""
    between_sequences: bool
    """Whether the sum over a response is a KL between responses."""
    warnings: tuple[str, ...] = ()


def estimand_of(job: MeasureJob, *, all_have_logprobs: bool = False, split: bool = True) -> Estimand:
    """What ``job`` measures.

    Args:
        job: the job.
        all_have_logprobs: of responses that somebody else generated: whether each of their tokens
            comes with the log-probability under which it was drawn.
        split: of text: whether a document was longer than a window.
    """
    kind, path = job.source
    if kind == "text":
        return _of_text(job, path, split=split)
    if kind == "responses":
        return _of_responses(job, path, all_have_logprobs=all_have_logprobs)
    return _of_prompts(job, path)


def _of_text(job: MeasureJob, path: str, *, split: bool) -> Estimand:
    read = _windows(job) if split else "each document read whole"
    return Estimand(
        words=_words(job, f"the prefixes of the text {path}, {read}"),
        weighting=None,
        estimators_note=(
            "left out: k1, abs, k2 and k3 are averages over tokens that the policy drew, and these are the text's"
        ),
        between_sequences=False,
    )


def _of_prompts(job: MeasureJob, path: str) -> Estimand:
    where = f"the policy's own responses to {path}, of up to {job.max_new_tokens} tokens"
    if job.temperature == 0:
        return Estimand(
            words=_words(job, f"{where}, decoded greedily"),
            weighting=None,
            estimators_note=(
                "left out, as is the KL between responses: greedy tokens are no sample, so no average of "
                "theirs estimates a divergence"
            ),
            between_sequences=False,
        )
    if job.truncates:
        cut = ", ".join(
            f"{name} {value}"
            for name, value in (("top-k", job.top_k), ("top-p", job.top_p), ("min-p", job.min_p))
            if value is not None
        )
        return Estimand(
            words=_words(job, f"{where}, drawn from its distribution cut down to {cut}"),
            weighting=None,
            estimators_note=(
                "left out, as is the KL between responses: a truncated sample never shows the tokens that were "
                "cut off, and no weight on the others makes up for them"
            ),
            between_sequences=False,
        )
    return Estimand(
        words=_words(job, f"{where}, drawn from its whole distribution"),
        weighting="none",
        estimators_note="averaged over the tokens that the policy drew",
        between_sequences=True,
    )


def _of_responses(job: MeasureJob, path: str, *, all_have_logprobs: bool) -> Estimand:
    words = _words(job, f"the prefixes of the responses in {path}")
    if all_have_logprobs:
        return Estimand(
            words=words,
            weighting="importance",
            estimators_note=(
                "each token weighted by the policy's probability over that under which it was drawn; "
                "the KL between responses by the product of these ratios"
            ),
            between_sequences=True,
        )
    return Estimand(
        words=words,
        weighting="none",
        estimators_note="averaged over the responses' tokens as if the policy had drawn them",
        between_sequences=False,
        warnings=(ON_TRUST,),
    )


def _words(job: MeasureJob, prefixes: str) -> str:
    temperature = job.temperature if job.temperature > 0 else 1.0
    return (
        "KL(policy || reference) in nats per token: the exact divergence between the two next-token "
        f"distributions over the whole vocabulary, both at temperature {temperature:g}, averaged over all "
        f"scored positions; over {prefixes}"
    )


def _windows(job: MeasureJob) -> str:
    size = "as long as the models can read" if job.window is None else f"of {job.window} tokens"
    step = "" if job.stride is None else f", {job.stride} tokens apart"
    return f"read in windows {size}{step}"


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
