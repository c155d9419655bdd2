"""Variations of the faulty functions, written after the audit had been improved with those."""

from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType

import numpy as np
import torch
from faulty_functions import (
    EXACT_SEQUENCE,
    GRADIENT,
    SUMMED,
    VALUE,
    WHOLE,
    FaultyFunction,
    Function,
    faulty,
    faulty_factory,
    future,
    steps_of,
    surrogate,
    to_go,
)
from single_faults import k3, masked, rho, right, u_of, up
from torch import Tensor

import kleash
from kleash.auditing import Convention, from_fields

ANY_VALUE = (*VALUE, "biased_value", "other_divergence")
SAMPLED_LOGITS = from_fields("sampled_logits", "logits_p", "logits_q", "tokens")


def every_other(x: Tensor) -> Tensor:
    return x * (1 - 2 * (steps_of(x) % 2))


def without_last(x: Tensor) -> Tensor:
    return torch.where((steps_of(x) == x.shape[-1] - 1) & (x.shape[-1] > 1), 0.0, x)


def responses() -> dict[str, FaultyFunction]:
    def aligned(p: Tensor, q: Tensor) -> Tensor:
        return kleash.kl(up(p).log_softmax(-1), up(q).roll(1, 1).log_softmax(-1))

    def next_token(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
        at = tokens.roll(-1, -1).unsqueeze(-1)
        p, q = (up(x).log_softmax(-1).gather(-1, at).squeeze(-1) for x in (p, q))
        return right(p, q)

    return {
        "sign alternates": faulty(lambda p, q: every_other(right(p, q)), "loss", *GRADIENT),
        "the last token left out": faulty(lambda p, q: without_last(right(p, q)), "loss", *GRADIENT),
        "the last token left out of the metric": faulty(
            lambda p, q: without_last(k3(p, q)), "metric", *VALUE
        ),
        "to-go sums as rewards": faulty(lambda p, q: to_go(u_of(p, q)), "reward", *GRADIENT),
        "mean for a sum in the reward": faulty(
            lambda p, q: u_of(p, q).mean(-1), "sequence_reward", *GRADIENT, *VALUE
        ),
        "squared log ratio over length": faulty(
            lambda p, q: u_of(p, q).sum(-1).square() / 2 / p.shape[-1], SUMMED, *GRADIENT, *VALUE
        ),
        "exact KL minus its mean over the response": faulty(
            lambda p, q: kleash.kl(p, q) - kleash.kl(p, q).mean(-1, keepdim=True),
            WHOLE,
            "other_divergence",
            *GRADIENT,
        ),
        "exact KL, future discounted": faulty(
            future(lambda d: (to_go(d * 0.9 ** steps_of(d)) / 0.9 ** steps_of(d)) - d),
            EXACT_SEQUENCE,
            *GRADIENT,
        ),
        "score function, advantages normalised": faulty(
            surrogate(lambda u: to_go(u) / (1 + to_go(u).abs())), SUMMED, *GRADIENT
        ),
        "score function, each response's mean": faulty(
            surrogate(lambda u: u.mean(-1, keepdim=True).expand_as(u)), SUMMED, *GRADIENT, *VALUE
        ),
        "metric spreads the response's mean": faulty(
            lambda p, q: k3(p, q).mean(-1, keepdim=True).expand_as(p), "metric", *VALUE, "wrong_credit"
        ),
        "reference logits one step behind": faulty(aligned, "logits", "wrong_credit", *GRADIENT, *VALUE),
        "log-probabilities of the next token": faulty(next_token, SAMPLED_LOGITS, *GRADIENT, *VALUE),
        "softmax over the steps": faulty(
            lambda p, q: kleash.kl(up(p).log_softmax(1), up(q).log_softmax(1)),
            "logits",
            *ANY_VALUE,
            "cross_entropy",
        ),
        "packed tokens accumulate": faulty(
            lambda p, q: right(p, q).cumsum(-1), "packed_loss", "batch_dependent"
        ),
        "packed tokens rolled": faulty(
            lambda p, q: u_of(p, q).roll(1), "packed_reward", "batch_dependent", "wrong_credit"
        ),
        "centred within the response": faulty(
            lambda p, q: u_of(p, q) - u_of(p, q).mean(-1, keepdim=True), "reward", "zero_gradient"
        ),
    }


def warm_up() -> Function:
    calls = count(1)
    return lambda p, q: right(p, q) * min(1.0, next(calls) / 20)


def alternates() -> Function:
    calls = count()
    return lambda p, q: right(p, q).detach() if next(calls) % 2 else right(p, q)


def largest_so_far() -> Function:
    largest = 0.0

    def function(p: Tensor, q: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, float(k3(p, q).abs().max()))
        return k3(p, q) / largest

    return function


def reference_of_the_last_call() -> Function:
    last: list[Tensor] = []

    def function(p: Tensor, q: Tensor) -> Tensor:
        before = last[-1] if last and last[-1].shape == q.shape else q
        last.append(q.detach().clone())
        return u_of(p, before.to(q.dtype))

    return function


def of_numpy() -> Function:
    return lambda p, q: right(p, q) + torch.as_tensor(0.2 * np.random.standard_normal(tuple(p.shape)))  # noqa: NPY002


def floor_in_place(p: Tensor, q: Tensor) -> Tensor:
    q.data.clamp_(min=-2.0)
    return right(p, q)


def shifts_logits(p: Tensor, q: Tensor) -> Tensor:
    q -= q.max(-1, keepdim=True).values
    return kleash.kl(up(p).log_softmax(-1), up(q).log_softmax(-1))


def default_dtype(p: Tensor, q: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return right(p, q)


def no_more_gradients(p: Tensor, q: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return k3(p, q)


def calls() -> dict[str, FaultyFunction]:
    return {
        "warms up": faulty_factory(lambda: warm_up(), "loss", "stateful"),
        "detached every other call": faulty_factory(lambda: alternates(), "loss", "stateful", "detached"),
        "divided by the largest so far": faulty_factory(lambda: largest_so_far(), "metric", "stateful"),
        "reference of the last call": faulty_factory(
            lambda: reference_of_the_last_call(), "reward", "stateful"
        ),
        "numpy's noise": faulty_factory(lambda: of_numpy(), "metric", "random", severity="note"),
        "a token drawn per response, biased": faulty(
            lambda p, q: right(p, q).gather(-1, torch.randint(p.shape[-1], (len(p), 1))).squeeze(-1),
            "sequence_loss",
            *GRADIENT,
            *VALUE,
        ),
        "floors the reference in place": faulty(floor_in_place, "loss", "changes_inputs"),
        "shifts logits in place": faulty(shifts_logits, "logits", "changes_inputs"),
        "sets the default dtype": faulty(default_dtype, "loss", "changes_settings"),
        "switches gradients off": faulty(no_more_gradients, "metric", "changes_settings"),
    }


def batches() -> dict[str, FaultyFunction]:
    def over_square(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        return masked(p, q, mask).sum() / mask.sum() * len(mask)

    def first_row(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        return masked(p, q, mask).sum() / (mask[0].sum() * len(mask))

    def weighted(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        each = masked(p, q, mask).sum(-1) / mask.sum(-1)
        return (each * torch.softmax(each.detach(), 0)).sum()

    def left_out(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        return (
            masked(p[:-1], q[:-1], mask[:-1]).sum() / mask[:-1].sum()
            if len(p) > 1
            else masked(p, q, mask).mean()
        )

    return {
        "a mean times the batch": faulty(over_square, "mean_loss_with_mask", "wrong_reduction"),
        "over the first response's length": faulty(first_row, "mean_loss_with_mask", "wrong_reduction"),
        "softmax over the batch": faulty(weighted, "mean_loss_with_mask", "wrong_reduction"),
        "without the last response": faulty(
            left_out, "mean_loss_with_mask", "wrong_reduction", "padding_in_denominator"
        ),
        "sorted by value": faulty(
            lambda p, q: right(p, q).sum(-1).sort().values, "sequence_loss", "batch_dependent"
        ),
        "leave-one-out baseline": faulty(
            lambda p, q: (
                u_of(p, q).sum(-1)
                - (u_of(p, q).sum() - u_of(p, q).sum(-1)) / max(1, len(p) - 1) * (len(p) > 1)
            ),
            "sequence_reward",
            "batch_dependent",
        ),
        "batch norm of logits": faulty(
            lambda p, q: kleash.kl((up(p) - up(p).mean((0, 1))).log_softmax(-1), up(q).log_softmax(-1)),
            "logits",
            "batch_dependent",
        ),
        "gradient of the neighbour": faulty(
            lambda p, q: right(p, q).detach() + right(p, q).roll(1, 0) - right(p, q).roll(1, 0).detach(),
            "loss",
            "batch_dependent",
        ),
        "mask inverted": faulty(
            lambda p, q, mask: masked(p, q, ~mask), "loss_with_mask", "padding_counts", "other_divergence"
        ),
    }


def ratios_and_ranges() -> dict[str, FaultyFunction]:
    fragile = {"severity": "fragile"}

    def huber(p: Tensor, q: Tensor) -> Tensor:
        u = u_of(p, q)
        return torch.where(u.abs() < 1, u.square() / 2, u.abs() - 0.5)

    def squashed(p: Tensor, q: Tensor) -> Tensor:
        return 20 * torch.tanh(u_of(p, q) / 20)

    return {
        "log ratio of the weight clamped at 2": faulty(
            lambda p, q, b: (up(p) - up(b)).clamp(-2, 2).exp().detach() * right(p, q),
            "loss_with_behaviour",
            "truncated_ratio",
            "off_policy_gradient",
        ),
        "weights outside 0.2 to 6 dropped": faulty(
            lambda p, q, b: (
                torch.where((rho(p, b) < 0.2) | (rho(p, b) > 6), 0.0, rho(p, b)).detach() * right(p, q)
            ),
            "loss_with_behaviour",
            "truncated_ratio",
            "off_policy_gradient",
        ),
        "weight of a response clamped at 20": faulty(
            lambda p, q, b, mask: (
                (up(p) - up(b)).sum(-1, keepdim=True).exp().clamp(max=20).detach() * u_of(p, q).square() / 2
            ),
            "loss_with_behaviour_and_mask",
            "truncated_ratio",
            "off_policy_gradient",
            "padding_counts",
        ),
        "weight without the token's own": faulty(
            lambda p, q, b: ((up(p) - up(b)).cumsum(-1) - (up(p) - up(b))).exp().detach() * right(p, q),
            "loss_with_behaviour",
            "off_policy_gradient",
            "off_policy_value",
        ),
        "smoothed weight": faulty(
            lambda p, q, b: rho(p, b).sqrt().detach() * right(p, q),
            "loss_with_behaviour",
            "off_policy_gradient",
        ),
        "log ratio clamped at 5 in k3": faulty(
            lambda p, q: k3(u_of(p, q).clamp(-5, 5), 0 * q), "metric", *ANY_VALUE
        ),
        "exponential clamped at 1e6": faulty(
            lambda p, q: (up(q) - up(p)).exp().clamp(max=1e6) - 1 + u_of(p, q),
            "metric",
            "biased_value",
            "wrong_offset",
            "flat_value",
            "infinite_missed",
            **fragile,
        ),
        "reference floored at -30": faulty(
            lambda p, q: u_of(p, up(q).clamp(min=-30)), "reward", "flat_value", **fragile
        ),
        "huber": faulty(huber, "loss", *GRADIENT, "biased_value"),
        "squashed": faulty(squashed, "reward", "flat_value", *GRADIENT, *ANY_VALUE),
        "NaN by comparison": faulty(
            lambda p, q: torch.where(u_of(p, q) == u_of(p, q), right(p, q), 0.0),
            "loss",
            "hides_nan",
            **fragile,
        ),
        "nan_to_num of log-probabilities": faulty(
            lambda p, q: kleash.kl(p.nan_to_num(), q.nan_to_num()),
            "log_probabilities",
            "hides_nan",
            **fragile,
        ),
        "gradient clipped": faulty(
            lambda p, q: (lambda x: x - x.detach() + k3(p, q).detach())(
                u_of(p, q).clamp(-12, 12).square() / 2
            ),
            "loss",
            "dead_gradient",
            **fragile,
        ),
    }


def quantities() -> dict[str, FaultyFunction]:
    def half(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else x.half().float()

    def mixture(p: Tensor, q: Tensor) -> Tensor:
        return kleash.kl(p, torch.logaddexp(up(p) + torch.tensor(0.1).log(), up(q) + torch.tensor(0.9).log()))

    return {
        "skewed": faulty(mixture, WHOLE, *ANY_VALUE),
        "policy detached": faulty(lambda p, q: kleash.kl(p.detach(), q), WHOLE, "detached"),
        "k3 with the gradient of k1": faulty(
            lambda p, q: k3(p, q).detach() + u_of(p, q) - u_of(p, q).detach(), "loss", "zero_gradient"
        ),
        "reference forgotten": faulty(lambda p, q: u_of(p, 0 * q), "reward", "cross_entropy", *ANY_VALUE),
        "top 4, the rest dropped": faulty(
            lambda p, q: (
                lambda at: (p.gather(-1, at).exp() * (p.gather(-1, at) - q.gather(-1, at))).sum(-1)
            )(p.topk(min(4, p.shape[-1]), -1).indices),
            "log_probabilities",
            "truncated",
        ),
        "rounds to three decimals": faulty(
            lambda p, q: u_of(p, q) if p.dtype == torch.float64 else (u_of(p, q) * 1000).round() / 1000,
            "reward",
            "low_precision",
            "cancellation",
        ),
        "negated in bfloat16": faulty(
            lambda p, q: -right(p, q) if p.dtype == torch.bfloat16 else right(p, q),
            "loss",
            "low_precision",
            severity="fragile",
        ),
        "mean over responses and words": faulty(
            lambda p, q: (up(p).exp() * u_of(p, q)).mean(),
            "mean_log_probabilities",
            "wrong_scale",
            *ANY_VALUE,
        ),
    }


FAULTY_FUNCTIONS: Mapping[str, FaultyFunction] = MappingProxyType(
    responses() | calls() | batches() | ratios_and_ranges() | quantities()
)

RIGHT_FUNCTIONS: Mapping[str, tuple[Callable[..., Tensor], str | Convention]] = MappingProxyType(
    {
        "k3 and k1 averaged": (lambda p, q: (k3(p, q) + u_of(p, q)) / 2, "metric"),
        "k1 with its control variate": (lambda p, q: u_of(p, q) + 0.3 * torch.expm1(-u_of(p, q)), "metric"),
        "k1 reward given one token late": (
            lambda p, q: (
                torch.cat([0 * p[:, :1], u_of(p, q)[:, :-1]], -1)
                + (u_of(p, q) * (steps_of(p) == p.shape[-1] - 1))
            ),
            "reward",
        ),
        "prefix weights on k1": (
            lambda p, q, b: (up(p) - up(b)).cumsum(-1).exp() * u_of(p, q),
            "loss_with_behaviour",
        ),
    }
)
