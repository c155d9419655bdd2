"""``kleash cache --from-hidden-states``: an engine's files give the cache that kleash makes, and faults are named."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from command_words import words
from engine_files import sglang_response, write_logps, write_vllm
from safetensors.torch import load_file, save_file
from tiny_models import SENTENCES, save_tiny, tiny_tokenizer
from transformers import AutoModelForCausalLM

from kleash.cli import main
from kleash.errors import Interrupted
from kleash.measuring import CacheJob, cache_reference, measure
from kleash.measuring.imported_states import ImportedStates

TEXTS = [*SENTENCES[:2], *SENTENCES[4:]]
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def requests():
    return [tiny_tokenizer()(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def responses(requests, tmp_path_factory):
    """Rollouts as token ids: the first five tokens of each text are its prompt. One stands twice."""
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    rows = [{"prompt_token_ids": ids[:5], "response_token_ids": ids[5:]} for ids in [*requests, requests[0]]]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def engine(pair, requests, tmp_path_factory):
    folder = write_vllm(tmp_path_factory.mktemp("engine"), pair[1], requests)
    write_logps(folder, pair[1], requests)
    return folder


@pytest.fixture
def files(engine, tmp_path):
    """A copy of the engine's files to damage."""
    return Path(shutil.copytree(engine, tmp_path / "files"))


@pytest.fixture
def refusal(pair, responses, tmp_path, refused):
    """Runs ``kleash cache`` on files and returns the one line that it ends with."""

    def run(files, *more, layers="1,2", reference=pair[1]):
        out = tmp_path / "cache"
        given = {"reference": reference, "responses": responses, "from_hidden_states": files}
        line = refused(*words("cache", **given, out=out, layers=layers), *more)
        assert not (out / "contents.json").exists(), line
        return line

    return run


def edit(files, change, number=None):
    """Change the hidden states of all files, or of one; returns the last that was changed."""
    paths = sorted(files.glob("*.safetensors"))
    for path in paths if number is None else [paths[number]]:
        tensors = load_file(path)
        tensors["hidden_states"] = change(tensors["hidden_states"]).contiguous()
        save_file(tensors, path)
    return path


def measured(pair, responses, out, **more):
    job = {"policy": str(pair[0]), "reference": str(pair[1]), "responses": str(responses), **more}
    return measure(out=out, **job)


def assert_equal_to_rounding(run, expected, rtol=2e-4, atol=2e-6):
    tables = [pq.read_table(folder / "tokens").to_pydict() for folder in (run, expected)]
    assert len(tables[0]["token_id"]) > 50
    for name, values in tables[1].items():
        if isinstance(values[0], float):
            np.testing.assert_allclose(tables[0][name], values, rtol=rtol, atol=atol, err_msg=name)
        else:
            assert tables[0][name] == values, name


@pytest.fixture(scope="module")
def plain(pair, responses, tmp_path_factory):
    """A measurement with the reference itself."""
    out = tmp_path_factory.mktemp("plain") / "run"
    return out, measured(pair, responses, out)


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
def test_a_cache_of_engine_files_gives_the_same_measurement(
    kind, pair, requests, responses, engine, tmp_path, plain, capsys
):
    layers = ["--layers", "1,2"]
    if kind == "SGLang":
        engine, layers = tmp_path / "sglang", []
        engine.mkdir()
        lines = [json.dumps(sglang_response(pair[1], ids, 5 + n)) for n, ids in enumerate(requests)]
        (engine / "responses.jsonl").write_text("\n".join(lines))
    cache = tmp_path / "cache"
    given = {"reference": pair[1], "responses": responses, "from_hidden_states": engine}
    assert main([*words("cache", **given, out=cache), *layers]) == 0
    assert "--dtype float32" in capsys.readouterr().out
    own = tmp_path / "own"
    cache_reference(CacheJob(reference=str(pair[1]), responses=str(responses), out=str(own)))
    for path in sorted(own.glob("part-*")):
        hidden, expected = load_file(cache / path.name), load_file(path)
        assert torch.equal(hidden["keys"], expected["keys"])
        torch.testing.assert_close(hidden["hidden"], expected["hidden"], rtol=1e-4, atol=1e-5)
    result = measured(pair, responses, tmp_path / "run", reference_cache=str(cache))
    assert_equal_to_rounding(tmp_path / "run", plain[0])
    value, expected_value = (m.per_token["kl_policy_reference"].value for m in (result, plain[1]))
    assert value == pytest.approx(expected_value, rel=1e-5) and expected_value > 0.01
    notes = " ".join(result.notes)
    assert f"computed by {kind} and read from {engine}" in notes
    assert "the rows agree with the engine's log-probabilities" in notes
    assert result.noise_floor is not None and abs(result.noise_floor.value) < 1e-9


