"""Which KL terms have the gradient that they name: one table of rules for losses, jobs and integrations, without torch.

Every interface that lets a user name a KL (``losses.KLTerm``, the jobs of ``records``, TRL, OpenRLHF) describes it by a
``TermSpec`` and refuses it if ``refusal`` gives a reason; only the spelling of the options differs. The rules are
tested against enumerated gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

KL = "KL(p ‖ q)"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The properties of an estimator of KL(p || q) that decide where it may be used."""

    unbiased: bool
    """Whether its mean over ``x ~ p`` is KL(p || q)."""
    never_negative: bool
    """Whether every value is at least 0."""
    backpropagated: str
    """The divergence that its gradient belongs to, in expectation over samples of the current ``p``."""
    right_as_reward: bool
    """Whether, detached and multiplied by the score grad log p, its expectation is the gradient of KL(p || q)."""


CONTRACTS: Mapping[str, Contract] = MappingProxyType(
    {
        "k1": Contract(unbiased=True, never_negative=False, backpropagated="zero", right_as_reward=True),
        "abs": Contract(
            unbiased=False, never_negative=True, backpropagated="sum |p - q|", right_as_reward=False
        ),
        "k2": Contract(unbiased=False, never_negative=True, backpropagated=KL, right_as_reward=False),
        "k3": Contract(unbiased=True, never_negative=True, backpropagated="KL(q ‖ p)", right_as_reward=False),
    }
)
"""Name -> contract; ``estimators.ESTIMATORS`` adds the functions."""

VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "place": ("loss", "reward"),
        "gradient": ("score", "backpropagated", "ratio_attached", "none"),
        "ratio": ("none", "token", "before", "prefix", "sequence"),
        "scope": ("token", "sequence"),
        "credit": ("own_token", "later_tokens", "response"),
    }
)
"""Field of ``TermSpec`` -> its allowed values."""


@dataclass(frozen=True, kw_only=True)
class TermSpec:
    """A KL term as an option or an argument names it, with every default filled in (``term_spec``)."""

    estimator: str
    """Name of the estimator, for messages."""
    contract: Contract | None
    """The contract of the estimator; None for the exact KL, summed over the vocabulary."""
    place: str
    """"loss": differentiated. "reward": detached, and subtracted from the reward."""
    scope: str
    """"token": the KL of each token, at the prefixes of the batch. "sequence": the KL between responses."""
    gradient: str
    """"score": weights * log ratio on log p. "backpropagated": through the estimator, with constant weights.
    "ratio_attached": through weights * estimator. "none": a reward."""
    ratio: str
    """Level of the importance weights; "none" without."""
    cap: float | None
    """Largest importance weight."""
    aggregation: str
    """Name of the aggregation, for messages."""
    sums_sequences: bool
    """Whether the aggregation sums the tokens of a response without dividing by its length."""
    follows: str
    """The divergence whose gradient the term is meant to have."""
    credit: str
    """Of a reward: the tokens whose log-probabilities it multiplies. "own_token": the token of the KL. "later_tokens":
    as a return does, so that a token is credited with its own sampled KL and that of later tokens; an exact KL with
    that of later tokens, while its own is in the loss. "response": all tokens of the response."""


def term_spec(
    estimator: str,
    contract: Contract | None,
    *,
    place: str = "loss",
    scope: str | None = None,
    gradient: str | None = None,
    ratio: str = "none",
    cap: float | None = None,
    aggregation: str = "sequence_sum",
    sums_sequences: bool = True,
    follows: str = KL,
    credit: str | None = None,
) -> TermSpec:
    """Fill in the defaults of a KL term.

    Scope: "token" in a loss, "sequence" in a reward. Gradient: "score" in a loss (the exact KL: "backpropagated"),
    "none" in a reward. Credit: "own_token" for scope "token", otherwise "response".
    """
    scope = default_scope(place) if scope is None else scope
    default_gradient = "none" if place == "reward" else "backpropagated" if contract is None else "score"
    default_credit = "own_token" if scope == "token" else "response"
    return TermSpec(
        estimator=estimator,
        contract=contract,
        place=place,
        scope=scope,
        gradient=default_gradient if gradient is None else gradient,
        ratio=ratio,
        cap=cap,
        aggregation=aggregation,
        sums_sequences=sums_sequences,
        follows=follows,
        credit=default_credit if credit is None else credit,
    )


