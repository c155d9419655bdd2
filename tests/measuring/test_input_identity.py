"""What a resumed run and a cache depend on is compared to the last byte."""

import json
from pathlib import Path

from gguf_file import write_gguf
from safetensors.torch import load_file, save_file

from kleash.cli import main
from kleash.store.checksums import record_checksums

SOURCE = "The sea was calm and a boat went out before dawn.\n\nIt came back.\n"


def changed_between_samples(folder):
    """Change weights that the old fingerprints did not look at: neither the first, the middle nor the last bytes."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    name = max(tensors, key=lambda name: tensors[name].numel())
    flat = tensors[name].view(-1)
    flat[200:400] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})


def changed_json(folder, name, **changes):
    path = folder / name
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, **changes}))


def command(models, kind, source, out, *more):
    words = ["measure", "--policy", models[0], "--reference", models[1], f"--{kind}", source, "--out", out]
    return [str(word) for word in [*words, "--max-new-tokens", 4, "--quiet", *more]]


CHANGES = {
    "weights of the policy": lambda policy, reference: changed_between_samples(policy),
    "weights of the reference": lambda policy, reference: changed_between_samples(reference),
    "template of the policy": lambda policy, reference: changed_json(
        policy, "tokenizer_config.json", chat_template="{{ messages }}"
    ),
    "template of the reference": lambda policy, reference: (reference / "chat_template.jinja").write_text(
        "{{ messages }}"
    ),
    "generation_config.json of the policy": lambda policy, reference: changed_json(
        policy, "generation_config.json", eos_token_id=[1, 7]
    ),
}


def test_resume_refuses_any_changed_byte_of_a_model(models, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The sea was calm\nIt came back\n")
    assert main(command(models, "prompts", prompts, tmp_path / "run")) == 0
    (tmp_path / "run" / "measurement.json").unlink()
    original = {folder: {path: path.read_bytes() for path in folder.iterdir()} for folder in models}
    for what, change in CHANGES.items():
        change(*models)
        assert main(command(models, "prompts", prompts, tmp_path / "run", "--resume")) == 2, what
        error = capsys.readouterr().err
        role, file = what.split()[-1], " generation_config.json" if "config" in what else ""
        assert f"holds another run: the fingerprint of the {role}{file} was" in error, error
        for folder, files in original.items():
            for path in folder.iterdir():
                path.unlink()
            for path, content in files.items():
                path.write_bytes(content)
    (models[0] / "README.md").write_text("a model card is no part of a model")
    (models[0] / "trainer_state.json").write_text("{}")
    assert main(command(models, "prompts", prompts, tmp_path / "run", "--resume")) == 0


def test_resume_refuses_another_tokenizer_of_gguf_files(models, tmp_path, capsys):
    files = [write_gguf(folder, tmp_path / f"{folder.name}.gguf") for folder in models]
    given = command(files, "text", tmp_path / "text.txt", tmp_path / "run", "--tokenizer", models[0])
    (tmp_path / "text.txt").write_text(SOURCE)
    assert main(given) == 0
    (models[0] / "chat_template.jinja").write_text("{{ messages }}")
    assert main([*given, "--resume"]) == 2
    assert "the fingerprint of the tokenizer was" in capsys.readouterr().err


def test_a_run_of_another_schema_is_refused(models, tmp_path, capsys):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(SOURCE)
    assert main(command(models, "text", text, run)) == 0
    changed_json(run, "run.json", schema=1)
    record_checksums(run, run / "run.json", hashes={})
    assert main(command(models, "text", text, run, "--resume")) == 2
    assert "has schema 1" in capsys.readouterr().err
    changed_json(run, "measurement.json", schema=1)
    record_checksums(run, run / "measurement.json", hashes={})
    for words in (["report", str(run)], ["compare", str(run), str(run)]):
        assert main(words) == 2
        assert "has schema 1" in capsys.readouterr().err


def test_a_cache_refuses_any_changed_byte_of_its_reference(models, tmp_path, capsys):
    text, cache = tmp_path / "text.txt", tmp_path / "cache"
    text.write_text(SOURCE)
    words = ["cache", "--reference", models[1], "--text", text, "--out", cache, "--quiet"]
    assert main([str(word) for word in words]) == 0
    again = command(models, "text", text, tmp_path / "run", "--reference-cache", cache)
    changed_json(models[1], "generation_config.json", eos_token_id=[1, 7])  # of which no hidden state depends
    assert main(again) == 0
    changed_between_samples(models[1])
    for refused in (again, [str(word) for word in words]):
        assert main([*refused[:-1], refused[-1], *(["--resume"] if refused is again else [])]) == 2
        assert "holds hidden states of" in capsys.readouterr().err


def test_a_path_that_is_not_utf8_works(models, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(SOURCE)
    out = f"{tmp_path}/run-\udcff"
    assert main(command(models, "text", text, Path(out))) == 0
    assert main(["report", out]) == 0
    assert main(["compare", out, out, "--out", f"{out}.html"]) == 0
    capsys.readouterr()
    for words in (
        ["cache", "--reference", str(models[1]), "--text", str(text), "--out", f"{out}-cache"],
        ["train", "ppo", "--steps", "1", "--out", f"{out}-ppo"],
    ):
        assert main(words) == 2
        assert "has a name that is not UTF-8, and safetensors opens no other" in capsys.readouterr().err
