"""What both models would rather have said: their likeliest tokens at each place of a response."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear import log_probabilities
from kleash.models.pair import Model, Pair
from kleash.models.scoring import reader
from kleash.models.sequences import TokenSequence
from kleash.models.tokenizers import token_texts

ROWS = 64
"""Positions whose whole distributions are in memory at once."""


def alternatives(
    pair: Pair, sequence: TokenSequence, *, top: int = 5, temperature: float = 1.0
) -> dict[str, np.ndarray | list[str]]:
    """The ``top`` likeliest tokens of both models at each position of one response, with their probabilities.

    Returns:
        The columns of a run's table of alternatives, ``top`` rows for each position, likeliest first.
    """
    top = min(top, pair.vocabulary)
    positions = len(sequence.response_ids)
    columns: dict[str, Any] = {
        "prompt_id": np.full(positions * top, sequence.prompt_id, dtype=np.int32),
        "sample_id": np.full(positions * top, sequence.sample_id, dtype=np.int32),
        "position": np.repeat(np.arange(positions, dtype=np.int32), top),
        "place": np.tile(np.arange(top, dtype=np.int32), positions),
    }
    for model in (pair.policy, pair.reference):
        logp, token_ids = _likeliest(model, sequence, top, temperature)
        columns[f"token_id_{model.role}"] = token_ids.flatten().to(torch.int32).numpy()
        columns[f"text_{model.role}"] = token_texts(pair.tokenizer, token_ids.flatten().tolist())
        columns[f"probability_{model.role}"] = logp.exp().flatten().to(torch.float32).numpy()
    return columns


def _likeliest(
    model: Model, sequence: TokenSequence, top: int, temperature: float
) -> tuple[Float[Tensor, "response top"], Tensor]:
    hidden = reader(model)([sequence])
    found = [
        log_probabilities(rows, model.head, temperature=temperature).topk(top, -1)
        for rows in hidden.split(ROWS)
    ]
    return torch.cat([part.values.cpu() for part in found]), torch.cat([part.indices.cpu() for part in found])
