"""Tiny pairs on disk, made once for all tests of the package."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_models import save_tiny, tiny_adapter, tiny_pair

from kleash.models import Pair, load_pair

PairFolders = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> PairFolders:
    """(policy, reference) folders of an architecture."""
    made: dict[str, tuple[Path, Path]] = {}

    def find(architecture: str) -> tuple[Path, Path]:
        if architecture not in made:
            made[architecture] = tiny_pair(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return find


@pytest.fixture(scope="session")
def pair(folders: PairFolders) -> Iterator[Pair]:
    """A loaded pair of Llamas."""
    policy, reference = folders("llama")
    yield load_pair(str(policy), str(reference))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, with a folder around it for the module's own."""
    return save_tiny(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    """An adapter over the Llama, beside it."""
    return tiny_adapter(base.parent / "adapter", base)
