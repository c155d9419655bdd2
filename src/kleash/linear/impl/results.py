"""What every implementation gives back, and how it asks an objective."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.autodiff import refuse_transforms
from kleash.errors import ShapeError
from kleash.linear.statistics import TokenTerms

Needed: TypeAlias = tuple[bool, ...]
"""Of hidden states, weight and bias of p, and of q: which gradients are wanted."""
Tensors: TypeAlias = tuple[Tensor | None, ...]
"""Hidden states, weight and bias of p, and of q."""
Objective: TypeAlias = Callable[[TokenTerms, slice], Tensor]
"""From the terms of some tokens, and which of all tokens in a row they are, to a loss for each."""


class ValueAndGrad(NamedTuple):
    """A divergence and its gradient."""

    per_token: Float[Tensor, " tokens"]
    """Of each token that was read; 0 for the others."""
    gradients: tuple[Tensor | None, ...]
    """Of the weighted sum, in hidden states, weight and bias of p, and of q; None where it is not needed. Each in
    its ``gradient_dtype``."""


class ObjectiveResult(NamedTuple):
    """What an objective made of the tokens."""

    loss: Float[Tensor, ""]
    terms: TokenTerms
    gradients: tuple[Tensor | None, ...]
    """Of the loss, in hidden states, weight and bias of p, and of q; None where it is not needed. Each in its
    ``gradient_dtype``."""


def gradient_dtype(tensor: Tensor) -> torch.dtype:
    """What a tensor's gradient is kept in until the backward pass: its own dtype, but float32 for float16.

    What float16 cannot hold may be what a scaled loss lifts into its range; autograd gives each its own dtype then.
    """
    return torch.float32 if tensor.dtype == torch.float16 else tensor.dtype


def summed_in_p(place: int, tensors: Tensors, needed: Needed) -> bool:
    """Whether the gradient of p's tensor at this place is that of q's, too: one half-precision tensor of both.

    Where the two models nearly agree, what they give such a tensor nearly cancels: their sum is rounded once, in
    its float32, and not each for itself.
    """
    mine, its = tensors[place], tensors[place + 3]
    if mine is None or mine is not its:
        return False
    return needed[place] and needed[place + 3] and mine.dtype in (torch.bfloat16, torch.float16)


def objective_value_and_grad(
    objective: Objective, terms: TokenTerms, where: slice
) -> tuple[Tensor, TokenTerms]:
    """The sum of the losses, and its derivative in each term.

    Raises:
        ShapeError: if there is not one loss for each token.
    """
    with torch.enable_grad():
        leaves = TokenTerms(*(x.clone().requires_grad_() for x in terms))
        losses = objective(leaves, where)
        if losses.shape != leaves.kl.shape:
            raise ShapeError(
                f"the objective was given {len(leaves.kl)} tokens and gave losses of shape "
                f"{tuple(losses.shape)}; give one for each token"
            )
        refuse_transforms(
            "linear_objective",
            "its losses are differentiated in its terms alone; detach what else they read",
            losses,
        )
        total = losses.sum()
    if not total.requires_grad:
        return total, TokenTerms(*(torch.zeros_like(x) for x in terms))
    return total.detach(), TokenTerms(
        *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    )


def combined(terms: TokenTerms, coefficients: TokenTerms) -> Float[Tensor, " tokens"]:
    """The sum of each token's terms times their coefficients; one whose coefficient is 0 is left out, NaN or not."""
    return torch.stack(
        [torch.where(c != 0, x, 0.0) * c for x, c in zip(terms, coefficients, strict=True)]
    ).sum(0)