def default_scope(place: str) -> str:
    """The scope of a term that names none: "token" in a loss, "sequence" in a reward."""
    return "sequence" if place == "reward" else "token"


Spelling = Callable[[str, object], str]
"""(field, value) -> how the user writes it: "gradient 'score'", "--kl-scope sequence", "kl_place='loss'"."""


def spell_argument(field: str, value: object) -> str:
    """The spelling of ``losses.KLTerm``: "gradient 'score'"."""
    return f"{field} {value!r}"


OPTIONS = MappingProxyType({"estimator": "--kl", "place": "--kl-place", "scope": "--kl-scope"})


def spell_option(field: str, value: object) -> str:
    """The spelling of options of the command line: "--kl-scope sequence"."""
    return f"{OPTIONS.get(field, field)} {value}"


def spell_trainer_argument(field: str, value: object) -> str:
    """The spelling of the TRL trainers: "kl_scope='sequence'"."""
    return f"kl={value!r}" if field == "estimator" else f"kl_{field}={value!r}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A combination that does not have the gradient that it names, or that means nothing."""

    place: str | None = None
    """That of the terms which it may refuse; None for any."""
    applies: Callable[[TermSpec], bool]
    reason: Callable[[TermSpec, Spelling], str]
    """One sentence: what is wrong, then what to do."""


def _is_biased(term: TermSpec) -> bool:
    return term.contract is not None and not term.contract.unbiased


def _backpropagated(term: TermSpec) -> str:
    """The divergence that a backpropagated estimator follows; "" of other gradients, and of the exact KL."""
    contract = term.contract if term.gradient == "backpropagated" else None
    return "" if contract is None else contract.backpropagated


