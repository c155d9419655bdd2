"""What a run says about itself, on runs whose truth is known."""

import json
import re

import numpy as np
import pytest
import torch
from scoring_cases import sequence_of

from kleash.cli import main
from kleash.cli.printing import print_summary
from kleash.errors import RunFolderError
from kleash.linear import log_probabilities
from kleash.measuring import compare, measure
from kleash.measuring.rescoring import noise_sequences, noise_tokens, shortened_to
from kleash.measuring.shards import source_sequences
from kleash.models import Model, load_pair
from kleash.models.tokenizers import token_texts
from kleash.records import STATISTICS, MeasureJob, Measurement, RunFolder
from kleash.uncertainty import quantiles


@pytest.fixture(scope="module")
def job(pair, prompts):
    return {"policy": str(pair[0]), "reference": str(pair[1]), "prompts": str(prompts), "max_new_tokens": 12}


@pytest.fixture(scope="module")
def own(job, tmp_path_factory):
    """A run over the policy's own responses."""
    out = tmp_path_factory.mktemp("own") / "run"
    measure(**job, samples_per_prompt=4, out=out)
    return out


def as_responses(run, path, **changes):
    """The responses of a run as a file of responses with their log-probabilities."""
    tokens = next(RunFolder(run).parts("tokens", ["prompt_id", "sample_id", "token_id", "logp_sampled"]))
    prompts = {}
    for part in RunFolder(run).parts("sequences", ["prompt_id", "prompt"]):
        prompts |= dict(zip(part["prompt_id"].tolist(), part["prompt"], strict=True))
    lines = []
    for who, sample in dict.fromkeys(
        zip(tokens["prompt_id"].tolist(), tokens["sample_id"].tolist(), strict=True)
    ):
        rows = (tokens["prompt_id"] == who) & (tokens["sample_id"] == sample)
        line = {
            "prompt": prompts[who],
            "response_token_ids": tokens["token_id"][rows].tolist(),
            "logprobs": [min(0.0, float(value)) for value in tokens["logp_sampled"][rows]],
        }
        lines.append(json.dumps({**line, **changes}))
    path.write_text("\n".join(lines))
    return path


def test_exact_and_sampled_estimates_agree_on_policy(own):
    measured = json.loads((own / "measurement.json").read_text())
    exact, total = measured["per_token"]["kl_policy_reference"], measured["per_sequence"]
    for name in ("k1", "k3"):
        bias = measured["estimators"][name]["bias"]
        assert abs(bias["value"]) < 4 * bias["standard_error"]
    assert measured["estimators"]["k2"]["bias"]["value"] > 0
    bias = measured["estimators"]["abs"]["bias"]
    assert bias["value"] > 10 * bias["standard_error"]
    assert total["exact_terms"]["value"] == pytest.approx(12 * exact["value"], rel=0.05)
    by_response = Measurement.read(own).to_pandas().tokens.groupby(["prompt_id", "sample_id"])
    largest = by_response["kl_policy_reference"].max().mean()
    assert total["largest_token"]["value"] == pytest.approx(largest, rel=1e-6)
    errors = [total[name]["standard_error"] for name in ("monte_carlo", "exact_terms")]
    assert total["kl_policy_reference"]["standard_error"] <= 1.05 * min(errors)
    assert all("rows of a head that are no tokens" in warning for warning in measured["warnings"])
    ends = next(RunFolder(own).parts("sequences", ["finish_reason"]))["finish_reason"]
    assert measured["counts"]["truncated_sequences"] == ends.count("length") > 0
    assert measured["counts"]["clusters"] == 40 and measured["counts"]["sequences"] == 160


def test_shares_and_bins_add_up_to_the_whole(own):
    measured = json.loads((own / "measurement.json").read_text())
    for kind in ("by_position", "by_confidence"):
        assert sum(part["share_of_kl"] for part in measured[kind]) == pytest.approx(1.0)
        assert sum(part["tokens"] for part in measured[kind]) == measured["counts"]["tokens"]
    kl = np.concatenate(
        [part["kl_policy_reference"] for part in RunFolder(own).parts("tokens", ["kl_policy_reference"])]
    )
    ladder = measured["quantiles"]["kl_policy_reference"]
    assert ladder["max"]["value"] == kl.max()
    for rung in ("50", "90", "99.9"):
        expected = np.quantile(kl, float(rung) / 100, method="inverted_cdf")
        assert ladder[rung]["value"] == pytest.approx(float(expected))