def test_bfloat16_files_are_compared_in_bfloat16(pair, requests, responses, tmp_path, refusal):
    files = write_vllm(tmp_path / "files", pair[1], requests, dtype=torch.bfloat16)
    assert "are in bfloat16 and --dtype is float32; leave --dtype out" in refusal(files, "--dtype", "float32")
    out = tmp_path / "cache"
    given = {"reference": str(pair[1]), "responses": str(responses), "out": str(out), "layers": "1,2"}
    contents = cache_reference(CacheJob(**given, from_hidden_states=str(files)))
    assert any("was not verified" in note for note in contents.notes)
    result = measured(pair, responses, tmp_path / "run", reference_cache=str(out), dtype="bfloat16")
    expected = measured(pair, responses, tmp_path / "expected", dtype="bfloat16")
    value, expected_value = (m.per_token["kl_policy_reference"].value for m in (result, expected))
    assert value == pytest.approx(expected_value, rel=0.02)
    assert result.dtype_gap is not None


def test_text_windows_and_other_architectures(tmp_path):
    """A head with a scale and a softcap, on documents that are sent as they are."""
    reference = save_tiny(tmp_path / "gemma2", "gemma2")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(TEXTS))
    requests = [tiny_tokenizer()(document)["input_ids"] for document in TEXTS]
    files = write_vllm(tmp_path / "files", reference, requests, layers=(2,))
    shutil.copy(files / "cmpl-001.safetensors", files / "again.safetensors")
    write_logps(files, reference, requests)
    job = {"reference": str(reference), "text": str(text)}
    imported = CacheJob(out=str(tmp_path / "a"), from_hidden_states=str(files), layers="2", **job)
    assert any("the rows agree with the engine's" in note for note in cache_reference(imported).notes)
    cache_reference(CacheJob(out=str(tmp_path / "b"), **job))
    for path in (tmp_path / "b").glob("part-*"):
        hidden = load_file(tmp_path / "a" / path.name)["hidden"]
        torch.testing.assert_close(hidden, load_file(path)["hidden"], rtol=1e-4, atol=1e-5)


def test_states_after_the_norm_in_the_layout_of_vllm_are_refused(pair, requests, tmp_path, refusal):
    network = AutoModelForCausalLM.from_pretrained(pair[1])
    with torch.no_grad():
        network.model.norm.weight.uniform_(0.5, 2.0)
    reference = Path(shutil.copytree(pair[1], tmp_path / "reference"))
    network.save_pretrained(reference)
    files = write_vllm(tmp_path / "files", reference, requests, layers=(1, 3))
    line = refusal(files, reference=reference)
    assert f"are not the hidden states of {reference}" in line and "cmpl-000.safetensors" in line
    assert "before the final norm" in line


@pytest.mark.parametrize("column", [-2, 1])
def test_states_before_the_norm_in_the_layout_of_sglang_are_refused(
    column, pair, requests, tmp_path, refusal
):
    lines = [json.dumps(sglang_response(pair[1], ids, 5, column)) for ids in requests]
    (tmp_path / "responses.jsonl").write_text("\n".join(lines))
    line = refusal(tmp_path, layers=None)
    assert f"are not the hidden states of {pair[1]}" in line
    assert "line 1" in line and "after the final norm" in line


@pytest.mark.parametrize(
    ("saved", "stated", "message"),
    [
        ((0, 1), "1,2", "are not the hidden states of"),
        ((1, 2), "1", "--layers is 1; it must name the 2 layers"),
        ((1, 2), "1,3", "and end with 2, the last layer"),
        ((1, 2), "2,1", "in ascending order, as vLLM saves them"),
        ((1, 2), "1,x", "such as 1,2,36; it is '1,x'"),
        ((1, 2), None, "--layers is not given; it must name"),
    ],
)
def test_a_wrong_list_of_layers_is_named(saved, stated, message, pair, requests, tmp_path, refusal):
    files = write_vllm(tmp_path / "files", pair[1], requests, layers=saved)
    assert message in refusal(files, layers=stated)


