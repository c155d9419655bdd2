"""Runs that several tests look at."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kleash.records import MeasureJob, Measurement


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny policy and its reference."""
    from tiny_models import tiny_pair

    return tiny_pair(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of forty prompts."""
    text = "the sea was calm and a boat went out before dawn came up so far"
    words = text.split()
    path = tmp_path_factory.mktemp("source") / "prompts.txt"
    path.write_text("\n".join(f"{words[n % 15]} {words[(3 * n + 1) % 15]} {n}" for n in range(40)))
    return path


@pytest.fixture(scope="session")
def job(pair: tuple[Path, Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> MeasureJob:
    """A job of many shards, for modules that have none of their own."""
    models = {"policy": str(pair[0]), "reference": str(pair[1]), "prompts": str(prompts)}
    out = str(tmp_path_factory.mktemp("alone") / "run")
    return MeasureJob(**models, limit=26, max_new_tokens=3, batch_tokens=8, out=out)


@pytest.fixture(scope="session")
def alone(job: MeasureJob) -> Measurement:
    """The measurement of this job by one process."""
    from kleash.measuring import measure

    measured = measure(job)
    assert measured.counts.shards >= 8
    return measured


@pytest.fixture
def models(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the pair, to be changed."""
    for source, name in zip(pair, ("policy", "reference"), strict=True):
        shutil.copytree(source, tmp_path / name)
    return tmp_path / "policy", tmp_path / "reference"


@pytest.fixture
def broken(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the reference, which gives NaN where it reads " sea"."""
    import torch
    from safetensors.torch import load_file, save_file
    from tiny_models import tiny_tokenizer

    folder = shutil.copytree(pair[1], tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][tiny_tokenizer()(" sea")["input_ids"][1]] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that cannot be; returns the one line that it ends with, without its "kleash: "."""
    from kleash.cli import main

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words), "--quiet"]) == 2
        line = capsys.readouterr().err
        assert line.startswith("kleash: ") and line.count("\n") == 1, line
        return line.removeprefix("kleash: ").strip()

    return run