def test_quantiles_over_many_shards_have_clustered_errors(job, tmp_path):
    out = tmp_path / "run"
    measured = measure(**{**job, "batch_tokens": 96}, samples_per_prompt=2, out=out)
    assert measured.counts.shards > 3
    parts = list(RunFolder(out).parts("tokens", ["prompt_id", "kl_policy_reference"]))
    prompt, kl = (
        np.concatenate([part[name] for part in parts]) for name in ("prompt_id", "kl_policy_reference")
    )
    expected = quantiles(kl, prompt, (0.5, 0.9), lower=0.0)
    assert measured.counts.tokens == len(kl)
    for rung, estimate in zip(("50", "90"), expected, strict=True):
        quantile = measured.quantiles["kl_policy_reference"][rung]
        assert (quantile.value, quantile.standard_error) == (estimate.value, estimate.standard_error)
        assert quantile.ci95 == estimate.ci95
        assert quantile.ci95[0] < quantile.value < quantile.ci95[1]


def test_the_same_responses_from_a_file_give_the_same_numbers(job, own, tmp_path):
    source = as_responses(own, tmp_path / "responses.jsonl")
    settings = {**job, "prompts": None, "responses": str(source)}
    measured = measure(**settings, out=tmp_path / "run")
    expected = json.loads((own / "measurement.json").read_text())
    value = measured.per_token["kl_policy_reference"].value
    assert value == pytest.approx(expected["per_token"]["kl_policy_reference"]["value"], rel=1e-5)
    total = expected["per_sequence"]["kl_policy_reference"]["value"]
    assert measured.per_sequence.kl_policy_reference.value == pytest.approx(total, rel=1e-4)
    assert measured.estimators["k3"].value == pytest.approx(expected["estimators"]["k3"]["value"], rel=1e-4)
    assert all("rows of a head that are no tokens" in warning for warning in measured.warnings)
    as_responses(own, source, temperature=0)
    for temperature in (0, 1):  # a greedy response is no sample
        greedy = measure(**settings | {"temperature": temperature}, out=tmp_path / str(temperature))
        assert not greedy.estimators and greedy.per_sequence is None
        assert greedy.per_token["kl_policy_reference"] == measured.per_token["kl_policy_reference"]
        assert greedy.warnings == measured.warnings


def test_importance_weights_correct_another_temperature(job, tmp_path):
    """Responses drawn at 1.5 and scored at 1: weighted k1 is unbiased there, unweighted is found out."""
    hot = {**job, "temperature": 1.5, "samples_per_prompt": 8, "max_new_tokens": 6}
    measure(**hot, out=tmp_path / "hot")
    source = as_responses(tmp_path / "hot", tmp_path / "hot.jsonl", temperature=1.5)
    settings = {**job, "prompts": None, "responses": str(source)}
    weighted = measure(**settings, out=tmp_path / "weighted")
    bias = weighted.estimators["k1"].bias
    assert abs(bias.value) < 4 * bias.standard_error
    assert any("declare temperature 1.5, and both models were scored at 1" in w for w in weighted.warnings)
    none = {"logprobs": None, "temperature": None}
    trusted = tmp_path / "trusted.jsonl"
    trusted.write_text("\n".join(json.dumps(json.loads(x) | none) for x in source.read_text().splitlines()))
    blind = measure(**{**settings, "responses": str(trusted)}, out=tmp_path / "blind")
    assert blind.per_sequence is None
    assert any("it cannot be checked" in warning for warning in blind.warnings)
    assert any("do not look drawn from the policy" in warning for warning in blind.warnings)


def test_truncated_and_greedy_runs_leave_out_estimators(job, tmp_path):
    for name, options in {"cut": {"top_k": 3}, "greedy": {"temperature": 0.0}}.items():
        measured = measure(**job, **options, limit=6, out=tmp_path / name)
        assert measured.per_sequence is None and measured.estimators == {}
        assert "left out, as is the KL between responses" in measured.estimators_note
        tokens = next(
            RunFolder(tmp_path / name).parts(
                "tokens", ["logp_sampled", "logp_policy", "top1_policy", "token_id"]
            )
        )
        if name == "greedy":
            assert (tokens["token_id"] == tokens["top1_policy"]).all() and (tokens["logp_sampled"] == 0).all()
        else:
            assert (tokens["logp_sampled"] > tokens["logp_policy"]).all()


