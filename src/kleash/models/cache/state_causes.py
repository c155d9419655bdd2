"""The cause of saved hidden states that are not their model's: norm, layer, shift, single rows, another model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.models.cache.layer_states import (
    ROW_TOLERANCES,
    STATE_TOLERANCES,
    FinalNorm,
    LayerStates,
    errors_agree,
    row_errors,
    rows_agree,
)
from kleash.models.cache.saved_records import SavedRequest

SMALL_SHIFTS = 8
"""Tokens of a shift that is tried in any case."""
SMALLEST_SHIFT_ROWS = 4
"""Rows that must overlap for a shift to be told from chance."""
NEARER = 0.5
"""Rows are those of another layer if their median error to it is less than this share of that to the stated layer. The
error of rounding is as large to both, however little a layer does."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StateComparison:
    """The saved rows of a sequence beside those that the model computes."""

    request: SavedRequest
    rows: Float[Tensor, "tokens layers dim"]
    """As they were saved, on the model's device and in its dtype."""
    computed: LayerStates
    norm: FinalNorm
    layers: tuple[int, ...] | None
    """The layers that the rows should be; None for final hidden states."""
    dtype: torch.dtype
    name: str
    """The model's name."""

    def errors(self) -> Float[Tensor, " tokens"]:
        """The relative error of each row's final hidden state."""
        last = self.rows[:, -1]
        return row_errors(last if self.layers is None else self.norm(last), self.computed.final)

    def is_after_norm(self) -> bool:
        """Whether rows that should be before the final norm are after it.

        A norm with a weight of 1 leaves such rows as they are, so that ``errors`` does not show it.
        """
        if self.layers is None or self.norm.module is None:
            return False
        last = self.rows[:, -1]
        return rows_agree(last, self.computed.final, self.dtype) and not rows_agree(
            last, self.computed.layers[-1], self.dtype
        )

    def matching_layer(self, column: int, shift: int = 0) -> int | None:
        """The layer after which the rows of a column are, moved by ``shift`` tokens; None if after none."""
        normed = self.norm(self.rows[:, column])
        errors = [_shifted_errors(normed, self.norm(layer), shift) for layer in self.computed.layers]
        best = min(range(len(errors)), key=lambda layer: float(errors[layer].quantile(0.9)))
        return best if errors_agree(errors[best], self.dtype) else None

    def nearest_layer(self, column: int, stated: int) -> int | None:
        """The layer after which the rows of a column are: the stated one, unless another is much nearer."""
        normed = self.norm(self.rows[:, column])
        errors = [row_errors(normed, self.norm(layer)) for layer in self.computed.layers]
        medians = [float(error.median()) for error in errors]
        if not errors_agree(errors[stated], self.dtype):
            return self.matching_layer(column)
        best = min(range(len(medians)), key=lambda layer: medians[layer])
        return best if medians[best] < NEARER * medians[stated] else stated

    def shifts(self) -> list[int]:
        """Numbers of tokens by which the rows may be shifted, the smallest first: all small ones, and those by which a
        single row is nearest to one of the model's."""
        last = self.rows[:, -1]
        length = len(last)
        picks = [length // 4, length // 2, 3 * length // 4]
        candidates: set[int] = {*range(-SMALL_SHIFTS, SMALL_SHIFTS + 1)}
        for states in (last,) if self.layers is None else (last, self.norm(last)):
            distances = torch.cdist(states[picks].double(), self.computed.final.double())
            candidates |= {best - row for row, best in zip(picks, distances.argmin(-1).tolist(), strict=True)}
        overlap = min(SMALLEST_SHIFT_ROWS, length)
        return sorted((shift for shift in candidates if length - abs(shift) >= overlap), key=_by_size)

    def wrong_layer_list(self) -> str | None:
        """A sentence if the rows of some layer are those of another; None if the list is right."""
        layers = self.layers or ()
        actual = [self.nearest_layer(column, layer) for column, layer in enumerate(layers)]
        if all(layer is None or layer == stated for layer, stated in zip(actual, layers, strict=True)):
            return None
        return _wrong_layers(self.request, actual, layers)


def explain_states(comparison: StateComparison) -> str | None:
    """A sentence with the cause of rows that are the model's, but of another place; None if they are not."""
    request, rows, computed, layers = (
        comparison.request,
        comparison.rows,
        comparison.computed,
        comparison.layers,
    )
    dtype, name = comparison.dtype, comparison.name
    last, depth = rows[:, -1], len(computed.layers) - 1
    for shift in comparison.shifts():
        where = _shift_clause(shift)
        if errors_agree(_shifted_errors(last, computed.final, shift), dtype):
            if layers is None:
                return f"{request}: {where}; let the engine save it again"
            return (
                f"{request} holds hidden states that are already after the final norm of {name}"
                f"{', and ' + where if shift else ''}; vLLM saves them before it: give the files as its connector "
                "wrote them"
            )
        layer = comparison.matching_layer(-1, shift)
        if layer is None:
            continue
        if layers is None:
            return (
                f"{request} holds hidden states before the final norm of {name} (after layer {layer} of {depth})"
                f"{', and ' + where if shift else ''}; SGLang returns those after it: give its responses unchanged"
            )
        if layer != layers[-1]:
            columns = [comparison.matching_layer(column, shift) for column in range(rows.shape[1])]
            return _wrong_layers(request, columns, layers)
        return f"{request}: {where}; let the engine save it again"
    return None


def explain_rows(comparison: StateComparison) -> str:
    """A sentence about rows of which some or all are not the model's."""
    request, dtype, name, errors = (
        comparison.request,
        comparison.dtype,
        comparison.name,
        comparison.errors(),
    )
    wrong = (errors > ROW_TOLERANCES[dtype]).nonzero().flatten().tolist()
    if errors.quantile(0.5) <= STATE_TOLERANCES[dtype] and wrong:
        return (
            f"{len(wrong)} of {len(errors)} rows of {request} are not those of {name}, the first being row "
            f"{wrong[0]}; let the engine save it again, without chunked prefill and prefix caching"
        )
    return (
        f"{request} differs from the hidden states of {name} by {float(errors.quantile(0.9)):.2g} (relative, nine "
        f"in ten rows; rounding in {str(dtype).removeprefix('torch.')} is at most {STATE_TOLERANCES[dtype]:g}) at "
        "every layer: give the weights, the adapter and the quantisation that the engine ran as --reference"
    )


def _wrong_layers(request: SavedRequest, actual: Sequence[int | None], layers: Sequence[int]) -> str:
    shown = ",".join("?" if layer is None else str(layer) for layer in actual)
    return (
        f"{request} holds the hidden states after layers {shown} and --layers is {','.join(map(str, layers))}; give "
        f"the engine's eagle_aux_hidden_state_layer_ids, of which the last must be {layers[-1]}"
    )


def _shifted_errors(rows: Tensor, expected: Tensor, shift: int) -> Tensor:
    """Errors of row t against the expected row t + shift, where both exist."""
    count = len(rows) - abs(shift)
    return row_errors(rows[max(0, -shift) :][:count], expected[max(0, shift) :][:count])


def _by_size(shift: int) -> tuple[int, int]:
    return abs(shift), shift


def _shift_clause(shift: int) -> str:
    direction = "later" if shift > 0 else "earlier"
    return f"its rows are shifted: row t is that of the token {abs(shift)} {direction}"
