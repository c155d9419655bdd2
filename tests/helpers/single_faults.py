"""KL implementations with one fault each, and some with none, as people write them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import log
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, kl_div

import kleash
from kleash.auditing import CONVENTIONS, Convention


def up(x: Tensor) -> Tensor:
    """At least float32, before anything is subtracted."""
    return x if x.dtype == torch.float64 else x.float()


def u_of(p: Tensor, q: Tensor) -> Tensor:
    return up(p) - up(q)


def right(p: Tensor, q: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2."""
    u = u_of(p, q)
    k3 = torch.expm1(-u) + u
    return u.square() / 2 - (u.square() / 2).detach() + k3.detach()


def masked(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, right(torch.where(mask, p, 0.0), torch.where(mask, q, 0.0)), 0.0)


def k3(p: Tensor, q: Tensor) -> Tensor:
    """Careful near 0, where the plain expression cancels."""
    return kleash.sampled_kl(p, q, "k3")


def rho(p: Tensor, behaviour: Tensor) -> Tensor:
    return (up(p) - up(behaviour)).exp()


def textbook(p: Tensor, q: Tensor) -> Tensor:
    return (up(p).exp() * u_of(p, q)).sum(-1)


def clamped_before(p: Tensor, q: Tensor) -> Tensor:
    d = (up(q) - up(p)).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)


def clamped_after(p: Tensor, q: Tensor) -> Tensor:
    d = up(q) - up(p)
    return (d.exp() - d - 1).clamp(-10, 10)


def renormalised_top(p: Tensor, q: Tensor, k: int = 3, *, both: bool = True) -> Tensor:
    best = p.topk(min(k, p.shape[-1] - 1), dim=-1).indices
    p, q = (up(x).gather(-1, best) for x in (p, q))
    p, q = p.log_softmax(-1), q.log_softmax(-1) if both else q
    return (p.exp() * (p - q)).sum(-1)


def dropped_tail(p: Tensor, q: Tensor, k: int = 3, dropped: int = 1) -> Tensor:
    best = q.topk(min(k, p.shape[-1] - dropped), dim=-1).indices
    p, q = (up(x).gather(-1, best) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1)


def flat_with_labels(student: Tensor, teacher: Tensor, labels: Tensor, ignored: int = -100) -> Tensor:
    """The mean of KL(teacher ‖ student) over the positions [positions, vocab] whose label is not ``ignored``."""
    teacher, student = (x[labels != ignored].log_softmax(-1) for x in (up(teacher), up(student)))
    return kleash.kl(teacher, student).mean()


def at_labels(p: Tensor, q: Tensor, labels: Tensor) -> Tensor:
    """k3 of the tokens that are labels, from the logits of all positions."""
    counted = labels != -100
    p, q = (up(x)[counted].log_softmax(-1).gather(-1, labels[counted, None]) for x in (p, q))
    return k3(p, q).mean()


def with_counts(*, ref: Tensor, logps: Tensor, response_mask: Tensor, count: Tensor) -> dict[str, Tensor]:
    return {"kl": masked(logps, ref, response_mask.bool()).sum() / count, "count": count}


class Planted(NamedTuple):
    function: Callable[..., Any]
    convention: str | Convention
    faults: set[str]
    """The faults that the audit names, no more and no less."""
    notes: frozenset[str] | set[str] = frozenset()
    """Notes that it names too, among others."""
    arguments: Mapping[str, Any] = MappingProxyType({})


WHOLE = CONVENTIONS["log_probabilities"]
JEFFREYS = replace(WHOLE, name="jeffreys", claims="jeffreys")
NAN_AT_ZEROS = {"nan_value"}
LABELS = "f(logits_p.flatten(0, 1), logits_q.flatten(0, 1), labels.flatten()) -> mean"
SHIFTED = "f(F.pad(logits_p, (0, 0, 0, 1)), F.pad(logits_q, (0, 0, 0, 1)), F.pad(labels, (1, 0), value=-100))"
OF_ARRAYS = "f(token_logp.detach().numpy(), token_logq.numpy()) ->"
HALF_RIGHT = {"biased_value", "wrong_gradient", "dead_gradient"}