def test_report_and_compare_need_only_the_files(job, own, prompts, tmp_path, capsys):
    before = (own / "report.html").read_text()
    (own / "report.html").unlink()
    assert main(["report", str(own)]) == 0
    assert capsys.readouterr().out.strip() == str(own / "report.html")
    assert (own / "report.html").read_text() == before
    other = tmp_path / "itself"
    measure(**{**job, "policy": job["reference"], "limit": 30}, out=other)
    comparison = compare([own, other])
    difference = comparison.differences[0]
    assert (difference.shared_prompts, difference.only_here, difference.only_there) == (30, 0, 10)
    again = compare([own, own]).differences[0].differences
    assert all(
        (number.value, number.standard_error, number.ci95, number.warnings) == (0, 0, (0, 0), ())
        for number in again.values()
    )
    assert comparison.runs[1].numbers["top1_agreement"].ci95 == (1.0, 1.0), "the reference against itself"
    sums = np.zeros(2)
    for part in RunFolder(own).parts("tokens", ["prompt_id", "kl_policy_reference"]):
        mine = part["prompt_id"] < 30
        sums += [part["kl_policy_reference"][mine].astype(float).sum(), mine.sum()]
    assert difference.differences["kl_policy_reference"].value == pytest.approx(-sums[0] / sums[1], rel=1e-9)
    assert main(["compare", str(own), str(other), "--out", str(tmp_path / "c.html")]) == 0
    assert "shared prompts" in (output := capsys.readouterr().out) and re.search(
        r" 30$", output, re.MULTILINE
    )
    assert (tmp_path / "c.html").exists()
    label = STATISTICS["acceptance_rate"].label
    for page in (own / "report.html", tmp_path / "c.html"):
        assert label in page.read_text()
    variation, rate = (difference.differences[name] for name in ("total_variation", "acceptance_rate"))
    assert rate.value == pytest.approx(-variation.value) and rate.value > 0
    assert rate.standard_error == pytest.approx(variation.standard_error)
    print_summary(Measurement.read(own))
    assert re.search(rf"^ *{label} +\d", capsys.readouterr().out, flags=re.MULTILINE)


def test_draws_do_not_depend_on_the_order_of_prompts(job, own, prompts, tmp_path):
    """Draws depend on seed, prompt and sample alone, and runs are paired by prompt, not by place."""
    turned = tmp_path / "turned.txt"
    turned.write_text("\n".join(reversed(prompts.read_text().splitlines())))
    options = {**job, "prompts": str(turned), "samples_per_prompt": 4, "limit": 10, "batch_tokens": 100}
    measure(**options, out=tmp_path / "run")
    difference = compare([own, tmp_path / "run"]).differences[0]
    assert (difference.shared_prompts, difference.only_here, difference.only_there) == (10, 0, 30)
    assert difference.differences["kl_policy_reference"].value == pytest.approx(0, abs=1e-6)
    assert difference.differences["top1_agreement"].value == pytest.approx(0, abs=1e-6)
    assert any("share only 10 prompts" in warning for warning in difference.warnings)
    turned.write_text("another prompt")
    measure(**job | {"prompts": str(turned)}, out=tmp_path / "one")
    with pytest.raises(RunFolderError, match=r"one \(1 prompt\) and .* \(40 prompts\) share no prompt;"):
        compare([own, tmp_path / "one"])


def test_seed_and_sampling_options_change_the_draws(job, tmp_path):
    responses, changes = {}, {"seed": {"seed": 1, "dtype": "float32"}, "cool": {"temperature": 0.5}}
    for name, options in {"a": {}, **changes}.items():
        measure(**{**job, "limit": 3, **options}, out=tmp_path / name)
        responses[name] = next(RunFolder(tmp_path / name).parts("tokens", ["token_id"]))["token_id"].tolist()
    assert responses["a"] != responses["seed"] and responses["a"] != responses["cool"]
    (warning,) = compare([tmp_path / name for name in responses]).warnings  # "auto" is float32 here
    assert warning == "cool was measured with temperature 0.5, a with 1.0"


def test_alternatives_have_the_probabilities_at_the_temperature(job, tmp_path):
    measure(**{**job, "limit": 3, "temperature": 0.5}, out=tmp_path / "run")
    names = ["prompt_id", "position", "top1_policy", "top1_probability_policy", "top1_probability_reference"]
    tokens = next(RunFolder(tmp_path / "run").parts("tokens", names))
    likeliest = {
        (who, place): row
        for row, (who, place) in enumerate(zip(tokens["prompt_id"], tokens["position"], strict=True))
    }
    table = RunFolder(tmp_path / "run").alternatives()
    first = np.flatnonzero(table["place"] == 0)
    rows = [likeliest[table["prompt_id"][n], table["position"][n]] for n in first]
    assert len(rows) == len(tokens["position"])
    assert (table["token_id_policy"][first] == tokens["top1_policy"][rows]).all()
    for side in ("policy", "reference"):
        np.testing.assert_allclose(
            table[f"probability_{side}"][first], tokens[f"top1_probability_{side}"][rows], rtol=1e-4
        )


