"""The kinds of findings with their meanings and remedies; ``--fail-on`` takes kinds."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kleash.auditing.conventions import Convention
from kleash.auditing.quantities import label_of
from kleash.registry import look_up

FINDINGS: Mapping[str, str] = MappingProxyType(
    {
        # Of the value:
        # its value is the claimed divergence, or k3 of it, with its arguments exchanged
        "wrong_direction": (
            "exchange the two arguments; a function that should give KL(q ‖ p) takes the convention "
            "'f(…) -> {gives} {place} reverse_kl'"
        ),
        # its value has the other sign
        "wrong_sign": (
            "negate it; if the sign is intended, write the call as the convention: 'f(…) -> minus {gives} {place}'"
        ),
        # its value is a multiple of the claimed divergence, or of k2, over one token or over several
        "wrong_scale": (
            "remove the factor, or move it into the coefficient; where a sum and a mean are exchanged, "
            "take the other"
        ),
        # its value is right for the first token of a response but not for the later ones
        "wrong_later_tokens": "compute every token like the first one",
        # the value at a token is that of another token
        "wrong_credit": "return the value of each token at its own position",
        # its value is the claimed divergence plus a constant, so not 0 where p = q
        "wrong_offset": "subtract the constant, so that it is 0 where p = q",
        # its value is a cross-entropy or an entropy, which is not 0 where p = q
        "cross_entropy": "subtract the entropy, or use {value}",
        # its value is another quantity than the convention claims
        "other_divergence": (
            "use {value}; if another divergence is intended, write the call as the convention, with its name: "
            "'f(…) -> {gives} {place} jensen_shannon'"
        ),
        # its value is a multiple of a KL of distributions at another temperature
        "other_temperature": (
            "audit f(T * logits_p, T * logits_q) / T**2 if the temperature T is intended; a loss is multiplied by T**2 "
            "to keep the size of its gradient"
        ),
        # its value is the divergence of the likeliest tokens only
        "truncated": (
            "sum over the whole vocabulary, by {value}; one bucket for the rest gives a lower bound"
        ),
        # the term of each sampled token is weighted by its probability a second time
        "weighted_twice": (
            "take the unweighted mean of log p - log q: sampling from p already applies the weight"
        ),
        # its mean over samples of p is not the claimed divergence, and no other of the table
        "biased_value": "use {value}",
        # its mean over samples of another distribution is not the claimed divergence
        "off_policy_value": "weight each token by p / behaviour (kleash.importance_weights)",
        # the value of a single response or token can be negative
        "negative_values": "use {value} if single values must not be negative",
        # its importance ratio is truncated beyond some value
        "truncated_ratio": "report how many ratios are truncated, or leave the ratio as it is",
        # Of the gradient:
        # no gradient reaches the policy
        "detached": "let the gradient through: without torch.no_grad, detach or item",
        # its expected gradient is zero: as a penalty it has no effect
        "zero_gradient": "use {value}",
        # its expected gradient on samples of p is not that of the claimed divergence
        "wrong_gradient": "use {value}",
        # on samples of another distribution its expected gradient is another one
        "off_policy_gradient": (
            "weight it by p / behaviour: detached on k2, attached on k3 (kleash.importance_weights)"
        ),
        # its gradient leaves out the effect of a token on the divergence at later tokens
        "token_gradient": "add kleash.future_kl_loss if the divergence between whole responses is intended",
        # Of extreme inputs:
        # over a range of log ratios its gradient is exactly zero
        "dead_gradient": "remove the clamp, or let the gradient through it",
        # over a range of log ratios its value does not change
        "flat_value": "remove the clamp, or the constant that is added before the logarithm",
        # its value is NaN where that of the divergence is defined
        "nan_value": "select the valid entries before the logarithm or the exponential, or use {value}",
        # its gradient is NaN or infinite where that of the divergence is finite
        "nan_gradient": (
            "select the valid entries before the exponential (0 * inf is NaN in the backward pass), or "
            "use {value}"
        ),
        # its value is finite where the divergence is infinite
        "infinite_missed": "return infinity: q rules out a token that p does not",
        # its value is infinite where the divergence is finite
        "infinite_value": "compute with logarithms and expm1",
        # a NaN at an unmasked token becomes a number
        "hides_nan": "mask the padding only, and return NaN elsewhere",
        # Of several responses in a call:
        # a response's value or gradient depends on the other responses in the batch
        "batch_dependent": (
            "compute each response independently, and centre or average outside the function"
        ),
        # over several responses it is not a mean, but a sum or something else
        "wrong_reduction": "divide by the number of unmasked tokens",
        # Of the padding:
        # NaN or infinity in the padding reaches the value or the gradient
        "nan_from_padding": (
            "select with torch.where before any computation, instead of multiplying by the mask"
        ),
        # numbers in the padding change the value or the gradient
        "padding_counts": "use the mask in every sum",
        # its mean counts the padding in the denominator
        "padding_in_denominator": "divide by mask.sum()",
        # a response without unmasked tokens makes the value or the gradient NaN
        "nan_from_empty_response": (
            "leave such responses out, or divide by the number of tokens clamped to at least 1"
        ),
        # Of the precision:
        # it computes in the precision of its inputs and loses digits in bfloat16
        "low_precision": "cast to float32 before the subtraction",
        # in float32 it loses digits to cancellation where p and q nearly agree
        "cancellation": "use expm1 near p = q, or {value}",
        # Of the call:
        # its result depends on earlier calls
        "stateful": "pass the state as an argument, and return the new state",
        # its result differs from call to call on the same numbers
        "random": "take the noise as an argument if results should be reproducible",
        # it overwrites its arguments
        "changes_inputs": "work on a copy instead of changing an argument in place",
        # it changes settings of the process: seeds, the default dtype, gradient mode
        "changes_settings": "use a separate torch.Generator, and pass the dtype as an argument",
        # it raises an error on valid inputs
        "cannot_be_called": "accept all valid inputs",
    }
)
"""Kind -> what to change, in one line, into which ``remedy_of`` puts functions of kleash; the comment above it says
what a finding of the kind means. ``--fail-on`` and ``Audit.failing`` take these and ``SEVERITIES``."""

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
    return FINDINGS[kind].format(value=value, gives=convention.gives, place=convention.place)


def kinds_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The kinds of findings in ``--fail-on``, of which a text may hold several, separated by commas.

    Raises:
        UnknownNameError: if one is neither in ``FINDINGS`` nor in ``SEVERITIES``: a check for it could never fail.
    """
    kinds = tuple(kind.strip() for text in texts for kind in text.split(",") if kind.strip())
    for kind in kinds:
        look_up({**FINDINGS, **dict.fromkeys(SEVERITIES, "")}, kind, "kind of finding")
    return kinds
