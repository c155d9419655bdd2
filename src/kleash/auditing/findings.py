"""The kinds of findings, and what each means: what ``--fail-on`` takes."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from kleash.registry import look_up

FINDINGS: Mapping[str, str] = MappingProxyType(
    {
        # the value
        "wrong_direction": "its value is the claimed divergence with its arguments exchanged",
        "wrong_sign": "its value has the other sign",
        "wrong_scale": "its value is a multiple of the claimed divergence, over one token or over several",
        "wrong_offset": "its value is the claimed divergence plus a constant, so not 0 where p = q",
        "cross_entropy": "its value is a cross-entropy or an entropy, which is not 0 where p = q",
        "other_divergence": "its value is another quantity than the one that the convention claims",
        "truncated": "its value is the divergence of the likeliest tokens only",
        "weighted_twice": "each sampled token's term is weighted by its probability once more",
        "not_symmetric": "it changes when p and q are exchanged, and what it claims to be does not",
        "takes_probabilities": "it wants probabilities where the convention gives it log-probabilities",
        "biased_value": "its mean over samples of p is not the claimed divergence, and no other of the table",
        "off_policy_value": "its mean over samples of another distribution is not the claimed divergence",
        "negative_values": "the value of a single response or token can be negative",
        # the gradient
        "detached": "no gradient reaches the policy",
        "zero_gradient": "its expected gradient is zero: as a penalty it does nothing",
        "wrong_gradient": "its expected gradient on samples of p is not that of the claimed divergence",
        "off_policy_gradient": "its expected gradient on samples of another distribution is not that either",
        "token_gradient": "its gradient leaves out how a token changes the divergence later in the response",
        # the edges
        "dead_gradient": "over a range of log ratios its gradient is exactly zero",
        "flat_value": "over a range of log ratios its value does not change",
        "nan_value": "its value is NaN where the divergence has one",
        "nan_gradient": "its gradient is NaN or infinite where that of the divergence is finite",
        "infinite_missed": "its value is finite where the divergence is infinite",
        "infinite_value": "its value is infinite where the divergence is finite",
        # the padding
        "nan_from_padding": "NaN or infinity in the padding reaches the value or the gradient",
        "padding_counts": "what stands in the padding changes the value or the gradient",
        "padding_in_denominator": "its mean divides by the padding too",
        # the precision
        "low_precision": "it computes in the precision of its inputs: in bfloat16 it loses digits it need not",
        "cancellation": "in float32 it loses its digits to cancellation where p and q nearly agree",
        # the call
        "cannot_be_called": "it raises an error on inputs that have an answer",
    }
)
"""Kind -> what it means. ``--fail-on`` and ``Audit.failing`` also take "fault" and "note"."""

SEVERITIES = ("fault", "note")


def require_kinds(kinds: Collection[str]) -> None:
    """Refuse what is no kind of finding, since a check for it could never fail.

    Raises:
        UnknownNameError: if one of them is no key of ``FINDINGS``, nor "fault" or "note".
    """
    for kind in kinds:
        look_up({**FINDINGS, **dict.fromkeys(SEVERITIES, "")}, kind, "kind of finding")
