"""Wrong KL functions, each with the finding that should report it, and right ones without faults.

The mistakes are those of published code (a mask that multiplies, a clamp with a dead gradient, a truncated weight, a
mean that is a sum), placed where a single token, call, precision or response would not show them. ``make`` builds the
function, so that state does not carry over from one audit to the next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType

import numpy as np
import torch
from single_faults import k3, masked, right, u_of, up
from torch import Tensor

import kleash
from kleash.auditing import CONVENTIONS, Convention, from_fields
from kleash.divergences.functions import divergence_of_rows

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


def made(make: Callable[[], Function], convention: str | Convention, *kinds: str, severity: str = "wrong"):
    return FaultyFunction(make=make, convention=convention, kinds=frozenset(kinds), severity=severity)


def faulty(function: Function, convention: str | Convention, *kinds: str, severity: str = "wrong"):
    return made(lambda: function, convention, *kinds, severity=severity)


fragile = partial(faulty, severity="fragile")


def steps_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], dtype=torch.float64)


def is_last(x: Tensor) -> Tensor:
    return steps_of(x) == x.shape[-1] - 1


def to_go(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def without_last(x: Tensor) -> Tensor:
    return torch.where(is_last(x) & (x.shape[-1] > 1), 0.0, x)


def first_then(later: float) -> Callable[[Tensor], Tensor]:
    """The first token as it is, the later ones times ``later``."""
    return lambda x: x * torch.where(steps_of(x) == 0, 1.0, later)


def of_logits(p: Tensor, q: Tensor) -> Tensor:
    return kleash.kl(up(p).log_softmax(-1), up(q).log_softmax(-1))


OVER_STEPS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "sign flipped after the first token": first_then(-1.0),
        "dropped after the first token": first_then(0.0),
        "only the last token": lambda x: x * is_last(x),
        "rolled by one token": lambda x: x.roll(1, -1),
        "in reverse order": lambda x: x.flip(-1),
        "discounted": lambda x: x * 0.9 ** steps_of(x),
        "cumulative from the front": lambda x: x.cumsum(-1),
        "divided by length": lambda x: x / x.shape[-1],
    }
)
"""What goes wrong only where a response has several tokens."""
MISPLACED = ("rolled by one token", "in reverse order")
"""These leave a response's sum as it is."""
VALUE = ("wrong_later_tokens", "wrong_scale", "wrong_credit")
GRADIENT = ("wrong_gradient",)
BOTH = (*GRADIENT, *VALUE)
ANY_VALUE = (*VALUE, "biased_value", "other_divergence")
WHOLE = CONVENTIONS["log_probabilities"]
EXACT_SEQUENCE = from_fields("exact_sequence", "logp", "logq", "token_logp", gives="sequence")
SAMPLED_LOGITS = from_fields("sampled_logits", "logits_p", "logits_q", "tokens")
PER_WORD = from_fields("per_word", "logp", "logq", gives="vocabulary")


def over_steps() -> dict[str, FaultyFunction]:
    """Each mistake in some of the forms: loss, reward and metric, per token, of a response and of distributions."""
    forms: dict[str, tuple[str, tuple[str, ...], Callable[..., Function]]] = {
        "token loss": ("loss", BOTH, lambda of: lambda p, q: of(right(p, q))),
        "token reward": ("reward", BOTH, lambda of: lambda p, q: of(u_of(p, q))),
        "token metric": ("metric", VALUE, lambda of: lambda p, q: of(k3(p, q))),
        "exact KL": ("log_probabilities", BOTH, lambda of: lambda p, q: of(kleash.kl(p, q))),
        "k2 of a response": (
            "sequence_loss", BOTH, lambda of: lambda p, q: (of(u_of(p, q).square()) / 2).sum(-1),
        ),
        "reward of a response": ("sequence_reward", BOTH, lambda of: lambda p, q: of(u_of(p, q)).sum(-1)),
    }  # fmt: skip
    found: dict[str, FaultyFunction] = {}
    for i, (name, of) in enumerate(OVER_STEPS.items()):
        for j, (form, (convention, kinds, make)) in enumerate(forms.items()):
            is_misplaced = name in MISPLACED
            if (i + j) % 3 == 0 and not (is_misplaced and convention.startswith("sequence")):
                expected = ("wrong_credit",) if is_misplaced and convention != "reward" else kinds
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


