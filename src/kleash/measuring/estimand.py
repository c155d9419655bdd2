"""The estimand of a run in words, the averages of sampled estimators that are valid for it, and sampling checks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kleash.jobs import MeasureJob
from kleash.measuring.cluster_sums import Weighting
from kleash.measuring.sequence_clusters import Floats
from kleash.models import Model
from kleash.sources.documents import DEFAULT_WINDOW
from kleash.store.statistics import KL_DIRECTIONS, label_of
from kleash.uncertainty import Estimate, effective_sample_size
from kleash.uncertainty.clusters import MIN_EFFECTIVE_SHARE
from kleash.uncertainty.student_t import student_t_quantile

UNVERIFIED_SAMPLES = (
    "not every response has the log-probabilities of its tokens, so it cannot be checked that the policy drew them at "
    "this temperature and from its whole distribution; add logprobs for each token to have the responses checked and "
    "weighted"
)
SAMPLER_MISMATCH = 0.9999683
"""Probability of Student's t beyond which, on both sides, the samples count as another policy's: four standard errors
between the mean log ratio and the exact KL where clusters are many, 17 where they are five."""

MAX_PADDING_PROBABILITY = 1e-4
"""Probability of rows that are no tokens above which the KL over the tokens is given beside that over all rows."""


@dataclass(frozen=True, kw_only=True)
class Estimand:
    """The quantity that a run estimates, and the weighting of its sampled estimators."""

    description: str = ""
    """Divergence, direction, whose prefixes, positions and temperature, in words."""
    weighting: Weighting | None
    """Weights of the sampled estimators; None if no average of them is valid."""
    estimators_note: str
    """The reason for the weighting, in words."""
    has_sequence_kl: bool
    """Whether the sum over a response estimates the KL between responses."""
    warnings: tuple[str, ...] = ()


OF_TEXT = Estimand(
    weighting=None,
    estimators_note=(
        "left out: k1, abs, k2 and k3 are averages over tokens that the policy drew, not over tokens of a text"
    ),
    has_sequence_kl=False,
)
GREEDY = Estimand(
    weighting=None,
    estimators_note=(
        "left out, as is the KL between responses: greedy tokens are not a sample, so no average over them estimates a "
        "divergence"
    ),
    has_sequence_kl=False,
)
TRUNCATED = Estimand(
    weighting=None,
    estimators_note=(
        "left out, as is the KL between responses: a truncated sample never contains the removed tokens, and weights "
        "on the other tokens cannot replace them"
    ),
    has_sequence_kl=False,
)
DRAWN = Estimand(
    weighting="unweighted",
    estimators_note="averaged over the tokens that the policy drew",
    has_sequence_kl=True,
)
WEIGHTED = Estimand(
    weighting="importance",
    estimators_note=(
        "each token weighted by the policy's probability over that under which it was drawn; the KL between responses "
        "by the product of these ratios"
    ),
    has_sequence_kl=True,
)
UNVERIFIED = Estimand(
    weighting="unweighted",
    estimators_note="averaged over the responses' tokens as if the policy had drawn them",
    has_sequence_kl=False,
    warnings=(UNVERIFIED_SAMPLES,),
)


def estimand_of(
    job: MeasureJob,
    *,
    all_have_logprobs: bool = False,
    is_greedy: bool = False,
    split: bool = True,
    window: int = DEFAULT_WINDOW,
    vocabulary: str = "the whole vocabulary",
    storage: str = "",
) -> Estimand:
    """The estimand of a job.

    Args:
        job: the job.
        all_have_logprobs: for off-policy responses, whether each token has the log-probability with which it was drawn.
        is_greedy: whether some of them were decoded greedily.
        split: for text, whether a document was longer than a window.
        window: for text, tokens of a window.
        vocabulary: what the distributions are over, in words.
        storage: how the weights of both models are stored, in words.
    """
    kind, path = job.source
    answers = f"the policy's own responses to {path}, of up to {job.max_new_tokens} tokens"
    options = (("top-k", job.top_k), ("top-p", job.top_p), ("min-p", job.min_p))
    truncation = ", ".join(f"{name} {value}" for name, value in options if value is not None)
    cases = (
        (kind == "text", f"the prefixes of the text {path}, {_windows(job, window, split=split)}", OF_TEXT),
        (
            kind == "responses",
            f"the prefixes of the responses in {path}",
            GREEDY if is_greedy else WEIGHTED if all_have_logprobs else UNVERIFIED,
        ),
        (job.temperature == 0, f"{answers}, decoded greedily", GREEDY),
        (job.truncates, f"{answers}, drawn from its distribution truncated to {truncation}", TRUNCATED),
        (True, f"{answers}, drawn from its whole distribution", DRAWN),
    )
    prefixes, estimand = next((words, estimand) for is_case, words, estimand in cases if is_case)
    weights = f"; {storage}" if storage else ""
    return replace(estimand, description=f"{_description(job, vocabulary)}; over {prefixes}{weights}")


def _windows(job: MeasureJob, window: int, *, split: bool) -> str:
    """How a text is read, in words; ``split`` if a document was longer than a window."""
    if job.has_base_logits:
        return "in chunks of which the second half is scored"
    if not split:
        return "each document read whole"
    stride = "" if job.stride is None else f", {job.stride} tokens apart"
    return f"read in windows of {window} tokens{stride}"


def _description(job: MeasureJob, vocabulary: str) -> str:
    """The description of the estimand without its prefixes."""
    temperature = job.temperature if job.temperature > 0 else 1.0
    what = "the exact divergence"
    if job.endpoint_role is not None:
        listed = f"the {job.top_logprobs} tokens that the {job.endpoint_role}'s server lists"
        what = f"bounds, from {listed}, of the divergence"
    elif job.has_base_logits:
        what = "bounds, from 16 bits for each of the reference's log-probabilities, of the divergence"
    return (
        f"{label_of(job.headline)} in nats per token: {what} between the two next-token "
        f"distributions over {vocabulary}, both at temperature {temperature:g}, averaged over all scored positions"
    )


def padding_note(probabilities: Mapping[str, float], served: str | None = None) -> str:
    """The probability, by role, of rows of a head that are no tokens; of the ``served`` model, of those listed."""
    values = " and ".join(
        f"at least {value:.3g} (the rows that its server lists) of the {role}'s"
        if role == served
        else f"{value:.3g} of the {role}'s"
        for role, value in probabilities.items()
    )
    return f"rows of a head that are no tokens have {values} probability".replace(
        "nan of", "an unknown part of"
    )


def measured_padding(
    numbers: Mapping[str, Estimate], tokens: int, served: str | None = None
) -> tuple[str, str]:
    """The note and the warning about rows of the heads that are no tokens, from the statistics of a run, or "".

    Args:
        numbers: the statistics, by name.
        tokens: number of scored tokens.
        served: role of the model behind a server, of which the rows that it lists are known; None if both are local.
    """
    if "is_padding" not in numbers:
        return "", ""
    roles = ("policy", "reference")
    probabilities = {role: numbers[f"padding_probability_{role}"].value for role in roles}
    scored = round(tokens * numbers["is_padding"].value)
    shares = padding_note(probabilities, served)
    note = f"{shares}; {scored:,} of the {tokens:,} scored tokens are such rows"
    if max(probabilities.values()) <= MAX_PADDING_PROBABILITY:
        return note, ""
    if served is not None:
        return note, f"{shares}, and the bounds of the divergences are over all rows"
    values = [
        f"{label_of(name)} is {_value_or_bounds(numbers, f'{name}_over_rows')} over all rows and "
        f"{_value_or_bounds(numbers, f'{name}_over_tokens')} over the tokens"
        for name in KL_DIRECTIONS
    ]
    return note, f"{shares}: {', and '.join(values)}, in nats per token"


def _value_or_bounds(numbers: Mapping[str, Estimate], name: str) -> str:
    """A number in digits; "between 1 and 2" where its bounds are known."""
    if name in numbers:
        return f"{numbers[name].value:.4g}"
    return f"between {numbers[f'{name}_lower'].value:.4g} and {numbers[f'{name}_upper'].value:.4g}"


def sampler_note(job: MeasureJob, policy: Model) -> str:
    """A note on the settings of the policy's generation configuration that its responses were not drawn with.

    Empty where nothing is generated, or with the options of the job all are used.
    """
    unused = {
        name: value
        for name, value in policy.generation_settings.items()
        if value is None or value != getattr(job, name, None)
    }
    if job.source[0] != "prompts" or not unused:
        return ""
    named = ", ".join(name if value is None else f"{name} {value:g}" for name, value in unused.items())
    return (
        f"the generation configuration of {policy.path} ({named}) is no part of the policy here, and its responses are "
        "drawn without it; to have it, draw with --temperature, --top-k, --top-p or --min-p, or for other settings "
        "generate with an engine and give its --responses"
    )


def on_policy_warning(k1_error: Estimate, estimand: Estimand) -> str:
    """The warning that the tokens cannot have been drawn from the policy; empty if they can.

    The log ratio of a token drawn from the policy has the exact KL as its mean at every prefix. A difference of many
    standard errors means another sampler: other weights, temperature, truncation or tokenisation.

    Args:
        k1_error: the mean log ratio minus the exact KL of the same tokens.
        estimand: of the run; its weighting must not be None.
    """
    if estimand.weighting == "importance" and not np.isfinite(k1_error.value):
        return (
            "the weighted estimators are not finite: some tokens are far likelier under the policy than their logprobs "
            "say; check that the logprobs belong to these tokens"
        )
    has_error = 0 < k1_error.standard_error < np.inf
    if not has_error or abs(k1_error.value) <= k1_error.standard_error * student_t_quantile(
        SAMPLER_MISMATCH, k1_error.clusters - 1
    ):
        return ""
    tokens = "the tokens" if estimand.weighting == "unweighted" else "even with their weights the tokens"
    return (
        f"{tokens} do not look drawn from the policy: their mean log ratio misses the exact KL by "
        f"{k1_error.value:+.3g} nats, {abs(k1_error.value) / k1_error.standard_error:.0f} standard errors; check the "
        "temperature, the truncation and the weights with which they were generated"
    )


def weight_warning(weights: Floats, estimand: Estimand) -> str:
    """The warning that the importance weights of whole responses overflow or leave a small effective sample, or "".

    Args:
        weights: one per response.
        estimand: of the run.
    """
    if estimand.weighting != "importance":
        return ""
    num_overflows = int(np.sum(~np.isfinite(weights)))
    if num_overflows:
        return (
            f"the KL between responses is left out: {num_overflows} of {len(weights)} responses are so much likelier "
            "under the policy than their logprobs say that the ratio overflows; check that the logprobs belong to "
            "these tokens"
        )
    effective = effective_sample_size(weights)
    if effective >= MIN_EFFECTIVE_SHARE * len(weights):
        return ""
    return (
        f"the importance weights of whole responses leave an effective sample size of {effective:.1f} out of "
        f"{len(weights)}: the KL between responses depends on few of them"
    )
