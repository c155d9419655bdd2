"""``kleash sweep --attribute``: against swaps of state dicts in float64, planted damage, resumption and failures."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny, tiny_tokenizer
from transformers import AutoModelForCausalLM

from kleash.cli.dispatch import run
from kleash.errors import OptionError, RunFolderError
from kleash.jobs import SweepJob
from kleash.measuring import attribution, sweep
from kleash.measuring.attribution import (
    attribute,
    choose_sequences,
    load_swap_models,
    plan_passes,
    run_passes,
)
from kleash.measuring.model_pair import header_of
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.sequence_clusters import sum_run
from kleash.models.weight_groups import WeightGroup
from kleash.reports.sweep import describe_attribution
from kleash.store import RunFolder
from kleash.store.sweep import Sweep

DOCUMENTS = [
    f"Boat {n} went out {n * n} times before the sun had come up; {'the sea was calm ' * (n % 4)}"
    for n in range(18)
]
LAYER = ".layers.1."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reference; candidates with noise in all weights and in those of one layer; and one of another architecture."""
    root = tmp_path_factory.mktemp("attribution")
    save_tiny(root / "base", num_hidden_layers=3)
    save_tiny(root / "noisy", num_hidden_layers=3, apart=0.1)
    save_tiny(root / "planted", num_hidden_layers=3)
    path = root / "planted" / "model.safetensors"
    tensors = load_file(path)
    torch.manual_seed(1)
    for name, tensor in tensors.items():
        if LAYER in name:
            tensor += 0.2 * torch.randn_like(tensor)
    save_file(tensors, path, metadata={"format": "pt"})
    save_tiny(root / "gpt2", "gpt2")
    (root / "text.txt").write_text("\n\n".join(DOCUMENTS))
    return root


@pytest.fixture(scope="module")
def job(folder):
    return SweepJob(
        candidates=tuple(str(folder / name) for name in ("noisy", "planted", "gpt2")),
        reference=str(folder / "base"),
        text=str(folder / "text.txt"),
        window=128,
        dtype="float64",
        attribute=("layers", "modules"),
        attribute_tokens=10**6,
        out=str(folder / "out"),
    )


@pytest.fixture(scope="module")
def result(job):
    return sweep(job)


def attribution_of(result, candidate, grouping):
    (found,) = (a for a in result.attributions if (a.candidate, a.grouping) == (candidate, grouping))
    return found


def log_probabilities(network):
    """The log-probabilities of the tokens that can follow each prefix of each document, in float64."""
    ids = [tiny_tokenizer()(document)["input_ids"] for document in DOCUMENTS]
    with torch.no_grad():
        return [network(torch.tensor([row])).logits[0, :-1].log_softmax(-1) for row in ids]


def kl_sums(first, second):
    """Sum of KL(first || second) over each document's tokens, and their number."""
    sums = [float((p.exp() * (p - q)).sum()) for p, q in zip(first, second, strict=True)]
    return np.array(sums), np.array([len(p) for p in first])


@pytest.mark.parametrize(
    ("grouping", "name", "part"),
    [
        ("layers", "layer 0", ".layers.0."),
        ("modules", "self_attn.v_proj", "v_proj"),
        ("modules", "head", "lm_head"),
    ],
)
def test_changes_are_those_of_mixed_state_dicts_in_float64(folder, result, grouping, name, part):
    networks = [
        AutoModelForCausalLM.from_pretrained(folder / model, dtype=torch.float64)
        for model in ("noisy", "base")
    ]
    before, reference = map(log_probabilities, networks)
    states = [network.state_dict() for network in networks]
    networks[0].load_state_dict({key: states[part in key][key] for key in states[0]})
    own, tokens = kl_sums(reference, before)
    swapped, _ = kl_sums(reference, log_probabilities(networks[0]))
    means = own.sum() / tokens.sum(), swapped.sum() / tokens.sum()
    residuals = ((swapped - means[1] * tokens) - (own - means[0] * tokens)) / tokens.sum()
    clusters = len(tokens)
    attribution = attribution_of(result, 1, grouping)
    (group,) = (group for group in attribution.groups if group.name == name)
    assert attribution.mean.value == pytest.approx(means[0], rel=1e-6)
    assert group.change.value == pytest.approx(means[1] - means[0], rel=1e-5)
    expected_error = np.sqrt(clusters / (clusters - 1) * (residuals**2).sum())
    assert group.change.standard_error == pytest.approx(expected_error, rel=1e-4)
    assert attribution.share_of(group) == pytest.approx(1 - means[1] / means[0], rel=1e-5)
    assert (attribution.clusters, attribution.tokens) == (clusters, tokens.sum())


