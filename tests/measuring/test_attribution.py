"""``kleash sweep --attribute``: against swaps of state dicts in float64, planted damage, resumption and failures."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny, tiny_tokenizer
from transformers import AutoModelForCausalLM

from kleash.cli.sweeping import EXIT_FAILED, run_sweep
from kleash.errors import OptionError, RunFolderError
from kleash.jobs import MeasureJob, SweepJob
from kleash.measuring import attribution_passes, sweep
from kleash.measuring.attribution_passes import SwapPass, choose_sequences, read_chosen, run_passes
from kleash.measuring.progress import NullProgressReporter
from kleash.measuring.sequence_clusters import SequenceSums
from kleash.models import TokenSequence
from kleash.models.weight_groups import WeightGroup
from kleash.reports.attribution import describe_attribution, describe_sum
from kleash.store.attribution import Attribution
from kleash.store.attribution_folder import AttributionFolder
from kleash.store.sweep import Sweep

DOCUMENTS = [
    f"Boat {n} went out {n * n} times before the sun had come up; {'the sea was calm ' * (n % 4)}"
    for n in range(34)
]
LAYER = ".layers.1."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def job(folder: Path) -> SweepJob:
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
def result(job: SweepJob) -> Sweep:
    return sweep(job)


def attribution_of(result: Sweep, candidate: int, grouping: str) -> Attribution:
    (attribution,) = (
        attribution
        for attribution in result.attributions
        if (attribution.candidate, attribution.grouping) == (candidate, grouping)
    )
    return attribution


def log_probabilities(network: Any) -> list[torch.Tensor]:
    """The log-probabilities of the tokens that can follow each prefix of each document, in float64."""
    ids = [tiny_tokenizer()(document)["input_ids"] for document in DOCUMENTS]
    with torch.no_grad():
        return [network(torch.tensor([row])).logits[0, :-1].log_softmax(-1) for row in ids]


def kl_sums(first: list[torch.Tensor], second: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
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
def test_changes_are_those_of_mixed_state_dicts_in_float64(
    folder: Path, result: Sweep, grouping: str, name: str, part: str
) -> None:
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
    assert attribution.mean is not None and attribution.mean.value == pytest.approx(means[0], rel=1e-6)
    assert group.change.value == pytest.approx(means[1] - means[0], rel=1e-5)
    expected_error = np.sqrt(clusters / (clusters - 1) * (residuals**2).sum())
    assert group.change.standard_error == pytest.approx(expected_error, rel=1e-4)
    assert attribution.share_of(group) == pytest.approx(1 - means[1] / means[0], rel=1e-5)
    assert (attribution.clusters, attribution.tokens) == (clusters, tokens.sum())


def test_all_groups_together_leave_no_kl_and_single_changes_do_not_add_up(result: Sweep) -> None:
    for grouping in ("layers", "modules"):
        attribution = attribution_of(result, 1, grouping)
        assert attribution.mean is not None and attribution.change_of_all is not None
        assert attribution.change_of_all.value == pytest.approx(-attribution.mean.value, rel=1e-9)
        assert attribution.sum_of_changes is not None and attribution.interaction is not None
        total = sum(group.change.value for group in attribution.groups)
        assert attribution.sum_of_changes.value == pytest.approx(total, rel=1e-9)
        difference = total - attribution.change_of_all.value
        assert attribution.interaction.value == pytest.approx(difference, rel=1e-9)
        assert "they do not add up" in describe_sum(attribution)


def test_planted_damage_is_attributed_to_its_layer_and_all_else_is_exactly_0(result: Sweep) -> None:
    attribution = attribution_of(result, 2, "layers")
    for group in attribution.groups:
        is_planted = group.name == "layer 1"
        assert group.is_identical != is_planted
        assert attribution.share_of(group) == pytest.approx(float(is_planted), abs=1e-9)
        if not is_planted:
            assert (group.change.value, group.change.ci95) == (0, (0, 0))
    assert attribution.interaction is not None
    assert (attribution.interaction.value, attribution.interaction.ci95) == (0, (0, 0))
    assert describe_attribution(attribution, "it").startswith("Swapping layer 1 back")
    assert describe_sum(attribution) == "No weights but those of layer 1 differ from the reference's."


def test_the_control_is_exactly_0(result: Sweep) -> None:
    controls = [attribution.control for attribution in result.attributions if not attribution.failure]
    assert len(controls) == 4
    for control in controls:
        assert control is not None and (control.value, control.ci95) == (0, (0, 0))


def test_simultaneous_intervals_are_wider_than_single_ones(result: Sweep) -> None:
    for group in attribution_of(result, 1, "modules").groups:
        if not group.is_identical:
            low, high = group.simultaneous_ci95
            assert low < group.change.ci95[0] < group.change.ci95[1] < high


def test_a_candidate_of_another_architecture_is_named_and_the_others_are_attributed(
    result: Sweep, job: SweepJob
) -> None:
    assert not result.failed
    for grouping in ("layers", "modules"):
        assert "GPT2LMHeadModel" in attribution_of(result, 3, grouping).failure
    assert Sweep.read(Path(str(job.out))).to_json() == result.to_json()
    page = (Path(str(job.out)) / "sweep.html").read_text()
    assert 'id="attribution"' in page and "was not attributed" in page


def test_a_resumed_attribution_runs_only_the_passes_that_are_missing(
    job: SweepJob, result: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score_pass, scored = attribution_passes.score_pass, []

    def recorded(swap: SwapPass, *arguments: Any) -> SequenceSums:
        scored.append(swap.name)
        return score_pass(swap, *arguments)

    monkeypatch.setattr(attribution_passes, "score_pass", recorded)
    (Path(str(job.out)) / "attribution" / "01-noisy" / "layers-002.json").unlink()
    assert run_sweep(SweepJob(**{**vars(job), "resume": True})) == EXIT_FAILED
    assert scored == ["layers-002"]
    written = Sweep.read(Path(str(job.out))).to_dict()
    assert written["attributions"] == result.to_dict()["attributions"]
    printed = capsys.readouterr()
    assert "Swapping layer 1 back to the reference's weights removes all of" in printed.out
    assert "a second pass without a swap changed exactly 0" in printed.out
    assert "forward passes of" in printed.err and "both models are in memory" in printed.err


def test_a_damaged_pass_is_named(tmp_path: Path) -> None:
    folder = AttributionFolder(tmp_path)
    with folder.opened({}):
        folder.write("all", [[0], [0], [0.25], [1.0]])
    path = tmp_path / "all.json"
    path.write_text(path.read_text().replace("0.25", "0.75"))
    with pytest.raises(RunFolderError, match=r"all.json is damaged.*--resume"):
        folder.read("all")


def test_passes_of_other_settings_are_run_again(tmp_path: Path) -> None:
    folder = AttributionFolder(tmp_path / "passes")
    with folder.opened({"tokens": 5}):
        folder.write("candidate", [[1], [0], [0.1], [7.0]])
    with folder.opened({"tokens": 5}):
        assert folder.read("candidate") == [[1], [0], [0.1], [7.0]]
    with folder.opened({"tokens": 6}):
        assert not folder.has("candidate")


def test_sequences_are_drawn_until_they_have_the_tokens() -> None:
    tokens = np.random.default_rng(2).integers(1, 50, 200).astype(float)
    chosen = choose_sequences(tokens, 1000)
    assert 1000 <= tokens[chosen].sum() < 1050
    assert (np.diff(chosen) > 0).all() and 60 < chosen.mean() < 140
    assert choose_sequences(tokens, 10**9).tolist() == list(range(200))
    assert len(choose_sequences(tokens, 1)) == 1


def test_a_source_with_other_sequences_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job, pair = MeasureJob(out="run"), cast("Any", None)
    sequences = [
        TokenSequence(
            prompt_id=number,
            sample_id=0,
            prompt_ids=(1,),
            response_ids=(2,) * (number + 1),
            prompt_text="",
            response_text="",
            finish_reason="",
            prompt_hash="",
        )
        for number in range(5)
    ]
    monkeypatch.setattr(attribution_passes, "source_sequences", lambda *_: iter(sequences))
    run = SequenceSums.from_lists(
        [[0, 1, 2, 3, 4], [0] * 5, [0, 1, 2, 3, 4], [0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]]
    )
    chosen = np.array([1, 4])
    assert read_chosen(job, pair, run, chosen) == (sequences[1], sequences[4])
    sequences.pop(0)
    with pytest.raises(RunFolderError, match="other sequences than were measured"):
        read_chosen(job, pair, run, chosen)


def test_processes_share_the_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[str] = []

    def sums_of(swap: SwapPass, *_: object) -> SequenceSums:
        scored.append(swap.name)
        return SequenceSums.from_lists([[0, 1], [0, 0], [0, 1], [float(swap.name), 0.5], [3.0, 4.0]])

    models: Any = SimpleNamespace(sequences=(None, None))
    monkeypatch.setattr(attribution_passes, "score_pass", sums_of)
    passes = [SwapPass(name=str(number), groups=()) for number in range(9)]

    def work(_: int) -> dict[str, SequenceSums]:
        folder = AttributionFolder(tmp_path)
        with folder.opened({}):
            return run_passes(passes, models, folder, NullProgressReporter())

    with ThreadPoolExecutor(2) as threads:
        for sums in threads.map(work, range(2)):
            assert {name: x.total[0] for name, x in sums.items()} == {str(n): n for n in range(9)}
    assert sorted(scored) == sorted("012345678")
    with (
        AttributionFolder(tmp_path).opened({}),
        pytest.raises(RunFolderError, match="another process"),
        AttributionFolder(tmp_path).opened({"a": 1}),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attribute": ("heads",)}, "--attribute must be one of layers, modules"),
        ({"attribute": ("layers", "layers")}, "names layers twice"),
        ({"attribute": ("layers", "modules", "modules")}, "names modules twice"),
        ({"attribute_tokens": 5}, "--attribute-tokens is for --attribute"),
        ({"attribute": ("layers",), "attribute_tokens": 0}, "--attribute-tokens must be at least 1"),
        ({"attribute": ("layers",), "device_map": "fsdp"}, "--device-map fsdp"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SweepJob(candidates=("a",), text="t", **options)


def test_a_candidate_equal_to_its_reference_needs_one_pass() -> None:
    group = WeightGroup(name="layer 0", modules=("a",), tensors=(), parameters=1, is_identical=True)
    passes = attribution_passes.plan_passes({"layers": [group]})
    assert [swap.name for swap in passes.values()] == ["candidate"]