def exchange(states):
    states[9] += 0.2 * (states[4] - states[9])
    return states


def spoil(states):
    states[7, -1, 3] = float("inf")
    return states


def clear(states):
    """A buffer that was not filled; its logits would be those of a uniform distribution."""
    states[11] = 0.0
    return states


@pytest.mark.parametrize(
    ("change", "number", "with_logps", "probes", "message"),
    [
        (lambda states: states.roll(1, 0), 2, False, 8, ".*are not the hidden states of"),
        (lambda states: states.roll(1, 0), 2, True, 1, ": the engine's log-probabilities are not those of"),
        (exchange, 1, False, 8, ": 1 of .*the first being row 9"),
        (spoil, 1, True, 8, " holds NaN, infinities or only zeros in row 7"),
        (clear, 2, False, 1, " holds NaN, infinities or only zeros in row 11"),
    ],
    ids=["shifted", "shifted in no probe", "one row", "infinite", "zeros in no probe"],
)
def test_wrong_rows_are_named(change, number, with_logps, probes, message, files, refusal, monkeypatch):
    monkeypatch.setattr("kleash.measuring.imported_states.NOISE_SEQUENCES", probes)
    path = edit(files, change, number)
    if not with_logps:
        (files / "logprobs.jsonl").unlink()
    assert re.search(f"^{re.escape(str(path))}{message}", line := refusal(files)), line


@pytest.mark.parametrize("changes", [{"temperature": 0.7}, {"shift": 1}], ids=str)
def test_other_log_probabilities_are_refused(changes, pair, requests, files, refusal):
    write_logps(files, pair[1], requests, **changes)
    assert "the engine's log-probabilities are not those of" in refusal(files)


def test_another_model_is_refused(pair, requests, tmp_path, refusal):
    line = refusal(write_vllm(tmp_path / "files", pair[0], requests))
    assert f"rows are not the hidden states of {pair[1]}" in line


def test_single_wrong_log_probabilities_are_named(files, refusal):
    lines = [json.loads(line) for line in (files / "logprobs.jsonl").read_text().splitlines()]
    lines[3]["logprobs"][8] -= 2.0
    (files / "logprobs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    line = refusal(files)
    assert "by up to 2 nats (response token 3 of prompt 3, sample 0" in line


def write_logprobs(path, logprobs):
    (path.parent / "a.jsonl").write_text(f'{{"token_ids": [1, 2], "logprobs": {logprobs}}}')


def save(path, states, tokens, **more):
    save_file({"hidden_states": states, "token_ids": tokens, **more}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-40]), "let the engine save it again, or wait until it is written"),
        (lambda p: p.write_bytes(b"\x1b[31m" * 40), "is no whole file of vLLM"),
        (lambda p: save(p, torch.zeros(9, 2, 16), torch.arange(9)), "2 layers of 16 numbers in float32"),
        (lambda p: save(p, torch.zeros(9, 3, 32), torch.arange(9)), "holds 3 layers of 32 numbers"),
        (lambda p: save(p, torch.zeros(9, 2, 32).half(), torch.arange(9)), "in float16, before the final norm"),
        (lambda p: save(p, torch.zeros(8, 2, 32), torch.arange(9)), "8 rows of hidden_states and token_ids [9]"),
        (lambda p: save(p, torch.zeros(9, 32), torch.arange(9)), "is no whole file of vLLM"),
        (lambda p: save(p, torch.zeros(0, 2, 32), torch.arange(0)), "is no whole file of vLLM"),
        (lambda p: save(p, torch.zeros(9, 2, 32), torch.zeros(9)), "token_ids [9] torch.float32"),
        (lambda p: save_file({"states": torch.zeros(2)}, p), "is no whole file of vLLM"),
        (lambda p: (p.parent / "a.jsonl").write_text("{"), "a.jsonl, line 1 is no response of SGLang"),
        (lambda p: (p.parent / "a.jsonl").write_text("{}"), "has neither 'meta_info'"),
        (lambda p: write_logprobs(p, "[null]"), "a.jsonl, line 1 is no response of SGLang"),
        (lambda p: write_logprobs(p, "[null, NaN]"), "has nan as the log-probability of token 1"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(damage, message, files, refusal):
    path = files / "cmpl-002.safetensors"
    damage(path)
    line = refusal(files)
    assert message in line and (str(files) in line or "a.jsonl" in line) and "\x1b" not in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["meta_info"]["hidden_states"].pop(), "line 2 is no response of SGLang"),
        (
            lambda r: r["meta_info"].update(hidden_states=r["meta_info"]["hidden_states"][-1:]),
            'ask for return_hidden_states true, not "last", and run SGLang with',
        ),
        (lambda r: r["meta_info"]["hidden_states"][0][3].pop(), "line 2 is no response of SGLang"),
        (
            lambda r: r["meta_info"]["hidden_states"][0][3].__setitem__(0, float("nan")),
            "NaN, infinities or only zeros in row 3",
        ),
        (lambda r: r["meta_info"].pop("input_token_logprobs"), "has no token ids: add the 'input_ids'"),
        (lambda r: r["output_ids"].reverse(), "'output_token_logprobs' of other tokens than 'output_ids'"),
        (lambda r: r["output_ids"].__setitem__(0, "x"), "token ids that are not a list of whole numbers"),
    ],
)
def test_damaged_responses_of_sglang_are_named(change, message, pair, requests, tmp_path, refusal):
    responses = [sglang_response(pair[1], ids, 5) for ids in requests]
    change(responses[1])
    (tmp_path / "responses.jsonl").write_text("\n".join(map(json.dumps, responses)))
    line = refusal(tmp_path, layers=None)
    assert message in line and "responses.jsonl, line 2" in line


