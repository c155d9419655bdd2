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
        "wrong_later_tokens": "its value is right for the first token of a response and not for the later ones",
        "wrong_credit": "the value at a token is that of another token",
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
        "truncated_ratio": "beyond some value its importance ratio no longer counts in full",
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
        "hides_nan": "it turns a NaN in what counts into a number",
        # several responses in a call
        "batch_dependent": "a response's value or gradient depends on the other responses in the batch",
        "wrong_reduction": "over several responses it is no mean, but a sum or something else",
        # the padding
        "nan_from_padding": "NaN or infinity in the padding reaches the value or the gradient",
        "padding_counts": "what stands in the padding changes the value or the gradient",
        "padding_in_denominator": "its mean divides by the padding too",
        # the precision
        "low_precision": "it computes in the precision of its inputs: in bfloat16 it loses digits it need not",
        "cancellation": "in float32 it loses its digits to cancellation where p and q nearly agree",
        # the call
        "stateful": "its result depends on earlier calls",
        "random": "its result differs from call to call on the same numbers",
        "changes_inputs": "it overwrites its arguments",
        "changes_settings": "it changes settings of the process: seeds, the default dtype, gradient mode",
        "cannot_be_called": "it raises an error on inputs that have an answer",
    }
)
"""Kind -> what it means. ``--fail-on`` and ``Audit.failing`` also take ``SEVERITIES``."""

SEVERITIES = ("wrong", "fragile", "fault", "note")
"""What stands for all findings of a severity; "fault" for wrong and fragile."""

REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "wrong_direction": "exchange the two arguments",
        "wrong_sign": "turn the sign round, or say sign=-1 in the convention",
        "wrong_scale": "take the factor out, or move it into the coefficient",
        "wrong_later_tokens": "treat every token as the first one is",
        "wrong_credit": "leave each token's value at its own position",
        "wrong_offset": "subtract the constant, so that it is 0 where p = q",
        "cross_entropy": "subtract the entropy, or use kleash.kl",
        "other_divergence": "use kleash.kl, or name the divergence that is meant in the convention's claims",
        "truncated": "sum over the whole vocabulary (kleash.linear_kl), or put the rest into one bucket: a lower bound",
        "weighted_twice": "take the plain mean of log p - log q: the samples already come with p's weight",
        "not_symmetric": "average both directions",
        "takes_probabilities": "give it probabilities, or have it take logarithms",
        "biased_value": "use k1 or k3 without a clamp (kleash.sampled_kl)",
        "off_policy_value": "weight each token by p / behaviour (kleash.importance_weights)",
        "negative_values": "use k3 where single values must not be negative",
        "truncated_ratio": "report how many ratios are truncated, or leave the ratio as it is",
        "detached": "let the gradient through: without torch.no_grad, detach or item",
        "zero_gradient": "use kleash.kl_loss (the value of k3 with the gradient of k2); k1 belongs into the reward",
        "wrong_gradient": "use kleash.kl_loss (the value of k3 with the gradient of k2)",
        "off_policy_gradient": "weight it by p / behaviour: detached on k2, attached on k3 (kleash.importance_weights)",
        "token_gradient": "add kleash.future_kl_loss where the divergence between whole responses is meant",
        "dead_gradient": "remove the clamp, or let the gradient through it",
        "flat_value": "remove the clamp",
        "nan_value": "select the entries that count before the logarithm or the exponential",
        "nan_gradient": "select the entries that count before the exponential: 0 * inf is NaN in the backward pass",
        "infinite_missed": "let infinity through: it says that q rules out what p does",
        "infinite_value": "compute with logarithms and expm1",
        "hides_nan": "mask what does not count before, and leave NaN where it is",
        "batch_dependent": "compute each response by itself, and centre or average outside",
        "wrong_reduction": "divide by the number of tokens that count",
        "nan_from_padding": "select with torch.where before anything is computed, not by multiplying with the mask",
        "padding_counts": "use the mask in every sum",
        "padding_in_denominator": "divide by mask.sum()",
        "low_precision": "cast to float32 before the subtraction",
        "cancellation": "use expm1, or kleash.sampled_kl, near p = q",
        "cannot_be_called": "let it take what has an answer",
        "stateful": "hand in what it keeps as an argument, and hand it out again",
        "random": "take the noise as an argument where results should be repeatable",
        "changes_inputs": "work on a copy: no in-place operation on an argument",
        "changes_settings": "leave the process as it was: a torch.Generator of its own, a dtype as an argument",
    }
)
"""Kind -> what to change, in a line."""


def require_kinds(kinds: Collection[str]) -> None:
    """Refuse what is no kind of finding, since a check for it could never fail.

    Raises:
        UnknownNameError: if one of them is no key of ``FINDINGS`` and none of ``SEVERITIES``.
    """
    for kind in kinds:
        look_up({**FINDINGS, **dict.fromkeys(SEVERITIES, "")}, kind, "kind of finding")
