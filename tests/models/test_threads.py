"""One thread for small models on a CPU, unless somebody chose another number; afterwards all is as before."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny

from kleash.models import threads
from kleash.models.threads import threads_for


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of two cores on which nothing is chosen."""
    before = torch.get_num_threads()
    for name in threads.CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_cores", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inside(*names: str, device: str = "cpu") -> tuple[int, str | None]:
    with threads_for(names, device=device) as note:
        found = torch.get_num_threads(), note
    assert torch.get_num_threads() != 1 or found[0] == 1
    return found


def test_small_models_take_one_thread_and_leave_as_many_as_there_were(tmp_path: Path) -> None:
    name = str(save_tiny(tmp_path / "tiny"))
    count, note = inside(name, name)
    assert (
        count == 1
        and note is not None
        and note.startswith("one CPU thread: the models are small (set OMP_NUM_TH")
    )
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError), threads_for([name]):
        raise ValueError
    assert torch.get_num_threads() == 2


def test_large_models_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = str(save_tiny(tmp_path / "tiny"))
    monkeypatch.setattr(threads, "SMALL_BYTES", 1000)
    assert inside(name) == (2, None)


@pytest.mark.parametrize("name", threads.CHOSEN_BY_USER)
def test_what_the_environment_says_stays(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    assert inside(str(save_tiny(tmp_path / "tiny"))) == (2, None)


def test_what_was_set_from_python_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_cores", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert inside(str(save_tiny(tmp_path / "tiny"))) == (2, None)
