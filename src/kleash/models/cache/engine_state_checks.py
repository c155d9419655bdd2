"""Checks of an engine's hidden states against the model that they should be of: layers, rows, log-probabilities."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import ModelError, OptionError
from kleash.extras import suppress_library_output
from kleash.linear import token_statistics
from kleash.models.cache.engine_states import EngineStates
from kleash.models.heads import head_on_device
from kleash.models.pair import Model
from kleash.sources.sequences import TokenSequence

STATE_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest relative error of nine in ten rows that is rounding, by dtype: another implementation of the same model."""
ROW_TOLERANCES = {torch.float64: 0.05, torch.float32: 0.05, torch.float16: 0.5, torch.bfloat16: 0.5}
"""Largest relative error of any row, by dtype: rounding may send a token to other experts."""
LOGP_TOLERANCES = {torch.float64: 0.01, torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest difference of a token's log-probability, in nats, that is rounding of hidden states and logits."""
TYPICAL_SHARE = 0.1
"""The median difference may be this share of the largest."""
Norm = Callable[[Tensor], Tensor]


def check_layout(saved: EngineStates, model: Model, layers: tuple[int, ...] | None) -> None:
    """Check the width of the rows, and the list of layers.

    Args:
        saved: the engine's files.
        model: the reference, loaded.
        layers: the layer of each row of a token, 0 for the embeddings; None for final hidden states.

    Raises:
        OptionError: if the list is not that of the files.
        ModelError: if the files cannot be of the model.
    """
    assert model.head.weight is not None, "a cache has a head"
    dim = model.head.weight.shape[1]
    if saved.layout.dim != dim:
        raise ModelError(
            f"{saved.folder} holds {saved.layout}, and {model.path} has {dim} numbers; give the model that the engine "
            "served as --reference"
        )
    depth = getattr(model.network.config.get_text_config(decoder=True), "num_hidden_layers", None)
    shown = "not given" if layers is None else f"{','.join(map(str, layers))}"
    if saved.layout.is_after_norm:
        if layers is not None:
            raise OptionError(f"--layers is {shown} and {saved.folder} has final hidden states; leave it out")
    elif layers is None or len(layers) != saved.layout.num_layers or layers[-1] != depth:
        raise OptionError(
            f"--layers is {shown}; it must name the {saved.layout.num_layers} layers that the files in {saved.folder} "
            f"hold, as the engine's eagle_aux_hidden_state_layer_ids, and end with {depth}, the last layer of "
            f"{model.path}, which the engine must save"
        )


def final_norm(model: Model, token_ids: Sequence[int]) -> Norm:
    """The final norm of a model, found by running it on a few tokens.

    It is the module outside the layers whose output is the backbone's final hidden state; a network without such a
    module has none, and its rows stay as they are.
    """
    outputs: list[tuple[Any, Any]] = []
    handles = [
        module.register_forward_hook(lambda module, _, output: outputs.append((module, output)))
        for name, module in model.backbone.named_modules()
        if name and not any(part.isdigit() for part in name.split(".")) and not list(module.children())
    ]
    try:
        final = final_states(model, token_ids)
    finally:
        for handle in handles:
            handle.remove()
    norms = (
        module
        for module, x in reversed(outputs)
        if isinstance(x, Tensor) and torch.equal(x, final[None].to(x.device))
    )
    module = next(norms, None)
    weight = None if module is None else next(module.parameters(), None)

    @torch.inference_mode()
    def norm(states: Tensor) -> Tensor:
        states = states if weight is None else states.to(weight.device, weight.dtype)
        return states if module is None else module(states)

    return norm


@suppress_library_output()
def final_states(model: Model, token_ids: Sequence[int]) -> Float[Tensor, "tokens dim"]:
    """The final hidden states of a model for the input tokens of one sequence."""
    return model.states_from([list(token_ids)], [0])[0]


def check_rounding(
    rows: Tensor, expected: Tensor, dtype: torch.dtype, subject: str, what: str, advice: str
) -> float:
    """Check that rows of hidden states differ by rounding alone.

    Args:
        rows: saved.
        expected: computed, or saved elsewhere.
        dtype: of the model.
        subject: what was saved, for the error.
        what: the expected rows, for the error.
        advice: what to do, for the error.

    Returns:
        The median relative error of a row, |saved − computed| / |computed|.

    Raises:
        ModelError: naming the first row that differs by more.
    """
    rows, expected = rows.double(), expected.to(rows.device).double()
    errors = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
    errors = torch.where(errors.isnan(), torch.inf, errors)
    if errors.quantile(0.9) > STATE_TOLERANCES[dtype] or errors.max() > ROW_TOLERANCES[dtype]:
        wrong = (errors > STATE_TOLERANCES[dtype]).nonzero().flatten().tolist()
        raise ModelError(
            f"{subject}: {len(wrong)} of {len(errors)} rows are not {what}, the first being row {wrong[0]} "
            f"(relative error {float(errors[wrong[0]]):.2g}); {advice}"
        )
    return float(errors.median())


@torch.inference_mode()
def check_token_logps(
    logps: Float[np.ndarray, " response"] | None,
    model: Model,
    sequence: TokenSequence,
    hidden: Float[Tensor, "response dim"],
    subject: str,
) -> float:
    """Check the final hidden states of a sequence against the engine's log-probabilities of its tokens.

    Args:
        logps: of the engine, NaN where unknown; None if none was saved.
        model: the reference, loaded.
        sequence: whose response tokens they are of.
        hidden: saved, after the final norm.
        subject: what was saved, for the error.

    Returns:
        The largest difference in nats; 0 without any log-probability.

    Raises:
        ModelError: if a difference is larger than rounding.
    """
    if logps is None or np.isnan(logps).all():
        return 0.0
    tokens = torch.tensor(sequence.response_ids, device=hidden.device)
    head = head_on_device(model.head, hidden)
    ours = token_statistics(hidden, head, hidden, head, tokens).token_logp
    differences = np.abs(ours.double().cpu().numpy() - logps)
    largest, tolerance = float(np.nanmax(differences)), LOGP_TOLERANCES[model.dtype]
    if largest > tolerance or np.nanmedian(differences) > TYPICAL_SHARE * tolerance:
        raise ModelError(
            f"{subject}: the engine's log-probabilities are not those of {model.path} for its hidden states, "
            f"by up to {largest:.3g} nats (response token {np.nanargmax(differences)} of {sequence.name}); let the "
            "engine save both of the same tokens, at temperature 1, and give the model with its head as --reference"
        )
    return largest
