"""A model against itself computed differently: how much of a drift is arithmetic."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kleash.linear import LinearOptions
from kleash.models.heads import cut
from kleash.models.pair import Model, Pair
from kleash.models.pair_loading import load_pair
from kleash.models.scoring import Sides, reader, score, score_sides
from kleash.models.sequences import TokenSequence


def score_against_alone(
    model: Model,
    sequences: Sequence[TokenSequence],
    *,
    temperature: float = 1.0,
    batch_tokens: int = 4096,
    options: LinearOptions | None = None,
) -> dict[str, np.ndarray]:
    """``score`` of a model in batches (as policy) against itself with each sequence alone (as reference).

    Its KL would be 0 if arithmetic were exact: it is the floor below which a drift in this dtype is noise.
    """
    pair = Pair(policy=model, reference=model, tokenizer=model.tokenizer)
    together = reader(model)
    sides = Sides(
        pair=pair, policy=together, reference=lambda batch: torch.cat([together([one]) for one in batch])
    )
    return score_sides(sides, sequences, temperature, batch_tokens, options)


def score_in_float32(
    model: Model,
    sequences: Sequence[TokenSequence],
    *,
    temperature: float = 1.0,
    batch_tokens: int = 4096,
    options: LinearOptions | None = None,
) -> dict[str, np.ndarray] | None:
    """``score`` of a model as it runs (as policy) against itself loaded in float32 (as reference).

    Its KL is what the dtype costs. The model is loaded once more, so for a while it is there twice.

    Returns:
        The columns, or None where the model runs in float32 or float64 already.
    """
    if model.dtype in (torch.float32, torch.float64):
        return None
    wide = load_pair(
        model.path,
        model.path,
        revision_policy=model.revision,
        revision_reference=model.revision,
        dtype="float32",
        device="auto" if model.device_map else str(model.device),
        device_map=model.device_map,
        trust_remote_code=model.trusted,
    ).reference
    wide = replace(wide, head=cut(wide.head, model.vocabulary), vocabulary=model.vocabulary)
    pair = Pair(policy=model, reference=wide, tokenizer=model.tokenizer)
    return score(pair, sequences, temperature=temperature, batch_tokens=batch_tokens, options=options)
