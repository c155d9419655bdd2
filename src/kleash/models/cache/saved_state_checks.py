"""Checks of saved hidden states against their model: layers, final norm, rows, log-probabilities."""

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError, OptionError
from kleash.models.cache.layer_states import (
    FinalNorm,
    errors_agree,
    layer_states,
    num_hidden_layers,
    row_errors,
)
from kleash.models.cache.saved_logps import explain_logps, logps_agree, token_logps
from kleash.models.cache.saved_records import SavedRequest
from kleash.models.cache.saved_states import SavedStates, check_rows
from kleash.models.cache.state_causes import StateComparison, explain_rows, explain_states
from kleash.models.pair import Model
from kleash.sources.sequences import TokenSequence

EXCHANGED_REQUESTS = 16
"""Requests of one length whose tokens are tried for the rows of another."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedStateChecker:
    """Compares saved hidden states with the model that they should be of."""

    saved: SavedStates
    model: Model
    """The reference, loaded."""
    norm: FinalNorm
    layers: tuple[int, ...] | None
    """The layer of each row of a token, 0 for the embeddings; None for final hidden states."""

    def __post_init__(self) -> None:
        """Check the list of layers, the width of the rows and the token ids.

        Raises:
            OptionError: if the list is not that of the files.
            ModelError: if the files cannot be of the model.
        """
        saved, model = self.saved, self.model
        assert model.head.weight is not None
        saved.check_shape(model.head.weight.shape[1], model.vocab_size, model.path)
        if saved.is_after_norm and self.layers is not None:
            raise OptionError(
                f"{saved.folder} holds the final hidden states that SGLang returns, without a list of layers; leave "
                "--layers out"
            )
        if saved.is_after_norm:
            return
        depth = num_hidden_layers(model)
        if self.layers is None:
            raise OptionError(
                f"the files in {saved.folder} do not say which layers they hold; give --layers with the engine's "
                f"eagle_aux_hidden_state_layer_ids, of which the last must be {depth}"
            )
        shown = ",".join(map(str, self.layers))
        if len(self.layers) != saved.num_layers:
            raise OptionError(
                f"--layers {shown} names {len(self.layers)} layers and the files in {saved.folder} hold "
                f"{saved.num_layers}; give the engine's eagle_aux_hidden_state_layer_ids"
            )
        if self.layers[-1] != depth:
            raise OptionError(
                f"--layers {shown} ends with {self.layers[-1]} and {model.path} has {depth} layers: the last is "
                f"missing; let the engine save layer {depth} as well"
                if self.layers[-1] < depth
                else f"--layers {shown} ends with {self.layers[-1]} and {model.path} has only {depth} layers; give the "
                "engine's eagle_aux_hidden_state_layer_ids"
            )

    def final_states(self, rows: Float[Tensor, "tokens layers dim"]) -> Float[Tensor, "tokens dim"]:
        """The final hidden states of rows of a file, on the model's device and in its dtype."""
        last = rows[:, -1].to(self.model.device, self.model.dtype)
        return last if self.layers is None else self.norm(last)

    def check_states(self, request: SavedRequest, sequence: TokenSequence) -> float:
        """Check the hidden states of a request against those that the model computes itself.

        Args:
            request: the request that holds the sequence.
            sequence: its input tokens are compared.

        Returns:
            The median relative error of a row, |saved − computed| / |computed|, after the final norm.

        Raises:
            ModelError: if the rows are another layer's, shifted, on the other side of the norm, or of another model.
        """
        token_ids = (*sequence.prompt_ids, *sequence.response_ids)[:-1]
        rows = self.saved.read(request, 0, len(token_ids))
        check_rows(rows, request, 0)
        comparison = StateComparison(
            request=request,
            rows=rows.to(self.model.device, self.model.dtype),
            computed=layer_states(self.model, self.norm, token_ids),
            norm=self.norm,
            layers=self.layers,
            dtype=self.model.dtype,
            name=self.model.path,
        )
        errors = comparison.errors()
        if not errors_agree(errors, self.model.dtype) or comparison.is_after_norm():
            raise ModelError(
                explain_states(comparison) or self._explain_exchange(comparison) or explain_rows(comparison)
            )
        wrong_list = comparison.wrong_layer_list()
        if wrong_list is not None:
            raise ModelError(wrong_list)
        return float(errors.median())

    def _explain_exchange(self, comparison: StateComparison) -> str | None:
        """A sentence if the rows of a request are those of another request's tokens; None if they are not."""
        length = len(comparison.rows)
        requests = (
            other
            for other in self.saved.requests()
            if other.rows == comparison.request.rows and other != comparison.request
        )
        for other in islice(requests, EXCHANGED_REQUESTS):
            token_ids = self.saved.token_ids(other)[:length]
            exchanged = replace(comparison, computed=layer_states(self.model, self.norm, token_ids))
            if errors_agree(exchanged.errors(), self.model.dtype):
                return (
                    f"{comparison.request} holds the hidden states of the tokens of {other}: hidden states and tokens "
                    "were exchanged; let the engine save both again"
                )
        return None

    def check_copy(self, first: SavedRequest, hidden: Tensor, copy: SavedRequest, other: Tensor) -> None:
        """Check that two requests with the same tokens have the same final hidden states.

        Raises:
            ModelError: if they differ by more than rounding.
        """
        errors = row_errors(other, hidden)
        if not errors_agree(errors, self.model.dtype):
            raise ModelError(
                f"{first} and {copy} hold the same tokens and hidden states that differ by up to "
                f"{float(errors.max()):.2g} (relative); delete the file that is not of this reference"
            )

    def check_token_logps(
        self, request: SavedRequest, sequence: TokenSequence, hidden: Float[Tensor, "response dim"]
    ) -> tuple[int, float]:
        """Check the final hidden states of a sequence against the engine's log-probabilities of its tokens.

        Returns:
            The number of rows that have a log-probability, and the largest difference in nats.

        Raises:
            ModelError: if a difference is larger than rounding, with its cause.
        """
        logps = self.saved.token_logps(sequence)
        known = np.zeros(0, dtype=bool) if logps is None else ~np.isnan(logps)
        if logps is None or not known.any():
            return 0, 0.0
        differences = np.abs(token_logps(hidden, self.model.head, sequence.response_ids) - logps)[known]
        if logps_agree(differences, self.model.dtype):
            return int(known.sum()), float(differences.max())
        self.check_states(request, sequence)
        raise ModelError(explain_logps(request, sequence, hidden, self.model, logps, differences))