RULES: tuple[Rule, ...] = (
    Rule(
        applies=lambda t: t.cap is not None and not t.cap > 0,
        reason=lambda t, say: f"cap is {t.cap}; give a weight above 0, or leave it out",
    ),
    Rule(
        applies=lambda t: t.cap is not None and t.ratio == "none",
        reason=lambda t, say: (
            f"cap is {t.cap} and there is no ratio that it could bound; name the ratio, or leave it out"
        ),
    ),
    Rule(
        place="reward",
        applies=lambda t: t.gradient != "none",
        reason=lambda t, say: (
            f"a reward is detached, so {say('gradient', t.gradient)} is never used; leave it out, or take "
            f"{say('place', 'loss')}"
        ),
    ),
    Rule(
        place="reward",
        applies=lambda t: t.ratio != "none",
        reason=lambda t, say: (
            f"{say('ratio', t.ratio)} on a reward; it belongs on the policy loss that the reward enters"
        ),
    ),
    Rule(
        place="reward",
        applies=lambda t: t.contract is None and t.credit == "own_token",
        reason=lambda t, say: (
            "the exact KL as a reward does not depend on the drawn token, so its gradient averages to zero on its own "
            f"token; take {say('place', 'loss')}, or {say('estimator', 'k1')} as the reward"
        ),
    ),
    Rule(
        place="reward",
        applies=lambda t: t.contract is None and t.credit == "response",
        reason=lambda t, say: (
            "the exact KL as a reward of the whole response lacks the gradient of each token's own KL; take "
            f"{say('estimator', 'k1')}, or {say('place', 'loss')}"
        ),
    ),
    Rule(
        place="reward",
        applies=lambda t: t.contract is not None and not t.contract.right_as_reward,
        reason=lambda t, say: (
            f"{t.estimator} as a reward does not have the gradient of {KL} in expectation; take "
            f"{say('estimator', 'k1')}, or {say('place', 'loss')}"
        ),
    ),
    Rule(
        place="reward",
        applies=lambda t: t.follows != KL,
        reason=lambda t, say: (
            f"a KL in the reward follows {KL}, not {t.follows}; take {say('place', 'loss')}"
        ),
    ),
    Rule(
        place="reward",
        applies=lambda t: (t.scope == "token") != (t.credit == "own_token"),
        reason=lambda t, say: (
            "a KL in the reward is credited to earlier tokens too, which is the gradient of the KL between responses; "
            f"take {say('scope', 'sequence')}, or {say('place', 'loss')}"
            if t.scope == "token"
            else "a KL in the reward that is credited to its own token only has the gradient of each token's KL; take "
            f"{say('scope', 'token')}"
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.gradient == "none",
        reason=lambda t, say: (
            f"a loss without a gradient trains nothing; leave gradient out, or take {say('place', 'reward')}"
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.contract is None and t.gradient == "score",
        reason=lambda t, say: (
            "the exact KL has its own gradient and needs no score; take " + say("gradient", "backpropagated")
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: not _backpropagated(t) and t.follows != KL,
        reason=lambda t, say: (
            f"{say('gradient', t.gradient)} follows {KL}, and {t.follows} was asked for; backpropagate k3"
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: _backpropagated(t) == "zero",
        reason=lambda t, say: (
            f"{t.estimator} backpropagated trains nothing: its gradient averages to zero; take "
            + say("gradient", "score")
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: _backpropagated(t) not in ("", t.follows),
        reason=lambda t, say: (
            f"{t.estimator} backpropagated follows {_backpropagated(t)}, not {t.follows}; "
            f"take {say('gradient', 'score')}, or say follows={_backpropagated(t)!r}"
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.gradient == "ratio_attached" and t.ratio == "none",
        reason=lambda t, say: (
            f"{say('gradient', 'ratio_attached')} and no ratio; name the ratio, or take {say('gradient', 'score')}"
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.gradient == "ratio_attached" and t.cap is not None,
        reason=lambda t, say: (
            f"a ratio capped at {t.cap} has no gradient above it, where it is needed most; take "
            + say("gradient", "score")
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.gradient == "ratio_attached" and _is_biased(t),
        reason=lambda t, say: (
            f"rho * {t.estimator} with the ratio attached follows the mean of {t.estimator}, which is "
            f"not {KL}; take {say('gradient', 'score')}, whose ratio is a constant"
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.gradient == "ratio_attached" and (t.ratio == "token") != (t.scope == "token"),
        reason=lambda t, say: (
            f"a ratio of level {t.ratio!r} that carries a gradient is of scope "
            f"{'token' if t.ratio == 'token' else 'sequence'!r}, not {t.scope!r}; change one of the two"
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.ratio == "before" and t.contract is not None,
        reason=lambda t, say: (
            f"{say('ratio', 'before')} leaves out the token that {t.estimator} was sampled from; "
            "take 'prefix', or the exact KL"
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.scope == "sequence" and t.follows != KL,
        reason=lambda t, say: (
            f"{say('scope', 'sequence')} is known for {KL} only, and {t.follows} was asked for; take "
            + say("scope", "token")
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.scope == "sequence" and t.ratio == "token",
        reason=lambda t, say: (
            f"{say('scope', 'sequence')} with a ratio of level 'token' averages over the behaviour's prefixes, which "
            f"training does not move; take {say('ratio', 'prefix')}, or {say('scope', 'token')}"
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.scope == "sequence" and _is_biased(t),
        reason=lambda t, say: (
            f"{say('scope', 'sequence')} makes the value of {t.estimator} part of the gradient of earlier tokens, and "
            f"its mean is not {KL}; take {say('estimator', 'exact')}, k1 or k3"
        ),
    ),
    Rule(
        place="loss",
        applies=lambda t: t.scope == "sequence" and not t.sums_sequences,
        reason=lambda t, say: (
            f"{say('scope', 'sequence')} under {t.aggregation!r} divides each response by its own length, which its "
            "tokens decide too; take 'sequence_sum' or 'constant' (in TRL a loss_type such as 'dapo' or 'dr_grpo'), or "
            + say("scope", "token")
        ),
    ),
)
"""In the order in which they are checked."""


def refusal(term: TermSpec, spelling: Spelling = spell_argument) -> str | None:
    """Why the term's gradient is not that of ``term.follows``, as one sentence; None if it is.

    Args:
        term: from ``term_spec``.
        spelling: how the user writes a field and its value.
    """
    for field, values in VALUES.items():
        value = getattr(term, field)
        if value not in values:
            return f"{field} is {value!r}; there are {', '.join(values)}"
    rules = (rule for rule in RULES if rule.place in (None, term.place))
    return next((rule.reason(term, spelling) for rule in rules if rule.applies(term)), None)
