"""``--dry-run``: its numbers against the tokenizer and the weights, and that nothing is loaded or written."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_file import write_gguf
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from kleash.cli import main
from kleash.errors import ModelError
from kleash.jobs import CacheJob, MeasureJob, SweepJob
from kleash.measuring import cache_reference, measure
from kleash.measuring.dry_run import dry_run
from kleash.models import network_loading

LINES = ["the sea was calm and grey", "a long road", "she counted the ships"]


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": line, "text": line}) + "\n" for line in LINES))
    return str(path)


@pytest.fixture(autouse=True)
def no_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    if "scored" not in request.node.name:
        monkeypatch.setattr("kleash.models.pair_loading.load_networks", read)


def test_models_and_prompts_are_counted(folder: Path, source: str, tmp_path: Path) -> None:
    models = {"policy": str(write_gguf(folder, tmp_path / "q8.gguf", "Q8_0")), "reference": str(folder)}
    plan = dry_run(MeasureJob(**models, prompts=source, samples_per_prompt=3, max_new_tokens=5))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = 3 * sum(len(tokenizer(line)["input_ids"]) + 5 for line in LINES)
    assert f"at most {tokens} tokens in 9 responses" in plan.headline
    assert dict(plan.facts)["a chunk of logits"].startswith(f"about {96 * 2**20 / 1e6:.3g} MB")
    weights = sum(x.numel() for x in AutoModelForCausalLM.from_pretrained(folder).parameters())
    (table,) = plan.tables
    ((count, memory),) = {(row[1], row[3]) for row in table.rows}  # 8.5 bits a weight are decoded to 32
    assert count == f"{weights:,}" and memory == f"{4 * weights / 1e3:.3g} kB"


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_text_has_the_tokens_and_windows_that_are_scored(
    is_gguf: bool, source: str, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path / "model", max_position_embeddings=8)
    name = str(write_gguf(model, model / "model.gguf") if is_gguf else model)
    job = MeasureJob(policy=name, reference=name, text=source)
    counts = measure(replace(job, out=str(tmp_path / "run"))).counts
    assert counts.sequences > len(LINES)
    for kind in (job, CacheJob(reference=name, text=source)):
        assert f"{counts.tokens} tokens in {counts.sequences} sequences" in dry_run(kind).headline


def test_what_the_scored_run_does_not_load_or_refuses(
    folder: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = SweepJob(reference=str(folder), candidates=(str(folder), "shipped:policy"), text=source)
    with pytest.raises(Exception, match="token"):
        dry_run(sweep)
    cache = str(tmp_path / "cache")
    cache_reference(CacheJob(reference=str(folder), text=source, out=cache))
    cached = MeasureJob(policy=str(folder), reference=cache, reference_cache=cache, text=source)
    loaded, load = list[str](), network_loading.load_base
    monkeypatch.setattr(
        network_loading, "load_base", lambda each, *on: loaded.append(each.role) or load(each, *on)
    )
    plan, measured = dry_run(cached), measure(replace(cached, out=str(tmp_path / "cached")))
    assert loaded == ["policy"]
    assert f"the reference {folder} is read from {cache} and not loaded" in measured.notes
    assert plan.headline.startswith(f"1 model would be loaded and {measured.counts.tokens} tokens")
    assert [row[0] for row in plan.tables[0].rows] == [str(folder)]
    for change in ({"limit": 1, "window": 8}, {"dtype": "bfloat16"}):
        with pytest.raises(ModelError) as refused:
            measure(replace(cached, **change))
        with pytest.raises(ModelError, match=re.escape(str(refused.value))):
            dry_run(replace(cached, **change))


def test_command_writes_nothing_and_prints_json(
    folder: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["measure", "--policy", str(folder), "--reference", str(folder), "--prompts", source, "--dry-run"]
    assert main([*words, "--out", "run"]) == 0
    assert "nothing was loaded or written" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"][0]["rows"][0][0] == str(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


def test_a_server_and_a_source_that_is_not_there_are_refused(capsys: Any) -> None:
    for policy, reason in (("http://localhost:1/v1", "base logits show"), ("shipped:policy", "no file /no")):
        assert main(["measure", "--dry-run", "--policy", policy, "--text", "/nowhere.jsonl"]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("command", ["measure", "cache", "sweep"])
def test_a_folder_that_holds_a_run_is_refused_as_by_the_run(
    command: str, folder: Path, source: str, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    if command == "sweep":
        (out / "candidates").mkdir(parents=True)
    else:
        (out / "sequences").mkdir(parents=True)
        (out / "sequences" / "part-00000.parquet").touch()
        (out / "run.json").touch()
    models = ["--candidates" if command == "sweep" else "--policy", str(folder)] if command != "cache" else []
    words = [command, *models, "--reference", str(folder), "--text", source, "--out", str(out)]
    assert main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"{out} holds" in line
    assert main([*words, "--dry-run"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == line
