"""``kleash cache``: what it keeps, that measuring with it is measuring without it, and what it refuses."""

import json
import shutil
import time
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from command_words import words
from run_files import parts, untimed
from tiny_models import DOCUMENTS, double_logits, save_tiny, tiny_pair, tiny_tokenizer

from kleash.cli import main
from kleash.measuring import CacheJob, ProgressReporter, cache_reference, measure
from kleash.records import Measurement

WINDOWS = {"window": 24, "stride": 16, "batch_tokens": 64}
"""Fourteen windows in two shards."""


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(DOCUMENTS))
    return path


@pytest.fixture(scope="session")
def cached(pair, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("cached") / "cache"
    cache_reference(CacheJob(reference=str(pair[1]), text=str(text), out=str(out), **WINDOWS))
    return out


@pytest.fixture(scope="session")
def plain(pair, text, tmp_path_factory):
    """The same text measured without a cache."""
    out = tmp_path_factory.mktemp("plain") / "run"
    measured(pair, text, out)
    return out


def measured(pair, text, out, **more):
    policy, reference = map(str, pair)
    options = {"policy": policy, "reference": reference, "text": str(text), **WINDOWS, **more}
    return measure(out=out, **options)


def columns(out, kind="tokens"):
    table = pq.read_table(out / kind)
    return {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}


def numbers(out):
    """All that a measurement says except when, how long, and that it was read from a cache."""
    measured = untimed(out, "notes")
    measured["job"].pop("reference_cache")
    return measured


def contents(folder):
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_results_with_the_cache_are_bit_equal(pair, text, cached, plain, tmp_path):
    before = contents(cached)
    result = measured(pair, text, tmp_path / "run", reference_cache=str(cached), reference=str(cached))
    assert parts(tmp_path / "run") == parts(plain) and len(parts(plain)) == 2
    with_cache, without = numbers(tmp_path / "run"), numbers(plain)
    with_cache["job"].pop("reference"), without["job"].pop("reference")
    assert with_cache == without
    assert with_cache["noise_floor"]["value"] > 0
    assert any("is read from" in note and "not loaded" in note for note in result.notes)
    assert contents(cached) == before, "a finished cache is only read"
    stored, exact = columns(tmp_path / "run", "alternatives.parquet"), columns(plain, "alternatives.parquet")
    for name in exact:
        assert np.array_equal(stored[name], exact[name]), name


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_other_batch_sizes_agree_with_float64(architecture, tmp_path, text):
    """Heads with a softcap, a scale, or none; the oracle is the models' own logits in float64."""
    policy, reference = tiny_pair(tmp_path, architecture)
    cache = str(tmp_path / "cache")
    cache_reference(CacheJob(reference=str(reference), text=str(text), out=cache, **WINDOWS))
    out = tmp_path / "run"
    measured((policy, reference), text, out, reference_cache=cache, batch_tokens=101, limit=3)
    tokens = columns(out)
    assert len(np.unique(tokens["prompt_id"])) == 3
    checked = 0
    for document in range(3):
        ids = tiny_tokenizer()(DOCUMENTS[document])["input_ids"]
        start = 1
        for window in np.unique(tokens["sample_id"][tokens["prompt_id"] == document]):
            rows = (tokens["prompt_id"] == document) & (tokens["sample_id"] == window)
            context, here = ids[16 * window : start], tokens["token_id"][rows].tolist()
            assert here == ids[start : start + len(here)]
            z = [
                double_logits(folder, [*context, *here])[len(context) - 1 : -1]
                for folder in (policy, reference)
            ]
            logp, logq = (side.log_softmax(-1) for side in z)
            exact = (logp.exp() * (logp - logq)).sum(-1)
            np.testing.assert_allclose(tokens["kl_policy_reference"][rows], exact, rtol=2e-4, atol=2e-6)
            token_logq = logq[range(len(here)), here]
            np.testing.assert_allclose(tokens["logp_reference"][rows], token_logq, rtol=2e-5, atol=2e-5)
            start += len(here)
            checked += len(here)
    assert checked == len(tokens["token_id"]) > 50


def test_bfloat16_results_are_bit_equal_with_their_dtype_gap(pair, text, tmp_path):
    cache = tmp_path / "cache"
    job = CacheJob(reference=str(pair[1]), text=str(text), out=str(cache), dtype="bfloat16", **WINDOWS)
    cache_contents = cache_reference(job)
    assert cache_contents.hidden_bytes < cache_contents.tokens * cache_contents.hidden_size * 2 + 4096
    assert cache_contents.logits_bytes == cache_contents.tokens * 320 * 2
    measured(pair, text, tmp_path / "plain", dtype="bfloat16")
    measured(pair, text, tmp_path / "run", dtype="bfloat16", reference_cache=str(cache))
    assert parts(tmp_path / "run") == parts(tmp_path / "plain")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "plain")
    near = measured((save_tiny(tmp_path / "b", apart=0.01), pair[1]), text, tmp_path / "n", dtype="bfloat16")
    for run, is_noted in ((Measurement.read(tmp_path / "run"), False), (near, True)):
        assert (2 * run.dtype_gap.value > run.per_token["kl_reference_policy"].standard_error) == is_noted
        assert any(note.startswith("rounding to bfloat16 puts the ref") for note in run.notes) == is_noted


