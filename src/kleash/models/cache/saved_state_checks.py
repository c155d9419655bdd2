"""Checks of saved hidden states against their model: layers, final norm, rows, log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError, OptionError
from kleash.linear import Head, log_probabilities
from kleash.models.cache.layer_states import (
    STATE_TOLERANCES,
    FinalNorm,
    errors_agree,
    final_states,
    num_hidden_layers,
    row_errors,
)
from kleash.models.cache.saved_records import SavedRequest
from kleash.models.cache.saved_states import SavedStates, check_rows
from kleash.models.pair import Model
from kleash.sources.sequences import TokenSequence

LOGP_TOLERANCES = {torch.float64: 0.01, torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest difference of a token's log-probability, in nats, that is rounding of hidden states and logits."""
TYPICAL_SHARE = 0.1
"""The median difference may be this share of the largest."""
LOGIT_ELEMENTS = 1 << 24
"""Elements of a block of logits."""


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
            ModelError: if rows differ by more than rounding: of another model, layer or token, or on the other side of
                the final norm.
        """
        token_ids = (*sequence.prompt_ids, *sequence.response_ids)[:-1]
        rows = self.saved.read(request, 0, len(token_ids))
        check_rows(rows, request, 0)
        dtype = self.model.dtype
        errors = row_errors(self.final_states(rows), final_states(self.model, token_ids)[0])
        if not errors_agree(errors, dtype):
            wrong = (errors > STATE_TOLERANCES[dtype]).nonzero().flatten().tolist()
            side = "after" if self.layers is None else "before"
            raise ModelError(
                f"{request}: {len(wrong)} of {len(errors)} rows are not the hidden states of {self.model.path}, the "
                f"first being row {wrong[0]} (relative error {float(errors[wrong[0]]):.2g}); they must be those {side} "
                "the final norm, of the tokens as they were sent, without chunked prefill and prefix caching, from the "
                "weights, adapter and quantisation of --reference"
            )
        return float(errors.median())

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
            ModelError: if a difference is larger than rounding.
        """
        logps = self.saved.token_logps(sequence)
        known = np.zeros(0, dtype=bool) if logps is None else ~np.isnan(logps)
        if logps is None or not known.any():
            return 0, 0.0
        differences = np.abs(token_logps(hidden, self.model.head, sequence.response_ids) - logps)[known]
        tolerance = LOGP_TOLERANCES[self.model.dtype]
        if differences.max() > tolerance or np.median(differences) > TYPICAL_SHARE * tolerance:
            self.check_states(request, sequence)
            position = int(np.flatnonzero(known)[int(differences.argmax())])
            raise ModelError(
                f"{request}: the engine's log-probabilities are not those of {self.model.path} for its hidden states, "
                f"by up to {differences.max():.3g} nats (response token {position} of {sequence.name}); let the engine "
                "save them at temperature 1, one for each token, and give the model with its head as --reference"
            )
        return int(known.sum()), float(differences.max())


def token_logps(hidden: Tensor, head: Head, tokens: Sequence[int]) -> Float[np.ndarray, " tokens"]:
    """The log-probability of each token in nats, a block of logits at a time."""
    block = max(1, LOGIT_ELEMENTS // (len(head.weight) if head.weight is not None else hidden.shape[-1]))
    ids = torch.tensor(list(tokens), device=hidden.device)
    with torch.inference_mode():
        parts = [
            log_probabilities(rows, head).gather(-1, chunk[:, None]).squeeze(-1).double().cpu()
            for rows, chunk in zip(hidden.split(block), ids.split(block), strict=True)
        ]
    return torch.cat(parts).numpy()
