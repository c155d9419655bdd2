"""A tiny pair whose tokenizer the sources are read by."""

import pytest
from tiny_models import tiny_pair

from kleash.models import Pair, load_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A loaded pair of Llamas."""
    policy, reference = tiny_pair(tmp_path_factory.mktemp("llama"), "llama")
    return load_pair(str(policy), str(reference))