def responses() -> dict[str, FaultyFunction]:
    """What shows only over the tokens of a response."""

    def per_word(of: Callable[[Tensor], Tensor]) -> Function:
        """As F.kl_div gives it: [batch, time, vocab]."""
        return lambda p, q: of((kleash.kl(p, q).unsqueeze(-1) / p.shape[-1] * torch.ones_like(p)).mT).mT

    def next_token(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
        at = tokens.roll(-1, -1).unsqueeze(-1)
        return right(*(up(x).log_softmax(-1).gather(-1, at).squeeze(-1) for x in (p, q)))

    def ratio_of_response(p: Tensor, q: Tensor, b: Tensor, mask: Tensor) -> Tensor:
        return (up(p) - up(b)).mean(-1, keepdim=True).exp() * k3(p, q)

    def less_its_mean(p: Tensor, q: Tensor) -> Tensor:
        return kleash.kl(p, q) - kleash.kl(p, q).mean(-1, keepdim=True)

    def over_the_steps(p: Tensor, q: Tensor) -> Tensor:
        return divergence_of_rows(kleash.DIVERGENCES["kl"], up(p).log_softmax(1), up(q).log_softmax(1))

    late = future(lambda d: to_go(d).roll(-2, -1) * (steps_of(d) < d.shape[-1] - 2))
    surrogates: dict[str, Callable[[Tensor], Tensor]] = {
        "without the last token's share": lambda u: to_go(u) - u[:, -1:] * (u.shape[-1] > 1),
        "discounted": lambda u: to_go(u * 0.8 ** steps_of(u)) / 0.8 ** steps_of(u),
        "averaged over the tokens left": lambda u: to_go(u) / to_go(torch.ones_like(u)),
        "advantages normalised": lambda u: to_go(u) / (1 + to_go(u).abs()),
    }
    return {
        **{f"score function, {name}": faulty(surrogate(of), "sequence_loss", *GRADIENT)
           for name, of in surrogates.items()},
        "exact KL with its future, one token too late": faulty(late, EXACT_SEQUENCE, *GRADIENT),
        "response's ratio on each token's k3": faulty(
            ratio_of_response, "loss_with_behaviour_and_mask", *GRADIENT
        ),
        "exact KL as reward": faulty(kleash.kl, from_fields("-", "logp", "logq", place="reward"), *GRADIENT),
        "per word, rolled": faulty(per_word(lambda x: x.roll(1, -1)), PER_WORD, "wrong_credit"),
        "per word, divided by length": faulty(per_word(lambda x: x / x.shape[-1]), PER_WORD, *BOTH),
        "the last token left out": faulty(lambda p, q: without_last(right(p, q)), "loss", *GRADIENT),
        "to-go sums as rewards": faulty(lambda p, q: to_go(u_of(p, q)), "reward", *GRADIENT),
        "exact KL minus its mean over the response": faulty(
            less_its_mean, WHOLE, "other_divergence", *GRADIENT
        ),
        "metric spreads the response's mean": faulty(
            lambda p, q: k3(p, q).mean(-1, keepdim=True).expand_as(p), "metric", *VALUE
        ),
        "reference logits one step behind": faulty(
            lambda p, q: of_logits(p, q.roll(1, 1)), "logits", *BOTH
        ),
        "log-probabilities of the next token": faulty(next_token, SAMPLED_LOGITS, *BOTH),
        "softmax over the steps": faulty(over_the_steps, "logits", *ANY_VALUE, "cross_entropy"),
        "packed tokens accumulate": faulty(
            lambda p, q: right(p, q).cumsum(-1), "packed_loss", "batch_dependent"
        ),
        "centred within the response": faulty(
            lambda p, q: u_of(p, q) - u_of(p, q).mean(-1, keepdim=True), "reward", *GRADIENT
        ),
    }  # fmt: skip


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


def detached_in_turns() -> Function:
    calls = count()
    return lambda p, q: right(p, q).detach() if next(calls) % 2 else right(p, q)


def in_place(p: Tensor, q: Tensor) -> Tensor:
    with torch.no_grad():
        q.copy_(up(p) - up(q))
    u = up(p) - up(p).detach() + q.to(up(p).dtype)
    return u.square() / 2 - (u.square() / 2).detach() + (torch.expm1(-u) + u).detach()


def masks_in_place(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
    q.masked_fill_(~mask, 0.0)
    return masked(p, q, mask)


def after(change: Callable[[], object]) -> Function:
    """A loss that changes a setting of the process."""

    def function(p: Tensor, q: Tensor) -> Tensor:
        change()
        return right(p, q)

    return function


def calls() -> dict[str, FaultyFunction]:
    """What shows only from one call to the next."""
    note, changed = {"severity": "note"}, "changes_settings"

    def numpys_noise(p: Tensor, q: Tensor) -> Tensor:
        return right(p, q) + torch.as_tensor(0.2 * np.random.standard_normal(tuple(p.shape)))  # noqa: NPY002

    return {
        "beta annealed by a counter": made(counting(lambda n: 1 + n / 1000), "loss", "stateful"),
        "decays after two hundred calls": made(
            counting(lambda n: 1.0 if n < 200 else 0.5), "loss", "stateful"
        ),
        "reference cached by address": made(cached_by_address, "metric", "stateful"),
        "detached every other call": made(detached_in_turns, "loss", "stateful", "detached"),
        "global noise, unbiased": faulty(
            lambda p, q: right(p, q) * (0.5 + torch.rand(p.shape)), "loss", "random", **note
        ),
        "numpy's noise": faulty(numpys_noise, "metric", "random", **note),
        "noise and half the size": faulty(lambda p, q: right(p, q) * torch.rand(p.shape), "loss", *BOTH),
        "writes into the reference's log-probabilities": faulty(in_place, "loss", "changes_inputs"),
        "masks its input in place": faulty(masks_in_place, "loss_with_mask", "changes_inputs"),
        "sorts the vocabulary in place": faulty(
            lambda p, q: kleash.kl(p, q) + 0 * q.data.copy_(q.data.flip(-1)).sum(-1).nan_to_num(neginf=0),
            *(WHOLE, "changes_inputs"),
        ),
        "seeds the generator of the process": faulty(after(lambda: torch.manual_seed(0)), "loss", changed),
        "sets the default dtype": faulty(
            after(lambda: torch.set_default_dtype(torch.float64)), "loss", changed
        ),
        "switches gradients off": faulty(after(lambda: torch.set_grad_enabled(False)), "metric", changed),
    }


def batches() -> dict[str, FaultyFunction]:
    """What shows only where several responses come at once, or responses of several lengths."""

    def mean(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., FaultyFunction]:
        """From a function of the masked losses and the mask: the fault of a mean loss."""
        return partial(faulty, lambda p, q, mask: of(masked(p, q, mask), mask), "mean_loss_with_mask")

    def left_out(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        some = slice(max(1, len(p) - 1))
        return masked(p[some], q[some], mask[some]).sum() / mask[some].sum()

    def off_by_one(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        return masked(p, q, torch.cat([mask[:, :1], mask[:, :-1]], -1))

    def with_gradient(of: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return right(p, q).detach() + of - of.detach()

    denominator, reduction, batch = "padding_in_denominator", "wrong_reduction", "batch_dependent"
    return {
        "sum over tokens, mean over the batch": mean(lambda x, _: x.sum(-1).mean())("wrong_scale", reduction),
        "divided by the padded length": mean(lambda x, m: (x.sum(-1) / m.shape[-1]).mean())(
            denominator, reduction
        ),
        "divided by the longest length": mean(lambda x, m: x.sum() / (m.sum(-1).max() * len(m)))(reduction),
        "over the first response's length": mean(lambda x, m: x.sum() / (m[0].sum() * len(m)))(reduction),
        "without the last response": faulty(left_out, "mean_loss_with_mask", reduction, denominator),
        "batch norm of logits": faulty(
            lambda p, q: of_logits(up(p) - up(p).mean((0, 1)), q), "logits", batch
        ),
        "gradient of the neighbour": faulty(
            lambda p, q: with_gradient(right(p, q).roll(1, 0), p, q), "loss", batch
        ),
        "baseline of the batch": faulty(
            lambda p, q: with_gradient((u_of(p, q) - u_of(p, q).mean()).detach() * p, p, q), "loss", batch
        ),
        "mask multiplied by a KL of probabilities": fragile(
            lambda p, q, m: (p * (p.log() - q.log())).sum(-1) * m,
            "f(probs_p, probs_q, mask)",
            "nan_from_padding",
        ),
        "mask off by one": faulty(off_by_one, "loss_with_mask", "padding_counts", *GRADIENT),
        "0 / 0 if masked": faulty(lambda p, q, m: masked(p, q, m) / m, "loss_with_mask", "nan_from_padding"),
        "mask inverted": faulty(
            lambda p, q, m: masked(p, q, ~m), "loss_with_mask", "padding_counts", "other_divergence"
        ),
    }


def ratios() -> dict[str, FaultyFunction]:
    """Weights that are truncated, dropped or of the wrong level."""

    def weighed(of: Callable[[Tensor], Tensor]) -> Function:
        """The right loss times a detached function of the log ratio of policy and behaviour."""
        return lambda p, q, b: of(up(p) - up(b)).detach() * right(p, q)

    straight, gradient, truncated = "loss_with_behaviour", "off_policy_gradient", "truncated_ratio"
    window = weighed(lambda r: torch.where((r.exp() < 0.2) | (r.exp() > 6), 0.0, r.exp()))
    return {
        **{
            f"ratio clamped at {cap}": fragile(
                weighed(lambda r, cap=cap: r.exp().clamp(max=cap)), straight, truncated
            )
            for cap in (5, 100)
        },
        "ratio clipped to 0.8 … 1.2": faulty(weighed(lambda r: r.exp().clamp(0.8, 1.2)), straight, gradient),
        "ratio the wrong way round": faulty(weighed(lambda r: (-r).exp()), straight, gradient),
        "weights outside 0.2 to 6 dropped": faulty(window, straight, truncated, gradient),
        "weight without the token's own": faulty(
            weighed(lambda r: (r.cumsum(-1) - r).exp()), straight, gradient, "off_policy_value"
        ),
        "smoothed weight": faulty(weighed(lambda r: (r / 2).exp()), straight, gradient),
    }


def ranges() -> dict[str, FaultyFunction]:
    """Clamps, dead gradients and hidden infinities."""

    def huber(p: Tensor, q: Tensor) -> Tensor:
        u = u_of(p, q)
        return torch.where(u.abs() < 1, u.square() / 2, u.abs() - 0.5)

    def clipped_gradient(p: Tensor, q: Tensor) -> Tensor:
        clipped = u_of(p, q).clamp(-12, 12).square() / 2
        return clipped - clipped.detach() + k3(p, q).detach()

    return {
        "k1 clamped at 10": fragile(lambda p, q: u_of(p, q).clamp(-10, 10), "reward", "flat_value"),
        "log ratio clamped at 3": faulty(
            lambda p, q: u_of(p, q).clamp(-3, 3).square() / 2, "loss", "dead_gradient"
        ),
        "exponential clamped at 1e6": fragile(
            lambda p, q: (-u_of(p, q)).exp().clamp(max=1e6) - 1 + u_of(p, q),
            *("metric", "biased_value", "wrong_offset", "flat_value", "infinite_missed"),
        ),
        "huber": faulty(huber, "loss", *GRADIENT, "biased_value"),
        "gradient clipped": fragile(clipped_gradient, "loss", "dead_gradient"),
        "nansum over the vocabulary": fragile(
            lambda p, q: torch.nansum(up(p).exp() * u_of(p, q), dim=-1), WHOLE, "hides_nan"
        ),
        "nan_to_num of logits": fragile(
            lambda p, q: of_logits(up(p).nan_to_num(), up(q).nan_to_num()), "logits", "hides_nan"
        ),
        "NaN by comparison": fragile(
            lambda p, q: torch.where(u_of(p, q) == u_of(p, q), right(p, q), 0.0), "loss", "hides_nan"
        ),
    }


def precisions() -> dict[str, FaultyFunction]:
    """Wrong in one precision."""
    low = "low_precision"

    def in_dtype(dtype: torch.dtype, factor: float) -> Function:
        return lambda p, q: right(p, q) * (factor if p.dtype == dtype else 1.0)

    def softmax_in_half(p: Tensor, q: Tensor) -> Tensor:
        p, q = (x.half().log_softmax(-1) for x in (p, q))
        return (p.exp() * (p - q)).sum(-1).float()

    def to_three_decimals(p: Tensor, q: Tensor) -> Tensor:
        return u_of(p, q) if p.dtype == torch.float64 else (u_of(p, q) * 1000).round() / 1000

    return {
        "half the size in float32": faulty(in_dtype(torch.float32, 0.5), "loss", low),
        "softmax in float16": faulty(softmax_in_half, "logits", low),
        "float16 breaks it": fragile(in_dtype(torch.float16, 3.0), "loss", low),
        "rounds to three decimals": faulty(to_three_decimals, "reward", low, "cancellation"),
    }


def whole_mistakes() -> dict[str, FaultyFunction]:
    """Functions that are wrong for one token already, by other conventions than those of ``single_faults``."""

    def hidden_of_p(hp: Tensor, wp: Tensor, hq: Tensor, wq: Tensor) -> Tensor:
        return of_logits(up(hp) @ up(wp).T, up(hp) @ up(wq).T)

    biased, other = "biased_value", "other_divergence"
    return {
        "distillation the other way round": faulty(of_logits, "distillation", "wrong_direction"),
        "hidden states of the wrong model": faulty(hidden_of_p, "hidden", biased, other),
        "reference forgotten": faulty(lambda p, q: u_of(p, 0 * q), "reward", "cross_entropy", *ANY_VALUE),
        "mean over responses and words": faulty(
            lambda p, q: (up(p).exp() * u_of(p, q)).mean(), "mean_log_probabilities", *ANY_VALUE
        ),
    }


FAULTY_FUNCTIONS: Mapping[str, FaultyFunction] = MappingProxyType(
    over_steps() | responses() | calls() | batches() | ratios() | ranges() | precisions() | whole_mistakes()
)


def one_token_late(p: Tensor, q: Tensor) -> Tensor:
    """k1 as a reward later than it was earned, which changes no expectation."""
    return torch.cat([0 * p[:, :1], u_of(p, q)[:, :-1]], -1) + u_of(p, q) * is_last(p)


RIGHT_FUNCTIONS: Mapping[str, tuple[Function, str | Convention]] = MappingProxyType(
    {
        "k1 reward on the last token": (lambda p, q: u_of(p, q).sum(-1, keepdim=True) * is_last(p), "reward"),
        "k1 reward given one token late": (one_token_late, "reward"),
        "score function, token by token": (surrogate(lambda u: u), "sequence_loss"),
        "score function of whole responses": (surrogate(to_go), "sequence_loss"),
        "exact KL with its past as baseline": (future(lambda d: d.cumsum(-1) - d), EXACT_SEQUENCE),
        "exact KL with its future": (future(lambda d: to_go(d) - d), EXACT_SEQUENCE),
        "k1 with its control variate": (lambda p, q: u_of(p, q) + 0.3 * torch.expm1(-u_of(p, q)), "metric"),
        "prefix weights on k1": (
            lambda p, q, b: (up(p) - up(b)).cumsum(-1).exp() * u_of(p, q),
            "loss_with_behaviour",
        ),
    }
)
"""Name -> a function without a fault, and its convention; besides those of ``right_functions``."""
