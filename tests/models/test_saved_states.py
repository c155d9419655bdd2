"""Folders of hidden states that an engine saved."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kleash.errors import OptionError
from kleash.models.cache.saved_states import SavedStates


def test_files_in_a_folder_within_are_named(tmp_path: Path) -> None:
    within = tmp_path / "rank-0"
    within.mkdir()
    save_file(
        {"hidden_states": torch.ones(3, 1, 4), "token_ids": torch.tensor([5, 6, 7])},
        within / "cmpl-0.safetensors",
    )
    with pytest.raises(OptionError, match=r"holds no hidden states: .*rank-0: give that folder"):
        SavedStates(tmp_path)
    assert SavedStates(within).num_rows == 3
