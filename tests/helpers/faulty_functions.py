"""Wrong KL functions, each with the finding that should report it, and right ones without faults.

The mistakes are those of published code (a mask that multiplies, a clamp with a dead gradient, a truncated weight, a
mean that is a sum), placed where a single token, call, precision or response would not show them. ``make`` builds the
function, so that state does not carry over from one audit to the next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType

import torch
from single_faults import k3, masked, rho, right, textbook, u_of, up
from torch import Tensor

import kleash
from kleash.auditing import CONVENTIONS, Convention, from_fields

Function = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class FaultyFunction:
    """A function whose mistake is known."""

    make: Callable[[], Function]
    convention: str | Convention
    kinds: frozenset[str]
    """Any of these kinds of findings reports the mistake."""
    severity: str = "wrong"
    """The worst severity that it should have: "wrong", "fragile" or "note"."""


def faulty(
    function: Function, convention: str | Convention, *kinds: str, severity: str = "wrong"
) -> FaultyFunction:
    return faulty_factory(lambda: function, convention, *kinds, severity=severity)


def faulty_factory(
    make: Callable[[], Function], convention: str | Convention, *kinds: str, severity: str = "wrong"
) -> FaultyFunction:
    return FaultyFunction(make=make, convention=convention, kinds=frozenset(kinds), severity=severity)


def steps_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], dtype=torch.float64)


def to_go(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def first_then(later: float) -> Callable[[Tensor], Tensor]:
    """The first token as it is, the later ones times ``later``."""
    return lambda x: x * torch.where(steps_of(x) == 0, 1.0, later)


def only_last(x: Tensor) -> Tensor:
    return x * (steps_of(x) == x.shape[-1] - 1)


OVER_STEPS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "sign flipped after the first token": first_then(-1.0),
        "halved after the first token": first_then(0.5),
        "dropped after the first token": first_then(0.0),
        "only the last token": only_last,
        "rolled by one token": lambda x: x.roll(1, -1),
        "read from the next token": lambda x: x.roll(-1, -1),
        "in reverse order": lambda x: x.flip(-1),
        "discounted": lambda x: x * 0.9 ** steps_of(x),
        "cumulative from the front": lambda x: x.cumsum(-1),
        "divided by length": lambda x: x / x.shape[-1],
        "multiplied by position": lambda x: x * (1 + steps_of(x)),
    }
)
"""What goes wrong only where a response has several tokens."""

MISPLACED = ("rolled by one token", "read from the next token", "in reverse order")
"""These leave a response's sum as it is."""
VALUE = ("wrong_later_tokens", "wrong_scale", "wrong_credit")
GRADIENT = ("wrong_gradient",)
SUMMED = CONVENTIONS["sequence_loss"]
EXACT_SEQUENCE = from_fields(
    "exact_sequence", "logp", "logq", "token_logp", gives="sequence", sees="distributions"
)
SEQUENCE_METRIC = replace(CONVENTIONS["sequence_loss"], name="sequence_metric", place="metric")
WHOLE = CONVENTIONS["log_probabilities"]


