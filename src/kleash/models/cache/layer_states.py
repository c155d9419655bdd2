"""The final norm of a model, its final hidden states, and the comparison of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError
from kleash.extras import suppress_library_output
from kleash.models.pair import Model

STATE_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest relative error of nine in ten rows that is rounding, by dtype: another implementation of the same model."""
ROW_TOLERANCES = {torch.float64: 0.05, torch.float32: 0.05, torch.float16: 0.5, torch.bfloat16: 0.5}
"""Largest relative error of any row, by dtype: rounding may send a token to other experts."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FinalNorm:
    """The module of a network that turns the last layer's output into the final hidden states."""

    module: Any
    """None if the network has no final norm."""

    def __call__(self, states: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """Final hidden states of rows that are before the norm."""
        if self.module is None:
            return states
        weight = next(self.module.parameters(), None)
        with torch.inference_mode():
            if weight is None:
                return self.module(states)
            return self.module(states.to(weight.device, weight.dtype))


def num_hidden_layers(model: Model) -> int:
    """The number of layers that a model's configuration states.

    Raises:
        ModelError: if it states none.
    """
    number = getattr(model.network.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if not isinstance(number, int):
        raise ModelError(f"{model.path} states no num_hidden_layers; its layers cannot be checked")
    return number


def find_final_norm(model: Model, token_ids: Sequence[int]) -> FinalNorm:
    """Find the final norm of a model by running it on a few tokens.

    The final norm is the module outside the layers whose output is the backbone's final hidden state. A network
    without such a module has no final norm.

    Raises:
        ModelError: if the module does not give the same for its input again.
    """
    calls: list[tuple[Any, Tensor, Tensor]] = []

    def record(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            calls.append((module, inputs[0], output))

    handles = [
        module.register_forward_hook(record)
        for name, module in model.backbone.named_modules()
        if name and not any(part.isdigit() for part in name.split(".")) and not list(module.children())
    ]
    try:
        final = final_states(model, token_ids)
    finally:
        for handle in handles:
            handle.remove()
    for module, before, after in reversed(calls):
        if after is final or (after.shape == final.shape and torch.equal(after, final)):
            norm = FinalNorm(module=module)
            if not rows_agree(norm(before[0, -1:]), final[0, -1:], model.dtype):
                break
            return norm
    else:
        return FinalNorm(module=None)
    raise ModelError(
        f"the final norm of {model.path} ({type(module).__name__}) does not repeat its output; run kleash cache "
        "without --from-hidden-states"
    )


def final_states(model: Model, token_ids: Sequence[int]) -> Float[Tensor, "1 tokens dim"]:
    """The final hidden states of a model for the input tokens of one sequence."""
    ids = torch.tensor([list(token_ids)], device=model.device)
    with torch.inference_mode(), model.activate_adapter(), suppress_library_output():
        return model.backbone(input_ids=ids, use_cache=False).last_hidden_state


def row_errors(rows: Tensor, expected: Tensor) -> Tensor:
    """The relative error of each row."""
    rows, expected = rows.double(), expected.to(rows.device).double()
    errors = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
    return torch.where(errors.isnan(), torch.inf, errors)


def rows_agree(rows: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether rows differ from expected ones by rounding only."""
    return errors_agree(row_errors(rows, expected), dtype)


def errors_agree(errors: Tensor, dtype: torch.dtype) -> bool:
    """Whether the errors of rows are rounding."""
    return bool(errors.quantile(0.9) <= STATE_TOLERANCES[dtype] and errors.max() <= ROW_TOLERANCES[dtype])
