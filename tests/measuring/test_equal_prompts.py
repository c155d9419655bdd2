"""Equal prompts are one cluster, however often and in whatever way a source holds them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kleash.measuring import DriftPart, compare, drift_of, measure, sweep
from kleash.measuring.sequence_clusters import distinct_prompts
from kleash.models import load_pair
from kleash.records import Measurement, RunFolder
from kleash.sources.prompts import read_prompts
from kleash.training.response_metrics import Response, response_metrics

COPIES = 4


@pytest.fixture(scope="module")
def job(pair):
    return {"policy": str(pair[0]), "reference": str(pair[1]), "max_new_tokens": 6}


@pytest.fixture(scope="module")
def eight(prompts, tmp_path_factory):
    """A file of eight prompts, and one that holds each of them ``COPIES`` times, in turn."""
    lines = prompts.read_text().split("\n")[:8]
    root = tmp_path_factory.mktemp("eight")
    (root / "once.txt").write_text("\n".join(lines))
    (root / "repeated.txt").write_text("\n".join(lines * COPIES))
    return root / "once.txt", root / "repeated.txt"


@pytest.fixture(scope="module")
def runs(job, eight, tmp_path_factory):
    """The same responses three times: samples of a prompt, copies of it, and a file with a prompt id for each."""
    root = tmp_path_factory.mktemp("runs")
    samples, copies, responses = root / "samples", root / "copies", root / "responses"
    measure(**job, prompts=eight[0], samples_per_prompt=COPIES, out=samples)
    measure(**job, prompts=eight[1], out=copies)
    lines = []
    tokens = next(RunFolder(copies).parts("tokens", ["prompt_id", "token_id"]))
    for part in RunFolder(copies).parts("sequences", ["prompt_id", "prompt"]):
        for prompt, text in zip(part["prompt_id"].tolist(), part["prompt"], strict=True):
            response = tokens["token_id"][tokens["prompt_id"] == prompt].tolist()
            lines.append(json.dumps({"prompt_id": prompt, "prompt": text, "response_token_ids": response}))
    (root / "responses.jsonl").write_text("\n".join(lines))
    models = {name: job[name] for name in ("policy", "reference")}
    measure(**models, responses=root / "responses.jsonl", out=responses)
    return {"samples": samples, "copies": copies, "responses": responses}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_sequences_of_one_id_or_one_prompt_belong_together(sequences):
    """Against the connected components, joined pair by pair."""
    expected = list(range(len(sequences)))
    for one, (id_one, hash_one) in enumerate(sequences):
        for other, (id_other, hash_other) in enumerate(sequences):
            if id_one == id_other or hash_one == hash_other:
                new, old = expected[one], expected[other]
                expected = [new if label == old else label for label in expected]
    ids, hashes = np.array(sequences).T
    labels = distinct_prompts(ids, np.arange(len(ids)), hashes, on_text=False)
    same = labels[:, None] == labels
    assert (same == (np.array(expected)[:, None] == expected)).all()
    assert sorted(set(labels.tolist())) == list(range(labels.max() + 1))


def test_documents_are_equal_where_all_their_windows_are():
    documents, windows = np.repeat([0, 1, 2, 3, 4], [2, 2, 2, 1, 2]), np.array([0, 1, 0, 1, 0, 1, 0, 0, 1])
    hashes = np.array([7, -8, 7, -8, -8, 7, 7, 7, 9])
    labels = distinct_prompts(documents, windows, hashes, on_text=True)
    assert labels.tolist() == [0, 0, 0, 0, 1, 1, 2, 3, 3]


def test_copies_of_a_prompt_count_as_samples_of_it(runs):
    measured = {name: Measurement.read(folder) for name, folder in runs.items()}
    expected = measured["samples"]
    assert expected.counts.clusters == 8 and not any("distinct" in note for note in expected.notes)
    for name in ("copies", "responses"):
        one = measured[name]
        same = {"shards": one.counts.shards, "truncated_sequences": one.counts.truncated_sequences}
        assert one.counts == replace(expected.counts, **same)
        assert sum("8 of the 32 prompts are distinct" in note for note in one.notes) == 1
        for statistic, number in expected.statistics().items():
            assert one.statistics()[statistic].ci95 == pytest.approx(number.ci95, rel=1e-5)
        for level, number in expected.quantiles["kl_policy_reference"].items():
            assert one.quantiles["kl_policy_reference"][level].ci95 == pytest.approx(number.ci95, rel=1e-4)
    total, copied = (measured[name].per_sequence for name in ("samples", "copies"))
    assert copied.kl_policy_reference.ci95 == pytest.approx(total.kl_policy_reference.ci95, rel=1e-5)


def test_copies_are_noted_once_and_paired_with_samples(runs):
    for name, count in (("samples", 8), ("copies", 32), ("responses", 32)):
        plain = [note for note in Measurement.read(runs[name]).notes if "are plain text" in note]
        assert len(plain) == 1 and plain[0].startswith(f"the {count} prompts are plain text, read without")
    comparison = compare([*runs.values()])
    assert comparison.warnings == ("responses was measured with source responses, samples with prompts",)
    for difference in comparison.differences:
        assert difference.shared_prompts == 8 and difference.only_here == difference.only_there == 0
        assert difference.differences["kl_policy_reference"].value == pytest.approx(0, abs=1e-6)


def test_the_turns_of_a_conversation_are_one_prompt(job, tmp_path):
    rollouts = [{"token_ids": [n, 1, 2, 3, n, 4], "loss_mask": [0, 1, 0, 1, 0, 1]} for n in range(5, 9)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rollouts)))
    run = measure(**job, responses=tmp_path / "rollouts.jsonl", out=tmp_path / "run")
    (difference,) = compare([run, run]).differences
    assert run.counts.sequences == 12 and run.counts.prompts == difference.shared_prompts == 4


def test_one_prompt_written_thirty_times_passes_no_gate(job, eight, tmp_path):
    (tmp_path / "one.txt").write_text("\n".join([eight[0].read_text().split("\n")[0]] * 30))
    one = measure(**job, prompts=tmp_path / "one.txt", at_most=5.0, out=tmp_path / "run")
    assert one.counts.clusters == 1 and one.gate.verdict == "undecided"


def test_copies_do_not_end_a_run_by_its_relative_error(job, eight, tmp_path):
    """64 clusters are needed, and 80 copies of 8 prompts are 8."""
    (tmp_path / "many.txt").write_text("\n".join(eight[0].read_text().split("\n") * 10))
    options = {**job, "max_new_tokens": 2, "batch_tokens": 32, "until_relative_error": 0.9}
    run = measure(**options, prompts=tmp_path / "many.txt", out=tmp_path / "run")
    assert run.counts.sequences == 80 and run.counts.clusters == 8


def test_equal_documents_are_one_cluster_of_a_measurement_and_a_sweep(pair, tmp_path):
    documents = [" ".join(f"Boat {n} went out {n * k + k} times;" for k in range(2)) for n in range(34)]
    records = [json.dumps({"text": text}) for text in ("", *documents, *documents, "")]
    (tmp_path / "text.jsonl").write_text("\n".join(records))
    options = {"reference": str(pair[1]), "text": str(tmp_path / "text.jsonl")}
    one = measure(policy=pair[0], out=tmp_path / "run", **options)
    assert one.counts.clusters == one.counts.prompts == 34
    assert any("34 of the 68 documents are distinct" in note for note in one.notes)
    assert "2 of the 70 documents have fewer than two tokens, and are left out" in one.notes
    result = sweep(candidates=(str(pair[0]),), out=tmp_path / "sweep", **options)
    assert result.clusters == 34


def test_paddings_of_a_prompt_are_one_prompt(pair, tmp_path):
    models = load_pair(str(pair[0]), str(pair[1]))
    padding = models.tokenizer.pad_token_id
    ids = [[7, 8, 9], [padding, padding, 7, 8, 9], [7, 8, 9, padding]]
    ids += [[7, padding, 9], [padding], [padding] * 2]
    lines = [json.dumps({"prompt_token_ids": prompt}) for prompt in ids]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    prompts = read_prompts(str(tmp_path / "prompts.jsonl"), models)
    assert len({prompt.prompt_hash for prompt in prompts[:3]}) == 1
    assert len({prompt.prompt_hash for prompt in prompts}) == 4
    assert [prompt.copy for prompt in prompts[:3]] == [0, 1, 2]  # other responses are drawn for each


def test_a_monitor_of_copies_has_the_error_of_samples():
    draw = np.random.default_rng(0)
    exact = np.repeat(draw.lognormal(size=8), COPIES) * draw.lognormal(0, 0.1, 8 * COPIES)
    prompts = np.repeat(np.arange(8), COPIES)
    drift = drift_of([DriftPart(prompts, np.full(len(exact), 5), exact)])
    assert drift.per_token.clusters == drift.per_sequence.clusters == 8
    assert drift.per_sequence.value == pytest.approx(exact.mean(), rel=1e-12)
    assert list(drift.by_prompt.values()) == pytest.approx(exact.reshape(8, COPIES).mean(1), rel=1e-12)
    rest = {"parts": {}, "is_truncated": False, "prompt": "", "response": ""}
    columns = ("token_kl", "token_logp", "token_logq", "entropy")
    responses = [
        Response(prompt_hash=f"{prompt:016x}", score=kl.sum(), tokens=dict.fromkeys(columns, kl), **rest)
        for prompt, kl in zip(prompts.tolist(), np.repeat(exact[:, None] / 5, 5, axis=1), strict=True)
    ]
    masked = replace(responses[0], score=0.0, tokens=dict.fromkeys(columns, np.empty(0)))
    metrics = response_metrics([*responses, masked], beta=0.1)
    assert metrics["kl/exact_per_sequence"] == pytest.approx(exact.mean()) and math.isnan(masked.kl)
    assert "response/length" not in metrics, "TRL's is of all responses"
    assert metrics["reward/adjusted"] == pytest.approx(0.9 * exact.mean())
    means = exact.reshape(8, COPIES).mean(1)
    assert metrics["response/prompts"] == 8
    assert metrics["kl/exact_per_sequence_error"] == pytest.approx(means.std(ddof=1) / 8**0.5)
