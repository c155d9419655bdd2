"""The statistics of a token: columns or functions of columns, with unit, bounds, name and explanation.

``measurement.json``, the terminal, the report and ``kleash compare`` read this table, so that a new statistic is one
entry of ``STATISTICS``.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How the reported number follows from the mean over tokens."""

    function: Callable[[float], float]
    """Monotone function of the mean."""
    derivative: Callable[[float], float]
    """Its derivative, by which the standard error is multiplied."""
    unit: str
    """Unit of the result."""


EXP_MEAN = Reduction(function=math.exp, derivative=math.exp, unit="none")
"""Perplexity: the exponential of a mean of negative log-probabilities."""
ROOT_MEAN = Reduction(function=math.sqrt, derivative=lambda mean: 0.5 / math.sqrt(mean), unit="probability")
"""Root mean square, of a mean of squared probabilities."""


def stored_column(column: Floats) -> Floats:
    """The column itself."""
    return column


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A number per token, of which a run reports the mean with its clustered error."""

    label: str
    """Name in reports and on the terminal."""
    explanation: str
    """What it says, in one line."""
    columns: tuple[str, ...]
    """Columns of ``tokens/`` that it is computed from."""
    function: Callable[[Floats], Floats] | Callable[[Floats, Floats], Floats] = stored_column
    """numpy function of these columns in float64; by default the one stored column."""
    unit: str = "nats"
    """"nats", "probability" or "none"."""
    lower: float | None = None
    """Least value of a token; None if there is no bound."""
    upper: float | None = None
    """Largest value of a token; None if there is no bound."""
    same_model_value: float | None = 0.0
    """Value of every token where policy and reference are the same model; None if that is not a constant."""
    models: tuple[str, ...] = ("policy", "reference")
    """Models on whose probabilities it depends."""
    reduction: Reduction | None = None
    """From the mean over tokens to the reported number; None if that is the mean."""
    field: str = "per_token"
    """Field of ``measurement.json`` that holds it; a mapping from its name without "<field>_", or the number itself."""
    compared: bool = True
    """Whether ``kleash compare`` shows it."""
    in_summary: bool = True
    """Whether the terminal shows it."""

    def values(self, tokens: Mapping[str, NDArray[Any]]) -> Floats:
        """The statistic of each token, in float64.

        Args:
            tokens: columns of ``tokens/``, ``columns`` among them.
        """
        function: Callable[..., Floats] = self.function
        return function(*(tokens[name].astype(np.float64) for name in self.columns))


@np.errstate(invalid="ignore")
def log_ratio(logp: Floats, logq: Floats) -> Floats:
    """log p - log q of the observed tokens; 0 where both models give the token probability 0."""
    return np.where(logp == logq, 0.0, logp - logq)


def _agreement(top1_policy: Floats, top1_reference: Floats) -> Floats:
    is_unknown = np.isnan(top1_policy) | np.isnan(top1_reference)
    return np.where(is_unknown, np.nan, top1_policy == top1_reference)


TOKEN_LOGP = ("logp_policy", "logp_reference")

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "kl_policy_reference": Statistic(
            label="KL(policy ‖ reference)",
            explanation="averages over the policy's next-token probabilities",
            columns=("kl_policy_reference",),
            lower=0.0,
        ),
        "kl_reference_policy": Statistic(
            label="KL(reference ‖ policy)",
            explanation="averages over the reference's next-token probabilities",
            columns=("kl_reference_policy",),
            lower=0.0,
        ),
        "jensen_shannon": Statistic(
            label="Jensen–Shannon",
            explanation="symmetric; at most log 2 = 0.693 nats",
            columns=("jensen_shannon",),
            lower=0.0,
            upper=math.log(2),
        ),
        "total_variation": Statistic(
            label="Total variation",
            explanation="half the summed absolute difference of the two next-token distributions",
            columns=("total_variation",),
            unit="probability",
            lower=0.0,
            upper=1.0,
        ),
        "acceptance_rate": Statistic(
            label="Expected acceptance rate, whole distributions",
            explanation="speculative decoding, one model drafting for the other: Σ min(p, q) = 1 − total variation",
            columns=("total_variation",),
            # A token drafted from p is accepted for q with sum_x p(x) min(1, q(x) / p(x)) (and the reverse): Leviathan,
            # Kalman & Matias (2023), https://arxiv.org/abs/2211.17192; Chen et al. (2023), https://arxiv.org/abs/2302.01318
            function=lambda total_variation: 1.0 - total_variation,
            unit="probability",
            lower=0.0,
            upper=1.0,
            same_model_value=1.0,
        ),
        "entropy_policy": Statistic(
            label="Entropy of the policy",
            explanation="of its next-token distribution",
            columns=("entropy_policy",),
            lower=0.0,
            same_model_value=None,
            models=("policy",),
        ),
        "entropy_reference": Statistic(
            label="Entropy of the reference",
            explanation="of its next-token distribution",
            columns=("entropy_reference",),
            lower=0.0,
            same_model_value=None,
            models=("reference",),
        ),
        "logp_policy": Statistic(
            label="log p of the observed token",
            explanation="under the policy",
            columns=("logp_policy",),
            upper=0.0,
            same_model_value=None,
            models=("policy",),
            compared=False,
            in_summary=False,
        ),
        "logp_reference": Statistic(
            label="log q of the observed token",
            explanation="under the reference",
            columns=("logp_reference",),
            upper=0.0,
            same_model_value=None,
            models=("reference",),
            compared=False,
            in_summary=False,
        ),
        "top1_agreement": Statistic(
            label="Top-1 agreement",
            explanation="share of positions at which both models have the same most likely token",
            columns=("top1_policy", "top1_reference"),
            function=_agreement,
            unit="probability",
            lower=0.0,
            upper=1.0,
            same_model_value=1.0,
            field="top1_agreement",
        ),
        "perplexity_policy": Statistic(
            label="Perplexity of the policy",
            explanation="on the observed tokens",
            columns=("logp_policy",),
            function=np.negative,
            lower=0.0,
            same_model_value=None,
            models=("policy",),
            reduction=EXP_MEAN,
            field="perplexity",
        ),
        "perplexity_reference": Statistic(
            label="Perplexity of the reference",
            explanation="on the observed tokens",
            columns=("logp_reference",),
            function=np.negative,
            lower=0.0,
            same_model_value=None,
            models=("reference",),
            reduction=EXP_MEAN,
            field="perplexity",
        ),
        "perplexity_ratio": Statistic(
            label="Perplexity ratio",
            explanation="policy over reference",
            columns=TOKEN_LOGP[::-1],
            function=log_ratio,
            reduction=EXP_MEAN,
            field="perplexity",
        ),
        "probability_change_mean": Statistic(
            label="Δp of the observed token, mean",
            explanation="the policy's probability minus the reference's",
            columns=TOKEN_LOGP,
            function=lambda logp, logq: np.exp(logp) - np.exp(logq),
            unit="probability",
            lower=-1.0,
            upper=1.0,
            field="probability_change",
            compared=False,
        ),
        "probability_change_rms": Statistic(
            label="Δp of the observed token, RMS",
            explanation="root of the mean square",
            columns=TOKEN_LOGP,
            function=lambda logp, logq: (np.exp(logp) - np.exp(logq)) ** 2,
            unit="probability",
            lower=0.0,
            upper=1.0,
            reduction=ROOT_MEAN,
            field="probability_change",
            compared=False,
        ),
    }
)
"""Name -> statistic, in the order in which they are shown."""
KL_POLICY_REFERENCE = "kl_policy_reference"
"""KL(policy || reference) of each token: the column and the statistic."""
KL_DIRECTIONS = (KL_POLICY_REFERENCE, "kl_reference_policy")
DIVERGENCE_COLUMNS = tuple(
    name for name, each in STATISTICS.items() if each.function is stored_column and len(each.models) == 2
)
"""Columns of ``tokens/`` that need the whole distributions of both models; entropies need that of one."""


def _bounds_of(divergences: Mapping[str, Statistic]) -> dict[str, Statistic]:
    """The statistics of the lower and the upper bound of each of these divergences."""
    ends = {"lower": "no smaller value is possible", "upper": "no larger value is possible"}
    return {
        f"{name}_{end}": Statistic(
            label=f"{exact.label}, {end} bound",
            explanation=f"{meaning}, from what is known of both models",
            columns=(f"{name}_{end}",),
            unit=exact.unit,
            lower=exact.lower,
            upper=exact.upper,
            same_model_value=None,
            compared=False,
            in_summary=exact.in_summary,
        )
        for name, exact in divergences.items()
        for end, meaning in ends.items()
    }


BOUND_STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        **_bounds_of({name: STATISTICS[name] for name in DIVERGENCE_COLUMNS}),
        "listed_probability": Statistic(
            label="Probability of the listed tokens",
            explanation="under the model behind the server; the bounds are tighter the larger it is",
            columns=("listed_probability",),
            unit="probability",
            lower=0.0,
            upper=1.0,
            same_model_value=None,
            compared=False,
        ),
    }
)
"""Name -> statistic, of runs in which one distribution is known within bounds: behind a server, or from a file of base
logits."""


OVER_PARTS: Mapping[str, Statistic] = MappingProxyType(
    {
        f"{name}_over_{part}": Statistic(
            label=f"{STATISTICS[name].label} over {what}",
            explanation="where a head has rows that are no tokens",
            columns=(f"{name}_over_{part}",),
            lower=STATISTICS[name].lower,
            compared=False,
            in_summary=False,
        )
        for name in KL_DIRECTIONS
        for part, what in (("tokens", "tokens"), ("rows", "all rows"))
    }
)
"""Name -> statistic of both KLs over the tokens alone, and over all rows of the heads."""

OPTIONAL_STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "llama_cpp_kld": Statistic(
            label="llama.cpp's KLD",
            explanation="KL(reference ‖ policy) of the stored codes, without tokens of log q of -16 or less",
            columns=("llama_cpp_kld",),
            same_model_value=None,
        ),
        "is_clipped": Statistic(
            label="Scored tokens of a probability below the range of the file",
            explanation="of which the file gives an upper bound for the reference",
            columns=("is_clipped",),
            unit="probability",
            lower=0.0,
            upper=1.0,
            same_model_value=None,
            models=("reference",),
            compared=False,
            in_summary=False,
        ),
        "acceptance_rate_of_sampler": Statistic(
            label="Expected acceptance rate of the sampler",
            explanation="draft and target each truncated as the responses were, or both greedy",
            columns=("acceptance_of_sampler",),
            unit="probability",
            lower=0.0,
            upper=1.0,
            same_model_value=1.0,
        ),
        **{
            name: Statistic(
                label=label,
                explanation="rows of a head for which the tokenizer has no token",
                columns=(name,),
                unit="probability",
                lower=0.0,
                upper=1.0,
                same_model_value=None,
                models=models,
                compared=False,
                in_summary=False,
            )
            for name, label, models in (
                ("is_padding", "Share of scored tokens that are none", ()),
                (
                    "padding_probability_policy",
                    "Policy's probability of rows that are no tokens",
                    ("policy",),
                ),
                (
                    "padding_probability_reference",
                    "Reference's probability of rows that are no tokens",
                    ("reference",),
                ),
            )
        },
        **OVER_PARTS,
        **_bounds_of(OVER_PARTS),
    }
)
"""Name -> statistic, of runs that draw greedily or from truncated distributions, of those in which a head has rows that
are no tokens, and of those against a file of base logits."""

ALL_STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {**BOUND_STATISTICS, **STATISTICS, **OPTIONAL_STATISTICS}
)
"""Every statistic that a run can have, in the order in which they are shown."""

COMPARED = tuple(name for name, each in ALL_STATISTICS.items() if each.compared and each.reduction is None)
"""The means per token that ``kleash compare`` shows."""
PERPLEXITIES = tuple(name for name, each in STATISTICS.items() if each.reduction is EXP_MEAN)
"""The perplexities that it shows beside them."""


def columns_of(names: tuple[str, ...]) -> list[str]:
    """The columns of ``tokens/`` that these statistics are computed from, each once."""
    return list(dict.fromkeys(column for name in names for column in ALL_STATISTICS[name].columns))


def known_statistics(columns: Collection[str], unknown_columns: Collection[str] = ()) -> tuple[str, ...]:
    """The statistics that can be computed.

    Args:
        columns: the columns of ``tokens/``.
        unknown_columns: names of those that are null.
    """
    known = set(columns) - set(unknown_columns)
    return tuple(name for name, each in ALL_STATISTICS.items() if known.issuperset(each.columns))


def to_fields(numbers: Mapping[str, V]) -> dict[str, Any]:
    """The numbers of all statistics as fields of ``measurement.json``."""
    fields: dict[str, Any] = {}
    for name, number in numbers.items():
        field = ALL_STATISTICS[name].field
        mapping = fields if field == name else fields.setdefault(field, {})
        mapping[name.removeprefix(f"{field}_")] = number
    return fields


def from_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of ``to_fields``, in the table's order; other means per token come last, under their own names."""
    numbers: dict[str, Any] = {}
    for name, statistic in ALL_STATISTICS.items():
        mapping = fields if statistic.field == name else fields[statistic.field]
        key = name.removeprefix(f"{statistic.field}_")
        if key in mapping:
            numbers[name] = mapping[key]
    other_means = {name: number for name, number in fields["per_token"].items() if name not in numbers}
    return {**numbers, **other_means}


def kl_directions(headline: str) -> tuple[str, ...]:
    """The names of the KLs of both directions, the headline first."""
    return (headline, *(name for name in KL_DIRECTIONS if name != headline))


def label_of(name: str) -> str:
    """The name of a statistic in reports; ``name`` if it is none."""
    return ALL_STATISTICS[name].label if name in ALL_STATISTICS else name