def over_steps() -> dict[str, FaultyFunction]:
    """Each mistake in half of the forms: loss, reward and metric, per token, of a response and of distributions."""
    forms: dict[str, tuple[str, bool, tuple[str, ...], Callable[..., Function]]] = {
        "token loss": ("loss", True, (*GRADIENT, *VALUE), lambda of: lambda p, q: of(right(p, q))),
        "token reward": ("reward", False, (*GRADIENT, *VALUE), lambda of: lambda p, q: of(u_of(p, q))),
        "token metric": ("metric", False, VALUE, lambda of: lambda p, q: of(k3(p, q))),
        "exact KL": (
            "log_probabilities",
            True,
            (*GRADIENT, *VALUE),
            lambda of: lambda p, q: of(kleash.kl(p, q)),
        ),
        "k2 of a response": (
            "sequence_loss",
            True,
            (*GRADIENT, *VALUE),
            lambda of: lambda p, q: (of(u_of(p, q).square()) / 2).sum(-1),
        ),
        "squared log ratio of a response": (
            "sequence_loss",
            True,
            (*GRADIENT, *VALUE),
            lambda of: lambda p, q: of(u_of(p, q)).sum(-1).square() / 2,
        ),
        "reward of a response": (
            "sequence_reward",
            True,
            (*GRADIENT, *VALUE),
            lambda of: lambda p, q: of(u_of(p, q)).sum(-1),
        ),
    }
    found: dict[str, FaultyFunction] = {}
    for i, (name, of) in enumerate(OVER_STEPS.items()):
        for j, (form, (convention, names_credit, kinds, make)) in enumerate(forms.items()):
            is_misplaced = name in MISPLACED
            if (i + j) % 2 == 0 and not (is_misplaced and convention.startswith("sequence")):
                expected = ("wrong_credit",) if is_misplaced and names_credit else kinds
                found[f"{form}, {name}"] = faulty(make(of), convention, *expected)
    return found


def surrogate(weights: Callable[[Tensor], Tensor]) -> Function:
    """log p times detached weights made of the log ratios: the score function."""
    return lambda p, q: (p * weights(u_of(p, q).detach())).sum(-1)


def future(later: Callable[[Tensor], Tensor]) -> Function:
    """Exact KL whose effect on later tokens is credited by ``later``."""

    def function(logp: Tensor, logq: Tensor, token_logp: Tensor) -> Tensor:
        each = kleash.kl(logp, logq)
        return (each + token_logp * later(each.detach())).sum(-1)

    return function


def score_functions() -> dict[str, FaultyFunction]:
    """Surrogates of the KL between whole responses, credited wrongly."""
    wrong: dict[str, Callable[[Tensor], Tensor]] = {
        "without the last token's share": lambda u: to_go(u) - u[:, -1:] * (u.shape[-1] > 1),
        "discounted": lambda u: to_go(u * 0.8 ** steps_of(u)) / 0.8 ** steps_of(u),
        "sign flipped after the first token": lambda u: first_then(-1.0)(to_go(u)),
        "averaged over the tokens left": lambda u: to_go(u) / to_go(torch.ones_like(u)),
    }
    found = {
        f"score function, {name}": faulty(surrogate(weights), SUMMED, *GRADIENT)
        for name, weights in wrong.items()
    }
    found["exact KL with its future, one token too late"] = faulty(
        future(lambda d: to_go(d).roll(-2, -1) * (steps_of(d) < d.shape[-1] - 2)), EXACT_SEQUENCE, *GRADIENT
    )
    found["exact KL with half its future"] = faulty(
        future(lambda d: 0.5 * (to_go(d) - d)), EXACT_SEQUENCE, *GRADIENT
    )
    found["response's ratio on each token's k3"] = faulty(
        lambda p, q, b, mask: (up(p) - up(b)).mean(-1, keepdim=True).exp() * k3(p, q),
        "loss_with_behaviour_and_mask",
        *GRADIENT,
    )
    found["exact KL as reward"] = faulty(
        lambda p, q: kleash.kl(p, q), replace(WHOLE, place="reward"), *GRADIENT, "zero_gradient"
    )
    return found


def vocabulary() -> dict[str, FaultyFunction]:
    """[batch, time, vocab], as F.kl_div gives it."""
    per_word = from_fields("per_word", "logp", "logq", gives="vocabulary", sees="distributions")

    def terms(p: Tensor, q: Tensor) -> Tensor:
        return kleash.kl(p, q).unsqueeze(-1) / p.shape[-1] * torch.ones_like(p)

    return {
        f"per word, {name}": faulty(
            lambda p, q, of=of: of(terms(p, q).mT).mT,
            per_word,
            *(("wrong_credit",) if name in MISPLACED else (*GRADIENT, *VALUE)),
        )
        for name, of in OVER_STEPS.items()
        if name in ("sign flipped after the first token", "rolled by one token", "divided by length")
    }