FAULTS: dict[str, Planted] = {
    "wrong direction": Planted(lambda p, q: kleash.kl(q, p), WHOLE, {"wrong_direction", "wrong_gradient"}),
    "wrong direction, sampled": Planted(
        lambda p, q: u_of(q, p).exp() * u_of(q, p), "metric", {"wrong_direction"}, {"negative_values"}
    ),
    "a cross-entropy for one KL of two": Planted(
        lambda p, q: (kleash.kl(p, q) - torch.where(q.isinf(), 0.0, up(q).exp() * up(p)).sum(-1)) / 2,
        *(JEFFREYS, {"biased_value", "wrong_gradient"}),
    ),
    "wrong sign": Planted(lambda p, q: -kleash.kl(p, q), WHOLE, {"wrong_sign", "wrong_gradient"}),
    "temperature 2 without its square": Planted(
        lambda p, q: kleash.kl(*((up(x) / 2).log_softmax(-1) for x in (p, q))),
        *("logits", {"other_temperature", "wrong_gradient"}),
    ),
    "twice the mean over the vocabulary": Planted(
        lambda p, q: 2 * kleash.kl(p, q) / p.shape[-1], WHOLE, {"wrong_scale", "wrong_gradient"}
    ),
    "minus log p": Planted(lambda p, q: -up(p), "loss", {"cross_entropy", "zero_gradient"}),
    "a log-likelihood beside the sum over a certain p": Planted(
        lambda p, q, t: textbook(p, q) - up(p).gather(-1, t.unsqueeze(-1)).squeeze(-1),
        *("f(logp, logq, tokens)", set(), {"cross_entropy"}),
    ),
    "k2 without its half": Planted(
        lambda p, q: u_of(p, q).square(), "loss", {"wrong_scale", "wrong_gradient"}
    ),
    "minus k2": Planted(lambda p, q: -u_of(p, q).square(), "loss", {"wrong_sign", "wrong_gradient"}),
    "divided by the batch": Planted(
        lambda p, q: right(p, q) / len(p), "loss", {"batch_dependent", "wrong_scale", "wrong_gradient"}
    ),
    "centred over the unmasked tokens": Planted(
        lambda p, q, mask: (k := torch.where(mask, u_of(p, q), 0.0).square()) - mask * k[mask].mean(),
        *("loss_with_mask", {"batch_dependent", "biased_value", "wrong_gradient"}),
    ),
    "ratio clamped at 2": Planted(
        lambda p, q: (-u_of(p, q)).clamp(max=0.7).exp() - 1 + u_of(p, q),
        "loss",
        {"biased_value", "wrong_gradient"},
    ),
    "mean over the steps for a sum": Planted(
        lambda p, q: right(p, q).mean(-1), "sequence_loss", {"wrong_scale"}, {"nan_value", "token_gradient"}
    ),
    "dropped weight": Planted(
        lambda p, q, behaviour: right(p, q),
        "loss_with_behaviour",
        {"off_policy_value", "off_policy_gradient"},
    ),
    "the weight in the gradient only": Planted(
        lambda p, q, b: k3(p, q).detach() + (rho(p, b) * u_of(p, q)).detach() * (up(p) - up(p).detach()),
        "loss_with_behaviour",
        set(),
        {"off_policy_value"},
    ),
    "no weight to drop": Planted(right, "loss", set(), {"off_policy_value", "off_policy_gradient"}),
    "multiplied mask": Planted(
        lambda p, q, mask: right(p * mask, q * mask), "loss_with_mask", {"nan_from_padding"}
    ),
    "mask forgotten": Planted(
        lambda p, q, label_mask: right(p, q), "loss_with_mask", {"padding_counts", "nan_from_padding"}
    ),
    "mean over padding": Planted(
        lambda p, q, mask: masked(p, q, mask).mean(), "mean_loss_with_mask", {"padding_in_denominator"}
    ),
    "mean of means": Planted(
        lambda p, q, m: (masked(p, q, m).sum(-1) / m.sum(-1)).mean(),
        "mean_loss_with_mask",
        {"nan_from_empty_response"},
    ),
    "an array in bits": Planted(lambda p, q: (p - q) / log(2), f"{OF_ARRAYS} metric", {"wrong_scale"}),
    "a number of numpy": Planted(lambda p, q: (p - q).mean(), f"{OF_ARRAYS} mean metric", set()),
    "a float": Planted(lambda p, q, m: masked(p, q, m)[m].mean().item(), "mean_metric_with_mask", set()),
    "clamp before exp": Planted(
        clamped_before, "loss", HALF_RIGHT, {"flat_value", "infinite_missed", "cancellation"}
    ),
    "clamp after exp": Planted(clamped_after, "loss", HALF_RIGHT | {"nan_gradient"}, {"flat_value"}),
    "clamped far out": Planted(
        lambda p, q: torch.where((u := u_of(p, q)).abs() < 30, u, 30 * u.sign()),
        *("reward", {"flat_value", "hides_nan"}, {"infinite_missed"}),
    ),
    "log q floored": Planted(
        lambda p, q: kleash.kl(p, q.clamp(min=-20)),
        WHOLE,
        {"flat_value", "biased_value"},
        {"infinite_missed"},
    ),
    "rounded before it upcasts": Planted(
        lambda p, q: ((p - q).float() if p.dtype == torch.bfloat16 else p - q).square() / 2,
        *("loss", {"low_precision"}, {"biased_value"}),
    ),
    "rounded always": Planted(lambda p, q: right(p.bfloat16(), q.half()), "loss", {"low_precision"}),
    "returned in bfloat16": Planted(lambda p, q: p - q, "reward", set(), {"low_precision"}),
    "k1 in the loss": Planted(u_of, "loss", {"zero_gradient"}, {"negative_values"}),
    "k3 in the loss": Planted(k3, "loss", {"wrong_gradient"}),
    "k2 in the loss": Planted(lambda p, q: u_of(p, q).square() / 2, "loss", set(), {"biased_value"}),
    "score function with a biased value": Planted(
        lambda p, q: u_of(p, q).detach() * up(p), "loss", set(), {"biased_value", "negative_values"}
    ),
    "k3 as a reward": Planted(k3, "reward", {"wrong_gradient"}),
    "k2 with the ratio attached": Planted(
        lambda p, q, b: rho(p, b) * u_of(p, q).square() / 2,
        "loss_with_behaviour",
        {"biased_value", "wrong_gradient"},
    ),
    "k3 without its -1": Planted(
        lambda p, q: (-u_of(p, q)).exp() + u_of(p, q), "loss", {"wrong_offset", "wrong_gradient"}
    ),
    "detached": Planted(lambda p, q: k3(p, q).detach(), "loss", {"detached"}),
    "renormalised top-k": Planted(renormalised_top, WHOLE, {"truncated", "wrong_gradient"}),
    "top-k of the other side, the rest dropped": Planted(
        dropped_tail, WHOLE, {"truncated", "wrong_gradient", "nan_value"}, {"negative_values"}
    ),
    "top-k of more tokens than there are on most pairs": Planted(
        partial(dropped_tail, k=20, dropped=0), WHOLE, {"biased_value", "nan_value"}
    ),
    "renormalised on one side": Planted(
        partial(renormalised_top, both=False), WHOLE, {"truncated", "wrong_gradient"}
    ),
    "KLs from the mixture": Planted(
        lambda p, q: (
            (kleash.kl(m := torch.logaddexp(up(p), up(q)) - log(2), up(p)) + kleash.kl(m, up(q))) / 2
        ),
        *("f(logp, logq) -> jensen_shannon", {"other_divergence", "wrong_gradient", "nan_gradient"}),
    ),
    "distance of SciPy": Planted(
        lambda p, q: kleash.jensen_shannon(p, q).sqrt(),
        *("f(logp, logq) -> jensen_shannon metric", {"other_divergence"}),
    ),
    "labels that refuse -100": Planted(
        lambda p, q, t: k3(*(up(x).log_softmax(-1).gather(-1, t.unsqueeze(-1)) for x in (p, q))).mean(),
        *(LABELS, {"wrong_gradient", "nan_gradient"}, {"cannot_be_called"}),
    ),
    "a log-likelihood beside a KL that is bounded on one side": Planted(
        lambda p, q, t: kleash.kl(q, p) - up(p).gather(-1, t.unsqueeze(-1)).squeeze(-1),
        *("f(logp, logq, tokens) -> reverse_kl metric", {"biased_value"}),
    ),
    "the teacher against itself": Planted(
        lambda p, q: (
            kl_div(up(q).log_softmax(-1), up(q).softmax(-1), reduction="none").sum(-1) + 0 * p.sum(-1)
        ),
        *("distillation", {"other_divergence", "zero_gradient", "nan_value"}),
    ),
    "bounded as it should be": Planted(
        kleash.jensen_shannon, replace(WHOLE, name="js", claims="jensen_shannon"), set(), {"flat_value"}
    ),
    "symmetric in name": Planted(
        lambda p, q: textbook(p, q) + (up(q).exp() * u_of(p, q)).sum(-1),
        *(JEFFREYS, {"other_divergence", "wrong_gradient", "nan_value"}),
    ),
    "cross-entropy": Planted(
        lambda p, q: -(up(p).exp() * up(q)).sum(-1), WHOLE, {"cross_entropy", "wrong_gradient", "nan_value"}
    ),
    "cross-entropy of the teacher": Planted(
        lambda p, q: -(up(q).softmax(-1) * up(p).log_softmax(-1)).sum(-1),
        *("distillation", {"nan_value"}, {"cross_entropy"}),
    ),
    "constant for each token of a reward": Planted(
        lambda p, q: u_of(p, q) + 0.1, "reward", {"wrong_offset"}, {"negative_values"}
    ),
    "surrogate of value zero": Planted(
        lambda p, q: u_of(p, q).detach() * (up(p) - up(p).detach()), "loss", set(), {"other_divergence"}
    ),
    "mean without the first token, which may be the only one": Planted(
        lambda p, q, mask: masked(p, q, mask)[:, 1:].sum() / mask[:, 1:].sum(),
        *("mean_loss_with_mask", {"biased_value", "wrong_gradient", "nan_value"}),
    ),
    "detached weights of the sum": Planted(
        lambda p, q: (up(p).exp().detach() * u_of(p, q)).sum(-1), WHOLE, {"zero_gradient", "nan_value"}
    ),
    "dropout of the logits": Planted(
        lambda p, q: kleash.kl(dropout(up(p), 0.1).log_softmax(-1), up(q).log_softmax(-1)),
        *("logits", {"biased_value", "wrong_gradient", "nan_value"}, {"random"}),
    ),
    "labels": Planted(flat_with_labels, f"{LABELS} reverse_kl", set(), {"token_gradient"}),
    "labels of another number": Planted(
        partial(flat_with_labels, ignored=-1),
        f"{LABELS} reverse_kl",
        {"padding_counts", "padding_in_denominator", "nan_from_padding"},
    ),
    "labels are shifted inside": Planted(
        lambda p, q, labels: flat_with_labels(p[:, :-1], q[:, :-1], labels[:, 1:]),
        *(f"{SHIFTED} -> mean reverse_kl", set()),
    ),
    "labels are overwritten": Planted(
        lambda p, q, labels: flat_with_labels(p, q, labels.clamp_(min=-1), -1),
        *("f(logits_p, logits_q, labels) -> reverse_kl mean", {"changes_inputs"}),
    ),
    "tokens are read at the labels": Planted(at_labels, LABELS, {"wrong_gradient", "nan_gradient"}),
    "keywords and a dictionary": Planted(
        with_counts,
        "f(ref=token_logq, logps=token_logp, response_mask=mask.long(), count=mask.sum())['kl'] -> mean",
        set(),
    ),
    "a list, the reference first": Planted(
        lambda q, p: [*(q - p)], "torch.stack(f(token_logq, token_logp)) -> minus reward", set()
    ),
    "exp(t)(t - l)": Planted(textbook, WHOLE, NAN_AT_ZEROS, {"cancellation"}),
    "probability twice": Planted(lambda p, q: up(p).exp() * u_of(p, q), "metric", {"weighted_twice"}),
    "probabilities wanted": Planted(
        lambda p, q: (up(p) * (up(p) / up(q)).log()).sum(-1),
        replace(WHOLE, place="metric"),
        {"biased_value", "nan_value"},
    ),
    "probability space overflows": Planted(
        lambda p, q: (
            (up(p).exp() * (up(p).exp() / (up(q).exp() * 1e-30)).log()).sum(-1) - torch.tensor(1e30).log()
        ),
        replace(WHOLE, place="metric"),
        {"infinite_value", "nan_value"},
    ),
    "reduced by batchmean": Planted(
        partial(kl_div, reduction="batchmean"),
        replace(CONVENTIONS["kl_div"], gives="mean"),
        {"wrong_scale", "nan_value", "nan_gradient", "low_precision"},
    ),
    "F.kl_div": Planted(
        kl_div, "kl_div", {"nan_value", "nan_gradient", "low_precision"}, arguments={"reduction": "none"}
    ),
}


def refuses_infinity(p: Tensor, q: Tensor) -> Tensor:
    if not q.isfinite().all():
        raise ValueError("q is not finite")
    return right(p, q)


FAULTS["refuses infinity"] = Planted(refuses_infinity, "loss", set(), {"cannot_be_called"})