def test_a_cache_of_responses_serves_another_temperature(pair, tmp_path, capsys):
    source = tmp_path / "rollouts.jsonl"
    lines = [
        {
            "prompt_token_ids": [0, 40 + n],
            "response_token_ids": [50 + n, 60, 70 + n],
            "logprobs": [-1, -2, -3],
        }
        for n in range(5)
    ]
    lines.append({"messages": [{"role": "user", "content": "The sea"}], "response": " was calm"})
    source.write_text("\n".join(map(json.dumps, lines)))
    same = words(reference=pair[1], responses=source, batch_tokens=16)
    cache = tmp_path / "cache"
    assert main(["cache", *same, "--out", str(cache), "--temperature", "0.5"]) == 0
    printed, told = capsys.readouterr()
    assert "in 6 sequences are cached in" in printed and told.startswith("loading the models; ")
    said_times = int(printed.split("hidden states, ")[1].split(" times")[0])
    stored = json.loads((cache / "contents.json").read_text())
    assert said_times == round(stored["tokens"] * 320 * 4 / stored["hidden_bytes"]) > 5
    assert f"kleash measure --policy POLICY --reference {pair[1]} --responses {source}" in printed
    assert "--temperature 0.5" in printed and f"--reference-cache {cache}" in printed
    for name, more in (("plain", []), ("run", ["--reference-cache", str(cache)])):
        out = ["--out", str(tmp_path / name), "--temperature", "0.5", "--quiet"]
        assert main(["measure", "--policy", str(pair[0]), *same, *out, *more]) == 0
    assert parts(tmp_path / "run") == parts(tmp_path / "plain")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "plain")
    given = ["measure", "--policy", pair[0], *same, "--reference-cache", cache, "--out", tmp_path / "warm"]
    assert main([*map(str, given)]) == 0
    warm, (_, told) = numbers(tmp_path / "warm"), capsys.readouterr()
    assert warm["noise_floor"] is None and told.startswith("loading the models; ")
    assert "\nall sequences are scored; " in told
    assert any("no noise floor" in each and "--temperature 1 adds it" in each for each in warm["warnings"])
    assert main(["cache", *same, "--out", str(cache), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"] == 6
    given[-1] = tmp_path / "warmer"
    assert main([*map(str, given), "--quiet"]) == 0
    assert numbers(tmp_path / "warmer")["noise_floor"]["value"] >= 0


def test_a_run_on_prompts_fills_its_cache(pair, cached, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(cached, cache)
    source = tmp_path / "prompts.txt"
    source.write_text("The sea\nA long road")
    for name in ("first", "second"):
        given = words(
            policy=pair[0], reference=pair[1], prompts=source, max_new_tokens=5, out=tmp_path / name
        )
        assert main(["measure", *given, "--reference-cache", str(cache), "--quiet"]) == 0
    assert len(list(cache.glob("part-*"))) == len(list(cached.glob("part-*"))) + 1
    assert parts(tmp_path / "first") == parts(tmp_path / "second")


def test_a_killed_cache_job_resumes_to_the_same_bytes(pair, text, cached, command_forks, tmp_path):
    out = tmp_path / "cache"
    given = ["cache", *words(reference=pair[1], text=text, out=out, **WINDOWS), "--quiet"]
    process = command_forks.start(given)
    while not list(out.glob("part-*")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not (out / "contents.json").exists()
    times = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
    (out / ".writing-part-x.safetensors").write_bytes(b"half")
    assert main(given) == 0
    assert all(path.stat().st_mtime_ns == changed for path, changed in times.items())
    # A kill may leave a checksum without its file, which is written once more with the file.
    both = [
        {name: part[0] for name, part in contents(folder).items() if name != "checksums.jsonl"}
        for folder in (out, cached)
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize("kind", ["responses", "text"])
def test_a_resumed_cache_counts_what_is_left_to_read(pair, tmp_path, kind):
    rows = [{"text": f"{n} boats", "prompt": f"{n}", "response": " boats"} for n in range(9)]
    (tmp_path / "source.jsonl").write_text("\n".join(map(json.dumps, rows)))
    paths = {"reference": str(pair[1]), kind: str(tmp_path / "source.jsonl"), "out": str(tmp_path / "cache")}
    first, rest = Mock(ProgressReporter), Mock(ProgressReporter)
    first.add_scored.side_effect = [None] * 5 + [KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):
        cache_reference(CacheJob(**paths, batch_tokens=2), first)
    cache_reference(CacheJob(**paths, batch_tokens=2), rest)
    scored = sum(call.args[0] for call in rest.add_scored.call_args_list)
    assert 3 <= scored < 9
    rest.set_total.assert_called_once_with(scored if kind == "responses" else None)


def test_a_repeated_document_is_stored_once(pair, tmp_path):
    source = tmp_path / "twice.txt"
    source.write_text("\n\n".join([*DOCUMENTS, *DOCUMENTS]))
    cache = tmp_path / "cache"
    cache_contents = cache_reference(
        CacheJob(reference=str(pair[1]), text=str(source), out=str(cache), **WINDOWS)
    )
    tokens = sum(len(tiny_tokenizer()(document)["input_ids"]) - 1 for document in DOCUMENTS)
    assert cache_contents.tokens == tokens
    result = measured(pair, source, tmp_path / "run", reference_cache=str(cache))
    assert result.counts.tokens == 2 * tokens


def test_other_windows_raise_with_both_settings(pair, text, cached, tmp_path, refused):
    given = words(policy=pair[0], reference=pair[1], text=text, out=tmp_path / "run", reference_cache=cached)
    line = refused("measure", *given, *words(limit=4, window=32, stride=16))
    assert f"{cached} lacks " in line and "windows of 32 tokens every 16, the first 4" in line
    assert "windows of 24 tokens every 16" in line and "the first being prompt 0, sample" in line
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_a_policy_with_another_chat_template_raises(pair, tmp_path, refused):
    policy, source, cache = tmp_path / "policy", tmp_path / "m.jsonl", tmp_path / "cache"
    shutil.copytree(pair[0], policy)
    (policy / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    source.write_text(json.dumps({"messages": [{"role": "user", "content": DOCUMENTS[0]}]}))
    cache_reference(CacheJob(reference=str(pair[1]), text=str(source), out=str(cache)))
    given = words(reference=pair[1], text=source, out=tmp_path / "run", reference_cache=cache)
    assert "its folder the reference's chat template" in refused("measure", *words(policy=policy), *given)


def test_missing_documents_and_another_text_raise(pair, text, cached, tmp_path, refused):
    few = tmp_path / "few"
    cache_reference(CacheJob(reference=str(pair[1]), text=str(text), out=str(few), limit=2, **WINDOWS))
    given = words(policy=pair[0], reference=pair[1], text=text, out=tmp_path / "run", **WINDOWS)
    line = refused("measure", *given, "--reference-cache", few)
    assert "the first being prompt 2, sample 0" in line and "the first 2, in batches" in line
    assert main(["measure", *given, "--reference-cache", str(few), "--limit", "2", "--quiet"]) == 0
    other = tmp_path / "other.txt"
    other.write_text(f"{DOCUMENTS[3]}\n\nNobody came.")
    given = words(policy=pair[0], reference=pair[1], text=other, out=tmp_path / "other", **WINDOWS)
    line = refused("measure", *given, "--reference-cache", cached)
    assert "lacks 1 of the 3 sequences of" in line and str(other) in line and str(text) in line
    line = refused("cache", *words(reference=pair[1], text=other, out=cached, **WINDOWS))
    assert f"{cached} holds hidden states of {text}" in line and f"the source is now {other}" in line


def test_another_reference_or_dtype_raises(pair, text, cached, tmp_path, refused):
    out = words(text=text, out=tmp_path / "run", reference_cache=cached, **WINDOWS)
    line = refused("measure", *words(policy=pair[0], reference=pair[0]), *out)
    assert f"{cached} holds hidden states of {pair[1]} (fingerprint" in line
    assert f"and the reference is {pair[0]} (fingerprint" in line
    models = words(policy=pair[0], reference=pair[1])
    line = refused("measure", *models, *out, "--dtype", "bfloat16")
    assert ", float32) and the reference is" in line and ", bfloat16); give --dtype float32" in line
    line = refused("cache", *words(reference=pair[0], text=text, out=cached, **WINDOWS))
    assert f"{cached} holds hidden states of {pair[1]}" in line


def test_damaged_files_are_reported_by_name(pair, text, cached, tmp_path, refused):
    models = words(policy=pair[0], reference=pair[1], text=text, **WINDOWS)
    for name, expected in (
        ("part", "is damaged; delete"),
        ("contents", "contents.json is damaged"),
        ("noise", "give the kleash cache command again"),
    ):
        broken = tmp_path / name
        shutil.copytree(cached, broken)
        victim = next(broken.glob(f"{name}*"))
        victim.write_bytes(victim.read_bytes()[:-9])
        line = refused("measure", *models, *words(reference_cache=broken, out=tmp_path / f"run-{name}"))
        assert expected in line and str(broken) in line
    shutil.copytree(cached, tmp_path / "torn")
    next((tmp_path / "torn").glob("part-*")).unlink()
    line = refused("measure", *models, *words(reference_cache=tmp_path / "torn", out=tmp_path / "run"))
    assert "of the 14 sequences" in line and "lacks" in line


def test_a_cache_without_checksums_and_other_folders_raise(pair, text, tmp_path, refused):
    given = words(reference=pair[1], text=text, **WINDOWS)
    old = tmp_path / "old"
    old.mkdir()
    (old / "reference.json").write_text('{"path": "x", "fingerprint": "y", "dtype": "torch.float32"}')
    line = refused("cache", *given, "--out", old)
    assert f"{old / 'reference.json'} cannot be trusted" in line
    line = refused("cache", *given, "--out", pair[0])
    assert f"{pair[0]} holds chat_template.jinja and is no reference cache of kleash" in line
    (tmp_path / "file").write_text("x")
    line = refused("cache", *given, "--out", tmp_path / "file")
    assert line == f"{tmp_path / 'file'} is a file, and a reference cache is a folder; give another name"
    thesis = tmp_path / "other" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("x")
    for taken in (
        refused("cache", *given, "--out", thesis.parent),
        refused("measure", "--policy", pair[0], *given, "--reference-cache", thesis.parent,
             "--out", tmp_path / "run"),
    ):  # fmt: skip
        assert taken.startswith(f"{thesis.parent} holds thesis.txt and is no reference cache")
    assert list(thesis.parent.iterdir()) == [thesis]


def test_nan_hidden_states_are_not_stored(broken, tmp_path, refused):
    source = tmp_path / "p.txt"
    source.write_text("A long road\n\nThe sea was calm")
    line = refused("cache", *words(reference=broken, text=source, out=tmp_path / "cache"))
    assert line.startswith(
        f"the reference gives NaN or infinite hidden states for prompt 1, sample 0 ({source}"
    )
    assert not list((tmp_path / "cache").glob("part-*"))


def test_a_cache_has_one_writer_and_many_readers(pair, text, cached, tmp_path, refused):
    from filelock import FileLock

    given = words(reference=pair[1], text=text, **WINDOWS)
    with FileLock(cached / ".lock"):
        line = refused("cache", *given, "--out", cached)
        assert line == f"another process is writing {cached}; wait for it, or give another --out"
        measured(pair, text, tmp_path / "run", reference_cache=str(cached))
        (tmp_path / "new").mkdir()
        with FileLock(tmp_path / "new" / ".lock"):
            more = words(policy=pair[0], reference_cache=tmp_path / "new", out=tmp_path / "other")
            line = refused("measure", *given, *more)
    assert line.startswith(f"another process is writing {tmp_path / 'new'}; wait for it, or make the cache")


def test_invalid_cache_options_raise(tmp_path, refused):
    line = refused("cache", "--reference", tmp_path)
    assert line == "say what the reference should read: --text or --responses"
    assert CacheJob().measurement().source == ("text", "shipped:text")
    job = CacheJob(reference="r", responses="x", revision_reference="v").measurement()
    assert (job.policy, job.revision_policy, job.source) == ("r", "v", ("responses", "x"))