def counting(change: Callable[[int], float]) -> Callable[[], Function]:
    """A loss that is multiplied by a function of how often it was called."""

    def make() -> Function:
        calls = count()
        return lambda p, q: right(p, q) * change(next(calls))

    return make


def cached_by_address() -> Function:
    kept: dict[tuple[int, ...], Tensor] = {}

    def function(p: Tensor, q: Tensor) -> Tensor:
        key = q.data_ptr(), *q.shape  # an address alone may have been that of a tensor of another shape
        return u_of(p, kept.setdefault(key, q.detach().clone()).to(p.dtype))

    return function


def private_noise() -> Function:
    draw = torch.Generator().manual_seed(1)
    return lambda p, q: right(p, q) * (0.5 + torch.rand(p.shape, generator=draw))


def in_place(p: Tensor, q: Tensor) -> Tensor:
    with torch.no_grad():
        q.copy_(up(p) - up(q))
    u = up(p) - up(p).detach() + q.to(up(p).dtype)
    return u.square() / 2 - (u.square() / 2).detach() + (torch.expm1(-u) + u).detach()


def masks_in_place(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
    q.masked_fill_(~mask, 0.0)
    return masked(p, q, mask)


def reseeds(p: Tensor, q: Tensor) -> Tensor:
    torch.manual_seed(0)
    return right(p, q)


def calls() -> dict[str, FaultyFunction]:
    """What shows only from one call to the next."""
    return {
        "beta annealed by a counter": faulty_factory(counting(lambda n: 1 + n / 1000), "loss", "stateful"),
        "off in its first ten calls": faulty_factory(counting(lambda n: float(n >= 10)), "loss", "stateful"),
        "doubled every seventh call": faulty_factory(
            counting(lambda n: 2.0 if n % 7 == 6 else 1.0), "loss", "stateful"
        ),
        "decays after two hundred calls": faulty_factory(
            counting(lambda n: 1.0 if n < 200 else 0.5), "loss", "stateful"
        ),
        "reference cached by address": faulty_factory(lambda: cached_by_address(), "metric", "stateful"),
        "global noise, unbiased": faulty(
            lambda p, q: right(p, q) * (0.5 + torch.rand(p.shape)), "loss", "random", severity="note"
        ),
        "own noise, unbiased": faulty_factory(lambda: private_noise(), "loss", "random", severity="note"),
        "noise and half the size": faulty(
            lambda p, q: right(p, q) * torch.rand(p.shape), "loss", "wrong_scale", "wrong_gradient"
        ),
        "noise of k3's wrong gradient": faulty(
            lambda p, q: k3(p, q) * (0.9 + 0.2 * torch.rand(p.shape)), "loss", "wrong_gradient"
        ),
        "writes into the reference's log-probabilities": faulty(in_place, "loss", "changes_inputs"),
        "masks its input in place": faulty(masks_in_place, "loss_with_mask", "changes_inputs"),
        "sorts the vocabulary in place": faulty(
            lambda p, q: (
                kleash.kl(p, q) + 0 * q.data.copy_(q.data.flip(-1)).sum(-1).detach().nan_to_num(neginf=0)
            ),
            "log_probabilities",
            "changes_inputs",
        ),
        "seeds the generator of the process": faulty(reseeds, "loss", "changes_settings"),
    }


def batches() -> dict[str, FaultyFunction]:
    """What shows only where several responses come at once, or responses of several lengths."""

    def sum_of_sequences(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        return masked(p, q, mask).sum(-1).mean()

    def constant_length(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        return (masked(p, q, mask).sum(-1) / mask.shape[-1]).mean()

    def longest(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        return masked(p, q, mask).sum() / (mask.sum(-1).max() * len(mask))

    return {
        "sum over tokens, mean over the batch": faulty(
            sum_of_sequences, "mean_loss_with_mask", "wrong_scale", "wrong_reduction"
        ),
        "divided by the padded length": faulty(
            constant_length, "mean_loss_with_mask", "padding_in_denominator", "wrong_reduction"
        ),
        "divided by the longest length": faulty(longest, "mean_loss_with_mask", "wrong_reduction"),
        "centred over the batch": faulty(
            lambda p, q: u_of(p, q) - u_of(p, q).mean(), "reward", "batch_dependent"
        ),
        "rolled over the batch": faulty(lambda p, q: right(p, q).roll(1, 0), "loss", "batch_dependent"),
        "a fifth of the neighbour": faulty(
            lambda p, q: 0.8 * k3(p, q) + 0.2 * k3(p, q).roll(1, 0), "metric", "batch_dependent"
        ),
        "cumulative sum over the padding": faulty(
            lambda p, q, mask: (
                torch.where(mask, to_go(right(p, q)) - to_go(right(p, q)) + right(p, q), 0.0)
                + 0.1 * to_go(torch.where(mask, 0.0, 1.0))
            ),
            "loss_with_mask",
            "padding_counts",
        ),
        "mask off by one": faulty(
            lambda p, q, mask: masked(p, q, torch.cat([mask[:, :1], mask[:, :-1]], -1)),
            "loss_with_mask",
            "padding_counts",
            "wrong_gradient",
        ),
        "padding in the denominator of distributions": faulty(
            lambda p, q, mask: torch.where(
                mask, kleash.kl(*(torch.where(mask.unsqueeze(-1), x, 0.0) for x in (p, q))), 0.0
            ).mean(),
            from_fields("mean_masked", "logp", "logq", "mask", gives="mean", sees="distributions"),
            "padding_in_denominator",
        ),
    }


def ratios() -> dict[str, FaultyFunction]:
    """Weights that are truncated, dropped or of the wrong level."""
    straight = "loss_with_behaviour"
    found = {
        f"ratio clamped at {cap}": faulty(
            lambda p, q, b, cap=cap: rho(p, b).clamp(max=cap).detach() * right(p, q),
            straight,
            "truncated_ratio",
            severity="fragile",
        )
        for cap in (5, 100)
    }
    return found | {
        "ratio clipped to 0.8 … 1.2": faulty(
            lambda p, q, b: rho(p, b).clamp(0.8, 1.2).detach() * right(p, q), straight, "off_policy_gradient"
        ),
        "ratio the wrong way round": faulty(
            lambda p, q, b: rho(b, p).detach() * right(p, q), straight, "off_policy_gradient"
        ),
    }


def ranges() -> dict[str, FaultyFunction]:
    """Clamps, dead gradients and hidden infinities."""

    def nansum(p: Tensor, q: Tensor) -> Tensor:
        return torch.nansum(up(p).exp() * u_of(p, q), dim=-1)

    def hides_nan(p: Tensor, q: Tensor) -> Tensor:
        return torch.nan_to_num(textbook(p, q))

    return {
        "k1 clamped at 10": faulty(
            lambda p, q: u_of(p, q).clamp(-10, 10), "reward", "flat_value", severity="fragile"
        ),
        "k2 clamped at 200": faulty(
            lambda p, q: (u_of(p, q).square() / 2).clamp(max=200), "loss", "dead_gradient", severity="fragile"
        ),
        "log ratio clamped at 3": faulty(
            lambda p, q: u_of(p, q).clamp(-3, 3).square() / 2, "loss", "dead_gradient"
        ),
        "nansum over the vocabulary": faulty(nansum, "log_probabilities", "hides_nan", severity="fragile"),
        "nan_to_num of logits": faulty(
            lambda p, q: kleash.kl(*(up(x).nan_to_num().log_softmax(-1) for x in (p, q))),
            "logits",
            "hides_nan",
            severity="fragile",
        ),
    }


def precisions() -> dict[str, FaultyFunction]:
    """Wrong in one precision."""

    def rounded(x: Tensor) -> Tensor:
        """Through bfloat16, whatever it was."""
        return x if x.dtype == torch.float64 else x.bfloat16().float()

    return {
        "computes in bfloat16 always": faulty(
            lambda p, q: right(rounded(p), rounded(q)), "loss", "low_precision"
        ),
        "half the size in float32": faulty(
            lambda p, q: right(p, q) * (0.5 if p.dtype == torch.float32 else 1.0), "loss", "low_precision"
        ),
        "subtracts in bfloat16": faulty(
            lambda p, q: (
                (p - q).float().square() / 2 if p.dtype == torch.bfloat16 else u_of(p, q).square() / 2
            ),
            "loss",
            "low_precision",
            severity="fragile",
        ),
        "float16 breaks it": faulty(
            lambda p, q: right(p, q) * (3.0 if p.dtype == torch.float16 else 1.0),
            "loss",
            "low_precision",
            severity="fragile",
        ),
    }


def whole_mistakes() -> dict[str, FaultyFunction]:
    """Functions that are wrong for one token already, by other conventions than those of ``single_faults``."""
    distillation = "distillation"

    def logs(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return up(p).log_softmax(-1), up(q).log_softmax(-1)

    return {
        "distillation the other way round": faulty(
            lambda p, q: kleash.kl(*logs(p, q)), distillation, "wrong_direction"
        ),
        "temperature squared forgotten": faulty(
            lambda p, q: kleash.kl(*logs(p / 2, q / 2)), "logits", "biased_value", "wrong_gradient"
        ),
        "hidden states of the wrong model": faulty(
            lambda hp, wp, hq, wq: kleash.kl(
                (up(hp) @ up(wp).T).log_softmax(-1), (up(hp) @ up(wq).T).log_softmax(-1)
            ),
            "hidden",
            "biased_value",
            "other_divergence",
        ),
        "k3 of the other direction": faulty(
            lambda p, q: k3(q, p), "metric", "biased_value", "other_divergence"
        ),
    }


FAULTY_FUNCTIONS: Mapping[str, FaultyFunction] = MappingProxyType(
    over_steps()
    | score_functions()
    | vocabulary()
    | calls()
    | batches()
    | ratios()
    | ranges()
    | precisions()
    | whole_mistakes()
)


def sequence_k1(p: Tensor, q: Tensor) -> Tensor:
    """The whole reward on the last token: later than it was earned, which changes no expectation."""
    return u_of(p, q).sum(-1, keepdim=True) * (steps_of(p) == p.shape[-1] - 1)


RIGHT_FUNCTIONS: Mapping[str, tuple[Function, str | Convention]] = MappingProxyType(
    {
        "value k3, gradient k2": (right, "loss"),
        "k2": (lambda p, q: u_of(p, q).square() / 2, "loss"),
        "attached ratio times k1": (lambda p, q, b: rho(p, b) * u_of(p, q), "loss_with_behaviour"),
        "detached ratio times k2": (
            lambda p, q, b: rho(p, b).detach() * u_of(p, q).square() / 2,
            "loss_with_behaviour",
        ),
        "k1 reward on the last token": (sequence_k1, "reward"),
        "mean of responses' means": (
            lambda p, q, mask: (masked(p, q, mask).sum(-1) / mask.sum(-1)).mean(),
            "mean_loss_with_mask",
        ),
        "score function, token by token": (surrogate(lambda u: u), SUMMED),
        "exact KL with its past as baseline": (future(lambda d: d.cumsum(-1) - d), EXACT_SEQUENCE),
        "score function of whole responses": (surrogate(to_go), SUMMED),
        "squared log ratio of a response": (lambda p, q: u_of(p, q).sum(-1).square() / 2, SUMMED),
        "exact KL with its future": (future(lambda d: to_go(d) - d), EXACT_SEQUENCE),
        "minus k1, as a reward": (
            lambda p, q: -u_of(p, q),
            replace(CONVENTIONS["reward"], name="-", sign=-1),
        ),
    }
)
"""Name -> a function without a fault, and its convention; besides those of ``right_functions``."""
