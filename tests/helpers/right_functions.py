"""For every convention a KL implementation without a fault."""

from collections.abc import Callable

import torch
from single_faults import k3, masked, rho, right, u_of, up
from torch import Tensor

import kleash


def weighted(p: Tensor, q: Tensor, behaviour: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """kl_loss as it is meant to be used off-policy."""
    weights = kleash.importance_weights(p.detach(), behaviour, mask, level=level).values
    return kleash.kl_loss(p, q, mask, weights=weights)


def whole_responses(p: Tensor, q: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """The sequence KL, in value and gradient, on- and off-policy."""
    weights = kleash.importance_weights(p.detach(), behaviour, mask, level="prefix").values
    here = kleash.kl_loss(p, q, mask, estimator="k1", weights=weights)
    token_kl = torch.where(mask, (p - q).detach(), 0.0)
    return (here + kleash.future_kl_loss(p, token_kl, mask, weights=weights)).sum(-1)


def head_matmul(p: Tensor, head_p: Tensor, q: Tensor, head_q: Tensor) -> Tensor:
    p, q = (up(x) @ up(head).T for x, head in ((p, head_p), (q, head_q)))
    return kleash.kl(p.log_softmax(-1), q.log_softmax(-1))


def of_logits(p: Tensor, q: Tensor) -> Tensor:
    return kleash.kl(up(p).log_softmax(-1), up(q).log_softmax(-1))


def chosen(value: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, value, 0.0)


def of_masked(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
    keep = mask.unsqueeze(-1)
    return chosen(of_logits(torch.where(keep, p, 0.0), torch.where(keep, q, 0.0)), mask)


def k1_masked(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, u_of(torch.where(mask, p, 0.0), torch.where(mask, q, 0.0)), 0.0)


def log_of(p: Tensor) -> Tensor:
    """Whose gradient has no 0 / 0 where p is 0."""
    return up(p).clamp(min=torch.finfo(torch.float32).tiny).log()


def every(p: Tensor) -> Tensor:
    return torch.ones_like(p, dtype=torch.bool)


def weighted_everywhere(p: Tensor, q: Tensor, behaviour: Tensor) -> Tensor:
    return weighted(p, q, behaviour, every(p))


def reverse_of_logits(p: Tensor, q: Tensor) -> Tensor:
    return of_logits(q, p)


RIGHT: dict[str, Callable[..., Tensor]] = {
    "loss": lambda p, q: kleash.kl_loss(p, q, every(p)),
    "loss_with_mask": kleash.kl_loss,
    "loss_with_behaviour": weighted_everywhere,
    "loss_with_behaviour_and_mask": weighted,
    "sequence_loss": lambda p, q: kleash.kl_loss(p, q, every(p)).sum(-1),
    "sequence_loss_with_mask": lambda p, q, mask: kleash.kl_loss(p, q, mask).sum(-1),
    "sequence_loss_with_behaviour": lambda p, q, b: weighted_everywhere(p, q, b).sum(-1),
    "mean_loss": lambda p, q: right(p, q).mean(),
    "mean_loss_with_mask": lambda p, q, mask: masked(p, q, mask).sum() / mask.sum(),
    "mean_loss_with_behaviour": lambda p, q, b: (rho(p, b).detach() * right(p, q)).mean(),
    "mean_loss_with_behaviour_and_mask": lambda p, q, b, mask: weighted(p, q, b, mask).sum() / mask.sum(),
    "packed_loss": right,
    "packed_loss_with_mask": masked,
    "packed_reward": u_of,
    "packed_metric": k3,
    "reward": u_of,
    "reward_with_mask": k1_masked,
    "sequence_reward": lambda p, q: u_of(p, q).sum(-1),
    "metric": k3,
    "mean_metric_with_mask": lambda p, q, mask: k1_masked(p, q, mask).sum() / mask.sum(),
    "log_probabilities": kleash.kl,
    "mean_log_probabilities": lambda p, q: kleash.kl(p, q).mean(),
    "log_probabilities_with_mask": lambda p, q, mask: chosen(
        kleash.kl(*(torch.where(mask.unsqueeze(-1), x, 0.0) for x in (p, q))), mask
    ),
    "probabilities": lambda p, q: kleash.kl(log_of(p), log_of(q)),
    "kl_div": lambda q, p: (
        kleash.kl(log_of(p), log_of(up(q).exp())).unsqueeze(-1) * torch.eye(p.shape[-1])[0]
    ),
    "kl_div_log_target": lambda q, p: kleash.kl(p, q).unsqueeze(-1) * torch.eye(p.shape[-1])[0],
    "logits": of_logits,
    "logits_with_mask": of_masked,
    "mean_logits": lambda p, q: of_logits(p, q).mean(),
    "mean_logits_with_mask": lambda p, q, mask: of_masked(p, q, mask).sum() / mask.sum(),
    "distillation": reverse_of_logits,
    "mean_distillation": lambda p, q: reverse_of_logits(p, q).mean(),
    "mean_distillation_with_labels": lambda p, q, labels: (
        of_masked(q, p, labels != -100).sum() / (labels != -100).sum()
    ),
    "hidden": head_matmul,
    "heads": kleash.linear_kl,
}
"""For every convention of the table a function that is right."""