def test_all_groups_together_leave_no_kl_and_single_changes_do_not_add_up(result):
    for grouping in ("layers", "modules"):
        attribution = attribution_of(result, 1, grouping)
        assert attribution.change_of_all.value == pytest.approx(-attribution.mean.value, rel=1e-9)
        total = sum(group.change.value for group in attribution.groups)
        assert attribution.sum_of_changes.value == pytest.approx(total, rel=1e-9)
        difference = total - attribution.change_of_all.value
        assert attribution.interaction.value == pytest.approx(difference, rel=1e-9)
        interaction = attribution.changes_together["sum minus all at once"]
        assert interaction is attribution.interaction and interaction.ci95[0] > 0


def test_planted_damage_is_attributed_to_its_layer_and_all_else_is_exactly_0(result):
    attribution = attribution_of(result, 2, "layers")
    for group in attribution.groups:
        is_planted = group.name == "layer 1"
        assert group.is_identical != is_planted
        assert attribution.share_of(group) == pytest.approx(float(is_planted), abs=1e-9)
        if not is_planted:
            assert (group.change.value, group.change.ci95) == (0, (0, 0))
    assert (attribution.interaction.value, attribution.interaction.ci95) == (0, (0, 0))
    swapped = "Swapping layer 1 back to the reference's weights removes all of the KL("
    assert describe_attribution(attribution, "it").startswith(swapped)
    html, groups = result._repr_html_(), [group for each in result.attributions for group in each.groups]
    assert html.count("identical weights") == sum(group.is_identical for group in groups)


def test_controls_are_exactly_0_and_simultaneous_intervals_are_wider_than_single_ones(result):
    controls = [attribution.control for attribution in result.attributions if not attribution.failure]
    assert [(control.value, control.ci95) for control in controls] == [(0, (0, 0))] * 4
    for group in attribution_of(result, 1, "modules").groups:
        if not group.is_identical:
            low, high = group.simultaneous_ci95
            assert low < group.change.ci95[0] < group.change.ci95[1] < high


def test_a_candidate_of_another_architecture_is_named_and_the_others_are_attributed(result, job):
    assert not result.failed
    for grouping in ("layers", "modules"):
        assert "GPT2LMHeadModel" in attribution_of(result, 3, grouping).failure
    assert Sweep.read(Path(str(job.out))).to_json() == result.to_json()
    page = (Path(str(job.out)) / "sweep.html").read_text()
    assert 'id="attribution"' in page and "Not attributed: " in page


def test_a_resumed_attribution_runs_only_the_passes_that_are_missing(job, result, monkeypatch, capsys):
    write_shard, written = RunFolder.write_shard, []

    def recorded(self, *arguments):
        written.append(self.root.name)
        write_shard(self, *arguments)

    monkeypatch.setattr(RunFolder, "write_shard", recorded)
    root = Path(str(job.out)) / "attribution" / "01-noisy" / "1000000-tokens"
    next((root / "layers-002" / "sequences").iterdir()).unlink()
    assert run(SweepJob(**{**vars(job), "resume": True})) == 2
    assert written == ["layers-002"]
    again = Sweep.read(Path(str(job.out))).to_dict()
    assert again["attributions"] == result.to_dict()["attributions"]
    printed = capsys.readouterr()
    assert re.search(r"layer 1 +-\S+ nats .* 100\.0 %", printed.out)
    assert " passes of " in printed.err