def likeliest_tokens(pair, sequence):
    """The five likeliest tokens of both models at each position, from hidden states of this sequence alone."""
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    positions = len(sequence.response_ids)
    columns = {
        "position": np.repeat(np.arange(positions), 5).tolist(),
        "place": np.tile(np.arange(5), positions).tolist(),
    }
    for model in (pair.policy, pair.reference):
        hidden = model.hidden_states(ids)[0, len(sequence.prompt_ids) - 1 : -1]
        best = log_probabilities(hidden, model.head).exp().topk(5)
        columns[f"token_id_{model.role}"] = best.indices.flatten().tolist()
        columns[f"text_{model.role}"] = token_texts(pair.tokenizer, best.indices.flatten().tolist())
        columns[f"probability_{model.role}"] = best.values.flatten().numpy()
    return columns


def test_alternatives_agree_with_scoring_the_sequences_again(job, own):
    """160 sequences in several shards, of which 50 are kept: as if both models had read these once more."""
    table = RunFolder(own).alternatives()
    worst = json.loads((own / "measurement.json").read_text())["worst_sequences"]
    order = dict.fromkeys(zip(table["prompt_id"].tolist(), table["sample_id"].tolist(), strict=True))
    assert list(order) == [(sequence["prompt_id"], sequence["sample_id"]) for sequence in worst]
    assert len(order) == 50
    pair = load_pair(job["policy"], job["reference"])
    responses = str(as_responses(own, own / "r.jsonl"))
    source = source_sequences(MeasureJob(**{**job, "prompts": None}, responses=responses), pair)
    for sequence in [
        sequence for sequence in source if (sequence.prompt_id, sequence.sample_id) in list(order)[::9]
    ]:
        again = likeliest_tokens(pair, sequence)
        rows = (table["prompt_id"] == sequence.prompt_id) & (table["sample_id"] == sequence.sample_id)
        for name, values in again.items():
            stored = [table[name][row] for row in np.flatnonzero(rows)]
            if name.startswith("probability"):
                np.testing.assert_allclose(stored, values, rtol=1e-4)
            else:
                assert stored == list(values), name


def test_rescoring_reads_a_small_share_of_the_tokens(pair, tmp_path, monkeypatch):
    """Both models read each token once, and the reference a small share of them twice more for the noise floor."""
    read = []
    hidden = Model.hidden_states

    def counted(self, input_ids):
        read.append(input_ids.numel())
        return hidden(self, input_ids)

    monkeypatch.setattr(Model, "hidden_states", counted)
    path = tmp_path / "text.txt"
    path.write_text(
        "\n\n".join(f"{number} the sea was calm and a boat went out " * 12 for number in range(70))
    )
    options = {"policy": str(pair[0]), "reference": str(pair[1]), "text": str(path), "batch_tokens": 512}
    measured = measure(**options, out=tmp_path / "run")
    assert measured.counts.tokens > 8000 and len(measured.worst_sequences) == 50
    assert measured.noise_floor is not None
    assert 2 * measured.counts.tokens <= sum(read) <= 2.15 * measured.counts.tokens


def test_noise_sequences_are_cut_from_the_first_sequences():
    def sequence(prompt, response):
        return sequence_of(range(prompt), range(prompt, prompt + response))

    for prompt, response in ((1, 5000), (5000, 1), (700, 700), (3, 3)):
        for length in (2, 32, 100):
            piece = shortened_to(sequence(prompt, response), length)
            assert piece.num_input_tokens <= length or prompt == 3
            joined = (*piece.prompt_ids, *piece.response_ids)
            assert joined == tuple(range(joined[0], joined[0] + len(joined)))
            assert piece.prompt_ids and piece.response_ids[0] == prompt
    for scored, budget in ((10, 256), (50_000, 1000), (10**7, 8192)):
        assert noise_tokens(scored) == budget
        chosen = noise_sequences((sequence(1, 3000) for _ in range(10**6)), scored)
        assert len(chosen) == 8 and abs(sum(each.num_input_tokens for each in chosen) - budget) <= 8
