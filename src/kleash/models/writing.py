"""Running a network one token further at a time."""

import inspect
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.models.pair import Model

ROUNDING = 1e-3
"""Relative difference of hidden states that two ways of reading the same text may have in float32."""
COARSE_ROUNDING = 5e-2
"""The same in half precision."""


class Writer:
    """Runs the network one token further at a time, with the key-value cache where the network has one.

    Prompts are padded on the left, so that the last column is everybody's newest token. A network that has no
    such cache, or does not bear that padding, reads the whole text again for each token: slower, and right.
    """

    def __init__(self, model: Model, prompts: list[tuple[int, ...]]) -> None:
        """Begin with the token ids of the prompts; the caller has switched the model on."""
        self.model = model
        whole = model.head.weight is None
        self.network = model.network if whole else model.body
        known = inspect.signature(self.network.forward).parameters
        self.positions = "position_ids" in known
        self.cached = "past_key_values" in known
        self.past: Any = None
        self.texts = [list(prompt) for prompt in prompts]

    def start(self) -> Float[Tensor, "rows dim"]:
        """The hidden state after each prompt."""
        if not self.cached:
            return self._all_again()
        longest = max(len(text) for text in self.texts)
        # Another token than the shortest prompt's own, where ``_reads_alike`` looks.
        padding = int(0 in min(self.texts, key=len))
        ids = torch.full((len(self.texts), longest), padding)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(self.texts):
            ids[row, longest - len(text) :] = torch.tensor(text)
            mask[row, longest - len(text) :] = 1
        self.mask = mask.to(self.model.device)
        hidden = self._run(ids.to(self.model.device))
        if self.cached and self._reads_alike(hidden):
            return hidden
        self.cached, self.past = False, None
        return self._all_again()

    def step(self, tokens: Int[np.ndarray, " rows"]) -> Float[Tensor, "rows dim"]:
        """The hidden state after one more token each."""
        if not self.cached:
            for text, token in zip(self.texts, tokens.tolist(), strict=True):
                text.append(token)
            return self._all_again()
        ids = torch.from_numpy(tokens)[:, None].to(self.model.device)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        return self._run(ids)

    def keep(self, places: list[int]) -> None:
        """Forget the rows that are not in ``places``."""
        self.texts = [self.texts[place] for place in places]
        if self.cached:
            chosen = torch.tensor(places, device=self.model.device)
            self.mask = self.mask[chosen]
            self.past.reorder_cache(chosen)

    def _run(self, ids: Int[Tensor, "rows new"]) -> Float[Tensor, "rows dim"]:
        where = {"position_ids": (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]}
        out = self.network(
            input_ids=ids,
            attention_mask=self.mask,
            past_key_values=self.past,
            use_cache=True,
            **(where if self.positions else {}),
        )
        self.past = getattr(out, "past_key_values", None)
        self.cached = self.past is not None
        return self._last(out)[:, -1]

    def _last(self, out: Any) -> Float[Tensor, "rows time dim"]:
        if self.model.head.weight is None:
            return out.logits[..., : self.model.vocabulary]
        return out.last_hidden_state

    def _reads_alike(self, hidden: Float[Tensor, "rows dim"]) -> bool:
        """Whether padding on the left left the shortest prompt as it is when read alone.

        Some recurrent networks read the padding too, and some count positions by themselves.
        """
        shortest = min(range(len(self.texts)), key=lambda row: len(self.texts[row]))
        alone = self._read([self.texts[shortest]])[0]
        slack = ROUNDING if hidden.dtype in (torch.float32, torch.float64) else COARSE_ROUNDING
        return bool((hidden[shortest] - alone).abs().max() <= slack * alone.abs().max())

    def _all_again(self) -> Float[Tensor, "rows dim"]:
        return self._read(self.texts)

    def _read(self, texts: list[list[int]]) -> Float[Tensor, "rows dim"]:
        """The whole of every text, padded on the right, where a causal model does not look."""
        ends = [len(text) - 1 for text in texts]
        ids = torch.zeros(len(texts), max(ends) + 1, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        out = self.network(input_ids=ids.to(self.model.device), use_cache=False)
        return self._last(out)[torch.arange(len(ends)), ends]