def test_a_damaged_pass_or_one_of_other_groups_is_no_attribution(job, result, tmp_path):
    out = Path(shutil.copytree(str(job.out), tmp_path / "out"))
    root = out / "attribution" / "01-noisy" / "1000000-tokens"
    one = {"candidates": job.candidates[:1], "attribute": ("layers",), "out": str(out), "resume": True}

    def resumed():
        return attribution_of(sweep(**{**vars(job), **one}), 1, "layers")

    path = next((root / "all" / "tokens").iterdir())
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")
    assert str(path) in resumed().failure
    path.write_bytes(content)
    moved = root / "layers-001"
    moved.rename(root / "kept")
    shutil.copytree(root / "layers-002", moved)
    assert "another run" in resumed().failure
    shutil.rmtree(moved)
    (root / "kept").rename(moved)
    assert resumed() == attribution_of(result, 1, "layers")


def test_sequences_are_drawn_until_they_have_the_tokens():
    tokens = np.random.default_rng(2).integers(1, 50, 200).astype(float)
    chosen = choose_sequences(tokens, 1000)
    assert 1000 <= tokens[chosen].sum() < 1050
    assert (np.diff(chosen) > 0).all() and 60 < chosen.mean() < 140
    assert choose_sequences(tokens, 10**9).tolist() == list(range(200))
    assert len(choose_sequences(tokens, 1)) == 1


def test_another_source_than_was_measured_is_refused(job, result):
    out, candidate = Path(str(job.out)), result.candidates[1]
    run = sum_run(RunFolder(out / candidate.folder), [job.statistic], itemgetter(job.statistic))
    with pytest.raises(RunFolderError, match="was written to after it was measured"):
        attribute(job, out, candidate, run, "0" * 64, ProgressReporter())


def test_processes_share_the_passes(job, result, tmp_path, monkeypatch):
    """Two threads, each with models and a device of its own, that score all passes of one candidate in small shards."""
    job = SweepJob(**{**vars(job), "batch_tokens": 64, "attribute": ("layers",)})
    scored = []
    write_shard = RunFolder.write_shard

    def recorded(self, index, *arguments):
        scored.append((self.root.name, index))
        write_shard(self, index, *arguments)

    monkeypatch.setattr(RunFolder, "write_shard", recorded)
    devices = iter(("auto", "cpu"))  # two names of one
    monkeypatch.setattr(attribution, "on_device_of_rank", lambda job: replace(job, device=next(devices)))
    run = sum_run(
        RunFolder(Path(str(job.out)) / "candidates" / "02-planted"),
        [job.statistic],
        itemgetter(job.statistic),
    )
    models = [load_swap_models(job, Path(str(job.out)), result.candidates[1], run) for _ in range(2)]
    passes, _ = plan_passes(models[0].groups)

    def work(own):
        return run_passes(passes, own, tmp_path, header_of(own.job, own.pair, "digest"), ProgressReporter())

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(work, models)
    assert len(scored) == len(set(scored)) and {name for name, _ in scored} == passes.keys()
    assert max(index for _, index in scored) > 1
    for name, sums in first.items():
        assert all(np.array_equal(*columns) for columns in zip(sums, second[name], strict=True))
    mean = first["candidate"].total.sum() / first["candidate"].tokens.sum()
    assert mean == pytest.approx(attribution_of(result, 2, "layers").mean.value, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attribute": ("heads",)}, "--attribute must be one of layers, modules"),
        ({"attribute": ("layers", "layers")}, "names layers twice"),
        ({"attribute_tokens": 5}, "--attribute-tokens is for --attribute"),
        ({"attribute": ("layers",), "device_map": "fsdp"}, "--device-map fsdp"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        SweepJob(candidates=("a",), text="t", **options)


def test_a_candidate_equal_to_its_reference_needs_one_pass():
    group = WeightGroup(name="layer 0", parts=("a",), parameters=1, is_identical=True)
    passes, _ = plan_passes({"layers": [group]})
    assert passes == {"candidate": ()}