def test_folders_without_the_source_are_named(pair, requests, files, tmp_path, refusal):
    assert "none holds no hidden states" in refusal(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "holds no hidden states: expected *.safetensors" in refusal(tmp_path / "empty")
    no_bos = write_vllm(tmp_path / "no-bos", pair[1], [ids[1:] for ids in requests])
    line = refusal(no_bos)
    assert "no hidden states of 5 of the 5 sequences" in line and "token ids of each sequence" in line
    (files / "cmpl-003.safetensors").unlink()
    line = refusal(files)
    assert "no hidden states of 1 of the 5 sequences" in line and "the first being prompt 3, sample 0" in line
    with pytest.raises(ValueError, match="--layers says what the files of --from-hidden-states hold"):
        CacheJob(reference=str(pair[1]), text=str(tmp_path), layers="1,2")


def test_copies_must_agree(files, refusal):
    shutil.copy(files / "cmpl-001.safetensors", files / "copy.safetensors")
    edit(files, lambda states: 1.2 * states + 1, 4)
    line = refusal(files)
    assert "cmpl-001.safetensors and" in line and "copy.safetensors hold the same tokens" in line


def test_a_cache_is_of_an_engine_or_of_kleash(pair, responses, engine, tmp_path, refusal):
    job = {"reference": str(pair[1]), "responses": str(responses), "out": str(tmp_path / "cache")}
    cache_reference(CacheJob(**job))
    (tmp_path / "cache" / "contents.json").unlink()
    line = refusal(engine, "--dtype", "float32")
    assert "holds hidden states that kleash computed and would get some that an engine saved" in line


def test_an_interrupted_import_resumes(pair, responses, engine, tmp_path, monkeypatch):
    out = tmp_path / "cache"
    job = {"reference": str(pair[1]), "responses": str(responses), "batch_tokens": 16, "out": str(out)}
    job |= {"from_hidden_states": str(engine), "layers": "1,2"}
    read, sequences_read = ImportedStates.read, []

    def read_or_stop(self, batch):
        if len(sequences_read) == 2:
            raise KeyboardInterrupt
        sequences_read.extend(batch)
        return read(self, batch)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="run the same command again"):
        patch.setattr(ImportedStates, "read", read_or_stop)
        cache_reference(CacheJob(**job))
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert before and not (out / "contents.json").exists()
    contents = cache_reference(CacheJob(**job))
    assert contents.sequences == len(TEXTS)
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}.items()
