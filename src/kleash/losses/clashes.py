"""Which combinations of estimator, place, gradient and ratio train something other than what was meant."""

from typing import NamedTuple

from kleash.estimators import Estimator
from kleash.estimators.weights import LEVELS
from kleash.losses.aggregation import AGGREGATIONS

OURS = "KL(p || q)"


class Named(NamedTuple):
    """A term as it was named; ``record`` is None for the exact KL."""

    estimator: str
    record: Estimator | None
    place: str
    gradient: str
    ratio: str
    cap: float | None
    scope: str
    aggregation: str
    follows: str


def clash(term: Named) -> str | None:
    """Why the term does not train what it names, as one sentence; None if it does."""
    checks = (_words, _reward) if term.place == "reward" else (_words, _loss, _attached, _ratio, _sequence)
    for check in checks:
        reason = check(term)
        if reason is not None:
            return reason
    return None


def _words(term: Named) -> str | None:
    allowed = {
        "place": ("loss", "reward"),
        "gradient": ("score", "backpropagated", "ratio_attached", "none"),
        "ratio": ("none", *LEVELS),
        "scope": ("token", "sequence"),
    }
    for field, words in allowed.items():
        said = getattr(term, field)
        if said not in words:
            return f"{field} is {said!r}; there are {', '.join(words)}"
    if term.cap is not None and term.ratio == "none":
        return f"cap is {term.cap} and there is no ratio that it could bound; name the ratio, or leave it out"
    return None


def _reward(term: Named) -> str | None:
    if term.gradient != "none":
        return f"a reward is detached, so gradient {term.gradient!r} is never used; leave it out, or take place 'loss'"
    if term.ratio != "none":
        return f"ratio {term.ratio!r} on a reward; it belongs on the policy loss that the reward enters"
    if term.record is None:
        return (
            "the exact KL as a reward is the same for every token that could have been drawn, so what it "
            "says of its own token averages to zero; take place 'loss', or k1 as the reward"
        )
    if not term.record.right_as_reward:
        return (
            f"{term.estimator} as a reward does not have the gradient of {OURS} in expectation "
            "(that of k3 is short of it by the gradient of KL(q || p)); take k1, or place 'loss'"
        )
    return None


def _loss(term: Named) -> str | None:
    if term.gradient == "none":
        return "a loss without a gradient trains nothing; leave gradient out, or take place 'reward'"
    if term.record is None and term.gradient == "score":
        return "the exact KL has its own gradient and needs no score; take gradient 'backpropagated'"
    if term.record is None or term.gradient != "backpropagated":
        if term.follows != OURS:
            return f"gradient {term.gradient!r} follows {OURS}, and {term.follows} was asked for; backpropagate k3"
        return None
    followed = term.record.backpropagated
    if followed == "zero":
        return f"{term.estimator} backpropagated trains nothing: its gradient averages to zero; take gradient 'score'"
    if followed != term.follows:
        return (
            f"{term.estimator} backpropagated follows {followed}, not {term.follows}; "
            f"take gradient 'score', or say follows={followed!r}"
        )
    return None


def _attached(term: Named) -> str | None:
    if term.gradient != "ratio_attached":
        return None
    if term.ratio == "none":
        return "gradient 'ratio_attached' and no ratio; name the ratio, or take gradient 'score'"
    if term.cap is not None:
        return f"a ratio capped at {term.cap} has no gradient above it, where it is needed most; take gradient 'score'"
    if term.record is not None and not term.record.unbiased:
        return (
            f"rho * {term.estimator} with the ratio attached follows the mean of {term.estimator}, which is "
            f"not {OURS}; take gradient 'score', whose ratio is a constant"
        )
    if (term.ratio == "token") != (term.scope == "token"):
        return (
            f"a ratio of level {term.ratio!r} that carries a gradient is of scope "
            f"{'token' if term.ratio == 'token' else 'sequence'!r}, not {term.scope!r}; change one of the two"
        )
    return None


def _ratio(term: Named) -> str | None:
    if term.ratio == "before" and term.record is not None:
        return (
            f"ratio 'before' leaves out the token that {term.estimator} was sampled from; "
            "take 'prefix', or the exact KL"
        )
    return None


def _sequence(term: Named) -> str | None:
    if term.scope == "token":
        return None
    if term.follows != OURS:
        return (
            f"scope 'sequence' is known for {OURS} only, and {term.follows} was asked for; take scope 'token'"
        )
    if term.ratio == "token":
        return (
            "scope 'sequence' with a ratio of level 'token' averages over the behaviour's prefixes, which "
            "training does not move; take ratio 'prefix', or scope 'token'"
        )
    if term.record is not None and not term.record.unbiased:
        return (
            f"scope 'sequence' makes the value of {term.estimator} part of the gradient of earlier tokens, and its "
            f"mean is not {OURS}; take k1, k3 or the exact KL"
        )
    if not AGGREGATIONS[term.aggregation].sums_sequences:
        return (
            f"scope 'sequence' under {term.aggregation!r} divides each response by its own length, which its "
            "tokens decide too; take 'sequence_sum' or 'constant'"
        )
    return None
