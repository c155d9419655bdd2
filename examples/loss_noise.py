"""The noise of each KL loss, by enumeration of all 256 responses of a toy model.

The table of docs/reference/losses.md: the standard deviation of a single response's value, and of its gradient,
relative to the size of what is estimated.
"""

import torch
from markov_models import MarkovModel, random_markov

from kleash.auditing.toy_distributions import every_sequence
from kleash.divergences import kl
from kleash.estimators import importance_weights, sampled_kl
from kleash.estimators.weights import Level
from kleash.losses import future_kl_loss, kl_loss

POLICY = random_markov(4, seed=0)
REFERENCE, BEHAVIOUR = POLICY.moved(1, apart=0.5), POLICY.moved(2, apart=0.3)
TOKENS = every_sequence(4, 4)
EVERY = torch.ones(TOKENS.shape, dtype=torch.bool)
LOSSES: dict[str, tuple[bool, bool, Level | None]] = {
    "per token, sampled": (False, False, None),
    "per token, exact": (True, False, None),
    "of responses, sampled": (False, True, None),
    "of responses, exact": (True, True, None),
    '… off-policy, sampled, "prefix"': (False, True, "prefix"),
    '… off-policy, sampled, "sequence"': (False, True, "sequence"),
    '… off-policy, exact, "before"': (True, True, "before"),
    '… off-policy, exact, "prefix"': (True, True, "prefix"),
}
"""Whether the KL of each token is exact, whether later tokens count, and the level of importance weights."""


def noise(exact: bool, of_responses: bool, level: Level | None) -> tuple[float, float]:
    """Standard deviation of one response's value, and of its gradient, over the size of the mean."""
    policy, reference, behaviour = (model.token_logp(TOKENS) for model in (POLICY, REFERENCE, BEHAVIOUR))
    drawn, weights = policy.sum(-1).exp(), None
    if level is not None:
        drawn = behaviour.sum(-1).exp()
        weights = importance_weights(policy, behaviour, EVERY, level=level).values
    logits = POLICY.then.clone().requires_grad_()
    model = MarkovModel(first=POLICY.first, then=logits.log_softmax(-1))
    token_logp = model.token_logp(TOKENS)
    if exact:
        token_kl = kl(model.next_logp(TOKENS), REFERENCE.next_logp(TOKENS))
        loss = token_kl if weights is None else weights * token_kl
    else:
        token_kl = sampled_kl(policy, reference)
        loss = kl_loss(token_logp, reference, EVERY, weights=weights)
    if of_responses:
        loss = loss + future_kl_loss(token_logp, token_kl, EVERY, weights=weights)
    value = loss.sum(-1)
    one_each = torch.eye(len(value), dtype=value.dtype)
    each = torch.autograd.grad(value, logits, one_each, is_grads_batched=True)[0].flatten(1)
    value, mean = value.detach(), drawn @ each
    of_value = (drawn @ (value - drawn @ value).square()).sqrt() / (drawn @ value)
    of_gradient = (drawn @ (each - mean).square().sum(-1)).sqrt() / mean.norm()
    return of_value.item(), of_gradient.item()


def rows() -> list[str]:
    """The rows of the table."""
    return [
        f"| {name} | {of_value:.2f} | {of_gradient:.2f} |"
        for name in LOSSES
        for of_value, of_gradient in [noise(*LOSSES[name])]
    ]


if __name__ == "__main__":
    print("\n".join(rows()))
