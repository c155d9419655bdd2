"""One thread for small models on a CPU, unless somebody chose another number; afterwards all is as before."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import save_tiny, tiny_pair

from kleash.measuring import cache_reference, measure
from kleash.measuring.progress import ProgressReporter
from kleash.models import load_pair, threads
from kleash.models.threads import threads_for, threads_for_scoring
from kleash.records import CacheJob, MeasureJob


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of two cores on which nothing is chosen."""
    before = torch.get_num_threads()
    for name in threads.THREAD_VARIABLES:
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


def test_small_models_use_one_thread_and_the_number_is_restored(tmp_path: Path) -> None:
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


def test_large_models_do_not_change_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(save_tiny(tmp_path / "tiny"))
    monkeypatch.setattr(threads, "SMALL_BYTES", 1000)
    assert inside(name) == (2, None)


@pytest.mark.parametrize("name", threads.THREAD_VARIABLES)
def test_a_number_set_in_the_environment_is_not_changed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "2")
    assert inside(str(save_tiny(tmp_path / "tiny"))) == (2, None)


def test_a_number_set_by_torch_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_cores", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert inside(str(save_tiny(tmp_path / "tiny"))) == (2, None)


class Notes(ProgressReporter):
    """A reporter that keeps its notes, and the number of threads at each step."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counts: set[int] = set()

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def add_scored(self, sequences: int, tokens: int) -> None:
        self.counts.add(torch.get_num_threads())


def test_tiny_models_are_measured_and_cached_with_one_thread(tmp_path: Path) -> None:
    policy, reference = map(str, tiny_pair(tmp_path))
    (tmp_path / "text.txt").write_text("the sea was calm")
    source = {"text": str(tmp_path / "text.txt"), "reference": reference}
    found = []
    for limit, count in ((threads.TINY_BYTES, 1), (0, 2)):
        seen = Notes()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threads, "TINY_BYTES", limit)
            result = measure(MeasureJob(policy=policy, **source, out=str(tmp_path / f"run-{count}")), seen)
        found.append([number.value for number in result.per_token.values()])
        assert seen.counts == {count} and torch.get_num_threads() == 2
        assert any(note.startswith("one CPU thread: ") for note in seen.notes) is (count == 1)
    seen = Notes()
    cache_reference(CacheJob(**source, out=str(tmp_path / "cache")), seen)
    assert seen.counts == {1} and torch.get_num_threads() == 2
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", ["policy", "reference"])
def test_scoring_keeps_its_threads_for_a_larger_model_or_another_device(tmp_path: Path, side: str) -> None:
    pair = load_pair(*map(str, tiny_pair(tmp_path)))

    def count(**changes: object) -> int:
        with threads_for_scoring(replace(pair, **{side: replace(getattr(pair, side), **changes)})):
            return torch.get_num_threads()

    assert count() == 1
    most = threads.TINY_BYTES // 4
    assert (count(parameters=most), count(parameters=most + 1)) == (1, 2)
    assert count(parameters=most + 1, dtype=torch.bfloat16) == 1
    assert count(device=torch.device("cuda", 0)) == count(device_map="auto") == 2
