"""The kinds of findings with their meanings and remedies; ``--fail-on`` takes kinds."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kleash.auditing.conventions import Convention
from kleash.auditing.quantities import label_of
from kleash.registry import look_up


class FindingKind(NamedTuple):
    """What findings of a kind say."""

    meaning: str
    remedy: str
    """What to change, in one line; ``remedy_of`` puts functions of kleash into it."""


FINDINGS: Mapping[str, FindingKind] = MappingProxyType(
    {
        # the value
        "wrong_direction": FindingKind(
            "its value is the claimed divergence, or k3 of it, with its arguments exchanged",
            "exchange the two arguments",
        ),
        "wrong_sign": FindingKind(
            "its value has the other sign", "negate it, or set sign=-1 in the convention"
        ),
        "wrong_scale": FindingKind(
            "its value is a multiple of the claimed divergence, or of k2, over one token or over several",
            "remove the factor, or move it into the coefficient; where a sum and a mean are exchanged, take the other",
        ),
        "wrong_later_tokens": FindingKind(
            "its value is right for the first token of a response but not for the later ones",
            "compute every token like the first one",
        ),
        "wrong_credit": FindingKind(
            "the value at a token is that of another token",
            "return the value of each token at its own position",
        ),
        "wrong_offset": FindingKind(
            "its value is the claimed divergence plus a constant, so not 0 where p = q",
            "subtract the constant, so that it is 0 where p = q",
        ),
        "cross_entropy": FindingKind(
            "its value is a cross-entropy or an entropy, which is not 0 where p = q",
            "subtract the entropy, or use {value}",
        ),
        "other_divergence": FindingKind(
            "its value is another quantity than the convention claims",
            "use {value}, or set the convention's claims to the intended divergence",
        ),
        "truncated": FindingKind(
            "its value is the divergence of the likeliest tokens only",
            "sum over the whole vocabulary, by {value}; one bucket for the rest gives a lower bound",
        ),
        "weighted_twice": FindingKind(
            "the term of each sampled token is weighted by its probability a second time",
            "take the unweighted mean of log p - log q: sampling from p already applies the weight",
        ),
        "biased_value": FindingKind(
            "its mean over samples of p is not the claimed divergence, and no other of the table",
            "use {value}",
        ),
        "off_policy_value": FindingKind(
            "its mean over samples of another distribution is not the claimed divergence",
            "weight each token by p / behaviour (kleash.importance_weights)",
        ),
        "negative_values": FindingKind(
            "the value of a single response or token can be negative",
            "use {value} if single values must not be negative",
        ),
        "truncated_ratio": FindingKind(
            "its importance ratio is truncated beyond some value",
            "report how many ratios are truncated, or leave the ratio as it is",
        ),
        # the gradient
        "detached": FindingKind(
            "no gradient reaches the policy",
            "let the gradient through: without torch.no_grad, detach or item",
        ),
        "zero_gradient": FindingKind(
            "its expected gradient is zero: as a penalty it has no effect", "use {value}"
        ),
        "wrong_gradient": FindingKind(
            "its expected gradient on samples of p is not that of the claimed divergence", "use {value}"
        ),
        "off_policy_gradient": FindingKind(
            "on samples of another distribution its expected gradient is another one",
            "weight it by p / behaviour: detached on k2, attached on k3 (kleash.importance_weights)",
        ),
        "token_gradient": FindingKind(
            "its gradient leaves out the effect of a token on the divergence at later tokens",
            "add kleash.future_kl_loss if the divergence between whole responses is intended",
        ),
        # extreme inputs
        "dead_gradient": FindingKind(
            "over a range of log ratios its gradient is exactly zero",
            "remove the clamp, or let the gradient through it",
        ),
        "flat_value": FindingKind(
            "over a range of log ratios its value does not change",
            "remove the clamp, or the constant that is added before the logarithm",
        ),
        "nan_value": FindingKind(
            "its value is NaN where that of the divergence is defined",
            "select the valid entries before the logarithm or the exponential, or use {value}",
        ),
        "nan_gradient": FindingKind(
            "its gradient is NaN or infinite where that of the divergence is finite",
            "select the valid entries before the exponential (0 * inf is NaN in the backward pass), or use {value}",
        ),
        "infinite_missed": FindingKind(
            "its value is finite where the divergence is infinite",
            "return infinity: q rules out a token that p does not",
        ),
        "infinite_value": FindingKind(
            "its value is infinite where the divergence is finite", "compute with logarithms and expm1"
        ),
        "hides_nan": FindingKind(
            "a NaN at an unmasked token becomes a number", "mask the padding only, and return NaN elsewhere"
        ),
        # several responses in a call
        "batch_dependent": FindingKind(
            "a response's value or gradient depends on the other responses in the batch",
            "compute each response independently, and centre or average outside the function",
        ),
        "wrong_reduction": FindingKind(
            "over several responses it is not a mean, but a sum or something else",
            "divide by the number of unmasked tokens",
        ),
        # the padding
        "nan_from_padding": FindingKind(
            "NaN or infinity in the padding reaches the value or the gradient",
            "select with torch.where before any computation, instead of multiplying by the mask",
        ),
        "padding_counts": FindingKind(
            "numbers in the padding change the value or the gradient", "use the mask in every sum"
        ),
        "padding_in_denominator": FindingKind(
            "its mean counts the padding in the denominator", "divide by mask.sum()"
        ),
        "nan_from_empty_response": FindingKind(
            "a response without unmasked tokens makes the value or the gradient NaN",
            "leave such responses out, or divide by the number of tokens clamped to at least 1",
        ),
        # the precision
        "low_precision": FindingKind(
            "it computes in the precision of its inputs and loses digits in bfloat16",
            "cast to float32 before the subtraction",
        ),
        "cancellation": FindingKind(
            "in float32 it loses digits to cancellation where p and q nearly agree",
            "use expm1 near p = q, or {value}",
        ),
        # the call
        "stateful": FindingKind(
            "its result depends on earlier calls", "pass the state as an argument, and return the new state"
        ),
        "random": FindingKind(
            "its result differs from call to call on the same numbers",
            "take the noise as an argument if results should be reproducible",
        ),
        "changes_inputs": FindingKind(
            "it overwrites its arguments", "work on a copy instead of changing an argument in place"
        ),
        "changes_settings": FindingKind(
            "it changes settings of the process: seeds, the default dtype, gradient mode",
            "use a separate torch.Generator, and pass the dtype as an argument",
        ),
        "cannot_be_called": FindingKind("it raises an error on valid inputs", "accept all valid inputs"),
    }
)
"""``--fail-on`` and ``Audit.failing`` take these and ``SEVERITIES``."""

SEVERITIES = ("wrong", "fragile", "fault", "note")
"""Names for all findings of a severity, the worst first; "fault" for wrong and fragile."""

OF_TOKENS = MappingProxyType(
    {
        "loss": "kleash.kl_loss (the value of k3 with the gradient of k2)",
        "reward": "k1, log p - log q without a clamp",
        "metric": "k3 without a clamp (kleash.sampled_kl)",
    }
)
"""Place of a function of sampled tokens -> what has the right value there, and the right gradient."""


def remedy_of(kind: str, convention: Convention) -> str:
    """What to change in a function of this convention because of a finding."""
    claims, is_kl = convention.claims, convention.claims == "kl"
    match "tokens" if convention.place == "reward" else convention.sees:
        case "tokens":
            value = OF_TOKENS[convention.place] if is_kl else f"an unbiased estimate of {label_of(claims)}"
        case "hidden":
            value = "kleash.linear_kl" if is_kl else f"kleash.linear_divergence(…, divergence={claims!r})"
        case _:
            calls = {"kl": "kleash.kl(logp, logq)", "reverse_kl": "kleash.kl(logq, logp)"}
            value = calls.get(claims, f"kleash.divergences.divergence({claims!r}, logp, logq)")
    return FINDINGS[kind].remedy.format(value=value)


def kinds_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The kinds of findings in ``--fail-on``, of which a text may hold several, separated by commas.

    Raises:
        UnknownNameError: if one is neither in ``FINDINGS`` nor in ``SEVERITIES``: a check for it could never fail.
    """
    kinds = tuple(kind.strip() for text in texts for kind in text.split(",") if kind.strip())
    for kind in kinds:
        look_up({**FINDINGS, **dict.fromkeys(SEVERITIES, "")}, kind, "kind of finding")
    return kinds
