"""The kinds of findings with their meanings and remedies; ``--fail-on`` takes kinds."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kleash.registry import look_up

FINDINGS: Mapping[str, str] = MappingProxyType(
    {
        # the value
        "wrong_direction": "its value is the claimed divergence with its arguments exchanged",
        "wrong_sign": "its value has the other sign",
        "wrong_scale": "its value is a multiple of the claimed divergence, over one token or over several",
        "wrong_later_tokens": "its value is right for the first token of a response but not for the later ones",
        "wrong_credit": "the value at a token is that of another token",
        "wrong_offset": "its value is the claimed divergence plus a constant, so not 0 where p = q",
        "cross_entropy": "its value is a cross-entropy or an entropy, which is not 0 where p = q",
        "other_divergence": "its value is another quantity than the convention claims",
        "truncated": "its value is the divergence of the likeliest tokens only",
        "weighted_twice": "the term of each sampled token is weighted by its probability a second time",
        "biased_value": "its mean over samples of p is not the claimed divergence, and no other of the table",
        "off_policy_value": "its mean over samples of another distribution is not the claimed divergence",
        "negative_values": "the value of a single response or token can be negative",
        "truncated_ratio": "its importance ratio is truncated beyond some value",
        # the gradient
        "detached": "no gradient reaches the policy",
        "zero_gradient": "its expected gradient is zero: as a penalty it has no effect",
        "wrong_gradient": "its expected gradient on samples of p is not that of the claimed divergence",
        "off_policy_gradient": "on samples of another distribution its expected gradient is another one",
        "token_gradient": "its gradient leaves out the effect of a token on the divergence at later tokens",
        # extreme inputs
        "dead_gradient": "over a range of log ratios its gradient is exactly zero",
        "flat_value": "over a range of log ratios its value does not change",
        "nan_value": "its value is NaN where that of the divergence is defined",
        "nan_gradient": "its gradient is NaN or infinite where that of the divergence is finite",
        "infinite_missed": "its value is finite where the divergence is infinite",
        "infinite_value": "its value is infinite where the divergence is finite",
        "hides_nan": "a NaN at an unmasked token becomes a number",
        # several responses in a call
        "batch_dependent": "a response's value or gradient depends on the other responses in the batch",
        "wrong_reduction": "over several responses it is not a mean, but a sum or something else",
        # the padding
        "nan_from_padding": "NaN or infinity in the padding reaches the value or the gradient",
        "padding_counts": "numbers in the padding change the value or the gradient",
        "padding_in_denominator": "its mean counts the padding in the denominator",
        # the precision
        "low_precision": "it computes in the precision of its inputs and loses digits in bfloat16",
        "cancellation": "in float32 it loses digits to cancellation where p and q nearly agree",
        # the call
        "stateful": "its result depends on earlier calls",
        "random": "its result differs from call to call on the same numbers",
        "changes_inputs": "it overwrites its arguments",
        "changes_settings": "it changes settings of the process: seeds, the default dtype, gradient mode",
        "cannot_be_called": "it raises an error on valid inputs",
    }
)
"""Kind -> meaning. ``--fail-on`` and ``Audit.failing`` also take ``SEVERITIES``."""

SEVERITIES = ("wrong", "fragile", "fault", "note")
"""Names for all findings of a severity; "fault" for wrong and fragile."""

REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "wrong_direction": "exchange the two arguments",
        "wrong_sign": "negate it, or set sign=-1 in the convention",
        "wrong_scale": "remove the factor, or move it into the coefficient",
        "wrong_later_tokens": "compute every token like the first one",
        "wrong_credit": "return the value of each token at its own position",
        "wrong_offset": "subtract the constant, so that it is 0 where p = q",
        "cross_entropy": "subtract the entropy, or use kleash.kl",
        "other_divergence": "use kleash.kl, or set the convention's claims to the intended divergence",
        "truncated": "sum over the whole vocabulary (kleash.linear_kl), or use one bucket for the rest: a lower bound",
        "weighted_twice": "take the unweighted mean of log p - log q: sampling from p already applies the weight",
        "biased_value": "use k1 or k3 without a clamp (kleash.sampled_kl)",
        "off_policy_value": "weight each token by p / behaviour (kleash.importance_weights)",
        "negative_values": "use k3 where single values must not be negative",
        "truncated_ratio": "report how many ratios are truncated, or leave the ratio as it is",
        "detached": "let the gradient through: without torch.no_grad, detach or item",
        "zero_gradient": "use kleash.kl_loss (the value of k3 with the gradient of k2); use k1 only in a reward",
        "wrong_gradient": "use kleash.kl_loss (the value of k3 with the gradient of k2)",
        "off_policy_gradient": "weight it by p / behaviour: detached on k2, attached on k3 (kleash.importance_weights)",
        "token_gradient": "add kleash.future_kl_loss if the divergence between whole responses is intended",
        "dead_gradient": "remove the clamp, or let the gradient through it",
        "flat_value": "remove the clamp",
        "nan_value": "select the valid entries before the logarithm or the exponential",
        "nan_gradient": "select the valid entries before the exponential: 0 * inf is NaN in the backward pass",
        "infinite_missed": "return infinity: q rules out a token that p does not",
        "infinite_value": "compute with logarithms and expm1",
        "hides_nan": "mask the padding only, and return NaN elsewhere",
        "batch_dependent": "compute each response independently, and centre or average outside the function",
        "wrong_reduction": "divide by the number of unmasked tokens",
        "nan_from_padding": "select with torch.where before any computation, instead of multiplying by the mask",
        "padding_counts": "use the mask in every sum",
        "padding_in_denominator": "divide by mask.sum()",
        "low_precision": "cast to float32 before the subtraction",
        "cancellation": "use expm1, or kleash.sampled_kl, near p = q",
        "cannot_be_called": "accept all valid inputs",
        "stateful": "pass the state as an argument, and return the new state",
        "random": "take the noise as an argument if results should be reproducible",
        "changes_inputs": "work on a copy instead of changing an argument in place",
        "changes_settings": "use a separate torch.Generator, and pass the dtype as an argument",
    }
)
"""Kind -> what to change, in one line."""
DENSE_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "biased_value": "use {function}, the sum over the whole vocabulary",
        "negative_values": "use {function}, which is never negative",
        "zero_gradient": "use {function}, and differentiate it in the policy",
        "wrong_gradient": "use {function}, and differentiate it in the policy",
        "nan_value": f"{REMEDIES['nan_value']}, or use {{function}}",
        "nan_gradient": f"{REMEDIES['nan_gradient']}; or use {{function}}",
        "cancellation": "use {function}, which loses no digits near p = q",
    }
)
"""Kind -> what to change in a function of whole distributions, where REMEDIES names one of sampled tokens or none."""


def remedy_of(kind: str, sees: str, claims: str) -> str:
    """What to change in a function that is given "tokens", "distributions" or "hidden" states to compute ``claims``."""
    if sees == "tokens" or kind not in DENSE_REMEDIES:
        return REMEDIES[kind]
    call = {
        "kl": "kleash.kl(logp, logq)",
        "reverse_kl": "kleash.kl(logq, logp)",
    }.get(claims, f"kleash.divergences.divergence({claims!r}, logp, logq)")
    return DENSE_REMEDIES[kind].format(function="kleash.linear_kl" if sees == "hidden" else call)


def kinds_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The kinds of findings in ``--fail-on``, of which a text may hold several, separated by commas.

    Raises:
        UnknownNameError: if one is neither in ``FINDINGS`` nor in ``SEVERITIES``: a check for it could never fail.
    """
    kinds = tuple(kind.strip() for text in texts for kind in text.split(",") if kind.strip())
    for kind in kinds:
        look_up({**FINDINGS, **dict.fromkeys(SEVERITIES, "")}, kind, "kind of finding")
    return kinds
