"""One thread for small models on a CPU, unless the environment sets a number; afterwards all is as before."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tiny_models import save_tiny, tiny_pair

from kleash.models import load_pair, threads
from kleash.models.threads import threads_for, threads_for_scoring


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    for name in threads.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


def test_small_models_use_one_thread(tmp_path, monkeypatch):
    name = str(save_tiny(tmp_path / "tiny"))

    def count() -> tuple[int, bool]:
        with threads_for([name, name], device="cpu") as notes:
            return torch.get_num_threads(), bool(notes)

    assert count() == (1, True)
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    assert count() == (4, False)
    monkeypatch.delenv("MKL_NUM_THREADS")
    monkeypatch.setattr(threads, "SMALL_BYTES", 1000)
    assert count() == (4, False)
    with pytest.raises(ValueError), threads_for([name]):
        raise ValueError


@pytest.mark.parametrize("side", ["policy", "reference"])
def test_scoring_keeps_its_threads_for_a_larger_model_or_another_device(tmp_path, side):
    pair = load_pair(*map(str, tiny_pair(tmp_path)))

    def count(processes: int = 1, **changes: object) -> int:
        changed = replace(pair, **{side: replace(getattr(pair, side), **changes)})
        with threads_for_scoring(changed, processes):
            return torch.get_num_threads()

    most = threads.TINY_BYTES // 4
    assert (count(), count(parameters=most), count(parameters=most + 1)) == (1, 1, 4)
    assert count(parameters=most + 1, dtype=torch.bfloat16) == 1
    assert count(device=torch.device("cuda", 0)) == count(device_map="auto") == 4
    assert [count(processes, parameters=most + 1) for processes in (2, 3, 8)] == [2, 1, 1]
